"""`vramfit diff`: what it prints, its JSON, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.synthetic import Recorder, fitting_run, gpt_training, virtual_run
from cli.conftest import Invocation
from vramfit.analysis import verdict
from vramfit.report import json_text

Command = Callable[..., Invocation]


@pytest.fixture
def before(tmp_path: Path) -> Path:
    path = tmp_path / "before.vft"
    fitting_run().trace.save(path)
    return path


@pytest.fixture
def after(tmp_path: Path) -> Path:
    recorder = Recorder()
    gpt_training(recorder, layers=13)
    path = tmp_path / "after.vft"
    recorder.finish().save(path)
    return path


def test_what_grew_is_told(vramfit: Command, before: Path, after: Path) -> None:
    found = vramfit("diff", before, after)
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("after.vft compared with before.vft\n")
    assert "more 24→26 × 9.00 MiB   float32[3072,768]" in found.out
    assert "×24→×26" not in found.out
    assert "optimizer state" in found.out


def test_the_same_file_does_not_differ(vramfit: Command, before: Path) -> None:
    found = vramfit("diff", before, before)
    assert found.out == "before.vft compared with before.vft\n  no difference\n"


def test_a_report_compares_with_a_trace(vramfit: Command, before: Path, tmp_path: Path) -> None:
    run = fitting_run()
    report = tmp_path / "run.json"
    report.write_text(json_text(run, verdict(run)))
    assert "no difference" in vramfit("diff", report, before).out
    assert "no difference" in vramfit("diff", before, report).out


def test_figures_alone_are_compared_as_such(vramfit: Command, before: Path, tmp_path: Path) -> None:
    figures = tmp_path / "card.json"
    figures.write_text(json.dumps({"max_memory_reserved": 4 << 30}))
    found = vramfit("diff", figures, before)
    assert found.code == 0
    assert "4.00 GiB" in found.out
    assert "card.json: figures alone" in found.out


def test_json_sums_to_the_peak(vramfit: Command, before: Path, after: Path, tmp_path: Path) -> None:
    file = tmp_path / "diff.json"
    printed = vramfit("diff", before, after, "--json", "-").out
    assert vramfit("diff", before, after, "--json", file).code == 0
    document = json.loads(printed)
    assert json.loads(file.read_text()) == document
    assert document["schema"] == "vramfit.diff/1"
    (device,) = document["devices"]
    total = device["peak"]["allocated"]["difference_bytes"]
    assert sum(one["difference_bytes"] for one in device["changes"]) == total
    assert sum(one["difference_bytes"] for one in device["categories"].values()) == total


def test_devices_can_be_chosen(vramfit: Command, tmp_path: Path) -> None:
    recorder = Recorder(devices=2)
    gpt_training(recorder, iterations=1)
    path = tmp_path / "two.vft"
    virtual_run(recorder.finish()).trace.save(path)
    found = vramfit("diff", path, path, "--device", 7)
    assert found.code == 2
    assert "has no device 7" in found.err


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b'{"schema": "vramfit.run/1"}', b'{"schema": "vramfit.run/9"}']
)
def test_a_file_that_is_none_is_told(vramfit: Command, before: Path, tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    for pair in ((bad, before), (before, bad)):
        found = vramfit("diff", *pair)
        assert found.code == 2
        assert found.err.startswith("error: ")
        assert "Traceback" not in found.err
        assert found.out == ""


def test_a_result_that_cannot_be_written_is_told_first(
    vramfit: Command, before: Path, tmp_path: Path
) -> None:
    found = vramfit("diff", before, before, "--json", tmp_path / "none" / "x.json")
    assert found.code == 2
    assert found.out == ""
