"""Bytes and seconds of workloads that run for real on the CPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import warm
from tests.techniques.toys import all_toys
from torch import nn
from torch.profiler import ProfilerActivity, profile

from vramfit import Workload
from vramfit.planner.activation_ilp.decisions import (
    Decision,
    DecisionKind,
    activation_choices,
    places,
    predicted_peak,
)
from vramfit.planner.devices.cpu_backend import CpuBackend, rates, seconds_of
from vramfit.techniques import Choice, find_technique, with_choices

pytestmark = pytest.mark.torch_versions

MIB = 1 << 20


class Layer(nn.Module):
    """Keeps its input and what the ReLU gives: as much of each as its input has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


def chain(width: int = 64, depth: int = 3) -> Workload:
    return Workload(
        model=lambda: nn.Sequential(*(Layer(width) for _ in range(depth))),
        batch=lambda batch_size: torch.ones(batch_size, width),
        sizes={"batch_size": 4096},
        loss=lambda model, batch: model(batch).sum(),
    )


SIZES = {"batch_size": 4096}
"""With a width of 64 floats, one MiB for each activation."""


def test_stretches_hold_what_blocks_keep() -> None:
    _, step_profile = CpuBackend().profile_step(chain(), SIZES, places)
    assert [block.path for block in step_profile.blocks] == ["0", "1", "2"]
    between = [interval.peak_bytes for interval in step_profile.intervals if interval.block == -1]
    # Between blocks: the batch, and two activations of each block that is over: what it gave, and its ReLU's.
    assert [round((peak - between[0]) / MIB) for peak in between[1:3]] == [2, 4]
    first, second = (
        max(s.peak_bytes for s in step_profile.intervals if s.block == block and not s.backward)
        for block in (0, 1)
    )
    assert round((second - first) / MIB) == 2


def test_the_seconds_of_a_run_are_those_that_were_observed() -> None:
    device = CpuBackend()
    profile, step_profile = device.profile_step(chain(), SIZES, places)
    price = device.step_cost(chain(), SIZES)
    assert price.step_seconds == pytest.approx(step_profile.seconds, rel=1e-9)
    assert (price.step_flops, price.peak_allocated_bytes) == (
        step_profile.flops,
        profile.peak_allocated_bytes,
    )
    arithmetic, traffic = rates()
    assert step_profile.flops / arithmetic <= price.step_seconds < 1e3 * MIB / traffic


def test_seconds_are_those_of_the_estimate_that_is_given() -> None:
    def arithmetic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, flops: int) -> float:
        return flops / rates()[0] + 1e-3 * seconds_of(func, args, kwargs, out, 0)

    device = CpuBackend(estimate=arithmetic)
    _, step_profile = device.profile_step(chain(), SIZES, places)
    products = [op for block in step_profile.blocks for op in block.ops if op.flops]
    others = [op for block in step_profile.blocks for op in block.ops if op.bytes and not op.flops]
    assert min(op.seconds for op in products) > max(op.seconds for op in others) > 0
    assert device.step_cost(chain(), SIZES).step_seconds == pytest.approx(step_profile.seconds, rel=1e-9)
    assert step_profile.seconds == pytest.approx(step_profile.flops / rates()[0], rel=0.01)


def test_measuring_the_machine_is_no_part_of_a_run() -> None:
    code = (
        "from tests.planner.test_cpu_backend import chain\n"
        "from vramfit.planner.devices.cpu_backend import CpuBackend\n"
        "from vramfit.planner.activation_ilp.decisions import places\n"
        "looks = [CpuBackend().profile_step(chain(8, 2), {'batch_size': 8}, places)[1] for _ in range(2)]\n"
        "assert looks[0].intervals == looks[1].intervals, looks\n"
        "assert max(s.peak_bytes for s in looks[0].intervals) < 1 << 16, looks\n"
    )
    done = warm.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Taking(nn.Module):
    """Ends with a ReLU, which keeps what it gives: the input that the next block keeps as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.tanh(self.first(x))))


@pytest.mark.parametrize("last", [nn.Identity, lambda: nn.Linear(64, 1)])
def test_recomputing_frees_nothing_that_others_hold(last: Callable[[], nn.Module]) -> None:
    workload = Workload(
        model=lambda: nn.Sequential(*(Taking(64) for _ in range(4)), last()),
        batch=lambda batch_size: torch.ones(batch_size, 64),
        sizes=SIZES,
        loss=lambda model, batch: model(batch).sum(),
    )
    device = CpuBackend()
    _, plain = device.profile_step(workload, SIZES, places)
    kept = [(round(block.kept_bytes / MIB), round(block.shared_bytes / MIB)) for block in plain.blocks]
    assert kept == [(2, 1)] * 3 + [(2, 0 if last is nn.Identity else 1)]
    decisions = {block.path: Decision(DecisionKind.RECOMPUTE) for block in plain.blocks}
    _, planned = device.profile_step(
        with_choices(workload, activation_choices(plain, decisions)), SIZES, places
    )
    # Of the random numbers: one for each block, and the present one while a block runs again.
    states = (len(decisions) + 1) * torch.get_rng_state().nbytes
    low = predicted_peak(plain, decisions)
    assert low <= max(interval.peak_bytes for interval in planned.intervals) <= low + states


def test_bytes_are_those_of_a_program_that_nobody_watches() -> None:
    class Twice(nn.Module):
        """Uses its weight twice: autograd sums the two gradients in place, unless a dispatch mode is on."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 20))

        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            return (self.weight * scale[0]).sum() + (self.weight * scale[1]).sum()

    workload = Workload(
        model=Twice,
        batch=lambda batch_size: torch.ones(batch_size),
        sizes={"batch_size": 2},
        loss=lambda model, batch: model(batch),
    )
    price = CpuBackend().step_cost(workload, {"batch_size": 2})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        state = workload.start("cpu")
        for _ in range(2):
            workload.run_step(state, {"batch_size": 2})
    held = highest = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        highest = max(highest, held)
    assert price.peak_allocated_bytes == highest


def test_what_earlier_runs_left_in_cycles_is_not_missing() -> None:
    class Left:
        """Garbage that only the collector frees."""

        def __init__(self) -> None:
            self.tensor, self.itself = torch.ones(8 * MIB // 4), self

    class Collecting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gc.collect()
            return super().forward(x)

    workload = Workload(
        model=lambda: Collecting(64, 64),
        batch=lambda batch_size: torch.ones(batch_size, 64),
        sizes={"batch_size": 4096},
        loss=lambda model, batch: model(batch).sum(),
    )
    device = CpuBackend()
    alone = device.step_cost(workload, {"batch_size": 4096})
    gc.disable()  # but for where it is asked for
    try:
        # Torch reports that memory is freed if it was allocated under a profiler, be it an earlier one.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True):
            Left()
        after = device.step_cost(workload, {"batch_size": 4096})
    finally:
        gc.enable()
    assert after.peak_allocated_bytes == alone.peak_allocated_bytes


def test_what_a_technique_switched_on_is_off_again_after_a_failure() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    toy = replace(all_toys()["mlp"], loss=lambda model, batch: model(batch[0]).view(-1, 7).sum())
    tf32 = find_technique("tf32")
    workload = with_choices(toy, (Choice(technique=tf32, setting=tf32.setting_type()),))
    with pytest.raises(RuntimeError, match="invalid for input"):
        CpuBackend().step_cost(workload, dict(toy.sizes))
    assert torch.backends.cuda.matmul.fp32_precision == before != "tf32"
