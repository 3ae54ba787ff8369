"""An optimizer's step that commits or leaves nothing behind, however often it runs out of memory on the way.

NOTE [Slices]: an optimizer that ran out in the middle of a step has stepped some parameters and not others, and nobody
can tell which. So parameters step in slices. Of a slice, parameters and states are copied before (on the device, or on
the host where there is no room), and put back if it fails; slices that are done stay done, and are not done again.
A slice that fails again steps parameter by parameter; a parameter that fails by itself steps on the host, where its
states then stay until there is room. So a step always ends, unless the host has no memory either. torch's optimizers
but LBFGS treat each parameter by itself, so that the sum of slices is the step, bit for bit. Of an optimizer that may
not (it is none of torch's), the whole is one slice.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.runtime.survival.emergency_reserve import EmergencyReserve
from vramfit.runtime.survival.leftovers import Recovery
from vramfit.runtime.survival.step_state import GeneratorStates, copied

Optimizer = torch.optim.Optimizer

SLICE_BYTES = 64 << 20
"""Of parameters that step together: what is copied before is three times as much with Adam's states."""

BY_PARAMETER = frozenset(
    {
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD", "SparseAdam",
    }
)  # fmt: skip
"""torch's optimizers that treat each parameter by itself: all but LBFGS (torch/optim)."""


class SliceCopy:
    """Parameters and their states before a slice steps."""

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = [
            (parameter, copied(parameter)) for parameter in parameters
        ]
        self._states: list[tuple[nn.Parameter, dict[str, Any] | None]] = []
        for parameter in parameters:
            known = optimizer.state.get(parameter)
            self._states.append((parameter, None if known is None else dict(known)))
            tensors = [value for value in (known or {}).values() if isinstance(value, torch.Tensor)]
            self._values += [(tensor, copied(tensor)) for tensor in tensors]
        self._random = GeneratorStates.of(device)

    @torch.no_grad()
    def restore(self) -> None:
        """As they were; states that the failed step made are gone."""
        for tensor, before in self._values:
            tensor.copy_(before)
        for parameter, states in self._states:
            if states is None:
                self._optimizer.state.pop(parameter, None)
            else:
                known = self._optimizer.state[parameter]
                known.clear()
                known.update(states)
        self._random.restore()


class GuardedStep:
    """Steps an optimizer in slices. See NOTE [Slices].

    Args:
        optimizer: it steps as it is; nothing of it is replaced between the steps.
        recovery: makes room after a shortage, on the device where the parameters are.
        reserve: of the device, from which the step takes what it finds nowhere else.

    Attributes:
        hosted: parameters whose states are on the host, since there was no room for a step on the device.
        retries: slices that were done again in the last step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        recovery: Recovery,
        *,
        slice_bytes: int = SLICE_BYTES,
        reserve: EmergencyReserve | None = None,
    ) -> None:
        self.optimizer, self._recovery = optimizer, recovery
        self._slice_bytes = slice_bytes
        self._reserve = reserve
        kind = type(optimizer)  # some say "torch.optim", others their own module below it
        self.by_parameter = kind.__name__ in BY_PARAMETER and f"{kind.__module__}.".startswith("torch.optim.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS calls the model several times in a step: there is no moment at which it is certain",
                "Take another optimizer, or run it without survive",
            )
        self.hosted: set[nn.Parameter] = set()
        self.retries = 0

    def step(self) -> None:
        """One step of the optimizer, with the gradients as they are.

        Raises:
            BaseException: what is no shortage of memory, or the host has no room either; the slice is undone.
        """
        optimizer, self.retries = self.optimizer, 0
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks = OrderedDict()
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            for hook in before.values():  # once for a step, not for each slice
                hook(optimizer, (), {})
            with contextlib.nullcontext() if self._reserve is None else self._reserve.opened():
                for part in list(self._slices()):
                    self._step_slice(part)
            for hook in after.values():
                hook(optimizer, (), {})
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after

    def leave(self) -> None:
        """Move all states to the host, where the parameters step from then on; as far as the host has room.

        Raises:
            BaseException: what is no shortage of memory.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self.hosted:
                    continue
                states = self.optimizer.state.get(parameter, {})
                try:
                    moved = {
                        name: value.cpu() if isinstance(value, torch.Tensor) else value
                        for name, value in states.items()
                    }
                except BaseException as error:
                    if not self._recovery.noted(error):
                        raise
                    return
                if states:
                    states.update(moved)
                self.hosted.add(parameter)
        self._recovery.release()

    def bring_back(self) -> None:
        """Move states on the host back to the device: each is there as a whole or stays where it is.

        Raises:
            BaseException: there is no room.
        """
        for parameter in list(self.hosted):
            states = self.optimizer.state[parameter]
            moved = {name: _like(value, parameter) for name, value in states.items()}
            states.update(moved)
            self.hosted.discard(parameter)

    def _slices(self) -> Iterator[tuple[nn.Parameter, ...]]:
        found = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not self.by_parameter:
            if found:
                yield tuple(found)
            return
        held = 0
        part: list[nn.Parameter] = []
        for parameter in found:
            if part and held + parameter.nbytes > self._slice_bytes:
                yield tuple(part)
                part, held = [], 0
            part.append(parameter)
            held += parameter.nbytes
        if part:
            yield tuple(part)

    def _step_slice(self, part: tuple[nn.Parameter, ...]) -> None:
        on_host = [parameter for parameter in part if parameter in self.hosted]
        rest = tuple(parameter for parameter in part if parameter not in self.hosted)
        for parameter in on_host:
            self._step_on_host(parameter)
        for last in (False, True):  # the same once more: what was freed may have been pending
            if not rest or self._tried(rest, last=last and not self.by_parameter):
                return
            self.retries += 1
        for parameter in rest:
            if not self._tried((parameter,), last=False):
                self.retries += 1
                self._step_on_host(parameter)

    def _tried(self, part: tuple[nn.Parameter, ...], *, last: bool) -> bool:
        """Whether the parameters of a slice have stepped; nothing of them is changed if not.

        Args:
            last: whether a shortage is passed on.
        """
        copy: SliceCopy | None = None
        try:
            copy = SliceCopy(self.optimizer, part, self._recovery.device)
            with _Only(self.optimizer, part):
                self.optimizer.step()
            return True
        except BaseException as error:
            if copy is not None:
                copy.restore()
            if last or not self._recovery.noted(error):
                raise
        del copy
        self._recovery.release()
        return False

    def _step_on_host(self, parameter: nn.Parameter) -> None:
        """One parameter's step on the host, where its states stay; into the parameter, which stays where it is.

        Raises:
            BaseException: the host has no room; nothing is changed.
        """
        if _is_on_host(parameter):  # once more, and then the error is passed on
            self._tried((parameter,), last=True)
            return
        optimizer = self.optimizer
        host = nn.Parameter(parameter.detach().cpu())
        assert parameter.grad is not None
        host.grad = parameter.grad.cpu()
        random, states = GeneratorStates.of(self._recovery.device), dict(optimizer.state.get(parameter, {}))
        optimizer.state[host] = {
            name: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in states.items()
        }
        try:
            with _Only(optimizer, (parameter,), instead=host):
                optimizer.step()
        except BaseException:
            optimizer.state.pop(host, None)
            random.restore()
            raise
        with torch.no_grad():
            parameter.copy_(host)  # into memory that is there: nothing is allocated
        optimizer.state[parameter] = optimizer.state.pop(host)
        self.hosted.add(parameter)


class _Only:
    """The optimizer's groups with some of their parameters alone, or another in the place of one."""

    def __init__(
        self, optimizer: Optimizer, part: Sequence[nn.Parameter], instead: nn.Parameter | None = None
    ) -> None:
        self._groups = optimizer.param_groups
        self._chosen = {id(one): one if instead is None else instead for one in part}
        self._whole: list[list[nn.Parameter]] = []

    def __enter__(self) -> None:
        for group in self._groups:
            whole = group["params"]
            self._whole.append(whole)
            group["params"] = [self._chosen[id(one)] for one in whole if id(one) in self._chosen]

    def __exit__(self, *_: object) -> None:
        for group, whole in itertools.zip_longest(self._groups, self._whole):
            group["params"] = whole


def _is_on_host(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu"


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """A state where the optimizer keeps it: with its parameter, but for counters, which stay on the host."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value.to(parameter.device)
    return value
