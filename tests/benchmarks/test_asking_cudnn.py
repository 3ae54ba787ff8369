"""The benchmark of asking cuDNN: what it asks, what it measures of a library, and the line without one."""

from __future__ import annotations

import sys
from pathlib import Path

import asking_cudnn
import pytest
from asking_cudnn import Asking, Spent, Turn, main, measure_asking, questions, tables
from tests.cudnn.libraries import behaving, installed

from vramfit.cudnn.found_library import find_cudnn
from vramfit.errors import VramfitError
from vramfit.gpus import find_gpu
from vramfit.units import MIB

CARD = find_gpu("RTX 4090")


def test_questions_differ_and_are_convolutions() -> None:
    asked = questions()
    assert len(set(asked)) == len(asked) == 384
    for one in asked:
        read, made, filters = one.x.dims, one.y.dims, one.w.dims
        assert (filters[0], filters[1], read[0]) == (made[1], read[1], made[0])
        assert made[2] == (read[2] + 2 * one.padding[0] - filters[2]) // one.stride[0] + 1


@pytest.mark.skipif(sys.platform != "linux", reason="cuDNN is asked on Linux")
def test_a_library_is_measured_cold_and_from_the_cache(tmp_path: Path) -> None:
    found = measure_asking(find_cudnn(str(behaving(tmp_path, "answers"))), CARD)
    assert found.version == "9.20.0" and found.questions == 383
    assert min(found.start_ms, found.load_ms, found.cold_per_s, found.kept_per_s) > 0
    assert min(found.peak_bytes, found.kept_peak_bytes) > 5 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="cuDNN is asked on Linux")
def test_a_library_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(VramfitError):
        measure_asking(find_cudnn(str(behaving(tmp_path / "one", "crashes"))), CARD)
    old = installed(tmp_path / "two", version="9.1.0")
    assert main(["--cudnn", str(old)]) == 2
    assert "9.1.0" in capsys.readouterr().out


def test_without_a_library_there_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(wanted: str) -> None:
        raise asking_cudnn.UsageError("no libcudnn.so.9 was found in this machine", "Install one")

    monkeypatch.setattr(asking_cudnn, "find_cudnn", nothing)
    assert main([]) == 0
    assert capsys.readouterr().out == "no libcudnn.so.9 was found in this machine. Install one\n"


def test_ratios_are_those_of_single_turns() -> None:
    asking = Asking(
        version="9.20.0",
        start_ms=400,
        load_ms=800,
        questions=383,
        cold_per_s=40,
        kept_per_s=2000,
        peak_bytes=273 * MIB,
        kept_peak_bytes=22 * MIB,
    )

    def turn(without: float, first: float, second: float) -> Turn:
        return Turn(
            **{
                name: Spent(processor=seconds, clock=2 * seconds + 1)
                for name, seconds in (("without", without), ("first", first), ("second", second))
            }
        )

    lines = list(tables([(asking, [turn(5, 10, 5), turn(10, 15, 10), turn(20, 30, 20)])], "RTX 4090"))
    assert lines[2] == "| 9.20.0 | 400 ms | 800 ms | 40 | 2,000 | 273 MiB | 22 MiB |"
    assert lines[-1] == "| 9.20.0 | 10.0 s | 15.0 s | 1.50 | 1.49 | 10.0 s | 1.00 | 1.00 | 3 |"
