"""Every parameter takes its step as soon as its gradient is there, so that gradients never exist together."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import LoopChange, Numerics, Promise, Setting, Technique
from vramfit.techniques.support.optimizer_exchange import (
    Optimizer,
    catch_up,
    is_separable,
    optimizer_of,
    parameters_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInBackwardSetting(Setting):
    """For which optimizers.

    Attributes:
        separable: the word that an optimizer which is not known here updates each parameter from its own gradient and
            state alone.
    """

    separable: bool = False


class StepInBackward(Technique[StepInBackwardSetting]):
    """The optimizer steps inside the backward pass, parameter by parameter, and each gradient goes at once.

    A hook of torch runs when a parameter's gradient is complete ("How to save memory by fusing the optimizer step into
    the backward pass", https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html). The
    tutorial makes an optimizer for each parameter; here the program's own takes the step with one parameter in view,
    so that its states, its ``state_dict``, its groups and the schedules made for it stay what they are. Step hooks of
    the optimizer are called for each parameter, and once more at the end of the step, without gradients.

    It pays wherever gradients are part of the peak: it saves all of them but those of
    one operation, a layer's weight and bias. It costs small kernels where
    foreach had large ones. Nothing can look at all gradients together any more: no clipping by norm, no accumulation
    over micro-batches, no loss scaling; nor can gradients be exchanged between processes.

    The update of each parameter is the same kernel on the same numbers: bitwise equal for each optimizer of torch.optim
    on the CPU.
    """

    name: ClassVar[str] = "step-in-backward"
    summary: ClassVar[str] = "step each parameter in the backward pass and drop its gradient"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    # The optimizer has to be the final one, and the scaler be there.
    phase: ClassVar[AttachStage] = AttachStage.STEP
    setting_type = StepInBackwardSetting
    follows: ClassVar[str | None] = "optimizer-kernel"
    excludes: ClassVar[dict[str, str]] = {
        "micro-batching": "gradients are gone before the next micro-batch could add to them",
        "optimizer-offload": "that takes the gradients away in hooks of its own",
    }

    def options(self, profile: Profile) -> Iterable[StepInBackwardSetting]:
        """One, where an optimizer that is known to be separable steps after one backward pass."""
        if profile.optimizer is not None and not profile.own_step and is_separable(profile.optimizer):
            yield StepInBackwardSetting()

    def promise(self, setting: StepInBackwardSetting) -> Promise:
        """Bitwise, unless the optimizer is one that we do not know."""
        if setting.separable:
            return Promise(
                self.numerics, "as long as the optimizer treats each parameter on its own, as was said"
            )
        return Promise(self.numerics)

    def loop_change(self, setting: StepInBackwardSetting) -> LoopChange:  # noqa: ARG002
        """See `Technique.loop_change`."""
        return LoopChange(
            what="steps in the backward pass, before the loop could cut, scale or add up gradients",
            instead="Leave it out",
        )

    def attach(self, live: AttachedProgram, setting: StepInBackwardSetting) -> None:
        """Hook every parameter that is trained now; others step at the end, as before."""
        optimizer = optimizer_of(live, self.name)
        _check(live, optimizer, setting)
        stepper = _Stepper(live, optimizer)
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad:
                    hook = _Hook(stepper, (number, index))
                    live.on_undo(parameter.register_post_accumulate_grad_hook(hook).remove)
        live.on_undo(optimizer.register_step_post_hook(stepper.end).remove)
        live.set(live, "steps_in_backward", True)
        live.after(AttachStage.STEP, lambda: _refuse_scaling(live))


def _check(live: AttachedProgram, optimizer: Optimizer, setting: StepInBackwardSetting) -> None:
    kind = type(optimizer).__name__
    _refuse_scaling(live)
    if not (setting.separable or is_separable(optimizer)):
        raise UsageError(
            f"{kind} is not known to treat each parameter on its own",
            "Leave step-in-backward out, or give it separable=True if you know that it does",
        )
    if isinstance(live.model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "step-in-backward cannot wait for the gradients of other processes", "Leave it out with DDP"
        )
    if not any(parameter.requires_grad for parameter in parameters_of(optimizer)):
        raise UsageError("no parameter of the optimizer is trained", "Leave step-in-backward out")


def _refuse_scaling(live: AttachedProgram) -> None:
    if live.scaler is not None:
        raise UsageError(
            "step-in-backward cannot go with loss scaling: gradients would be used before they are divided again",
            "Train in bfloat16, or leave one of them out",
        )


class _Stepper:
    """What the hooks of all parameters share.

    It holds the program weakly: hooks of tensors are unseen by Python's garbage collector, so that a cycle through them
    would keep the program for ever.
    """

    def __init__(self, live: AttachedProgram, optimizer: Optimizer) -> None:
        self._live, self._optimizer = weakref.ref(live), weakref.ref(optimizer)
        self._stepped: set[tuple[int, int]] = set()
        # Autograd has a thread for each device, and parameters may lie on two (parameter-offload); hooks of an
        # optimizer know of no second step that begins before the first is over.
        self._alone = threading.Lock()

    def step(self, parameter: torch.Tensor, place: tuple[int, int]) -> None:
        """Step with the parameter at a place in the groups alone, and let its gradient go."""
        live, optimizer = self._live(), self._optimizer()
        if optimizer is None:
            return
        if live is not None:
            _refuse_scaling(live)
        with self._alone:
            self._step(optimizer, parameter, place)

    def _step(self, optimizer: Optimizer, parameter: torch.Tensor, place: tuple[int, int]) -> None:
        if place in self._stepped:
            raise UsageError(
                f"a parameter of shape {list(parameter.shape)} got a second gradient in one step",
                "End each step after one backward pass, or leave step-in-backward out",
            )
        self._stepped.add(place)
        catch_up(optimizer)
        view = _view(optimizer, parameter, place)
        step = cast(Any, type(optimizer).step)  # not a wrapper that a schedule put onto the object
        step(view)
        if parameter in view.state:
            optimizer.state[parameter] = view.state[parameter]
        parameter.grad = None

    def end(self, optimizer: Optimizer, *_: Any) -> None:
        """The whole step is over; a hook of the optimizer, which its views share."""
        if optimizer is self._optimizer():
            self._stepped.clear()


class _Hook:
    """The hook of one parameter, with its place: the index of its group, and that in the group."""

    def __init__(self, stepper: _Stepper, place: tuple[int, int]) -> None:
        self._stepper, self._place = stepper, place

    def __call__(self, parameter: torch.Tensor) -> None:
        """The gradient is complete."""
        self._stepper.step(parameter, self._place)


def _view(optimizer: Optimizer, parameter: torch.Tensor, place: tuple[int, int]) -> Optimizer:
    """The optimizer as if it had one parameter alone, with its states and hooks and what its group says now."""
    view: Optimizer = object.__new__(type(optimizer))
    view.__dict__.update(vars(optimizer))
    view.__dict__.pop("step", None)
    view.param_groups = [_one_of(optimizer.param_groups[place[0]], parameter, place[1])]
    view.state = defaultdict(dict)
    if parameter in optimizer.state:
        view.state[parameter] = optimizer.state[parameter]
    return view


def _one_of(group: dict[str, Any], parameter: torch.Tensor, index: int) -> dict[str, Any]:
    """A group with one of its parameters, and with its share of what ``each_...`` lists by parameter."""
    one = {name: [value[index]] if name.startswith("each_") else value for name, value in group.items()}
    return one | {"params": [parameter]}
