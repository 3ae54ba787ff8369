"""What results look like at a prompt: one short line each, whatever they hold."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from tests import warm

import vramfit
from analysis.synthetic import fitting_run, oom_run
from vramfit.analysis import Tolerance, reconcile, verdict
from vramfit.planner.largest_size import LargestSize
from vramfit.planner.plan_file import PlanFigures, PlanStep, PlanTarget
from vramfit.planner.plans import Plan
from vramfit.planner.verification import Simulated, Verification
from vramfit.techniques import Choice, Numerics, find_technique
from vramfit.trace import Actual

GIB = 1 << 30
RUN = replace(fitting_run(), program=("train.py", "--steps", "3"))
REPORT = vramfit.Report(run=RUN, verdict=verdict(RUN))
FIGURES = PlanFigures(peak_allocated_bytes=GIB, peak_reserved_bytes=GIB, total_bytes=2 * GIB)


def plan(*names: str) -> Plan:
    choices = [Choice(technique=(one := find_technique(name)), setting=one.setting_type()) for name in names]
    return Plan(
        entries=tuple(PlanStep(choice=choice) for choice in choices),
        aim=PlanTarget(device="RTX 4090", budget_bytes=24 * GIB, margin_bytes=GIB),
        before=FIGURES,
        after=FIGURES,
    )


def test_of_a_run_and_its_parts() -> None:
    assert repr(REPORT) == ("<Report: fits RTX 4090: 8.78 GiB of 24.00 GiB used at the peak, 15.22 GiB free>")
    assert repr(RUN) == (
        "<Run of 'train.py --steps 3': exit code 0, RTX 4090: peak allocated 3.14 GiB, reserved 8.39 GiB>"
    )
    assert repr(RUN.trace) == f"<MemoryTrace: {len(RUN.trace):,} events on RTX 4090>"
    assert repr(REPORT.verdict) == "<Verdict: fits, 8.78 GiB of 24.00 GiB used on RTX 4090>"
    assert repr(REPORT.peak()) == "<Breakdown of GPU 0: 3.14 GiB allocated, 5.75 GiB reserved>"


def test_of_one_that_ran_out() -> None:
    run = oom_run()
    assert repr(vramfit.Report(run=run, verdict=verdict(run))).startswith("<Report: does not fit ")


def test_of_a_comparison() -> None:
    found = reconcile(RUN, Actual(name="real.vft", trace=RUN.trace), tolerance=Tolerance.parse("1%"))
    assert repr(found) == "<Reconciliation with real.vft: within 1%>"


def test_of_plans() -> None:
    assert repr(plan()) == "<Plan for RTX 4090: nothing to change; fits, 2.00 GiB of 23.00 GiB>"
    found = repr(plan("tf32", "channels-last"))
    assert found == "<Plan for RTX 4090: tf32, channels-last; fits, 2.00 GiB of 23.00 GiB>"


def test_of_what_plans_were_held_to() -> None:
    simulated = Simulated(before=FIGURES, after=FIGURES, planned=FIGURES, limit_bytes=24 * GIB)
    assert repr(
        Verification(simulated=simulated, gradients=None, losses=None, sizes={}, numerics=Numerics.BITWISE)
    ) == ("<Verification: simulated pass>")
    nothing = Verification(simulated=None, gradients=None, losses=None, sizes={}, numerics=Numerics.BITWISE)
    assert repr(nothing) == "<Verification: nothing was looked at>"
    found = LargestSize(
        size="batch_size",
        usual=8,
        value=1024,
        failing=1025,
        total_bytes=20 * GIB,
        limit_bytes=22 * GIB,
        step_seconds=1.0,
        tries=(),
    )
    assert repr(found) == "<Largest batch_size: 1,024 (usually 8), 20.00 GiB of 22.00 GiB>"


def test_of_a_recording_before_while_and_after() -> None:
    tracked = vramfit.track(device="cpu")
    assert repr(tracked) == "<Track of cpu: nothing recorded yet>"
    with tracked:
        kept = torch.ones(1 << 20)
        assert repr(tracked) == "<Track of cpu: peak allocated 4.00 MiB, reserved 20.00 MiB, recording>"
    assert repr(tracked) == "<Track of cpu: peak allocated 4.00 MiB, reserved 20.00 MiB>"
    del kept


def test_of_leaks() -> None:
    found = vramfit.check_leaks(lambda: None, rounds=5, device="cpu")
    assert repr(found).startswith("<LeakReport of GPU 0: ")
    assert len(repr(found)) < 100


_VIRTUAL = """
import vramfit
gpu = vramfit.VirtualGPU("RTX 4090", gpus=2)
print(gpu)
with gpu:
    import torch
    kept = torch.ones(1 << 20, device="cuda")
    print(gpu)
print(gpu, gpu._repr_html_().count("<svg"))
"""


@pytest.fixture(scope="module")
def virtual() -> list[str]:
    """In a process of its own: this one may have gone backward on the CPU already."""
    done = warm.run([sys.executable, "-c", _VIRTUAL], capture_output=True, text=True, check=True)
    return str(done.stdout).splitlines()


def test_of_a_virtual_gpu(virtual: list[str]) -> None:
    used = "<VirtualGPU 2 × RTX 4090: peak allocated 4.00 MiB, reserved 20.00 MiB>"
    assert virtual == [
        "<VirtualGPU 2 × RTX 4090: peak allocated 0 B, reserved 0 B>",
        used,
        f"{used} 1",
    ]
