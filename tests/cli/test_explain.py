"""`vramfit explain`: the recording in words, its JSON, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.reconciling import predicted, training
from analysis.synthetic import Recorder, fitting_run, gpt_training, oom_run
from cli.conftest import Invocation
from vramfit.analysis import peak
from vramfit.errors import TraceFormatError
from vramfit.trace import write_snapshot

Command = Callable[..., Invocation]
TRACES = Path(__file__).parents[1] / "data" / "traces"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run.vft"
    fitting_run().trace.save(path)
    return path


def test_it_tells_what_the_run_told(vramfit: Command, trace: Path) -> None:
    found = vramfit("explain", trace)
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("run.vft on RTX 4090: ")
    for heading in ("At the peak", "Modules", "Largest tensors", "Phases", "Local peaks", "Growth"):
        assert f"\n{heading}" in found.out
    assert "to lower it by 10 %" in found.out


def test_a_snapshot_tells_the_same_figures(vramfit: Command, tmp_path: Path) -> None:
    run = predicted(training(layers=3))
    snapshot, file = tmp_path / "run.pickle", tmp_path / "run.vft"
    write_snapshot(run.trace, snapshot)
    run.trace.save(file)
    wanted = next(line for line in vramfit("explain", file).out.splitlines() if "peak allocated" in line)
    assert wanted.split(" of ")[0] in vramfit("explain", snapshot).out


def test_running_out_is_told_first(vramfit: Command, tmp_path: Path) -> None:
    path = tmp_path / "oom.vft"
    oom_run().trace.save(path)
    found = vramfit("explain", path)
    assert found.code == 0
    assert "ran out of memory: asked for 512.00 MiB" in found.out
    assert "When it ran out" in found.out


def test_a_recording_of_three_cards_explains_the_one_that_ran_out(vramfit: Command) -> None:
    recording = TRACES / "expandable-3gpu-oom.json.gz"
    assert "(GPU 1)" in vramfit("explain", recording).out
    assert "(GPU 2)" in vramfit("explain", recording, "--device", 2).out
    missing = vramfit("explain", recording, "--device", 9)
    assert missing.code == 2
    assert "has no data for device 9" in missing.err


def test_why_it_did_not_fit_is_told_where_it_ran_out(vramfit: Command) -> None:
    recording = TRACES / "expandable-3gpu-oom.json.gz"
    question = "Would the request of 4.94 GiB have fitted?"
    assert question in vramfit("explain", recording).out
    assert question not in vramfit("explain", recording, "--no-fragmentation").out


def test_a_recording_that_contradicts_itself_is_explained_as_far_as_it_goes(
    vramfit: Command, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contradicts(*_: object, **__: object) -> None:
        raise TraceFormatError("a block is freed twice")

    monkeypatch.setattr("vramfit.analysis.causes", contradicts)
    found = vramfit("explain", trace, "--fragmentation")
    assert found.code == 0
    assert "Local peaks" in found.out
    assert "a block is freed twice" in found.err


def test_json(vramfit: Command, trace: Path, tmp_path: Path) -> None:
    document = json.loads(vramfit("explain", trace, "--json", "-", "--lower", "25%", "--peaks", 1).out)
    assert document["schema"] == "vramfit.explain/1"
    assert document["run"]["schema"] == "vramfit.run/1"
    (first,) = document["peaks"]
    assert first["allocated_bytes"] == peak(fitting_run().trace).allocated
    assert first["removal"]["share"] == 0.25
    freed = sum(group["total_bytes"] for group in first["removal"]["groups"])
    assert freed == first["removal"]["freed_bytes"] >= first["removal"]["wanted_bytes"]
    assert document["leaks"]["verdict"] == "too_few_steps"
    file = tmp_path / "explain.json"
    assert vramfit("explain", trace, "--json", file).code == 0
    assert json.loads(file.read_text())["run"] == document["run"]


def test_an_empty_trace(vramfit: Command, tmp_path: Path) -> None:
    path = tmp_path / "empty.vft"
    Recorder().finish().save(path)
    found = vramfit("explain", path)
    assert found.code == 0
    assert "Nothing was allocated" in found.out


@pytest.mark.parametrize(
    ("lower", "reason"),
    [
        ("0%", "not a share above 0 and up to 100%"),
        ("200%", "not a share above 0 and up to 100%"),
        ("0MiB", "nothing at all"),
        ("much", "neither a share nor a size"),
        ("1e400GiB", "neither a share nor a size"),
    ],
)
def test_a_share_is_a_share(vramfit: Command, trace: Path, lower: str, reason: str) -> None:
    found = vramfit("explain", trace, "--lower", lower)
    assert found.code == 2
    assert found.out == ""
    assert found.err.startswith(f"error: --lower is '{lower}', {reason}\n")
    assert '"10%"' in found.err
    assert '"2GiB"' in found.err


def test_a_peak_may_be_lowered_by_a_size(vramfit: Command, trace: Path) -> None:
    found = vramfit("explain", trace, "--lower", "50MiB")
    assert found.code == 0
    assert "% (50.00 MiB), without:" in found.out


def test_no_trace(vramfit: Command, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()")
    for path in (script, tmp_path, tmp_path / "none.vft"):
        found = vramfit("explain", path)
        assert found.code == 2
        assert (
            found.err.startswith("error: cannot read") or "is neither" in found.err or "error:" in found.err
        )
        assert "Traceback" not in found.err


def test_a_file_without_names_of_the_program(vramfit: Command, tmp_path: Path) -> None:
    recorder = Recorder(devices=2)
    gpt_training(recorder, iterations=1)
    path = tmp_path / "two.vft"
    recorder.finish().save(path)
    assert "two.vft" in vramfit("explain", path).out
