"""Steps of any optimizer in float32, for parameters that rest in bfloat16 between the steps.

NOTE [Steps in float32]: the hooks of an optimizer run the update themselves, chunk by chunk: weights, gradients and
states of a chunk are widened into tensors beside, the optimizer's own update runs on these as if they were its
parameters, and the weights come back rounded. The parameters keep their dtype throughout: a change of it would make
autograd drop the gradient accumulators that distributed data parallel hangs its hooks on. For the rest of the
optimizer's step, which follows, the parameters that are done have no gradient, so that it leaves them out. States live
in ``optimizer.state`` under the parameter, as always.

NOTE [Two halves]: bfloat16 is the upper half of float32. A float32 weight is kept as its bfloat16 rounding, which the
model computes with, and the 16 bits by which the two differ as integers: 4 bytes together, as float32 alone
(NVIDIA Apex keeps such remainders: apex/contrib/optimizers/distributed_fused_adam.py, ``store_param_remainders``).
The weights may be changed by others in between (clamped, averaged, loaded): the remainder is then off by at most half
a unit of bfloat16, which is what rounding would have lost.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.techniques.support.optimizer_exchange import ELEMENTWISE, is_separable
from vramfit.torch_internals.dispatch import is_traceable_wrapper_subclass
from vramfit.torch_internals.optimizers import foreach_copy_

Optimizer = torch.optim.Optimizer


class Float32Steps:
    """The hooks of an optimizer. See NOTE [Steps in float32].

    Args:
        remainders: of the weights by parameter, int16, where float32 weights are kept; None rounds at random instead.
        half_states: whether the states rest in bfloat16, rounded at random.
    """

    def __init__(self, remainders: dict[torch.Tensor, torch.Tensor] | None, *, half_states: bool) -> None:
        self.remainders = remainders
        self.half_states = half_states
        self._versions = {parameter: parameter._version for parameter in remainders or ()}
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._begun: dict[torch.Tensor, dict[str, Any]] = {}
        self._counted: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._saved: Mapping[str, Any] = {}

    # -- a step --------------------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Update all parameters in bfloat16, and take their gradients aside; a hook before the step."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (args[0],), {**kwargs, "closure": lambda: loss}
        self._aside.clear()
        self._begun.clear()
        ours = [
            (index, parameter)
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.dtype is torch.bfloat16 and parameter.grad is not None
        ]
        changed: dict[int, dict[str, Any]] = defaultdict(dict)
        with torch.no_grad():
            for chunk in chunks_of(optimizer, ours):
                self._update(optimizer, chunk, changed)
        for _, parameter in ours:
            assert parameter.grad is not None
            self._aside.append((parameter, parameter.grad))
            parameter.grad = None
        # What an optimizer counts in its groups, it counts once: here, or in the rest of the step for what is left.
        self._counted = [
            (group, {k: v for k, v in group.items() if k != "params"} | changed[index])
            for index, group in enumerate(optimizer.param_groups)
            if all(parameter.grad is None for parameter in group["params"])
        ]
        return args, kwargs

    def after(self, *_: Any) -> None:
        """Give the gradients back; a hook after the step."""
        for group, values in self._counted:
            group.update(values)
        self._counted.clear()
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside.clear()

    def _update(self, optimizer: Optimizer, chunk: Chunk, changed: dict[int, dict[str, Any]]) -> None:
        flat = chunk.room(torch.float32)
        wide = chunk.parts(flat)
        narrow = [piece.of(piece.parameter) for piece in chunk.slices]
        foreach_copy_(wide, narrow)
        if self.remainders is not None:
            kept = [piece.of(self._remainder(piece.parameter)) for piece in chunk.slices]
            lost = chunk.room(torch.int16)
            foreach_copy_(chunk.parts(lost), kept)
            join_(flat, lost)
            del lost
        _widen_gradients(chunk, wide)
        view, given = self._view(optimizer, chunk, wide)
        kind: Any = type(optimizer).step
        # Without the hooks, which are called once a step (torch/optim/optimizer.py, Optimizer.profile_hook_step).
        (kind.__wrapped__ if getattr(kind, "hooked", False) else kind)(view)
        for index, group in zip(
            dict.fromkeys(piece.group for piece in chunk.slices), view.param_groups, strict=True
        ):
            before = optimizer.param_groups[index]
            changed[index].update(
                {k: v for k, v in group.items() if k != "params" and v is not before.get(k)}
            )
        for piece, tensor, states in zip(chunk.slices, wide, given, strict=True):
            self._take_back(optimizer, piece, view.state.pop(tensor, {}), states)
        if self.remainders is None:
            foreach_copy_(narrow, chunk.parts(round_at_random(flat)))
        else:
            half, lost = split(flat)
            foreach_copy_(narrow, chunk.parts(half))
            foreach_copy_(kept, chunk.parts(lost))

    def _remainder(self, parameter: torch.Tensor) -> torch.Tensor:
        """Its remainders, where it is; zeros for one that came later."""
        assert self.remainders is not None
        found = self.remainders.get(parameter)
        if found is None or found.device != parameter.device:
            fresh = parameter.new_zeros(parameter.shape, dtype=torch.int16)
            found = fresh if found is None else fresh.copy_(found)
            self.remainders[parameter] = found
        return found

    def _view(
        self, optimizer: Optimizer, chunk: Chunk, wide: list[torch.Tensor]
    ) -> tuple[Optimizer, list[dict[str, Any]]]:
        """The optimizer as if a chunk in float32 were all its parameters, and the states of each slice."""
        view: Optimizer = object.__new__(type(optimizer))
        view.__dict__.update(vars(optimizer))
        groups: dict[int, dict[str, Any]] = {}
        view.state = defaultdict(dict)
        given = []
        for piece, tensor in zip(chunk.slices, wide, strict=True):
            group = groups.setdefault(piece.group, {**optimizer.param_groups[piece.group], "params": []})
            group["params"].append(tensor)
            states = {}
            for name, value in optimizer.state.get(piece.parameter, {}).items():
                if is_elementwise(name, value, piece.parameter.shape):
                    states[name] = piece.of(value).to(torch.float32)
                else:
                    # Each slice of a cut parameter counts the same step.
                    states[name] = (
                        value if piece.whole or not isinstance(value, torch.Tensor) else value.clone()
                    )
            given.append(states)
            if states:
                view.state[tensor] = dict(states)
        view.param_groups = list(groups.values())
        return view, given

    def _take_back(
        self, optimizer: Optimizer, piece: Slice, states: dict[str, Any], given: dict[str, Any]
    ) -> None:
        """Put the states that a slice came to into those of its parameter; complete after the last slice."""
        parameter = piece.parameter
        before = optimizer.state.get(parameter, {})
        begun = self._begun.setdefault(parameter, {})
        dtype = resting_dtype(parameter, half_states=self.half_states)
        for name, value in states.items():
            if not is_elementwise(name, value, piece.of(parameter).shape):
                begun[name] = value
                continue
            full = begun.get(name, before.get(name))
            if full is None or full.dtype is not dtype:
                if piece.whole and dtype is torch.float32:
                    begun[name] = value
                    continue
                full = parameter.new_empty(parameter.shape, dtype=dtype)
            begun[name] = full
            if full.dtype is torch.bfloat16:
                piece.of(full).copy_(round_at_random(value))
            elif full is not before.get(name) or value is not given.get(name):
                # Otherwise it is a part of the full one, updated in place.
                piece.of(full).copy_(value)
        if piece.stop == parameter.numel():
            del self._begun[parameter]
            if begun:
                optimizer.state[parameter] = begun

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the remainders; a hook after ``state_dict``."""
        if self.remainders is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            kept = {index: self.remainders[p] for index, p in enumerate(parameters) if p in self.remainders}
            state_dict[REMAINDERS] = kept

    def _is_untouched(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is as it was cast, so that what it lost then is right, whatever states are loaded."""
        return self._versions.get(parameter) == parameter._version

    def before_load(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Keep what is loaded: torch casts states to the dtype of their parameters."""
        self._saved = state_dict

    def after_load(self, optimizer: Optimizer) -> None:
        """Load states in the precision that they were saved in, and the remainders."""
        saved, self._saved = self._saved, {}
        names = itertools.chain.from_iterable(group["params"] for group in saved["param_groups"])
        parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.dtype is not torch.bfloat16:
                continue
            for key, value in saved["state"].get(name, {}).items():
                if is_elementwise(key, value, parameter.shape):
                    dtype = resting_dtype(parameter, half_states=self.half_states)
                    optimizer.state[parameter][key] = value.to(parameter.device, dtype, copy=True)
            if self.remainders is not None and not (
                REMAINDERS not in saved and self._is_untouched(parameter)
            ):
                self.remainders.pop(parameter, None)
                if (lost := saved.get(REMAINDERS, {}).get(name)) is not None:
                    self.remainders[parameter] = lost.to(parameter.device, copy=True)


def _widen_gradients(chunk: Chunk, wide: list[torch.Tensor]) -> None:
    parts = chunk.parts(chunk.room(torch.float32))
    dense = []
    for piece, tensor, part in zip(chunk.slices, wide, parts, strict=True):
        gradient = piece.parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            tensor.grad = gradient.to(torch.float32)
        else:
            tensor.grad = part
            dense.append((part, piece.of(gradient)))
    if dense:
        foreach_copy_([part for part, _ in dense], [gradient for _, gradient in dense])


# -- between float32 and bfloat16: without loss, as two halves, or at random, right on average ---------------------


REMAINDERS = "float32_remainders"
"""Where they are in an optimizer's ``state_dict``, beside ``state`` and ``param_groups``: by parameter's number."""

_HALF_UNIT = 1 << 15
_UNIT = 1 << 16


def split(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 tensor as bfloat16 (rounded to nearest, ties upwards in size) and int16 remainders.

    Shapes are those of `wide`. NaN stays NaN.
    """
    half = wide.to(torch.bfloat16)
    lost = _upper_bits(half).neg_().add_(wide.view(torch.int32))
    # Ties go to the even neighbour in torch. One that went downwards lost half a unit, which int16 does not hold.
    tie = lost == _HALF_UNIT
    half.view(torch.int16).add_(tie)
    lost.masked_fill_(tie, -_HALF_UNIT)
    return half, lost.to(torch.int16)


def lost_bits(wide: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """The remainders of a float32 tensor that torch rounded to bfloat16: int16.

    A tie that went to the lower neighbour lost half a unit, which int16 does not hold: it gets a unit of float32 less.
    """
    lost = _upper_bits(half).neg_().add_(wide.view(torch.int32))
    return lost.clamp_(max=_HALF_UNIT - 1).to(torch.int16)


def join_(wide: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Give a float32 tensor that came of bfloat16 its remainders back, in place."""
    lost = remainder.to(torch.int32)
    # A weight that somebody set to zero has no remainder below: its bits would wrap around to NaN.
    lost.masked_fill_((wide == 0) & (lost < 0), 0)
    wide.view(torch.int32).add_(lost)
    return wide


def round_at_random(wide: torch.Tensor) -> torch.Tensor:
    """A float32 tensor in bfloat16, each value to one of its two neighbours, to the nearer with more probability.

    The expected value is the value (Zamirai et al., 2020, arXiv:2010.06192, "Revisiting BFloat16 Training"). The random
    numbers are those of the device's default generator.
    """
    bits = torch.empty_like(wide, dtype=torch.int32).random_(0, _UNIT)
    bits.add_(wide.view(torch.int32)).bitwise_and_(-_UNIT)
    half = bits.view(torch.float32).to(torch.bfloat16)
    return half.masked_fill_(wide.isnan(), torch.nan)  # the bits of a NaN may have wrapped around to a number


def _upper_bits(half: torch.Tensor) -> torch.Tensor:
    return half.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)


# Beside the parameters a chunk holds about 28 bytes an element: weights, gradients and states in float32, random bits,
# and what the optimizer's foreach kernels need. A 128th of the parameters keeps that below a quarter of a byte for each
# parameter; fewer than 4 million elements would be more launches than work.
# -- parameters as pieces of a limited size, updated one chunk after another ---------------------------------------


_SMALLEST_CHUNK = 4 << 20
_CHUNKS = 128
_ALIGNED = 4  # elements of float32 that a vectorised kernel takes at once


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """Elements of a parameter.

    Attributes:
        group: index of the optimizer's group that the parameter is in.
    """

    group: int
    parameter: torch.Tensor
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether it is the parameter as a whole."""
        return self.stop - self.start == self.parameter.numel()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that is shaped as the parameter: a view."""
        return tensor if self.whole else tensor.view(-1)[self.start : self.stop]


def is_elementwise(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state of a parameter of that shape is a floating number for each element."""
    return (
        name != "step"  # a scalar, as the parameter may be
        and not is_traceable_wrapper_subclass(value)  # codes of a low-bit optimizer stay as they are
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.shape == shape
    )


def resting_dtype(parameter: torch.Tensor, *, half_states: bool) -> torch.dtype:
    """The dtype that such states have between steps; those of a scalar are too few to save, and may be counters."""
    return torch.bfloat16 if half_states and parameter.dim() > 0 else torch.float32


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """Slices on one device that are updated together."""

    slices: tuple[Slice, ...]

    def room(self, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with an element for each element of the slices, and a few between them; without values."""
        total = sum(map(_aligned, self.slices))
        return self.slices[0].parameter.new_empty(total, dtype=dtype)

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each slice's part of such a tensor, in the parameter's shape where it is the whole parameter."""
        found, start = [], 0
        for piece in self.slices:
            part = flat[start : start + piece.stop - piece.start]
            found.append(part.view(piece.parameter.shape) if piece.whole else part)
            start += _aligned(piece)
        return found


def chunks_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[tuple[int, torch.Tensor]]
) -> Iterator[Chunk]:
    """Parameters, each with the index of its group, in chunks; several small ones together, large ones cut.

    A parameter is cut only where the optimizer treats each element on its own. An optimizer that is not known to treat
    each parameter on its own gets all of a device at once.
    """
    limit = max(_SMALLEST_CHUNK, sum(parameter.numel() for _, parameter in parameters) // _CHUNKS)
    if not is_separable(optimizer):
        limit = sum(parameter.numel() for _, parameter in parameters)
    chunk: list[Slice] = []
    room = limit
    for group, parameter in parameters:
        count = parameter.numel()
        step = limit if _may_be_cut(optimizer, parameter) else count
        for start in range(0, count, max(1, step)):
            piece = Slice(group, parameter, start, min(start + step, count))
            if chunk and (piece.stop - piece.start > room or chunk[0].parameter.device != parameter.device):
                yield Chunk(tuple(chunk))
                chunk, room = [], limit
            chunk.append(piece)
            room -= piece.stop - piece.start
    if chunk:
        yield Chunk(tuple(chunk))


def _may_be_cut(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    tensors = (parameter, parameter.grad, *optimizer.state.get(parameter, {}).values())
    return type(optimizer) in ELEMENTWISE and all(
        tensor.layout is torch.strided and tensor.is_contiguous()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )


def _aligned(piece: Slice) -> int:
    return -(-(piece.stop - piece.start) // _ALIGNED) * _ALIGNED
