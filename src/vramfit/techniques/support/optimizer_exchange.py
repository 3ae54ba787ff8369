"""Puts another optimizer in the place of a live program's: its hyperparameters, its states, and the way back.

NOTE [Exchanged optimizers]: the new optimizer has the groups of the old one, one by one, so that a schedule's list of
values still fits. Where the schedule was made before, it goes on to change the old groups; `Follow` takes every such
change over before the next step or the next ``state_dict``, the learning rate times a constant ratio, and takes what is
loaded into the new groups back into the old ones, from which the schedule goes on. The old optimizer's states wait on
the host, where they cost no memory of the card, and are back in their place after the undo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram

Optimizer: TypeAlias = torch.optim.Optimizer
States: TypeAlias = dict[str, Any]

ONE_PLACE = "both put their own optimizer in the place of the program's"
EXCHANGING = ("low-bit-optimizer", "optimizer-offload", "lean-optimizer", "gradient-projection")
_FOLLOW = "_vramfit_follow"
_NOT_FOLLOWED = ("params", "initial_lr")
_RATES = ("lr", "initial_lr")
_SCHEDULED = (*_RATES, "momentum", "betas")  # what torch/optim/lr_scheduler.py changes

ELEMENTWISE = frozenset(
    {
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
        *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
        torch.optim.SGD,
    }
)
"""Each element's update depends on its own gradient and state alone, so that a parameter may be cut anywhere."""

# Each updates every parameter from its own gradient and state alone. LBFGS does not.
_SEPARABLE = ELEMENTWISE | {torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam}
_SEPARABLE_MODULES = (
    "torchao.optim.adam",
    "vramfit.techniques.gradient_projection",
    "vramfit.techniques.low_bit_optimizer",
)


def others_excluded(name: str) -> dict[str, str]:
    """What an optimizer of our own cannot go with: the others, and the choice of torch's implementations."""
    kernels = {"optimizer-kernel": "the optimizer that takes the place has one implementation"}
    return {other: ONE_PLACE for other in EXCHANGING if other != name} | kernels


def optimizer_of(live: AttachedProgram, technique: str) -> Optimizer:
    """The program's optimizer.

    Raises:
        UsageError: it has none.
    """
    if live.optimizer is None:
        raise UsageError(
            f"{technique} needs an optimizer, and the program has none", "Give one, or leave it out"
        )
    return live.optimizer


def exchangeable(live: AttachedProgram, technique: str) -> Optimizer:
    """The program's optimizer, which another may take the place of.

    Raises:
        UsageError: there is none, or what hangs on it would be lost.
    """
    optimizer = optimizer_of(live, technique)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UsageError(
            f"{technique} would leave behind the step hooks of {_name(optimizer)}",
            "Apply the plan first, and register them on the optimizer that it gives",
        )
    for option in ("maximize", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise UsageError(
                f"{technique} cannot take over {option}=True of {_name(optimizer)}", "Leave one of them out"
            )
    return optimizer


def adam_of(live: AttachedProgram, technique: str) -> torch.optim.Adam:
    """The program's Adam or AdamW, which another may take the place of.

    Raises:
        UsageError: it is another optimizer.
    """
    optimizer = exchangeable(live, technique)
    if not is_adam(optimizer):
        raise UsageError(
            f"{technique} takes the place of Adam or AdamW, and the program has {_name(optimizer)}",
            "Use one of torch.optim's two, or leave it out",
        )
    assert isinstance(optimizer, torch.optim.Adam)
    return optimizer


def is_adam(optimizer: Optimizer | None) -> bool:
    """Whether it is torch's Adam or AdamW itself, on real numbers."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        parameter.is_complex() for parameter in parameters_of(optimizer)
    )


def is_separable(optimizer: Optimizer) -> bool:
    """Whether it is known to update every parameter from its own gradient and state alone."""
    kind = type(optimizer)
    return kind in _SEPARABLE or kind.__module__ in _SEPARABLE_MODULES


def parameters_of(optimizer: Optimizer | None) -> list[nn.Parameter]:
    """All parameters, in the order of the groups."""
    return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]


def state_tensors(optimizer: Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    """What an optimizer keeps of a parameter between steps, its counter too."""
    states: dict[str, Any] = optimizer.state.get(parameter) or {}
    return [value for value in states.values() if isinstance(value, torch.Tensor)]


def carried_groups(old: Optimizer, names: Iterable[str], *, ratio: float = 1.0) -> list[dict[str, Any]]:
    """The groups for a new optimizer: the same parameters with those hyperparameters that it knows.

    Args:
        names: the hyperparameters besides the learning rate.
        ratio: what the learning rate is multiplied with.
    """
    wanted, groups = tuple(names), []
    for group in old.param_groups:
        new = {"params": list(group["params"]), **{name: group[name] for name in wanted if name in group}}
        if "betas" in new:
            new["betas"] = tuple(map(float, new["betas"]))
        for name in _RATES:
            if name in group:
                new[name] = float(group[name]) * ratio
        groups.append(new)
    return groups


def base_rate(old: Optimizer) -> float:
    """The learning rate of the first group before any schedule.

    Raises:
        UsageError: it is zero.
    """
    group = old.param_groups[0]
    rate = float(group.get("initial_lr", group["lr"]))
    if rate <= 0:
        raise UsageError(f"the learning rate of {_name(old)} is {rate:g}", "Give it the one to train with")
    return rate


def exchange(
    live: AttachedProgram,
    new: Optimizer,
    *,
    ratio: float = 1.0,
    move: Callable[[torch.Tensor, States], States | None] | None = None,
) -> None:
    """Put `new` in the place of the program's optimizer until the undo. See NOTE [Exchanged optimizers].

    Args:
        new: with the groups of the old one, as `carried_groups` gives them.
        ratio: what a change of the old learning rate is multiplied with.
        move: makes a parameter's states of the old ones, in memory of their own; None starts it anew.
    """
    old = live.optimizer
    assert old is not None
    parked: list[tuple[States, str, torch.device]] = []
    for parameter, states in old.state.items():
        if move is not None and states and (moved := move(parameter, states)) is not None:
            new.state[parameter] = moved
        for name, value in states.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                parked.append((states, name, value.device))
                states[name] = value.cpu()
    follow = Follow(old, new, ratio)
    handles = (
        new.register_step_pre_hook(follow),
        new.register_state_dict_pre_hook(follow),
        new.register_load_state_dict_post_hook(follow.take_back),
    )
    setattr(new, _FOLLOW, follow)
    live.set(live, "optimizer", new)

    def back() -> None:
        for handle in handles:
            handle.remove()
        delattr(new, _FOLLOW)
        new.state.clear()  # whoever still holds it holds no memory with it
        for states, name, device in parked:
            states[name] = states[name].to(device)

    live.on_undo(back)


class Follow:
    """Takes changes of one optimizer's hyperparameters over into another's. See NOTE [Exchanged optimizers]."""

    def __init__(self, old: Optimizer, new: Optimizer, ratio: float) -> None:
        self._old, self._new, self._ratio = old, new, ratio
        self._seen = [_hyperparameters(group) for group in old.param_groups]

    def __call__(self, *_: Any) -> None:
        """Look for changes; a step hook."""
        for seen, theirs, ours in zip(
            self._seen, self._old.param_groups, self._new.param_groups, strict=False
        ):
            for name, value in _hyperparameters(theirs).items():
                if name not in seen or seen[name] != value:
                    seen[name] = value
                    if name in ours:
                        set_value(ours, name, value * self._ratio if name == "lr" else value)
        if hasattr(self._old.step, "_wrapped_by_lr_sched"):
            # A schedule made before warns unless its own optimizer has stepped (torch/optim/lr_scheduler.py).
            vars(self._old)["_opt_called"] = True

    def take_back(self, *_: Any) -> None:
        """Let the old groups stand where loaded new ones stand; a hook after loading."""
        for seen, theirs, ours in zip(
            self._seen, self._old.param_groups, self._new.param_groups, strict=False
        ):
            for name in _SCHEDULED:
                if name in theirs and name in ours:
                    set_value(theirs, name, float(ours[name]) / self._ratio if name in _RATES else ours[name])
            seen.update(_hyperparameters(theirs))


def catch_up(optimizer: Optimizer) -> None:
    """Take over what a schedule changed in an optimizer whose place this one has taken."""
    follow: Follow | None = getattr(optimizer, _FOLLOW, None)
    if follow is not None:
        follow()


def set_value(group: dict[str, Any], name: str, value: Any) -> None:
    """Change a hyperparameter as torch's schedules do: a tensor keeps its identity."""
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name not in _NOT_FOLLOWED
    }


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def fused_refused(kind: type[Optimizer], parameters: Iterable[torch.Tensor]) -> str | None:
    """Why torch's fused kernel of an optimizer cannot be used with parameters; None where it can."""
    for parameter in parameters:
        if not parameter.is_floating_point():
            return f"a parameter is of {parameter.dtype}"
        if parameter.device.type not in ("cuda", "cpu", "mps", "xpu"):
            return f"there is no fused kernel for {parameter.device.type}"
        halves = parameter.dtype in (torch.bfloat16, torch.float16)
        if parameter.device.type == "cpu" and issubclass(kind, torch.optim.SGD) and halves:
            return f"fused SGD on the CPU is wrong for {parameter.dtype}"
    return None


def place_counters(optimizer: Optimizer) -> None:
    """Put the step counters where the implementation wants them: on the card for fused and capturable ones."""
    for group in optimizer.param_groups:
        on_card = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            states: dict[str, Any] = optimizer.state.get(parameter) or {}
            counter = states.get("step")
            if isinstance(counter, torch.Tensor):
                states["step"] = counter.to(parameter.device if on_card else "cpu", torch.float32)
