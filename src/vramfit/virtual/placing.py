"""Places what one op takes on a card: temporaries, results and workspaces, in the order of its kernel's requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.capture.ops import placed, tensors_in
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.trace import Category
from vramfit.virtual import kernels
from vramfit.virtual.data_dependent.assume import Extent, Resting, bounds, concatenated, merged
from vramfit.virtual.describe import COMPRESSED
from vramfit.virtual.kernels import Blas, Extras, KernelContext
from vramfit.virtual.meter import Held, Meter
from vramfit.virtual.op_cache import RememberedCall
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.workspaces import Workspaces

NO_EXTRAS = Extras()
Release = Callable[[], None]
"""Gives back what a kernel took before its results."""

_CERTAIN = Resting()
_CAT = torch.ops.aten.cat.default
_PADS = [f"{how}_pad{n}d" for how in ("reflection", "replication") for n in (1, 2, 3)]
_JOINING = {_CAT, *(getattr(torch.ops.aten, pad).default for pad in ("constant_pad_nd", *_PADS))}


def _nothing() -> None:
    """A kernel that took nothing before its results gives nothing back."""


class Placing:
    """Places the results of ops, and what their kernels need meanwhile."""

    def __init__(self, meter: Meter, workspaces: Workspaces) -> None:
        self._meter = meter
        self._workspaces = workspaces

    def place(
        self, call: OpCall, device: int, *, category: Category | None, extents: tuple[Extent, ...]
    ) -> None:
        """Place an op's results; its temporaries are gone afterwards.

        Args:
            call: the op, whose results are not placed yet.
            category: what the results are for; None takes that from the phase of the program.
            extents: assumed sizes of the results, beside those on which the arguments rest.

        Raises:
            torch.OutOfMemoryError: the card is full.
        """
        info, out, name = call.info, call.out, call.info.name
        extras = kernels.extras(call) or NO_EXTRAS
        rests, scale = _CERTAIN, (1.0, 1.0)
        if self._meter.assuming:
            rests, scale = self._resting(call, extents)
        libraries = kernels.blas_libraries(call)

        def results(release: Release) -> None:
            if extras.between:
                self._adopt_in_turn(out, name, category, rests, extras, device, scale, release)
            elif info.fresh or info.mutated:
                self._adopt(info.as_made(out), name, category, rests)

        self.take(name, extras, libraries, results, device=device, context=call.context, scale=scale)
        self._doubt_kept(extras, name, out)

    def place_again(self, plan: RememberedCall, name: str, out: Any, category: Category | None) -> None:
        """`place` for a call whose requests a plan holds."""
        context = plan.context
        if context is None:  # no rule and no library is concerned: there is nothing but the results
            self._results_again(plan, name, out, category)
            return
        extras = plan.extras or NO_EXTRAS

        def results(release: Release) -> None:
            if extras.between:
                self._results_again_in_turn(plan, name, out, category, extras, release)
            else:
                self._results_again(plan, name, out, category)

        if plan.extras is not None or plan.libraries:
            self.take(name, extras, plan.libraries, results, device=plan.device, context=context)
            self._doubt_kept(extras, name, out)
        else:
            results(_nothing)

    def _doubt_kept(self, extras: Extras, name: str, out: Any) -> None:
        for position, below, above in extras.kept_errors:
            self._meter.in_doubt(out[position], below, above, name)

    def adopt_parts(self, out: Any, name: str) -> None:
        """Place the parts that an op on compressed tensors has made; those shared with others are placed already."""
        if type(out) is FakeTensor and out.layout in COMPRESSED:
            for part in placed(out):
                if self._meter.record_of(part) is None:
                    self._meter.adopt(part, name)

    def _results_again(self, plan: RememberedCall, name: str, out: Any, category: Category | None) -> None:
        single, place = plan.recipe[0] is None, self._meter.place
        for position, nbytes, described in plan.fresh:
            tensor = out if single else out[position]
            place(tensor, nbytes, plan.device, name, plan.op, described, category)
        for position in plan.others:
            self._meter.adopt(out if single else out[position], name, category)

    def _results_again_in_turn(
        self,
        plan: RememberedCall,
        name: str,
        out: tuple[Any, ...],
        category: Category | None,
        extras: Extras,
        release: Release,
    ) -> None:
        meter, device = self._meter, plan.device
        fresh = {position: (nbytes, described) for position, nbytes, described in plan.fresh}
        for position in range(len(extras.between)):
            if position in fresh:
                nbytes, described = fresh[position]
                meter.place(out[position], nbytes, device, name, plan.op, described, category)
            self._hold_between(position, extras, device, name)
            if position == extras.until:
                release()

    def _hold_between(
        self,
        part: int,
        extras: Extras,
        device: int,
        name: str,
        scale: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Take what the computation of one of several results needs, scaled as in `take`, and give it back."""
        held = self._meter.temporary(extras.between[part], device, name, scale)
        if extras.between_errors and any(extras.between_errors[part]):
            choice = extras.choices[part] if extras.choices else ""
            self._meter.estimate(held, device, extras.between_errors[part], name, part, choice)
        self._meter.note_doubt(device)
        self._meter.give_back(reversed(held), device)

    def take(
        self,
        name: str,
        extras: Extras,
        libraries: tuple[Blas, ...],
        results: Callable[[Release], None],
        *,
        device: int,
        context: KernelContext,
        scale: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Place an op's results by calling `results`, with its kernel's temporaries and the workspaces of `libraries`.

        `results` gets a function that gives back what was taken before. Temporaries may really be as small and as
        large as the multiples in `scale`.

        Raises:
            torch.OutOfMemoryError: the card is full.
        """
        meter = self._meter
        below, above = extras.error_below_bytes, extras.error_bytes
        if below or above:
            meter.widen(device, below, above, name)
        held: list[Held] = []
        addresses: list[int] = []

        def release() -> None:
            meter.give_back(reversed(held), device)
            held.clear()

        try:
            if extras.before:
                held += meter.temporary(extras.before, device, name, scale)
            results(release)
            if extras.after:
                held += meter.temporary(extras.after, device, name, scale)
            for blas in libraries:
                addresses += self._workspaces.use(blas, device, context)
            if below or above:
                if not extras.between_errors:
                    meter.estimate(
                        held, device, (below, above), name, choice=extras.choices[0] if extras.choices else ""
                    )
                meter.note_doubt(device)
        finally:
            for address in reversed(addresses):
                meter.free(address, device)
            meter.give_back(reversed(held), device)
            if below or above:
                meter.narrow(device, below, above)

    def _resting(
        self,
        call: OpCall,
        extents: tuple[Extent, ...],
    ) -> tuple[Resting, tuple[float, float]]:
        """The assumed sizes on which the results may rest, and the least and most multiples of the temporaries."""
        out = call.out
        arguments = placed((call.args, tuple(call.kwargs.values())))
        given = [(tensor, self._meter.extents_of(tensor)) for tensor in arguments]
        named = call.named_sizes()
        made = {size for tensor in tensors_in(out) for size in tensor.shape}
        known = named.union(*(tensor.shape for tensor, _ in given))
        if call.func is _CAT and isinstance(out, torch.Tensor) and out.dim():
            axis = call.argument(1, "dim", 0) % out.dim()
            parts = [(t.shape, found) for t, found in given]
            along = concatenated(parts, axis, out.shape[axis])
            # No other dimension of its result differs from those of its parts.
            across = [
                e for _, found in given for e in found if e.shown in out.shape and e.shown != out.shape[axis]
            ]
            rests = Resting(merged(extents, () if along is None else (along,), across), known)
        else:
            found = [extents, *(found for _, found in given), self._meter.numbers.named(named & made)]
            rests = Resting(merged(*found), known, joined=call.func in _JOINING)
        low = high = 1.0
        for tensor, of in (*given, *((t, rests.of(t.shape)) for t in placed(out))):
            if of and tensor.nbytes:
                least, most = bounds(tensor.nbytes, tensor.shape, of)
                low, high = min(low, least / tensor.nbytes), max(high, most / tensor.nbytes)
        return rests, (low, high)

    def _adopt(self, out: Any, op: str, category: Category | None, rests: Resting) -> None:
        for part in placed(out):
            self._meter.adopt(part, op, category, rests.of(part.shape) if rests.extents else ())

    def _adopt_in_turn(
        self,
        out: tuple[Any, ...],
        op: str,
        category: Category | None,
        rests: Resting,
        extras: Extras,
        device: int,
        scale: tuple[float, float],
        release: Release,
    ) -> None:
        """Place results one after the other, each with the temporaries of its own computation."""
        for position, result in enumerate(out):
            if result is not None:
                self._adopt(result, op, category, rests)
            self._hold_between(position, extras, device, op, scale)
            if position == extras.until:
                release()
