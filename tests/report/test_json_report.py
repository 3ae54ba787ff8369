import json
from dataclasses import replace
from typing import Any

import pytest

from analysis.synthetic import Recorder, fitting_run, needing, oom_run, virtual_run
from report.golden_files import check_golden
from vramfit.analysis import verdict
from vramfit.report import SCHEMA, json_text
from vramfit.trace import Run
from vramfit.units import GIB

KEYS = {
    "schema",
    "torch",
    "gpu",
    "fits",
    "peak",
    "outside_pytorch_bytes",
    "total_bytes",
    "categories",
    "fragmentation",
    "oom",
    "seconds_simulated",
    "ops",
    "warnings",
    "devices",
    "modules",
    "tensors",
    "phases",
    "exit_code",
    "program",
}
CATEGORIES = [
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "inputs",
    "temporaries",
    "workspaces",
    "communication_buffers",
    "unsharded_parameters",
    "prefetch",
    "other",
]


def report(run: Run) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json_text(run, verdict(run, cards=())))
    return loaded


@pytest.mark.parametrize(("name", "make"), [("fits", fitting_run), ("does-not-fit", oom_run)])
def test_report_is_as_agreed(name: str, make: Any) -> None:
    run = make()
    check_golden(f"{name}.json", json_text(run, verdict(run, cards=())))


def test_the_promised_keys_are_there() -> None:
    found = report(fitting_run())
    assert set(found) >= KEYS
    assert found["schema"] == SCHEMA == "vramfit.run/1"
    assert set(found["gpu"]) == {"name", "total_bytes"}
    assert set(found["peak"]) == {
        *("allocated_bytes", "reserved_bytes", "active_bytes"),
        *("error", "reserved_error", "used_error"),
    }
    assert set(found["peak"]["error"]) == {"below_bytes", "above_bytes"}
    assert list(found["categories"]) == CATEGORIES
    assert found["oom"] is None


@pytest.mark.parametrize("make", [fitting_run, oom_run])
def test_figures_agree_with_each_other(make: Any) -> None:
    found = report(make())
    held = sum(found["categories"].values())
    assert found["modules"][0]["total_bytes"] == held
    assert sum(module["own_bytes"] for module in found["modules"]) == held
    assert sum(group["total_bytes"] for group in found["tensors"]) + found["tensors_omitted"]["bytes"] == held
    fragments = found["fragmentation"]
    parts = (fragments["occupied_bytes"], fragments["inactive_split_bytes"], fragments["releasable_bytes"])
    assert sum(parts) == fragments["reserved_bytes"]
    assert found["devices"][found["device"]]["categories"] == found["categories"]
    if found["fits"]:
        assert held == found["peak"]["allocated_bytes"]


def test_running_out_names_request_stack_and_holders() -> None:
    found = report(oom_run())
    assert found["fits"] is False
    oom = found["oom"]
    assert oom["request"] == 512 << 20
    assert [frame["file"].rsplit("/", 1)[1] for frame in oom["stack"]] == ["linear.py", "train.py"]
    assert oom["holders"] == found["tensors"][: len(oom["holders"])]
    assert len(oom["holders"]) == len(found["tensors"]) or len(oom["holders"]) == 20
    assert oom["why"]


def test_what_is_needed_is_there_with_how_it_is_known() -> None:
    needs = report(needing())["need"]
    assert needs["whole"] is True
    assert needs["bytes"] == needs["peak_reserved_bytes"] + needs["outside_pytorch_bytes"]
    assert needs["error"] == {"below_bytes": 0, "above_bytes": 0}
    assert needs["why_not"] is None
    garbage = report(needing(garbage=True))
    assert garbage["need"]["garbage_collected"] is True
    assert garbage["need"]["garbage_bytes"] == 5 * GIB
    assert garbage["oom"]["dead_bytes"] == garbage["oom"]["dead"]["parameters"] == 2 * GIB
    failed = report(needing(error="EOFError: no input"))
    assert failed["need"]["whole"] is False
    assert failed["smallest_gpu"]["at_least"] is True
    assert failed["smallest_gpu"]["name"] is None
    assert "EOFError" in failed["need"]["why_not"]
    assert report(fitting_run())["need"] is None


def test_a_caught_error_has_no_holders() -> None:
    found = report(oom_run(handled=True, exit_code=0))
    assert found["fits"] is True
    assert found["oom"]["handled"] is True
    assert found["oom"]["holders"] == []


def test_a_failed_program_leaves_the_question_open() -> None:
    found = report(replace(fitting_run(), exit_code=5, error="KeyError: 'x'"))
    assert found["fits"] is None
    assert (found["outcome"], found["exit_code"], found["error"]) == ("failed", 5, "KeyError: 'x'")


def test_a_program_that_saw_no_card_fits_nowhere_in_particular() -> None:
    found = report(replace(fitting_run(), devices=()))
    assert found["fits"] is None
    assert found["outcome"] == "unused"
    assert found["device"] == -1
    assert found["devices"] == []
    assert sum(found["categories"].values()) == 0


def test_a_run_without_events_is_valid() -> None:
    found = report(virtual_run(Recorder().finish()))
    assert found["peak"]["allocated_bytes"] == 0
    assert found["modules"] == [{"path": "", "total_bytes": 0, "own_bytes": 0, "categories": {}}]
    assert found["tensors"] == found["phases"] == []
