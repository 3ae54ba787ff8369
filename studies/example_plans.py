"""Whether the plans under examples/plans keep their word: each is applied and run on the virtual GPU that it is for.

    python studies/example_plans.py [--only NAME ...]

The exit code is 1 where a run comes to other bytes than a plan says. Tests do the same, but for GPT-2 XL: the 32
pieces of its batch take minutes.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from vramfit import Plan, Workload
from vramfit.gpus import find_gpu
from vramfit.planner.devices.cost import StepCost, step_cost_with
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.units import format_bytes

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "plans"


def names() -> list[str]:
    """The plans that there are."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def workload_of(name: str) -> Workload:
    """What a plan was made for."""
    workload = runpy.run_path(str(FOLDER / "workloads.py"))[name]
    assert isinstance(workload, Workload)
    return workload


def cost_of(name: str) -> StepCost:
    """What a step of the planned program takes."""
    plan = Plan.load(FOLDER / f"{name}.toml")
    device = VirtualBackend(find_gpu(plan.aim.device), alloc_conf="", host_bytes=plan.aim.host_budget_bytes)
    return step_cost_with(
        device, workload_of(name), plan.choices, dict(plan.aim.sizes), plan.aim.budget_bytes
    )


def main() -> int:
    """Run each plan; 1 where one does not keep its word."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names(), default=names(), metavar="NAME")
    broken = 0
    for name in parser.parse_args().only:
        said, found = Plan.load(FOLDER / f"{name}.toml").after, cost_of(name)
        keeps = found.fits and (found.peak_allocated_bytes, found.total_bytes, found.host_bytes) == (
            said.peak_allocated_bytes,
            said.total_bytes,
            said.host_bytes,
        )
        broken += not keeps
        told = f"{format_bytes(found.total_bytes)} on the card, {format_bytes(found.host_bytes)} on the host"
        print(f"{name}: {told}: {'as planned' if keeps else 'not as planned'}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
