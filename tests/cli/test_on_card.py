"""``vramfit fit`` and ``vramfit verify`` on this machine's card, with the virtual GPU in the place of one."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.cli.test_plan import WORKLOADS, invoke
from tests.planner.test_plan_objects import _plan

from vramfit.errors import UsageError
from vramfit.gpus import find_gpu
from vramfit.planner.plan_file import PlanFigures, PlanTarget
from vramfit.planner.planner_job import DeviceMemory, MemoryBudget
from vramfit.planner.planner_run import measure_in_child
from vramfit.planner.verification import CardRun, Measured, Verification
from vramfit.planner.verify_questions import AskedRun
from vramfit.report import print_report
from vramfit.techniques import Numerics

HERE = """
keep = []


def hoarding_loss(model, batch):
    keep[:] = [torch.ones(1 << 20, device=batch[0].device)]
    return loss(model, batch)


hoarding = Workload(**(parts | {"loss": hoarding_loss}))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "workloads.py"
    path.write_text(WORKLOADS + HERE)
    return path


@pytest.fixture
def rtx_4090(monkeypatch: pytest.MonkeyPatch) -> None:
    """An RTX 4090 in this machine, as far as children that ask for the card can tell."""
    from vramfit.planner import asking

    plain = asking.child_command

    def command(folder: Path, device: str) -> list[str]:
        if device != "card":
            return plain(folder, device)
        start = [sys.executable, "-P", "-m", "vramfit", "run", "--gpu", "RTX 4090", "--writes", "real", "-m"]
        return [*start, "vramfit.planner.planner_child", str(folder)]

    monkeypatch.setattr(asking, "child_command", command)


@pytest.mark.slow
@pytest.mark.usefixtures("rtx_4090")
def test_the_largest_batch_is_confirmed_on_the_card(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "fit.json"
    asked = ["--gpu", "RTX 4090", "--budget", "480MiB", "--size", "batch_size=2048", "--card"]
    result = invoke("fit", f"{file}:training", *asked, "--at-least", "100", "--json", str(out))
    assert result.exit_code == 0, result.output
    value = json.loads(out.read_text())
    assert value["schema"] == "vramfit.fit/1"
    assert value["passes"] is True
    assert value["value"] == value["predicted"] == value["card"]["value"]
    assert value["card"]["card"] == "NVIDIA GeForce RTX 4090"
    assert value["card"]["failing"] == value["card"]["left_bytes"] == 0
    ((tried,), predicted) = value["card"]["tries"], value["tries"]
    assert value["total_bytes"] == tried["total_bytes"] <= 480 << 20
    assert value["step_seconds"] == tried["step_seconds"] > 0
    simulated = next(one for one in predicted if one["value"] == value["value"])
    assert simulated["total_bytes"] == tried["total_bytes"]
    assert "confirmed on NVIDIA GeForce RTX 4090: measured" in result.output
    assert "; 100 was asked for" in result.output


@pytest.mark.slow
def test_a_gate_ends_with_3_if_less_fits(file: Path) -> None:
    asked = ["--gpu", "RTX 4090", "--budget", "480MiB", "--size", "batch_size=64", "--no-card"]
    result = invoke("fit", f"{file}:training", *asked, "--at-least", "1000000", "--json", "-")
    assert result.exit_code == 3
    value = json.loads(result.stdout)
    assert value["passes"] is False
    assert value["at_least"] == 1_000_000
    assert 0 < value["value"] < 1_000_000
    assert value["card"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("rtx_4090")
def test_a_plan_is_measured_beside_its_simulation(file: Path, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "verify.json"
    whole = {"modules": [str(number) for number in range(6)]}
    found = _plan(activation_checkpointing=whole)
    aim = PlanTarget(
        device="RTX 4090", budget_bytes=600 << 20, sizes={"batch_size": 4096}, target=f"{file}:hoarding"
    )
    figures = PlanFigures(
        peak_allocated_bytes=100 << 20,
        peak_reserved_bytes=150 << 20,
        total_bytes=550 << 20,
        step_seconds=0.01,
    )
    replace(found, aim=aim, before=figures, after=figures).save(plan)
    result = invoke("verify", str(plan), "--no-values", "--card", "--json", str(out))
    assert result.exit_code == 0, result.output
    value = json.loads(out.read_text())
    measured, simulated = value["measured"], value["simulated"]
    before, after = measured["before"]["figures"], measured["after"]["figures"]
    assert measured["card"] == "NVIDIA GeForce RTX 4090"
    assert measured["passes"] and measured["after"]["fits"] and measured["before"]["fits"]
    assert before["total_bytes"] == simulated["before"]["total_bytes"] > 600 << 20
    # What outlives a step is there when the next run begins.
    assert measured["left_bytes"] == 4 << 20
    assert simulated["after"]["total_bytes"] <= after["total_bytes"] <= 600 << 20
    assert after["total_bytes"] <= simulated["after"]["total_bytes"] + (24 << 20)
    assert measured["limit_bytes"] == simulated["limit_bytes"] == 600 << 20
    assert measured["peak_error"] == pytest.approx(after["peak_reserved_bytes"] / (150 << 20) - 1)
    assert after["step_seconds"] > before["step_seconds"] > 0
    assert "✓ measured on NVIDIA GeForce RTX 4090" in result.output
    assert "10 ms planned" in result.output
    assert "4.00 MiB of tensors outlived their run" in result.output


@pytest.mark.slow
@pytest.mark.usefixtures("rtx_4090")
def test_what_does_not_fit_or_is_of_another_card_is_told(file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    _plan(activation_checkpointing={"modules": ["0"]}).save(plan)
    room = MemoryBudget(gpu=find_gpu("RTX 3090"))
    runs = [AskedRun(name="planned", plan=str(plan), limit=500 << 20)]
    found = measure_in_child(f"{file}:training", room, runs)
    assert (found.runs, found.left_bytes) == ((), 0)
    assert found.skipped == f"this machine's card is a {found.card}, not a RTX 3090"

    found = measure_in_child(f"{file}:training", room, runs, card=True)
    (ran,) = found.runs
    assert (found.card, found.left_bytes, found.skipped) == ("NVIDIA GeForce RTX 4090", 0, "")
    assert not ran.fits
    assert ran.ended
    assert ran.oom.startswith("CUDA out of memory. Tried to allocate")
    assert ran.figures.total_bytes > 500 << 20


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_a_card_that_is_not_there_is_told(file: Path) -> None:
    runs = [AskedRun(name="plain")]
    with pytest.raises(UsageError, match=r"torch finds no CUDA card here\. Leave --card out"):
        measure_in_child(f"{file}:training", MemoryBudget(gpu=find_gpu("RTX 4090")), runs)


def test_a_run_that_never_ended_is_shown_as_that() -> None:
    small = PlanFigures(peak_allocated_bytes=1 << 20, peak_reserved_bytes=1 << 20, total_bytes=400 << 20)
    planned = replace(small, step_seconds=0.1)
    failed = CardRun(figures=small, fits=False, oom="CUDA out of memory.")
    measured = Measured(card="a card", before=failed, after=failed, planned=planned, limit_bytes=500 << 20)
    found = Verification(
        simulated=None,
        measured=measured,
        gradients=None,
        losses=None,
        sizes={},
        numerics=Numerics.BITWISE,
        skipped="not asked for",
    )
    stream = io.StringIO()
    print_report(found, console=Console(file=stream, width=100))
    assert "✗ measured on a card: does not fit the card: CUDA out of memory." in stream.getvalue()
    assert stream.getvalue().count("out of memory") == 3
    assert not found.passes


def test_children_have_the_variables_that_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.planner.asking import child_environ

    for name in ("KINETO_LOG_LEVEL", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    conf = "expandable_segments:True"

    def on(device: str) -> DeviceMemory:
        return DeviceMemory(device=device, gpu=None, budget=1 << 30, alloc_conf=conf)

    on_card = child_environ(on("card"))
    assert on_card["PYTORCH_ALLOC_CONF"] == on_card["PYTORCH_CUDA_ALLOC_CONF"] == conf
    # The virtual GPU is told by the job: another allocator of the process would read the variables too.
    assert "PYTORCH_ALLOC_CONF" not in child_environ(on("cuda"))
    assert child_environ(on("cpu"))["KINETO_LOG_LEVEL"] == "6"
    monkeypatch.setenv("KINETO_LOG_LEVEL", "0")
    assert child_environ(on("cpu"))["KINETO_LOG_LEVEL"] == "0"
