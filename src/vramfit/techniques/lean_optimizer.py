"""An optimizer with less state than Adam: Adafactor, or SGD with momentum and a cosine schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.techniques.support.optimizer_exchange import (
    Optimizer,
    base_rate,
    carried_groups,
    exchange,
    exchangeable,
    fused_refused,
    is_adam,
    others_excluded,
    parameters_of,
    set_value,
)

_ADAFACTOR_RATE = 1e-2  # torch.optim.Adafactor's default
_SGD_RATIO = 100.0  # 0.1 for AdamW's 1e-3, the customary pair for convolutional networks
_FRACTION = "cosine_final_fraction"

# Where these normalise or embed, SGD lags far behind Adam ("Why Transformers Need Adam", arXiv 2402.16788).
_ADAM_COUNTRY = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention)
# Its customary rate is that of networks whose layers these make blind to the scale of their weights. At that rate a
# small network of convolutions and group norms diverged within 40 steps, and so did a pair of adversaries.
_SGD_COUNTRY = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class LeanKind(Enum):
    """Which optimizer.

    Attributes:
        ADAFACTOR: the second moment as a row and a column, no first moment.
        SGD: with momentum, one tensor a parameter; none without.
    """

    ADAFACTOR = "adafactor"
    SGD = "sgd"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeanOptimizerSetting(Setting):
    """Which optimizer, and its schedule.

    Attributes:
        kind: which optimizer.
        lr: learning rate of the first group, the others in proportion; None takes 0.01 for Adafactor, and for SGD the
            rate of the optimizer before times 100.
        momentum: of SGD; 0 keeps no state.
        steps: length of a cosine annealing of the learning rate to ``final`` times its value; 0 leaves the rate to the
            program's own schedule.
        warm_up: steps of a linear rise from zero before it.
        final: what is left of the learning rate in the end.
    """

    kind: LeanKind = LeanKind.ADAFACTOR
    lr: float | None = None
    momentum: float = 0.9
    steps: int = 0
    warm_up: int = 0
    final: float = 0.0


class LeanOptimizer(Technique[LeanOptimizerSetting]):
    """``torch.optim.Adafactor`` or ``torch.optim.SGD`` in the place of an optimizer with more state.

    Adafactor keeps the mean squares of the rows and of the columns of each matrix (Shazeer and Stern,
    https://arxiv.org/abs/1804.04235): for 4096 x 4096 parameters 32 KiB instead of AdamW's 128 MiB. Its learning rate
    is relative to the size of the parameters and falls with the root of the steps. SGD keeps one tensor with momentum,
    and suits convolutional networks. With ``steps`` the learning rate follows a cosine (Loshchilov and Hutter,
    https://arxiv.org/abs/1608.03983) inside the optimizer: its place in the schedule is saved with its groups, and the
    program should have no schedule of its own then.

    Weight decay is carried over so that one step shrinks the parameters as much as before. States begin anew. It is
    another optimizer: the loss falls along another curve, and the learning rate wants tuning. Over 40 steps of twelve
    small models, losses with Adafactor at its own rate fell further than with AdamW in nine, and half as far at worst.
    """

    name: ClassVar[str] = "lean-optimizer"
    summary: ClassVar[str] = "train with Adafactor, or with SGD and a cosine schedule"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[AttachStage] = AttachStage.OPTIMIZER
    setting_type = LeanOptimizerSetting
    follows: ClassVar[str | None] = "optimizer-offload"
    excludes: ClassVar[dict[str, str]] = others_excluded("lean-optimizer")

    def options(self, profile: Profile) -> Iterable[LeanOptimizerSetting]:
        """Adafactor for Adam's and AdamW's place; SGD where the model is one that it trains well: with batch norm."""
        if not is_adam(profile.optimizer):
            return
        yield LeanOptimizerSetting(kind=LeanKind.ADAFACTOR)
        modules = tuple(profile.model.modules())
        normalised = any(isinstance(module, _SGD_COUNTRY) for module in modules) and not profile.own_step
        if normalised and not any(isinstance(module, _ADAM_COUNTRY) for module in modules):
            yield LeanOptimizerSetting(kind=LeanKind.SGD)

    def promise(self, setting: LeanOptimizerSetting) -> Promise:
        """Another optimizer."""
        name = "Adafactor" if setting.kind is LeanKind.ADAFACTOR else "SGD"
        return Promise(self.numerics, f"{name} trains instead, along another curve")

    def attach(self, live: AttachedProgram, setting: LeanOptimizerSetting) -> None:
        """Exchange the optimizer."""
        old = exchangeable(live, self.name)
        _check(setting, old)
        rate = base_rate(old)
        if setting.lr is not None:
            wanted = setting.lr
        else:
            wanted = _ADAFACTOR_RATE if setting.kind is LeanKind.ADAFACTOR else rate * _SGD_RATIO
        ratio = wanted / rate
        groups = carried_groups(old, (), ratio=ratio)
        for new, group in zip(groups, old.param_groups, strict=True):
            decay = float(group.get("weight_decay", 0.0)) / ratio
            new["weight_decay"] = decay * (1 - setting.momentum) if setting.kind is LeanKind.SGD else decay
        made = _made(setting, groups, wanted)
        exchange(live, made, ratio=ratio)
        if setting.steps or setting.warm_up:
            for group in made.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group |= {
                    "steps_taken": 0,
                    "warm_up": setting.warm_up,
                    "cosine_steps": setting.steps,
                    _FRACTION: setting.final,
                }
            live.on_undo(made.register_step_pre_hook(Schedule(made)).remove)


class Schedule:
    """Linear warm-up and cosine annealing, from what an optimizer's groups say; a step hook.

    The place in the schedule is in the groups, so that it is saved and loaded with them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Set the learning rate of the step to come; a view of the optimizer takes it, and counts no step."""
        for group in optimizer.param_groups:
            rise, length, taken = group["warm_up"], group["cosine_steps"], group["steps_taken"]
            factor = 1.0
            if taken < rise:
                factor = (taken + 1) / rise
            elif length:
                part = min(1.0, (taken - rise) / max(1, length - rise))
                final = group[_FRACTION]
                factor = final + (1 - final) * 0.5 * (1 + math.cos(math.pi * part))
            set_value(group, "lr", group["initial_lr"] * factor)
            if optimizer is self._optimizer:
                group["steps_taken"] = taken + 1


def _made(setting: LeanOptimizerSetting, groups: list[dict[str, Any]], rate: float) -> Optimizer:
    if setting.kind is LeanKind.ADAFACTOR:
        return torch.optim.Adafactor(groups, lr=rate)
    parameters = [parameter for group in groups for parameter in group["params"]]
    # The kernel without temporaries: foreach copies all gradients where there is weight decay.
    fused = fused_refused(torch.optim.SGD, parameters) is None
    return torch.optim.SGD(groups, lr=rate, momentum=setting.momentum, fused=fused or None)


def _check(setting: LeanOptimizerSetting, old: Optimizer) -> None:
    wanted = torch.optim.Adafactor if setting.kind is LeanKind.ADAFACTOR else torch.optim.SGD
    if isinstance(old, wanted):
        raise UsageError(f"the program has {wanted.__name__} already", "Leave lean-optimizer out")
    if setting.lr is not None and setting.lr <= 0:
        raise UsageError(f"the learning rate is {setting.lr:g}", "Give one above 0")
    if not 0 <= setting.momentum < 1:
        raise UsageError(f"the momentum is {setting.momentum:g}", "Give one from 0 to below 1")
    if setting.steps < 0 or setting.warm_up < 0 or (setting.steps and setting.warm_up >= setting.steps):
        raise UsageError(
            f"a schedule of {setting.steps} steps with {setting.warm_up} of warm-up is not possible",
            "Give fewer steps of warm-up than steps in all",
        )
    if setting.kind is LeanKind.ADAFACTOR and any(p.is_complex() for p in parameters_of(old)):
        raise UsageError("Adafactor needs real parameters, and some are complex", "Leave lean-optimizer out")
