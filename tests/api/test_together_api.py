"""`vramfit.together`: scripts, traces and runs side by side, and what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vramfit
from analysis.synthetic import no_room_run, quick_run
from vramfit.errors import TraceFormatError, UsageError, VramfitError
from vramfit.trace import Run

SCRIPT = "import sys, torch; torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device='cuda')"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "take.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "gpt.vft"
    quick_run().trace.save(path)
    return path


def test_scripts_with_their_arguments_and_traces_together(script: Path, trace: Path) -> None:
    lines: list[str] = []
    found = vramfit.together([script, "100"], trace, gpu="RTX 4090", progress=lines.append)
    (one, two) = found.sharing.processes
    assert (one.name, one.reserved, one.allocated) == ("take.py 100", 100 << 20, 100 << 20)
    assert two.name == "gpt.vft"
    assert found.fits
    assert found.total_bytes == one.total + two.total
    assert lines == ["program 1 of 2: take.py 100"]
    assert json.loads(found.to_json()) == json.loads(json.dumps(found.to_dict()))
    assert str(found).startswith("✓ 2 programs fit RTX 4090 side by side")
    assert repr(found).startswith("<Together: 2 programs fit RTX 4090 side by side")


def test_runs_reports_and_traces_are_taken_as_they_are() -> None:
    run = quick_run()
    report = vramfit.Report(run=run, verdict=vramfit.analysis.verdict(run))
    found = vramfit.together(run, report, run.trace, gpu="RTX 4090")
    assert [one.name for one in found.sharing.processes] == [
        "train.py --epochs 1 (1)",
        "train.py --epochs 1 (2)",
        "trace 3",
    ]
    assert len({one.total for one in found.sharing.processes}) == 1


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """What the child interpreter gives, one run after the other."""
    prepared: list[Run] = []
    monkeypatch.setattr(
        "vramfit.virtual.virtual_run.run_in_child", lambda _command, _options, _settings: prepared.pop(0)
    )
    return prepared


def test_a_program_that_runs_out_alone_fits_beside_nobody(script: Path, trace: Path, runs: list[Run]) -> None:
    ran_out = no_room_run()
    runs.append(replace(ran_out, devices=(replace(ran_out.devices[0], gpu="RTX 4090"),)))
    found = vramfit.together(script, trace, gpu="RTX 4090")
    assert not found.fits
    assert found.sharing.outcome is vramfit.analysis.SharingOutcome.DOES_NOT_FIT
    assert [one.fits_alone for one in found.sharing.processes] == [False, True]
    assert [one.fraction for one in found.sharing.processes] == [None, None]
    assert found.sharing.fitting == ((1,),)
    assert "out of memory by itself already: take.py" in str(found).replace("\n  ", " ")


def test_a_program_that_fails_is_told(script: Path, trace: Path, runs: list[Run]) -> None:
    runs.append(replace(quick_run(), exit_code=1, error="ValueError: no data"))
    with pytest.raises(VramfitError, match=r"take.py failed: ValueError: no data") as raised:
        vramfit.together(script, trace, gpu="RTX 4090")
    assert raised.value.exit_code == 1


@pytest.mark.parametrize(
    ("programs", "options", "said"),
    [
        ([], {}, "from two on"),
        (["TRACE"], {}, "from two on"),
        (["TRACE", "missing.py"], {}, "there is no script missing.py"),
        (["TRACE", "TRACE"], {"progress": 5}, "progress=5 cannot be called"),
        (["TRACE", []], {}, "programs[1]=[] names no program"),
        (["TRACE", 7], {}, "programs[1]=7 is no path"),
        (["TRACE", ["TRACE", "--epochs"]], {}, "is a recording, and takes no arguments"),
        (["TRACE", "TRACE"], {"gpu": "RTX 3090"}, "gpt.vft (1) is of another card: RTX 4090"),
        (["TRACE", "TRACE"], {"gpu": "RTX 4900"}, "no GPU is called 'RTX 4900'"),
    ],
)
def test_bad_input_is_one_line(programs: list[Any], options: dict[str, Any], said: str, trace: Path) -> None:
    def filled(one: Any) -> Any:
        if isinstance(one, list):
            return [filled(word) for word in one]
        return trace if one == "TRACE" else one

    with pytest.raises(UsageError) as raised:
        vramfit.together(*map(filled, programs), **{"gpu": "RTX 4090", **options})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_trace_is_refused(trace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.vft"
    broken.write_bytes(b"no trace")
    with pytest.raises(TraceFormatError):
        vramfit.together(trace, broken, gpu="RTX 4090")


def test_nothing_runs_after_what_cannot_be_told(
    script: Path, trace: Path, runs: list[Run], tmp_path: Path
) -> None:
    """A run may take long: what is wrong with another program is said before it, or right after its own."""
    broken = tmp_path / "broken.vft"
    broken.write_bytes(b"no trace")
    with pytest.raises(TraceFormatError):
        vramfit.together(script, broken, gpu="RTX 4090")
    with pytest.raises(UsageError, match=r"gpt\.vft is of another card"):
        vramfit.together(script, trace, gpu="RTX 3090")
    with pytest.raises(UsageError, match="14 programs cannot be looked at together"):
        vramfit.together(*[script] * 14, gpu="RTX 4090")
    runs += [replace(quick_run(), devices=()), quick_run()]
    with pytest.raises(UsageError, match=r"take\.py \(1\) never used a card"):
        vramfit.together(script, script, gpu="RTX 4090")
    assert len(runs) == 1
