"""Sees each op of a piece of code begin and end, and tells which blocks belong to it.

The same dispatch mode watches a real card and the virtual GPU: it stands above the kernels (or above the virtual
GPU's own mode) and below autograd and autocast, so both show the same ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.calibrate.records import BlockKind, Give, OpRecord, Step, Take, canonical
from vramfit.capture.ops import OpInfo, strided_parts, tensors_in
from vramfit.virtual.kernels.measured import Switches, signature

_PRIM_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class Taken:
    """A block was taken at an address."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Given:
    """The block at an address was given back."""

    address: int


Event = Taken | Given


@dataclass(slots=True)
class WatchedCall:
    """One call of an op, and where its results lie.

    Attributes:
        op: full name.
        signature: what decides its temporaries.
        places: address and position of each result on the card.
        results: how many results.
        reserve_at: position of a result of raw bytes that cuDNN keeps, None without one.
    """

    op: str
    signature: str
    places: list[tuple[int, int]] = field(default_factory=list)
    results: int = 1
    reserve_at: int | None = None


class Listener(Protocol):
    """Hears of each op; calls come in pairs, one op at a time."""

    def begin(self) -> None:
        """An op is about to run."""

    def end(self, call: WatchedCall) -> None:
        """It has run."""


class OpWatch(TorchDispatchMode):
    """Tells a listener of every op but views and sums of gradients, in whichever thread it runs."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self._views: dict[Any, bool] = {}
        self._switches = Switches.now()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap each call to keep its compiler away."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op between two words to the listener."""
        del types
        kwargs = kwargs or {}
        if self._is_view(func) or _sums_gradients(func):
            return func(*args, **kwargs)
        call = WatchedCall(str(func), signature(func, args, kwargs, self._switches))
        self._listener.begin()
        out = func(*args, **kwargs)
        _place(call, out)
        self._listener.end(call)
        return out

    def _is_view(self, func: Any) -> bool:
        """Whether a call only looks at memory that is there."""
        found = self._views.get(func)
        if found is None:
            is_op = isinstance(func, torch._ops.OpOverload) and func is not _PRIM_DEVICE
            found = self._views[func] = not is_op or OpInfo(func, None).view
        return found


def _sums_gradients(func: Any) -> bool:
    """Whether the engine may be summing two gradients: in place on a card, but never where a mode looks on."""
    return func is _ADD and torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _place(call: WatchedCall, out: Any) -> None:
    """Note where the results of a call lie."""
    results = list(out) if isinstance(out, (list, tuple)) else [out]
    call.results = len(results)
    for position, result in enumerate(results):
        for tensor in tensors_in(result):
            if tensor.device.type != "cuda":
                continue
            call.places += [(part.untyped_storage().data_ptr(), position) for part in strided_parts(tensor)]
            if "cudnn" in call.op and tensor.dtype is torch.uint8 and tensor.dim() == 1:
                call.reserve_at = position


def op_record(call: WatchedCall, events: Iterable[Event], *, below: int = 0, above: int = 0) -> OpRecord:
    """What an op did with memory, from the events between its begin and its end.

    Blocks that were there before and are given back meanwhile are not the op's.
    """
    return OpRecord(
        op=call.op,
        signature=call.signature,
        steps=canonical(_steps(list(events), dict(call.places))),
        results=call.results,
        reserve_at=call.reserve_at,
        below=below,
        above=above,
    )


def _steps(events: Sequence[Event], places: dict[int, int]) -> list[Step]:
    given_at: dict[int, int] = {}  # index of a block's taking to that of its giving back
    live: dict[int, int] = {}
    for index, event in enumerate(events):
        if isinstance(event, Taken):
            live[event.address] = index
        elif event.address in live:
            given_at[live.pop(event.address)] = index
    steps: list[Step] = []
    numbers: dict[int, int] = {}
    giving = {given: taken for taken, given in given_at.items()}
    for index, event in enumerate(events):
        if isinstance(event, Taken):
            numbers[index] = len(numbers) + 1
            if index in given_at:
                steps.append(Take(BlockKind.TEMPORARY, event.nbytes))
            elif event.address in places:
                steps.append(Take(BlockKind.RESULT, event.nbytes, places[event.address]))
            else:
                steps.append(Take(BlockKind.KEPT, event.nbytes))
        elif index in giving:
            steps.append(Give(numbers[giving[index]]))
    return steps
