"""Operators of libraries: fake implementations that ask for a size that depends on data, torchvision, bitsandbytes.

``torch.library.get_ctx().new_dynamic_size()`` wants a symbolic size, for which our FakeTensorMode has no ShapeEnv. So
the fake implementation runs again with a context of ours, which gives an assumed number instead. Where the operator
says no maximum its arguments bound the size: by their elements where the result looks like coordinates of elements,
else by their rows. The operator does not promise that, so a warning says that the error bar does not hold its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vramfit.capture.attribution import ProgramPhase
from vramfit.capture.ops import tensors_in
from vramfit.options.assume_choice import Assume
from vramfit.torch_internals.custom_ops import FakeImplCtx, set_fake_context_getter
from vramfit.torch_internals.dispatch import DispatchKey, OpOverload, has_kernel
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.trace import Category
from vramfit.virtual import roofline
from vramfit.virtual.data_dependent.assume import Extent
from vramfit.virtual.describe import fake_implementation
from vramfit.virtual.fake_impls import shapes
from vramfit.virtual.fake_impls.registry import LATE, finish, rule
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

_MASKED_SELECT = torch.ops.aten.masked_select.default
_BITS = 64  # threadsPerBlock of vision/csrc/ops/cuda/nms_kernel.cu: pairs of boxes are bits of 64-bit words
_ROWS_OF_FIRST = frozenset({"torchvision::nms", "torchvision::qnms"})
"""Operators that give the numbers of some of the rows of their first argument."""
_SPECIALISED = 2  # default minimum of create_unbacked_symint: torch.compile's, not the operator's


def run(mode: OpRunner, call: OpCall) -> Any:
    """The operator's results, with sizes that are assumed where its arguments are not known."""
    if (true := _true_result(mode, call)) is not None:
        return true
    name, given = call.func.name(), call.tensors()
    rows = max((t.shape[0] for t in given if t.dim()), default=0)
    if name in _ROWS_OF_FIRST:
        sizes = _Sizes(mode, call.func, call.args[0].shape[0], binding=True)
    else:
        sizes = _Sizes(mode, call.func, rows, binding=False)
    out = _describe(mode, call, sizes)
    if not sizes.binding and (source := _located(out, given)) is not None:
        sizes = _Sizes(mode, call.func, source.numel(), binding=False)
        out = _describe(mode, call, sizes)
    extents = sizes.tell()
    mode.settle(call, out, extents=extents)
    for part in tensors_in(out):
        if part.dim() == 1 and part.dtype is torch.int64 and part.numel() in {e.shown for e in extents}:
            shapes.number_rows(mode, sizes.bound, part)
    return out


def _true_result(mode: OpRunner, call: OpCall) -> Any:
    """What the operator gives on true values, where it runs on the host; None without them."""
    if call.info.mutated:
        return None
    try:
        true = shapes.true_result(mode, call)
    except NotImplementedError:  # it has no kernel for the host
        return None
    if true is None:
        return None
    return finish(mode, call, shapes.like(mode, true, shapes.device_of(call.args)))


def _describe(mode: OpRunner, call: OpCall, sizes: _Sizes) -> Any:
    with set_fake_context_getter(lambda: sizes), mode.fake:
        return fake_implementation(call.func)(*call.args, **call.kwargs)


@dataclass(frozen=True, slots=True)
class _Asked:
    low: int
    high: int
    shown: int
    bounded: bool


class _Sizes(FakeImplCtx):  # type: ignore[misc]  # torch's, looked up by its path
    """The context of a fake implementation: gives assumed sizes, and reports afterwards what they were."""

    def __init__(self, mode: OpRunner, func: OpOverload, bound: int, *, binding: bool) -> None:
        super().__init__(mode.fake, func)
        self._mode, self._name = mode, func.name()
        self.bound = bound
        self.binding = binding  # the operator gives no more than `bound`, whatever else it says
        self._asked: list[_Asked] = []
        self._fewer: int | None = None

    def create_unbacked_symint(self, *, min: int = _SPECIALISED, max: int | None = None) -> int:
        """The older name; its default minimum is no statement of the operator."""
        return self.new_dynamic_size(min=0 if min == _SPECIALISED else min, max=max)

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> int:
        """An assumed size between two bounds.

        Raises:
            ValueError: the lower bound is negative.
        """
        if min < 0:
            raise ValueError(
                f"ctx.new_dynamic_size(min={min}, ...): expected min to be greater than or equal to 0: "
                "this API can only create non-negative sizes."
            )
        high = self.bound if max is None else max
        if max is not None and self.binding:
            high = _least(max, self.bound)
        low = _least(min, high)
        count = high if self._mode.machine.assume is Assume.UPPER else low + (high - low + 1) // 2
        shown = _most(low, self._mode.guesses.fewer(count))
        self._asked.append(_Asked(low, high, shown, self.binding or max is not None))
        return shown

    def tell(self) -> tuple[Extent, ...]:
        """Warn of the sizes that were assumed; returns their extents."""
        found = []
        for asked in self._asked:
            what = f"{asked.shown:,} of {asked.high:,} elements"
            if asked.low == asked.high and asked.bounded:
                continue
            shapes.tell(self._mode, self._name, what)
            found.append(shapes.assumed(self._mode, asked.shown, asked.low, asked.high))
        if any(not asked.bounded for asked in self._asked):
            self._mode.machine.warn(
                "size-without-bound",
                f"nothing bounds the result of {self._name}, whose shape depends on data: the error bar does not hold "
                "it. Give new_dynamic_size of its fake implementation a max",
                location=self._mode.guesses.location(),
            )
        return tuple(found)


_least, _most = min, max  # the arguments of new_dynamic_size have these names


def _located(out: Any, given: list[torch.Tensor]) -> torch.Tensor | None:
    """The argument of whose elements a result has the coordinates, one row for each, as ``nonzero`` has."""
    rows = [t.shape[1] for t in tensors_in(out) if t.dim() == 2 and t.dtype is torch.int64]
    return max((t for t in given if t.dim() > 1 and t.dim() in rows), key=torch.Tensor.numel, default=None)


@rule("torchvision.nms.default")
def nms(mode: OpRunner, call: OpCall) -> Any:
    """``torchvision.ops.nms`` on a card: boxes sorted by score, a bit for each pair, a mask of what is kept.

    vision/csrc/ops/cuda/nms_kernel.cu: ``nms_kernel``, since torchvision 0.21 without a copy to the host
    (https://github.com/pytorch/vision/pull/8766).
    """
    boxes, scores = call.args[:2]
    if type(boxes) is not FakeTensor or boxes.fake_device.type != "cuda" or not boxes.numel():
        return run(mode, call)
    _describe(mode, call, _Sizes(mode, call.func, 0, binding=True))  # what it says of its arguments
    if (true := _true_result(mode, call)) is not None:
        return true
    count = boxes.shape[0]
    with mode:  # metered like ops of the program
        order = scores.sort(stable=True, dim=0, descending=True)[1]
        ordered = boxes.index_select(0, order)
        pairs = boxes.new_empty(count * -(-count // _BITS), dtype=torch.int64)
        kept = boxes.new_zeros(count, dtype=torch.bool)
    mode.shadows.forget(kept)
    mode.meter.expect(kept, None)
    del ordered
    found = shapes.select_masked(mode, mode.call(_MASKED_SELECT, order, kept), call.func.name())
    del pairs
    shapes.number_rows(mode, count, found)
    return found


# -- bitsandbytes ----------------------------------------------------------------------------------------------------

_QUANTISING = {"quantize_4bit", "quantize_blockwise", "int8_vectorwise_quant"}
_KEYS = (DispatchKey.CUDA, DispatchKey.CompositeExplicitAutograd)


def bitsandbytes_on_card(mode: OpRunner, call: OpCall) -> Any:
    """Run the Python that an op has for a card: its allocations arrive one by one, and its values are unknown then.

    See NOTE [bitsandbytes] in torch_patches/libraries.py.
    """
    card = next((t.device.index or 0 for t in call.tensors() if t.device.type == "cuda"), None)
    key = next((k for k in _KEYS if has_kernel(call.func.name(), k)), None)
    if card is None or key is None:
        return mode.run(call)
    with mode:
        call.out = out = call.func._op_dk(key, *call.args, **call.kwargs)
    for tensor in (*tensors_in(out), *call.written()):
        if type(tensor) is FakeTensor:
            mode.shadows.forget(tensor)
            # Before anything runs, weights are quantised: packed, and their scales.
            if mode.meter.phases.phase is ProgramPhase.SETUP and call.func._opname in _QUANTISING:
                mode.meter.tag(tensor, Category.PARAMETERS)
    spec, rates = mode.machine.devices[card].spec, mode.machine.rates
    mode.machine.advance(1e6 * roofline.seconds(call, spec, rates), card)
    return out


LATE["bitsandbytes.*"] = bitsandbytes_on_card
