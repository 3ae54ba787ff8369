"""What follows a program's output begins on a line of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vramfit.launch.line_ends import LineEnds
from vramfit.patching import PatchStack


def bar() -> None:
    print("\r 10%|█", end="", file=sys.stderr)


def bar_then_line() -> None:
    bar()
    print("done")


def through_another() -> None:
    """As a program that copies its output does."""
    original = sys.stdout

    class Copy(io.TextIOBase):
        def write(self, text: str) -> int:
            return original.write(text)

    sys.stdout = Copy()  # type: ignore[assignment]
    print("half", end="")
    sys.stdout = original


PROGRAMS: dict[str, tuple[Callable[[], object], str]] = {
    "bar": (bar, "\r 10%|█\n"),
    "line": (bar_then_line, "\r 10%|█done\n"),
    "nothing": (lambda: None, ""),
    "another": (through_another, "half\n"),
    "empty": (lambda: print("", end=""), ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_line_that_is_open_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, expected = PROGRAMS[name]
    file = tmp_path / "output"
    with file.open("a", encoding="utf-8") as output, file.open("a", encoding="utf-8") as errors:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", errors)
        with PatchStack() as patches:
            ends = LineEnds(patches)
            program()
        errors.flush()
        output.flush()
        ends.end()
        ends.end()
        assert "write" not in vars(output), "the patch is gone"
    assert file.read_bytes().decode() == expected


def test_errors_that_go_elsewhere_end_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of errors is the program's own; the report follows on its output."""
    with (tmp_path / "out").open("w") as output, (tmp_path / "err").open("w") as errors:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", errors)
        with PatchStack() as patches:
            ends = LineEnds(patches)
            bar()
        ends.end()
    assert (tmp_path / "out").read_text() == ""
    assert (tmp_path / "err").read_text().endswith("█")


def test_a_stream_without_a_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with PatchStack() as patches:
        ends = LineEnds(patches)
        print("half", end="")
    ends.end()
    assert isinstance(sys.stdout, io.StringIO)
    assert sys.stdout.getvalue() == "half"
