"""What is saved has the form that the file's ending asks for, whatever is saved and however its path is given."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import vramfit
from analysis.synthetic import fitting_run
from vramfit.analysis import verdict
from vramfit.errors import UsageError
from vramfit.gpus.measured_profile import load_profile
from vramfit.report import check_writable, write_csv, write_page, write_perfetto, write_text
from vramfit.report.forms import writer_of
from vramfit.trace import MemoryTrace, load_snapshot, read_actual, read_any, write_snapshot

RUN = fitting_run()
BEGINS = {
    "page.html": b"<!doctype html>",
    "timeline.svg": b"<svg ",
    "timeline.png": b"\x89PNG",
    "timeline.csv": b"event,device,",
    "trace.perfetto.json": b'{"displayTimeUnit"',
    "report.json": b'{\n  "schema": "vramfit.run/',
    "snapshot.pickle": b"\x80",
    "trace.vft": b"",
    "CAPITAL.HTML": b"<!doctype html>",
}


@pytest.fixture(scope="module")
def tracked() -> vramfit.Track:
    with vramfit.track(device="cpu") as found:
        torch.nn.Linear(64, 64)(torch.ones(4, 64))
    return found


@pytest.mark.parametrize("name", BEGINS)
def test_a_recording_is_saved_in_the_form_of_its_name(
    tracked: vramfit.Track, tmp_path: Path, name: str
) -> None:
    for kind, saved in (("track", tracked), ("report", vramfit.Report(run=RUN, verdict=verdict(RUN)))):
        path = tmp_path / kind / name
        path.parent.mkdir()
        saved.save(str(path))
        assert path.read_bytes().startswith(BEGINS[name])
        if path.suffix in (".vft", ".pickle"):
            assert read_any(path).equals(saved.trace)


@pytest.mark.parametrize("name", ["a.bogus", "a", "a.vft.txt"])
def test_a_name_of_no_form_is_refused(tracked: vramfit.Track, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"does not say which form to write.*End it in \.html"):
        tracked.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["a.svg", "a.png", "a.csv", "a.json", "a.perfetto.json", "a.html", "A.PICKLE"]
)
def test_a_trace_takes_no_name_of_another_form(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"another form\. End it in \.vft"):
        RUN.trace.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@dataclass
class Named:
    """A path of the user's own kind."""

    name: str

    def __fspath__(self) -> str:
        return self.name


WRITERS: dict[str, Callable[[str | os.PathLike[str]], object]] = {
    "text.txt": lambda path: write_text(path, "text"),
    "page.html": lambda path: write_page(path, RUN.trace, root=os.getcwd()),
    "perfetto.json": lambda path: write_perfetto(RUN.trace, path),
    "table.csv": lambda path: write_csv(RUN.trace, path),
    "snapshot.pickle": lambda path: write_snapshot(RUN.trace, path),
    "trace.vft": RUN.trace.save,
    "report.json": vramfit.Report(run=RUN, verdict=verdict(RUN)).save,
}


@pytest.mark.parametrize("name", WRITERS)
def test_writers_take_paths_of_every_kind(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for given in (str(path), Named(str(path)), path):
        check_writable(given)
        WRITERS[name](given)
        assert path.stat().st_size > 0
        path.unlink()


def test_so_do_readers(tmp_path: Path) -> None:
    trace, snapshot = tmp_path / "a.vft", tmp_path / "a.pickle"
    RUN.trace.save(trace)
    write_snapshot(RUN.trace, snapshot)
    for kind in (str, lambda path: Named(str(path))):
        assert MemoryTrace.load(kind(trace)).equals(RUN.trace)
        assert read_any(kind(trace)).equals(RUN.trace)
        assert read_actual(kind(trace)).trace is not None
        assert load_snapshot(kind(snapshot))["device_traces"]
        with pytest.raises(UsageError, match="cannot read the profile"):
            load_profile(kind(tmp_path / "none.json"))
        assert writer_of(kind(trace)) is writer_of("b.vft")
