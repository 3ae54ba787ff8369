"""Which of torch's implementations of an optimizer takes the step: foreach, a loop, or a fused kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.techniques.support.optimizer_exchange import (
    Optimizer,
    fused_refused,
    optimizer_of,
    parameters_of,
    place_counters,
)

# torch.optim.Adafactor takes the loop unless foreach says otherwise (torch/optim/_adafactor.py).
_LOOPS_BY_DEFAULT = (torch.optim.Adafactor,)


class Implementation(Enum):
    """What runs a step.

    Attributes:
        FUSED: one kernel reads and writes everything; no temporaries.
        LOOP: the parameters one after the other; the temporaries of the largest.
        FOREACH: each operation over all parameters at once; temporaries of all of them. The default on a card.
    """

    FUSED = "fused"
    LOOP = "loop"
    FOREACH = "foreach"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKernelSetting(Setting):
    """Which implementation."""

    implementation: Implementation = Implementation.FUSED


class OptimizerKernel(Technique[OptimizerKernelSetting]):
    """Choose torch's implementation of the optimizer that the program has.

    On a card torch takes ``foreach``, whose temporaries are as large as all parameters of a group: AdamW makes one of
    them for the square roots. ``fused`` has none and is the fastest, but exists for Adam, AdamW, Adagrad and SGD
    alone; ``loop`` has those of one parameter at a time and launches many small kernels.
    (https://docs.pytorch.org/docs/stable/optim.html, "Algorithms".)

    It pays where the step is the peak: small batches, checkpointed activations. It costs nothing with ``fused``.

    Measured on the CPU, 50 steps in float32 and float64: foreach and loop give the same bits for Adam, AdamW, Adamax,
    RMSprop, Rprop and SGD, as for Adadelta and Adagrad; NAdam, RAdam, ASGD, Adafactor and all fused kernels round
    otherwise in the last bits. In bfloat16 intermediate results are rounded at other places.

    Known limitation of torch 2.13: fused SGD on the CPU computes wrong updates for bfloat16 and float16 parameters, and
    is refused there.
    """

    name: ClassVar[str] = "optimizer-kernel"
    summary: ClassVar[str] = "step with the fused kernel, in a loop or with foreach"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.OPTIMIZER
    setting_type = OptimizerKernelSetting
    follows: ClassVar[str | None] = "attention-backend"
    quickens: ClassVar[bool] = True

    def options(self, profile: Profile) -> Iterable[OptimizerKernelSetting]:
        """Fused where there is such a kernel, then the loop; not what runs already."""
        optimizer = profile.optimizer
        if optimizer is None or "foreach" not in optimizer.param_groups[0]:
            return
        now = _current(optimizer, profile.device_type)
        for wanted in (Implementation.FUSED, Implementation.LOOP):
            if wanted is now or (wanted is Implementation.LOOP and now is Implementation.FUSED):
                continue
            if implementation_refused(optimizer, wanted) is None:
                yield OptimizerKernelSetting(implementation=wanted)

    def promise(self, setting: OptimizerKernelSetting) -> Promise:  # noqa: ARG002
        """Rounding: not every pair of implementations gives the same bits."""
        return Promise(self.numerics, "the optimizer's step may round differently in the last bits")

    def attach(self, live: AttachedProgram, setting: OptimizerKernelSetting) -> None:
        """Set the flags of the optimizer's groups, now and whenever a checkpoint is loaded into it."""
        optimizer, wanted = optimizer_of(live, self.name), setting.implementation
        why = implementation_refused(optimizer, wanted)
        if why is not None:
            raise UsageError(f"the {wanted.value} implementation cannot be chosen: {why}", "Choose another")
        before = [
            {name: group.get(name) for name in ("foreach", "fused")} for group in optimizer.param_groups
        ]
        scaling = getattr(optimizer, "_step_supports_amp_scaling", None)
        _choose(optimizer, wanted)
        loaded = optimizer.register_load_state_dict_post_hook(lambda known: _choose(known, wanted))

        def back() -> None:
            loaded.remove()
            for group, flags in zip(optimizer.param_groups, before, strict=False):
                group.update({name: value for name, value in flags.items() if name in group})
            if scaling is None:
                vars(optimizer).pop("_step_supports_amp_scaling", None)
            else:
                vars(optimizer)["_step_supports_amp_scaling"] = scaling
            place_counters(optimizer)

        live.on_undo(back)


def implementation_refused(optimizer: Optimizer, wanted: Implementation) -> str | None:
    """Why an optimizer cannot run an implementation; None where it can."""
    group, kind = optimizer.param_groups[0], type(optimizer)
    flag = "fused" if wanted is Implementation.FUSED else "foreach"
    if flag not in group:
        return f"{kind.__name__} has no {flag} implementation"
    if wanted is Implementation.FUSED:
        if any(known.get("differentiable") for known in optimizer.param_groups):
            return "differentiable=True needs the loop"
        return fused_refused(kind, parameters_of(optimizer))
    if wanted is Implementation.FOREACH and any(
        isinstance(known["lr"], torch.Tensor) and not known.get("capturable")
        for known in optimizer.param_groups
    ):
        return "a learning rate in a tensor needs capturable=True"
    return None


def _current(optimizer: Optimizer, device_type: str) -> Implementation:
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return Implementation.FUSED
    default = device_type == "cuda" and not isinstance(optimizer, _LOOPS_BY_DEFAULT)
    chosen = group.get("foreach")
    return Implementation.FOREACH if (default if chosen is None else chosen) else Implementation.LOOP


def _choose(optimizer: Optimizer, wanted: Implementation) -> None:
    fused = wanted is Implementation.FUSED
    for group in optimizer.param_groups:
        group["foreach"] = wanted is Implementation.FOREACH
        if "fused" in group:
            group["fused"] = fused
    if "fused" in optimizer.param_groups[0]:
        # What GradScaler looks at: a fused kernel divides by the scale and skips the step itself.
        vars(optimizer)["_step_supports_amp_scaling"] = fused
    place_counters(optimizer)
