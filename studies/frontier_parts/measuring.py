"""Measures a workload: its peak by torch's profiler, its arithmetic by torch's formulas. Everybody's the same way."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from vramfit.capture.ops import OpTable
from vramfit.gpus import find_gpu
from vramfit.planner.devices.cpu_backend import FlopMode
from vramfit.techniques import live_of
from vramfit.virtual import roofline
from vramfit.virtual.op_call import OpCall
from vramfit.workload import State, Workload

CARD = find_gpu("RTX 4090")
"""Whose seconds are told: its rates are those by which plans are priced for cards (vramfit/virtual/roofline.py)."""

_MEMORY = "[memory]"
"""What the profiler calls an allocation or a free (torch/csrc/profiler/collection.cpp)."""

_OPS = OpTable({})

_CHUNKED_LOSS = "torch_nn::_linear_cross_entropy_batch_chunked"
"""The operator of torch's chunked loss, which is known to torch once it was called: a function in Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """What a step computes.

    Attributes:
        flops: multiplications and additions, as torch's counter counts them. Attention of the CPU, for which it has no
            formula, counts for nothing.
        attention_flops: those of the CPU's attention, by the formula that torch has for the kernels of cards.
        seconds: of all operations, one after the other, as `CARD` is taken to work.
        pointwise_seconds: of them, those of pointwise operations, which a compiler can do along with others.
    """

    flops: int
    attention_flops: int
    seconds: float
    pointwise_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a step takes.

    Attributes:
        peak_bytes: the most that tensors hold at once, above parameters and gradients.
        arithmetic: its multiplications and additions.
    """

    peak_bytes: int
    arithmetic: Arithmetic


class Counting(FlopMode):
    """Counts all of it.

    Attributes:
        attention: multiplications and additions of the CPU's attention.
        simulated: seconds on a card.
        pointwise: of them, those of pointwise operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = 0
        self.simulated = self.pointwise = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled while this counts; without this, torch falls back to eager."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it; of torch's chunked loss, the operations that it is made of."""
        if func._schema.name == _CHUNKED_LOSS:
            from torch.nn.modules import linear_cross_entropy

            with self:
                return linear_cross_entropy._linear_cross_entropy_batch_chunked._init_fn(
                    *args, **(kwargs or {})
                )
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.attention += _attention_flops(func, args)
        seconds = card_seconds(func, args, kwargs or {}, out)
        self.simulated += seconds
        self.pointwise += seconds if torch.Tag.pointwise in func.tags else 0.0
        return out


def card_seconds(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, flops: int | None = None
) -> float:
    """Estimated seconds of an operation on `CARD`, an `Estimate` of the planner's: plans are priced as tables are.

    Args:
        func: the operation; its arguments and its results follow.
        flops: ignored, since the roofline counts them itself.
    """
    del flops
    if func.is_view or func.namespace == "prim":
        return 0.0
    if func is torch.ops.aten.index_add_.default:
        # It touches the rows that are named, not the whole of what they are added to.
        func, args, kwargs, out = torch.ops.aten.add.Tensor, (args[3], args[3]), {}, args[3]
    seconds = roofline.seconds(OpCall(func, _OPS[func], args, kwargs, out), CARD)
    unknown = _attention_flops(func, args)  # to torch's counter
    return max(seconds, unknown / roofline.flops_per_second(CARD, torch.float32))


def _attention_flops(func: Any, args: tuple[Any, ...]) -> int:
    """Of the CPU's attention, by the formula for the kernels of cards; zero for anything else."""
    aten = torch.ops.aten
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return sdpa_backward_flop_count(*(given.shape for given in args[:4]))
    return 0


def measure(workload: Workload, *, compiled: bool = False) -> Measured:
    """Measure a step of a workload at its own sizes.

    All is counted that is allocated from the model's making on: buffers, the batch, and whatever a technique holds.

    Args:
        workload: what is run.
        compiled: whether its operations show only where it runs for real: then a step is counted before the one
            whose peak is taken. Else they are counted on tensors of the CPU that hold no values, which take the same
            operations in no time, unless the step asks for values.
    """
    counted = None if compiled else _arithmetic_if_told(workload)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state = _started(workload)
        if counted is None:
            counted = _counted_step(workload, state)
        began = time.time_ns()
        workload.run_step(state, workload.sizes)
        ended = time.time_ns()
    kept = _bytes(state.model.parameters()) + _bytes(
        parameter.grad for parameter in state.model.parameters() if parameter.grad is not None
    )
    _undo(state)
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == _MEMORY
    )
    held = peak = 0
    for at, size in events:
        within = began <= at <= ended
        peak = max(peak, held if within else 0)
        held += size
        peak = max(peak, held if within else 0)
    return Measured(peak_bytes=peak - kept, arithmetic=counted)


def _arithmetic_if_told(workload: Workload) -> Arithmetic:
    """The same on fake tensors, or on others where a batch is cut by what its labels are."""
    try:
        return arithmetic(workload)
    except DataDependentOutputException:
        return arithmetic(workload, fake=False)


def arithmetic(workload: Workload, *, fake: bool = True) -> Arithmetic:
    """The multiplications and additions of a step.

    Args:
        workload: what is run, at its own sizes.
        fake: whether on tensors of the CPU that hold no values.
    """
    with fake_tensors() if fake else nullcontext():
        state = _started(workload)
        counted = _counted_step(workload, state)
        _undo(state)
    return counted


def _counted_step(workload: Workload, state: State) -> Arithmetic:
    with Counting() as counting:
        workload.run_step(state, workload.sizes)
    return Arithmetic(
        flops=counting.total,
        attention_flops=counting.attention,
        seconds=counting.simulated,
        pointwise_seconds=counting.pointwise,
    )


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors of the CPU hold no values. Models are where they belong already, and fake ones could not be moved."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(nn.Module, "to", lambda self, *_args, **_kwargs: self),
        # Truncated normal weights are drawn until all are within bounds, which nothing can tell without values.
        mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_kwargs: tensor),
    ):
        yield


def _started(workload: Workload) -> State:
    """A fresh model whose gradients are allocated."""
    torch.manual_seed(0)
    state = workload.start("cpu")
    for parameter in state.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return state


def _undo(state: State) -> None:
    if (live := live_of(state)) is not None:
        live.undo()


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
