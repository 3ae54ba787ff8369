"""Keeps shadows true: runs each op that touches small virtual tensors on their shadows too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from vramfit.capture.ops import tensors_in
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.data_dependent.assume import Extent
from vramfit.virtual.data_dependent.expectations import Expectation
from vramfit.virtual.data_dependent.plausible_values import COUNTING, counts, guess_value, ranks
from vramfit.virtual.data_dependent.shadow import (
    MAX_ELEMENTS,
    ShadowStore,
    map_tensors,
    may_be_known,
    may_carry,
    most_known,
)
from vramfit.virtual.fills import Fills
from vramfit.virtual.machine import Machine
from vramfit.virtual.masks import Masks
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.torch_cuda import VirtualGenerator, default_generator, virtual_generator

_COMPARISONS = {
    getattr(torch.ops.aten, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "less", "greater")
}
_WHERE = torch.ops.aten.where.self
_TO_COPY = torch.ops.aten._to_copy.default


def is_quiet(call: OpCall) -> bool:
    """Whether an op that reads something unknown leaves nothing but unknown values: none are drawn or guessed."""
    if call.info.random or call.func is _WHERE or call.func in COUNTING:
        return False
    return not call.info.fresh or all(t.is_floating_point() for t in tensors_in(call.out))


class Shading:
    """What happens to the shadows of a virtual GPU when an op runs."""

    def __init__(
        self,
        machine: Machine,
        shadows: ShadowStore,
        expected: Callable[[torch.Tensor], Expectation],
        note_count: Callable[[Extent], None],
        ends: Callable[[], bool | None],
    ) -> None:
        self.machine = machine
        self.shadows = shadows
        self.expected = expected
        self.note_count = note_count
        self.fills = Fills()
        self.masks = Masks(machine.assume, shadows, expected, ends)

    def follow(self, call: OpCall) -> None:
        """Bring shadows up to date after an op: compute small results, or guess or forget them."""
        self.fills.follow(call)
        self.masks.follow(call)
        func, info, args, out = call.func, call.info, call.args, call.out
        drawn = self._draw(call, call.device) if info.random and call.device is not None else None
        # Many draws are better counted than drawn otherwise.
        fits = may_carry if info.random else may_be_known
        fresh = [t for t in tensors_in(out) if fits(t)] if info.fresh else []
        written = call.written() if info.mutated else []
        for tensor in written:
            self.masks.forget(tensor)
        if not fresh and not any(w.numel() <= most_known(w) for w in written):
            return
        read = self._chosen(args) if func is _WHERE else args
        if info.shadowed and (inputs := self.arguments(read, call.kwargs)) is not None:
            real_args, real_kwargs, guessed = inputs
            try:
                result = self._compute(call, real_args, real_kwargs, drawn)
            except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
                # Not every CUDA op exists on the CPU: such an op's results are guessed from now on.
                info.shadowed = False
            else:
                for fake, value in zip(tensors_in(out), tensors_in(result), strict=False):
                    # A shape assumed by a rule (shapes.py) need not be that of a guessed value.
                    if fake.shape != value.shape or any(fake is w for w in written):
                        continue
                    if may_carry(fake) or (fits(fake) and not guessed):
                        if guessed and args:
                            value = self.masks.revised(func, fake, value, args[0])
                        self.shadows.set(fake, value, guessed=guessed)
                if guessed:
                    for tensor in written:
                        if (shadow := self.shadows.find(tensor)) is not None:
                            shadow.guessed = True
                            self.masks.rewrite(func, tensor)
                return
        self.forget_written(call)
        for tensor in fresh:
            # Fractions are guessed when someone looks; answers and indices here, where the op tells which are usual.
            if not may_carry(tensor) or (tensor.is_floating_point() and func not in COUNTING):
                continue
            if not any(tensor is w for w in written):
                self.shadows.set(tensor, self._guess(call, tensor), guessed=True)

    def stays_unknown(self, call: OpCall, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether an op reads something unknown, so that what it writes is forgotten and `follow` has nothing to do.

        This is for ops that draw nothing and whose results are not guessed at once.

        Args:
            tensors: those among its arguments, all of them small.
        """
        if call.info.shadowed and self.shadows.has_all(tensors):
            return False
        self.forget_written(call)
        return True

    def forget_written(self, call: OpCall) -> None:
        """Nothing is known any more of the values of what an op writes."""
        if call.info.mutated:
            for tensor in call.written():
                self.shadows.forget(tensor)
                self.masks.forget(tensor)

    def _chosen(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of ``where`` without the branch that nobody takes, whose values may be unknown."""
        condition = self.shadows.view(args[0]) if type(args[0]) is FakeTensor else None
        if condition is None or condition.dtype is not torch.bool:
            return args
        if bool(condition.all()):
            return args[0], args[1], args[1]
        return args if bool(condition.any()) else (args[0], args[2], args[2])

    def _guess(self, call: OpCall, out: torch.Tensor) -> torch.Tensor:
        """Values for a small result that nobody computed."""
        func, args = call.func, call.args
        if out.dtype is torch.bool and out.numel() > 1:
            return self.masks.values(out)
        source = args[0] if args else None
        if func is _TO_COPY and isinstance(source, torch.Tensor) and source.dtype is torch.bool:
            return self.masks.values(source).to(out.dtype)  # a part of a mask too large for values of its own
        if isinstance(source, torch.Tensor) and (holds := self.masks.answer(func, source)) is not None:
            return torch.full(out.shape, holds, device="cpu")
        if func._overloadpacket in _COMPARISONS and all(t.numel() <= MAX_ELEMENTS for t in tensors_in(args)):
            # Compare what the program would be told if it looked: `loss < best` agrees with the values of both.
            answer: torch.Tensor = func(*map_tensors(self._assumed, args))
            return answer
        counted = counts(call, out, self.expected, self.machine.assume)
        if counted is not None:
            values, bounds = counted
            if bounds is not None:
                self.note_count(bounds)
            return values
        ranked = ranks(call, out)
        if ranked is not None:
            return ranked
        return torch.full(out.shape, guess_value(func, out.dtype, args), dtype=out.dtype, device="cpu")

    def _assumed(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not FakeTensor:
            return tensor
        view = self.shadows.view(tensor)
        return torch.full(tensor.shape, self.number(tensor), dtype=tensor.dtype) if view is None else view

    def number(self, tensor: torch.Tensor) -> float | int | bool:
        """What an element of a fake tensor without values is taken for."""
        fill = self.fills.find(tensor)
        return guess_value(None, tensor.dtype, (tensor,)) if fill is None else fill.value

    def accumulate(self, target: torch.Tensor, other: torch.Tensor) -> None:
        """Bring the shadow of a gradient up to date to which the engine adds another in place."""
        self.fills.forget(target)
        found = self.arguments((target, other), {})
        if found is None or 0 in target.stride():
            self.shadows.forget(target)
            return
        (values, added), _, guessed = found
        values.add_(added)
        if guessed and (shadow := self.shadows.find(target)) is not None:
            shadow.guessed = True

    def arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool] | None:
        """Arguments with shadows in place of fake tensors, and whether one was a guess; None if one is missing."""
        guessed = False
        shadows = self.shadows
        for tensor in (*tensors_in(args), *tensors_in(tuple(kwargs.values()))):
            if type(tensor) is FakeTensor:
                if tensor.numel() > most_known(tensor):
                    return None
                shadow = shadows.find(tensor)
                if shadow is None:
                    return None
                guessed = guessed or shadow.guessed

        def to_real(tensor: torch.Tensor) -> Any:
            return shadows.view(tensor) if type(tensor) is FakeTensor else tensor

        real_kwargs = {k: map_tensors(to_real, v) for k, v in kwargs.items()}
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        if "pin_memory" in real_kwargs:
            # A shadow lies in plain memory, the only one where there is no card.
            real_kwargs["pin_memory"] = False
        return map_tensors(to_real, args), real_kwargs, guessed

    def _compute(
        self,
        call: OpCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        drawn: VirtualGenerator | None,
    ) -> Any:
        """Run an op on true values of its arguments."""
        func, info = call.func, call.info
        generator = kwargs.pop("generator", None)
        if not info.random:
            return func(*args, **kwargs)
        if info.takes_generator:
            return func(*args, **{**kwargs, "generator": drawn or generator})
        if drawn is None:
            return func(*args, **kwargs)
        # An op without such an argument draws from the program's CPU generator, which is not to notice.
        state = torch.get_rng_state()
        try:
            torch.default_generator.set_state(drawn.cpu_state())
            return func(*args, **kwargs)
        finally:
            torch.set_rng_state(state)

    def _draw(self, call: OpCall, device: int) -> VirtualGenerator:
        """Consume random numbers of a card; gives the generator from which the true values of small tensors come.

        The same state gives the same values, as on a card (but not the card's values). How far the state moves is
        ATen/native/cuda/DistributionTemplates.h: calc_execution_policy, four numbers a thread and round.
        """
        spec = self.machine.devices[device].spec
        generator = virtual_generator(call.kwargs.get("generator")) or default_generator(device)
        numel = max((t.numel() for t in (*tensors_in(call.out), *tensors_in(call.args))), default=1)
        threads = 256 * max(1, min(spec.sm_count * (spec.max_threads_per_sm // 256), -(-numel // 256)))
        return generator.draw(4 * -(-numel // (threads * 4)))
