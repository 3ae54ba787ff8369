from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Invocation
from vramfit.trace import read_any

RECORDING = Path(__file__).parents[1] / "data" / "traces" / "expandable-3gpu-oom.json.gz"
Vramfit = Callable[..., Invocation]


def test_several_forms_at_once(vramfit: Vramfit, tmp_path: Path) -> None:
    begins = {
        "page.html": b"<!doctype html>",
        "timeline.svg": b"<svg ",
        "timeline.csv": b"event,device,",
        "trace.perfetto.json": b'{"displayTimeUnit"',
        "report.json": b"{",
        "snapshot.pickle": b"\x80",
        "trace.vft": b"",
    }
    options = [part for name in begins for part in ("-o", tmp_path / name)]
    done = vramfit("export", RECORDING, *options)
    assert done.code == 0
    for name, begin in begins.items():
        assert (tmp_path / name).read_bytes().startswith(begin), name
        assert name in done.out.replace("\n", "")
    assert json.loads((tmp_path / "report.json").read_text())["schema"].startswith("vramfit.run")
    trace = read_any(RECORDING)
    assert read_any(tmp_path / "trace.vft").equals(trace)
    assert len(read_any(tmp_path / "snapshot.pickle")) == len(trace)


def test_a_picture_of_a_device(vramfit: Vramfit, tmp_path: Path) -> None:
    for device in (0, 2):
        assert vramfit("export", RECORDING, "-o", tmp_path / f"{device}.svg", "--device", device).code == 0
        assert f"GPU {device}" in (tmp_path / f"{device}.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "trace.docx"], "does not say which form"),
        (["-o", "a.svg", "--device", "7"], "no data for device 7"),
        (["-o", "a.svg", "-o", "a.svg"], "which another option names too"),
        (["-o", "nowhere/a.svg"], "Create the folder first"),
    ],
)
def test_bad_requests_write_nothing(
    vramfit: Vramfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = vramfit("export", RECORDING, *arguments)
    assert done.code == 2
    assert said in " ".join(done.err.split())
    assert list(tmp_path.iterdir()) == []


def test_no_recording(vramfit: Vramfit, tmp_path: Path) -> None:
    done = vramfit("export", tmp_path / "none.vft", "-o", tmp_path / "a.svg")
    assert done.code == 2
    assert "no such file" in done.err
