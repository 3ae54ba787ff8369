"""An optimizer's states in a store: they are on the device while their parameters step, and only then.

A step goes through the parameters in slices, whose states together take at most a quarter of the device's budget; those
of the next slice are brought meanwhile, and those that have stepped go down first, the last of them before the others:
from one step to the next a part stays. Optimizers that treat each parameter by itself give the same numbers so, bit
for bit.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.patching import PatchStack
from vramfit.runtime.survival.guarded_step import BY_PARAMETER
from vramfit.runtime.tiers.store import Store

_USUAL_RATIO = 2.0
"""States are twice their parameter, as Adam's, until a step has told."""

_PART = 4
"""A slice takes the device's budget by this: one that is used, one that comes, and what lies between them."""


class StoredOptimizer:
    """Steps an optimizer whose states are in a store, until `undo`.

    Args:
        optimizer: one of torch's that treat each parameter by itself; it keeps its identity.
        store: on the device of the parameters.
        prefix: keys are ``(prefix, number of the parameter, name of the state)``.

    Raises:
        UsageError: the optimizer is another.
        StoreFull: there is no room; the optimizer is as it was.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, store: Store, prefix: str = "optimizer") -> None:
        name = type(optimizer).__name__
        if name not in BY_PARAMETER or not f"{type(optimizer).__module__}.".startswith("torch.optim."):
            raise UsageError(
                f"{name} may not treat each parameter by itself, so that it cannot step a few at a time",
                "Take one of torch's but LBFGS, or put its tensors into the store yourself",
            )
        self.optimizer, self._store, self._prefix = optimizer, store, prefix
        self._names: dict[nn.Parameter, list[str]] = {}  # of all states, in order
        self._numbers: dict[nn.Parameter, int] = {}
        self._ratio = _USUAL_RATIO
        self._patches = PatchStack()
        self._plain_step = optimizer.step
        try:
            for parameter in self._parameters():
                self._strip(parameter)
            self._attach()
        except BaseException:
            self.undo()
            raise

    def _attach(self) -> None:
        optimizer, patches = self.optimizer, self._patches

        def step(closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        if hasattr(self._plain_step, "_wrapped_by_lr_sched"):  # torch/optim/lr_scheduler.py asks for it
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        patches.set(optimizer, "step", step)
        patches.call(optimizer.register_state_dict_post_hook(self._fill).remove)
        patches.call(optimizer.register_load_state_dict_post_hook(self._take_loaded).remove)

    def undo(self) -> None:
        """Give the optimizer its states back, on the device, and its own step."""
        self._patches.undo()
        for parameter in list(self._names):
            states = self.optimizer.state[parameter]
            found = {name: self._value(parameter, name, states) for name in self._names[parameter]}
            states.clear()
            states.update(found)
            del self._names[parameter]
            for name in found:
                key = self._key(parameter, name)
                if key in self._store:
                    del self._store[key]

    # -- within --------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _key(self, parameter: nn.Parameter, name: str) -> tuple[str, int, str]:
        number = self._numbers.setdefault(parameter, len(self._numbers))
        return self._prefix, number, name

    def _keys(self, parameter: nn.Parameter) -> list[tuple[str, int, str]]:
        keys = [self._key(parameter, name) for name in self._names.get(parameter, ())]
        return [key for key in keys if key in self._store]

    def _value(self, parameter: nn.Parameter, name: str, states: dict[str, Any]) -> Any:
        key = self._key(parameter, name)
        return self._store.on_host(key).to(parameter.device) if key in self._store else states[name]

    def _strip(self, parameter: nn.Parameter) -> None:
        """Leave the store alone with the tensors of a parameter's states."""
        states = self.optimizer.state.get(parameter)
        if not states:
            return
        self._names[parameter] = [*states]
        for name, value in list(states.items()):
            if isinstance(value, torch.Tensor) and value.dim() and value.device == self._store.device:
                del states[name]  # what somebody holds cannot go down
                try:
                    self._store.put(self._key(parameter, name), value)
                except BaseException:
                    states[name] = value
                    raise

    def _slices(self) -> list[list[nn.Parameter]]:
        limit = self._store.capacity // _PART
        found: list[list[nn.Parameter]] = []
        held = 0
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            size = int(parameter.nbytes * self._ratio)
            if not found or held + size > limit:
                found.append([])
                held = 0
            found[-1].append(parameter)
            held += size
        return found

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        optimizer = self.optimizer
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        groups, slices = [group["params"] for group in optimizer.param_groups], self._slices()
        optimizer._optimizer_step_pre_hooks = OrderedDict()  # called once for a step, not for each slice
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            for hook in before.values():
                hook(optimizer, (), {})
            for part, following in zip(slices, [*slices[1:], []], strict=True):
                chosen = {id(parameter) for parameter in part}
                for group, whole in zip(optimizer.param_groups, groups, strict=True):
                    group["params"] = [one for one in whole if id(one) in chosen]
                self._step_slice(part, following)
            for group, whole in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = whole
            for hook in after.values():
                hook(optimizer, (), {})
        finally:
            for group, whole in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = whole
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
        return loss

    def _step_slice(self, part: Sequence[nn.Parameter], following: Sequence[nn.Parameter]) -> None:
        store, state = self._store, self.optimizer.state
        homes = [(parameter, key) for parameter in part for key in self._keys(parameter)]
        new = sum(int(parameter.nbytes * self._ratio) for parameter in part if parameter not in self._names)
        if new:  # states that the step makes
            store.make_room(new)
        with store.writing(*(key for _, key in homes)) as tensors:
            for (parameter, key), tensor in zip(homes, tensors, strict=True):
                state[parameter][key[2]] = tensor
            for parameter in part:  # a state_dict has them in the order in which they were made
                _in_order(state[parameter], self._names.get(parameter, ()))
            with contextlib.suppress(NameError):
                del tensor
            del tensors
            store.prefetch(*(key for parameter in following for key in self._keys(parameter)))
            try:
                self._plain_step()
            finally:
                self._put_away(part)

    def _put_away(self, part: Sequence[nn.Parameter]) -> None:
        for parameter in part:
            fresh = parameter not in self._names
            self._strip(parameter)
            self._store.done(*self._keys(parameter))
            if fresh and parameter.nbytes:
                sizes = [self._store.nbytes_of(key) for key in self._keys(parameter)]
                self._ratio = max(self._ratio, sum(sizes) / parameter.nbytes)

    def _fill(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Complete a ``state_dict`` with what is in the store, on the host; a hook after it was made."""
        del optimizer
        filled = dict(state_dict["state"])
        for number, parameter in enumerate(self._parameters()):
            if parameter in self._names:
                states = filled[number]
                filled[number] = {
                    name: self._store.on_host(key)
                    if (key := self._key(parameter, name)) in self._store
                    else states[name]
                    for name in self._names[parameter]
                }
        return {**state_dict, "state": filled}

    def _take_loaded(self, optimizer: Any) -> None:
        """Take loaded states into the store; a hook after loading."""
        del optimizer
        self._names.clear()
        for parameter in self._parameters():
            self._strip(parameter)


def _in_order(states: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        states[name] = states.pop(name)
