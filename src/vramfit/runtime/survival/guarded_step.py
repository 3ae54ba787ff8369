"""An optimizer's step that commits or leaves nothing behind, however often it runs out of memory on the way.

NOTE [Three kinds of optimizers]: an optimizer that ran out in the middle of a step has stepped some parameters and not
others. Most of torch's are taken up where they stopped, without a copy of anything (`resumed_step`). Others of torch's
treat each parameter by itself, so that the sum of slices is the step: of a slice, parameters and states are copied
before, and put back if it fails. Of an optimizer that is not torch's, everything that it holds is copied to the host
just before the step (`optimizer_copy`). Where a parameter of torch's optimizers finds no room for its step it steps on
the host, where its states then stay until there is room.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.runtime.survival.emergency_reserve import EmergencyReserve
from vramfit.runtime.survival.leftovers import Recovery
from vramfit.runtime.survival.optimizer_copy import OptimizerCopies
from vramfit.runtime.survival.resumed_step import RESUMABLE, Counting, Resumed, WrittenSoFar, memory_of
from vramfit.runtime.survival.slice_copy import SliceCopy
from vramfit.torch_internals.optimizers import make_states
from vramfit.training_state.random_generators import GeneratorStates

Optimizer = torch.optim.Optimizer

SLICE_BYTES = 64 << 20
"""Of parameters that step together once the whole step ran out."""

BY_PARAMETER = RESUMABLE | {"ASGD", "Adadelta", "Adafactor", "SparseAdam"}
"""torch's optimizers that treat each parameter by itself: all but LBFGS (torch/optim)."""

_TRIES = 3
"""Of the step of an optimizer that is not torch's."""


class GuardedStep:
    """Steps an optimizer so that the step is done as a whole. See NOTE [Three kinds of optimizers].

    Args:
        optimizer: it steps as it is; nothing of it is replaced between the steps.
        recovery: makes room after a shortage, on the device where the parameters are.
        reserve: of the device, from which the step takes what it finds nowhere else.

    Attributes:
        by_parameter: whether the optimizer is one of torch's that treat each parameter by itself.
        copies: of an optimizer that is not; None for torch's.
        hosted: parameters whose states are on the host, since there was no room for a step on the device.
        retries: parts of the last step that were done again.
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
        torchs = f"{kind.__module__}.".startswith("torch.optim.")
        self.by_parameter = torchs and kind.__name__ in BY_PARAMETER
        self._by_name = torchs and kind.__name__ in RESUMABLE
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS calls the model several times in a step: there is no moment at which it is certain",
                "Take another optimizer, or run it without survive",
            )
        self.copies = None if self.by_parameter else OptimizerCopies(optimizer, recovery.device)
        self._checked: tuple[int, ...] = ()
        self._resumes = self._takes_lists = False
        self.hosted: set[nn.Parameter] = set()
        self.retries = 0

    def step(self) -> None:
        """One step of the optimizer, with the gradients as they are.

        Raises:
            BaseException: what is no shortage of memory, or the host has no room either. An optimizer that is not
                torch's is as before then.
        """
        self.retries = 0
        with contextlib.nullcontext() if self._reserve is None else self._reserve.opened():
            if self.copies is not None:
                self._step_copied(self.copies)
                return
            with self._hooks_once():
                parts = [part for part in self._parts() if part]
                for part in parts:
                    self._step_part(part)

    @contextlib.contextmanager
    def _hooks_once(self) -> Iterator[None]:
        """Hooks run once for a step, not for each part of it."""
        optimizer = self.optimizer
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks = OrderedDict()
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            for hook in before.values():
                hook(optimizer, (), {})
            yield
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

    # -- torch's optimizers ----------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[tuple[nn.Parameter, ...]]:
        """What steps together where nothing runs out."""
        groups = [
            tuple(one for one in group["params"] if one.grad is not None)
            for group in self.optimizer.param_groups
        ]
        whole = tuple(itertools.chain.from_iterable(groups))
        signature = tuple(map(id, whole))
        if signature != self._checked:
            self._resumes, self._checked = self._by_name and self._can_resume(whole), signature
        if not self._resumes:
            yield from self._slices(whole)
        elif self._lacks_states(whole):
            yield from ((one,) for one in whole)
        else:
            yield whole

    def _lacks_states(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the step makes states on its way, as SGD makes its momenta."""
        keeps = type(self.optimizer).__name__ != "SGD" or any(
            group["momentum"] for group in self.optimizer.param_groups
        )
        return keeps and any(not self.optimizer.state.get(one) for one in parameters)

    def _can_resume(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether counts of writes tell where a step of these stopped."""
        groups = self.optimizer.param_groups
        if any(group.get("differentiable") for group in groups):
            return False
        on_device = any(one.device.type != "cpu" for one in parameters)
        self._takes_lists = any(
            group.get("fused") or group.get("foreach") or (on_device and group.get("foreach", False) is None)
            for group in groups
        )
        if any(group.get("fused") for group in groups) and len({(p.device, p.dtype) for p in parameters}) > 1:
            return False
        if any(
            one.is_complex() or one.is_inference() or one.layout is not torch.strided for one in parameters
        ):
            return False
        tensors = self._tensors_of(parameters)
        return len({memory_of(one) for one in tensors}) == len(tensors)

    def _tensors_of(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """What the step of some parameters writes."""
        state = self.optimizer.state
        found: list[torch.Tensor] = list(parameters)
        for parameter in parameters:
            known = state.get(parameter)
            if known:
                found += [value for value in known.values() if isinstance(value, torch.Tensor)]
        return found

    def _slices(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, ...]]:
        held = 0
        part: list[nn.Parameter] = []
        for parameter in parameters:
            if part and held + parameter.nbytes > self._slice_bytes:
                yield tuple(part)
                part, held = [], 0
            part.append(parameter)
            held += parameter.nbytes
        if part:
            yield tuple(part)

    def _step_part(self, part: tuple[nn.Parameter, ...]) -> None:
        for parameter in part if self.hosted else ():
            if parameter in self.hosted:
                self._step_on_host(parameter, None)
        rest = tuple(parameter for parameter in part if parameter not in self.hosted) if self.hosted else part
        if not rest:
            return
        sparse = any(one.grad is not None and one.grad.layout is not torch.strided for one in rest)
        if self._resumes and not sparse:
            self._step_resumably(rest)
        else:
            self._step_slice(rest)

    def _step_resumably(self, part: tuple[nn.Parameter, ...]) -> None:
        """The step of some parameters; what is done of it stays, and the rest is done again."""
        self._make_states(part)
        written = WrittenSoFar(self._tensors_of(part))
        try:
            with _Only(self.optimizer, part), Counting() if self._takes_lists else contextlib.nullcontext():
                self.optimizer.step()
            return
        except BaseException as error:
            if not self._recovery.noted(error):
                raise
        written.note_stop()
        self._recovery.retry()
        self.retries += 1
        if self._resumed(part, written):
            return
        for smaller in list(self._slices(part)):
            if len(smaller) > 1 and self._resumed(smaller, written):
                continue
            for parameter in smaller:
                if not self._resumed((parameter,), written):
                    self._step_on_host(parameter, written)

    def _resumed(self, part: tuple[nn.Parameter, ...], written: WrittenSoFar) -> bool:
        """Whether the rest of a step of some parameters is done."""
        try:
            with _Only(self.optimizer, part), Resumed(written, self._tensors_of(part)):
                self.optimizer.step()
            return True
        except BaseException as error:
            if not self._recovery.noted(error):
                raise
        self.retries += 1
        self._recovery.retry()
        return False

    def _make_states(self, part: tuple[nn.Parameter, ...]) -> None:
        """Have the states of parameters that lack them, each whole or not at all."""
        state = self.optimizer.state
        for parameter in part:
            if state.get(parameter) or parameter in self.hosted:
                continue

            def made(parameter: nn.Parameter = parameter) -> None:
                try:
                    with _Only(self.optimizer, (parameter,)):
                        for group in self.optimizer.param_groups:
                            if group["params"]:
                                make_states(self.optimizer, group)
                except BaseException:
                    state.pop(parameter, None)
                    raise

            try:
                self._recovery.insist(made)
            except BaseException as error:
                if _is_on_host(parameter) or not self._recovery.noted(error):
                    raise
                self._step_on_host_next(parameter)

    def _step_on_host_next(self, parameter: nn.Parameter) -> None:
        """A parameter whose states find no room on the device has them on the host from the start."""
        self.hosted.add(parameter)

    # -- by copies -------------------------------------------------------------------------------------------------

    def _step_slice(self, part: tuple[nn.Parameter, ...]) -> None:
        for _ in range(2):  # the same once more: what was freed may have been pending
            if self._tried(part, last=False):
                return
            self.retries += 1
        for parameter in part:
            if not self._tried((parameter,), last=False):
                self.retries += 1
                self._step_on_host(parameter, None)

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
        self._recovery.retry()
        return False

    def _step_copied(self, copies: OptimizerCopies) -> None:
        """The step of an optimizer that is not torch's, from a copy of all that it holds."""
        for left in reversed(range(_TRIES)):
            copy = self._recovery.insist(copies.take)
            began = time.perf_counter()
            try:
                with copies.stepping() as swallowed:
                    self.optimizer.step()
                if swallowed is not None and swallowed.last is not None:
                    raise torch.OutOfMemoryError(
                        f"{swallowed.last.message} (caught inside of the optimizer's step)"
                    )
            except BaseException as error:
                copy.restore()
                if not left or not self._recovery.noted(error):
                    raise
            else:
                copies.after_step(copy, time.perf_counter() - began)
                return
            del copy
            self.retries += 1
            self._recovery.retry()

    def _step_on_host(self, parameter: nn.Parameter, written: WrittenSoFar | None) -> None:
        """One parameter's step on the host, where its states stay; into the parameter, which stays where it is.

        Args:
            written: what is done of the step already.

        Raises:
            BaseException: the host has no room; nothing is changed.
        """
        if _is_on_host(parameter):  # once more, and then the error is passed on
            self._once_more(parameter, written)
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
        rest: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if written is not None:
            written.moved(parameter, host)
            for name, value in states.items():
                if isinstance(value, torch.Tensor):
                    written.moved(value, optimizer.state[host][name])
            rest = Resumed(written, self._tensors_of((host,)))
        try:
            with _Only(optimizer, (parameter,), instead=host), rest:
                optimizer.step()
        except BaseException:
            optimizer.state.pop(host, None)
            random.restore()
            raise
        with torch.no_grad():
            parameter.copy_(host)  # into memory that is there: nothing is allocated
        optimizer.state[parameter] = optimizer.state.pop(host)
        self.hosted.add(parameter)

    def _once_more(self, parameter: nn.Parameter, written: WrittenSoFar | None) -> None:
        if written is None:
            self._tried((parameter,), last=True)
            return
        with _Only(self.optimizer, (parameter,)), Resumed(written, self._tensors_of((parameter,))):
            self.optimizer.step()


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
