"""Mixed precision: products in bfloat16 or float16, parameters, reductions and the optimizer in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import LoopChange, Numerics, Promise, Setting, Technique
from vramfit.techniques.support.casting import (
    HALVES,
    cast_tensors,
    device_type_of,
    find_islands,
    router_kinds,
    surround_loss,
)
from vramfit.workload import Workload

# CUDA C++ Programming Guide, arithmetic instructions: bfloat16 from 8.0 on, float16 from 5.3 on.
_BFLOAT16_FROM = (8, 0)
_FLOAT16_FROM = (5, 3)


class HalfType(Enum):
    """A floating type of 16 bits."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def dtype(self) -> torch.dtype:
        """As torch names it."""
        return torch.bfloat16 if self is HalfType.BFLOAT16 else torch.float16


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecisionSetting(Setting):
    """In which type, and where not.

    Attributes:
        dtype: of products and convolutions.
        islands: paths of modules that compute in float32.
        island_kinds: names of classes whose modules compute in float32.
        float32_outputs: whether the model's outputs are float32 where the loss is computed outside of autocast.
        initial_scale: what float16's losses are multiplied with at first; torch's own default.
    """

    dtype: HalfType = HalfType.BFLOAT16
    islands: tuple[str, ...] = ()
    island_kinds: tuple[str, ...] = ()
    float32_outputs: bool = True
    initial_scale: float = 65536.0


class MixedPrecision(Technique[MixedPrecisionSetting]):
    """Runs the forward pass under ``torch.autocast``; float16 with ``torch.amp.GradScaler``.

    Autocast gives products, convolutions and attention their inputs in half precision, and leaves reductions, norms
    on CUDA and losses in float32 (https://docs.pytorch.org/docs/stable/amp.html, "Autocast Op Reference"). What they
    keep for the backward pass halves, and tensor cores make them faster. It costs a copy of each weight in half
    precision, kept from its first use until its backward pass. So it pays where activations outweigh parameters, and
    costs memory at a small batch. Parameters, gradients and the optimizer's state stay float32.

    bfloat16 has float32's range and 8 bits of precision, and needs a card of capability 8.0. float16 has 11 bits, and
    its gradients underflow unless the loss is scaled (Micikevicius et al., 2018, arXiv:1710.03740): the scaler is the
    ``scaler`` of the live program, and steps with an infinite gradient are left out.

    In a workload the whole loss is inside autocast, as in ``with autocast: loss = loss_function(model(x), y)``, and
    memory is that recipe's to the byte. In a loop of your own only the model's forward pass is: the loss gets
    outputs that were cast to float32 (as Accelerate does), unless ``float32_outputs`` is false or your loop enters
    autocast itself. A ``step`` that belongs to a workload is such a loop too; float16 is refused there, since nothing
    could scale its losses.

    An island gets its inputs in float32 and computes without autocast: for what overflows or cancels in half precision.
    Routers of experts (classes named so, as in transformers) are islands of every plan: in bfloat16 the gradient of a
    small mixture's router is 0.22 of its norm off, in float32 all gradients are within 0.03.
    """

    name: ClassVar[str] = "mixed-precision"
    summary: ClassVar[str] = "products and their activations in 16 bits, parameters in 32"
    numerics: ClassVar[Numerics] = Numerics.PRECISION
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = MixedPrecisionSetting
    follows: ClassVar[str | None] = None
    quickens: ClassVar[bool] = True

    def options(self, profile: Profile) -> Iterator[MixedPrecisionSetting]:
        """bfloat16 where the card computes in it, then float16 where its losses can be scaled; routers in float32."""
        if not _has_float32(profile.model):
            return
        routers = router_kinds(profile.model)
        if profile.device_type == "cpu" or profile.capability >= _BFLOAT16_FROM:
            yield MixedPrecisionSetting(island_kinds=routers)
        if profile.device_type == "cuda" and profile.capability >= _FLOAT16_FROM and not profile.own_step:
            yield MixedPrecisionSetting(dtype=HalfType.FLOAT16, island_kinds=routers)

    def promise(self, setting: MixedPrecisionSetting) -> Promise:
        """What has fewer bits."""
        bits = 8 if setting.dtype is HalfType.BFLOAT16 else 11
        note = f"products and their activations have {bits} bits of precision ({setting.dtype.value})"
        if setting.dtype is HalfType.FLOAT16:
            note += ", and steps whose scaled gradients overflow are left out"
        return Promise(Numerics.PRECISION, note)

    def loop_change(self, setting: MixedPrecisionSetting) -> LoopChange | None:
        """See `Technique.loop_change`."""
        if setting.dtype is not HalfType.FLOAT16:
            return None
        return LoopChange(
            what="scales the loss in float16, and divides the gradients before the step",
            instead="Take bfloat16, or torch.amp.GradScaler in the program",
        )

    def apply(self, workload: Workload, setting: MixedPrecisionSetting) -> Workload:
        """A new workload with the technique.

        Raises:
            UsageError: the workload owns its step, so that float16's losses cannot be scaled.
        """
        if workload.step is not None and setting.dtype is HalfType.FLOAT16:
            raise UsageError(
                "float16 needs scaled losses, and this workload's own step computes them",
                "Use bfloat16, or use torch.amp.GradScaler in the step",
            )
        return super().apply(workload, setting)

    def attach(self, live: AttachedProgram, setting: MixedPrecisionSetting) -> None:
        """Surround the model, its islands and the loss; make a scaler for float16."""
        islands = find_islands(live.model, setting.islands, setting.island_kinds)
        if not _has_float32(live.model):
            raise UsageError(
                "mixed precision is for a model in float32, and this one has no such parameter",
                "Leave it out",
            )
        scales = setting.dtype is HalfType.FLOAT16 and live.optimizer is not None
        if scales and live.steps_in_backward:
            raise UsageError(
                "float16 scales gradients before the step, but the optimizer steps in the backward pass",
                "Use bfloat16, or forbid step-in-backward in the plan",
            )
        for module in islands:
            live.surround(module, Float32Island())
        live.surround(live.model, Autocast(setting.dtype.dtype, float32_outputs=setting.float32_outputs))
        surround_loss(live, setting.dtype.dtype)
        if scales:
            live.set(live, "scaler", torch.amp.GradScaler(live.device.type, init_scale=setting.initial_scale))


class Autocast:
    """Runs a model under autocast; inside an autocast to the same type it leaves everything to that."""

    def __init__(self, dtype: torch.dtype, *, float32_outputs: bool) -> None:
        self.dtype, self.float32_outputs = dtype, float32_outputs

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass."""
        device = device_type_of(module, (args, kwargs))
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is self.dtype:
            return forward(*args, **kwargs)
        with torch.autocast(device, self.dtype):
            outputs = forward(*args, **kwargs)
        return cast_tensors(outputs, HALVES, torch.float32) if self.float32_outputs else outputs


class Float32Island:
    """Runs a module without autocast, on float32."""

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass."""
        device = device_type_of(module, (args, kwargs))
        args, kwargs = cast_tensors((args, kwargs), HALVES, torch.float32)
        with torch.autocast(device, enabled=False):
            return forward(*args, **kwargs)


def _has_float32(model: nn.Module) -> bool:
    return any(parameter.dtype is torch.float32 for parameter in model.parameters())
