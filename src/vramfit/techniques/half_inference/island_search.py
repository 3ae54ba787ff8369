"""Finds the modules that have to stay in float32, by running a model in float32 and in half precision side by side.

NOTE [The search for islands]: each module that computes something by itself is run twice on what it gets in float32:
as it is, and in half precision on inputs and weights that were cast. The difference is its own error; what it calls
runs in float32 meanwhile, so that nothing is blamed for what is inside it. Then the whole model runs in half precision
with the worst one, two, four modules kept in float32, and so on, until its outputs are as close as they have to be;
halving finds the smallest number, and what is not needed after all is dropped. What overflows comes first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vramfit.arguments import number_argument, shown
from vramfit.errors import UsageError
from vramfit.searching.allowed import Multiples
from vramfit.searching.largest import Strategy, largest_where
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.core.forward_trace import ForwardTrace, trace_forward
from vramfit.techniques.half_inference.half_program import (
    WIDER,
    Float32Part,
    make_half,
    same_tensors,
)
from vramfit.techniques.support.casting import HALVES, cast_tensors, find_islands, put_values
from vramfit.techniques.support.evaluation import in_evaluation
from vramfit.torch_internals.dispatch import TorchDispatchMode
from vramfit.torch_internals.layers import BatchNorm
from vramfit.workload import Batch, call_model

TOLERANCE = 0.01
"""Part of an output's norm by which half precision may change it."""

_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundIslands:
    """What has to stay in float32.

    Attributes:
        islands: names of the modules, the worst first.
        handing_on: those of them whose outputs another island gets, or the model's caller.
        error: of the outputs with these islands: the norm of the difference to float32's, as a part of theirs.
        plain_error: the same without any island; infinite where something overflows.
        runs: passes of the whole model in half precision that were made.
    """

    islands: tuple[str, ...]
    handing_on: tuple[str, ...]
    error: float
    plain_error: float
    runs: int


class IslandSearchError(UsageError):
    """The search came to no end: no time, nothing to compare, or no islands that would do.

    Attributes:
        refuted: whether it was seen that the tolerance cannot be kept.
    """

    def __init__(self, message: str, hint: str, *, refuted: bool = False) -> None:
        super().__init__(message, hint)
        self.refuted = refuted


def find_float32_islands(
    model: nn.Module,
    batch: Batch,
    dtype: torch.dtype,
    *,
    tolerance: float = TOLERANCE,
    seconds: float = _SECONDS,
) -> FoundIslands:
    """The modules to keep in float32 so that the outputs stay close to float32's.

    The model runs in evaluation mode, and is left as it was. Products in float16 are computed in float32 and rounded,
    as tensor cores do; a CPU's own are slow.

    Args:
        model: with its values, in float32, on the CPU.
        batch: what it is called with; inputs of small sizes will do if values are like the real ones.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        tolerance: the norm of the difference that any floating output may have, as a part of its norm.
        seconds: after which the search is given up.

    Raises:
        UsageError: the dtype is neither, or a number is out of bounds.
        IslandSearchError: no time was left, the outputs cannot be compared, or no islands keep the tolerance.
    """
    if dtype not in HALVES:
        raise UsageError(f"{shown(dtype)} is no half precision", "Give torch.float16 or torch.bfloat16")
    tolerance = number_argument("tolerance", tolerance, least=0.0, most=math.inf)
    seconds = number_argument("seconds", seconds, least=0.0, most=math.inf)
    with in_evaluation(model), torch.no_grad():
        return _Search(model, batch, dtype, tolerance, time.monotonic() + seconds).found()


@dataclass(slots=True)
class _Search:
    model: nn.Module
    batch: Batch
    dtype: torch.dtype
    tolerance: float
    ends: float
    runs: int = 0
    reference: Any = None
    errors: dict[tuple[str, ...], float] = field(default_factory=dict)
    links: set[tuple[str, str]] = field(default_factory=set)
    """Modules whose outputs other modules get, or the model's caller: that one's name is empty."""

    def found(self) -> FoundIslands:
        self.reference = call_model(self.model, self.batch)
        outputs = [one for one, _ in same_tensors(self.reference, self.reference)]
        if not outputs or not all(bool(one.isfinite().all()) for one in outputs):
            raise IslandSearchError(
                "outputs in float32 are not finite" if outputs else "the model returns no floating tensors",
                "Give a batch for which it does",
            )
        plain = self._error(())
        islands: tuple[str, ...] = ()
        if plain > self.tolerance:
            ranked = self._ranked()
            islands = self._dropped(self._fewest(ranked))
            self._check_worth(islands)
        return FoundIslands(
            islands=islands,
            handing_on=self._handing_on(islands),
            error=self._error(islands),
            plain_error=plain,
            runs=self.runs,
        )

    def _fewest(self, ranked: Sequence[str]) -> tuple[str, ...]:
        """As many of the worst as are needed."""
        too_few = largest_where(
            lambda count: self._error(tuple(ranked[:count])) > self.tolerance,
            Strategy(allowed=Multiples(most=len(ranked))),
        ).value
        if too_few == len(ranked):
            error = self._error(tuple(ranked))
            raise IslandSearchError(
                f"the outputs in {_short(self.dtype)} differ by {error:.2g} of their norm whatever module stays in "
                "float32",
                "Use another type, or allow more with tolerance",
                refuted=True,
            )
        return tuple(ranked[: too_few + 1])

    def _check_worth(self, islands: tuple[str, ...]) -> None:
        """Make sure that something is left in half precision."""
        inside = {id(one) for name in islands for one in self.model.get_submodule(name).parameters()}
        if all(id(one) in inside for one in self.model.parameters()):
            raise IslandSearchError(
                f"the outputs in {_short(self.dtype)} stay within {self.tolerance:g} only with all weights in float32",
                "Use another type, or allow more with tolerance",
                refuted=True,
            )

    def _dropped(self, islands: tuple[str, ...]) -> tuple[str, ...]:
        """Without those that are not needed, as far as there is time to see."""
        for name in reversed(islands):
            rest = tuple(one for one in islands if one != name)
            try:
                if self._error(rest) <= self.tolerance:
                    islands = rest
            except IslandSearchError:
                break
        return islands

    def _error(self, names: tuple[str, ...]) -> float:
        """The error of the outputs with some islands."""
        if names not in self.errors:
            self._check_time()
            self.runs += 1
            live = AttachedProgram(self.model, None)
            try:
                with products_in_float32(self.dtype):
                    make_half(
                        live,
                        self.dtype,
                        find_islands(self.model, with_sharers(self.model, names), ()),
                        handing_on=[self.model.get_submodule(one) for one in self._handing_on(names)],
                    )
                    result = call_model(self.model, self.batch)
            except (RuntimeError, NotImplementedError):  # an operation that half precision does not have here
                self.errors[names] = math.inf
            else:
                self.errors[names] = relative_error(result, self.reference)
            finally:
                live.undo()
        return self.errors[names]

    def _handing_on(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of some islands that others of them follow, or nothing."""
        chosen = {*names, ""}
        return tuple(
            name
            for name in names
            if any(maker == name and taker in chosen and taker != name for maker, taker in self.links)
        )

    def _ranked(self) -> list[str]:
        """Modules by their own errors, the worst first."""
        trace = trace_forward(self.model, lambda: call_model(self.model, self.batch), self.batch)
        self.links = _links(trace)
        live = AttachedProgram(self.model, None)
        probes = _Probes(self.dtype, self._check_time)
        for path, module in self.model.named_modules():
            if path in trace.computing and path and not isinstance(module, BatchNorm):
                live.surround(module, _Probe(path, probes))
        try:
            with products_in_float32(self.dtype):
                call_model(self.model, self.batch)
        finally:
            live.undo()
        return sorted(probes.errors, key=lambda path: -probes.errors[path])

    def _check_time(self) -> None:
        if time.monotonic() > self.ends:
            raise IslandSearchError(
                "the time for comparing half precision with float32 was over", "Give more, or a smaller batch"
            )


def _links(trace: ForwardTrace) -> set[tuple[str, str]]:
    """Modules, each with one that got its output as it was."""
    makers: dict[object, set[str]] = {}
    found: set[tuple[str, str]] = set()
    for call in trace.calls:
        for storage in call.outputs:
            makers.setdefault(storage, set()).add(call.path)
    for call in trace.calls:
        taken = call.outputs if not call.path else [one.storage for one in call.inputs]
        found.update((maker, call.path) for storage in taken for maker in makers.get(storage, ()))
    return found


class _Probes:
    """The modules' own errors.

    Attributes:
        nested: how many modules run in float32 inside one whose error is being measured; -1 where none is measured.
    """

    def __init__(self, dtype: torch.dtype, check: Callable[[], None]) -> None:
        self.dtype, self.check = dtype, check
        self.errors: dict[str, float] = {}
        self.nested = -1


class _Probe:
    """Measures what half precision does to a module's own operations."""

    def __init__(self, path: str, probes: _Probes) -> None:
        self.path, self.probes = path, probes

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass in float32, after one in half precision."""
        probes = self.probes
        if probes.nested >= 0:
            return self._called(module, forward, args, kwargs)
        probes.check()
        half_args, half_kwargs = cast_tensors((args, kwargs), WIDER, probes.dtype)
        probes.nested = 0
        try:
            with _own_tensors(module, probes.dtype):
                half = forward(*half_args, **half_kwargs)
        except (RuntimeError, NotImplementedError):  # an operation that half precision does not have here
            half = None
        finally:
            probes.nested = -1
        result = forward(*args, **kwargs)
        error = math.inf if half is None else relative_error(half, result)
        probes.errors[self.path] = max(error, probes.errors.get(self.path, 0.0))
        return result

    def _called(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a measured module calls runs in float32; what that calls is inside it."""
        probes = self.probes
        if probes.nested > 0:
            return forward(*args, **kwargs)
        probes.nested += 1
        try:
            return Float32Part(probes.dtype)(module, forward, args, kwargs)
        finally:
            probes.nested -= 1


@contextmanager
def _own_tensors(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A module's own parameters and buffers in half precision, not those of the modules in it."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    before = [(tensor, tensor.detach()) for tensor in own if tensor.dtype is torch.float32]
    for tensor, values in before:
        put_values(tensor, values.to(dtype))
    try:
        yield
    finally:
        for tensor, values in before:
            put_values(tensor, values)


def with_sharers(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Names of modules, and of those that share parameters with them, which can have only one dtype."""
    chosen = dict.fromkeys(names)
    inside = {id(one) for name in names for one in model.get_submodule(name).parameters()}
    for path, module in model.named_modules():
        held = any(path == name or path.startswith(f"{name}.") for name in names)
        if not held and path and any(id(one) in inside for one in module.parameters(recurse=False)):
            chosen[path] = None
    return tuple(chosen)


def relative_error(result: Any, reference: Any) -> float:
    """The norm of the difference of any floating output, as a part of the reference's norm; the worst counts."""
    worst = 0.0
    for one, other in same_tensors(result, reference):
        difference = float((one.double() - other.double()).norm())
        norm = float(other.double().norm())
        if math.isnan(difference):
            return math.inf
        if difference > 0:
            worst = max(worst, difference / norm if norm > 0 else math.inf)
    return worst


def products_in_float32(dtype: torch.dtype) -> Any:
    """A context in which products in float16 are computed in float32 and rounded; nothing for bfloat16."""
    return Float32Products() if dtype is torch.float16 else nullcontext()


_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _aten.convolution.default,
        _aten.addmm.default,
        _aten.mm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
    }
)


class Float32Products(TorchDispatchMode):
    """Computes products of 16 bits in float32 and rounds them, as a card's tensor cores do.

    cuBLAS and cuDNN add up in float32 (docs.nvidia.com/cuda/cublas, ``CUBLAS_COMPUTE_32F``). A CPU without
    instructions for float16 takes some twenty times as long for the same.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        del types
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype not in HALVES:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = cast_tensors((args, kwargs), HALVES, torch.float32)
        return func(*wide_args, **wide_kwargs).to(args[0].dtype)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
