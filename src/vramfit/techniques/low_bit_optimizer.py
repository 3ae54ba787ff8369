"""Adam's two averages in eight or four bits: torchao's optimizers in the place of torch's."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
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
    States,
    adam_of,
    carried_groups,
    exchange,
    is_adam,
    others_excluded,
    parameters_of,
)

_FP8_FROM = (8, 9)  # Triton compiles float8_e4m3fn for Ada, Hopper and later alone
_SMALLEST = 4096  # torchao/optim/adam.py, _AdamBase._new_buffer: smaller tensors keep their precision
_AVERAGES = (("exp_avg", True), ("exp_avg_sq", False), ("max_exp_avg_sq", False))


class StateBits(Enum):
    """The form of the states.

    Attributes:
        EIGHT: codes of 8 bits, dynamic quantisation by blocks.
        FP8: float8_e4m3fn with a scale for each block.
        FOUR: codes of 4 bits.
    """

    EIGHT = "8"
    FP8 = "fp8"
    FOUR = "4"


_SUFFIX = {StateBits.EIGHT: "8bit", StateBits.FP8: "Fp8", StateBits.FOUR: "4bit"}
_BLOCK = {
    StateBits.EIGHT: 256,
    StateBits.FP8: 256,
    StateBits.FOUR: 128,
}  # torchao/optim/adam.py, the defaults


@dataclass(frozen=True, kw_only=True, slots=True)
class LowBitOptimizerSetting(Setting):
    """The form of the states.

    Attributes:
        bits: how the averages are kept.
        block_size: elements that share a scale; 0 takes torchao's own, 256 and for four bits 128.
        bf16_stochastic_round: whether bfloat16 parameters are rounded at random, so that small updates count.
    """

    bits: StateBits = StateBits.EIGHT
    block_size: int = 0
    bf16_stochastic_round: bool = False


class LowBitOptimizer(Technique[LowBitOptimizerSetting]):
    """torchao's ``AdamW8bit``, ``AdamWFp8`` or ``AdamW4bit`` in the place of Adam or AdamW.

    Blocks of each average share a scale (Dettmers et al., https://arxiv.org/abs/2110.02861; Li et al. for four bits,
    https://arxiv.org/abs/2309.01507); the update is computed in float32. A parameter keeps ``2 + 8 / block`` bytes an
    element in eight bits and ``1 + 8 / block`` in four, instead of 8; those with fewer than 4096 elements, or with a
    number of them that the block does not divide, keep theirs.

    It pays where Adam's states are a large part of the memory. torchao compiles the update for every shape of a
    parameter, which takes seconds each at the first step; then a step costs about as much as a fused one. On the CPU
    the update runs uncompiled, which gives the same to rounding and needs no compiler of C++.
    States that the program's optimizer has already are quantised and taken over.

    Measured on the CPU over 100 steps of two small models, as the largest distance of the losses from AdamW's, in parts
    of the first loss: 0.6 % in eight bits, 7 % in float8 and 9 % in four bits. So eight bits keep the promise of less
    precision; the two others are approximations, which train along a curve of their own.
    """

    name: ClassVar[str] = "low-bit-optimizer"
    summary: ClassVar[str] = "keep Adam's states in 8 or 4 bits"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[AttachStage] = AttachStage.OPTIMIZER
    setting_type = LowBitOptimizerSetting
    follows: ClassVar[str | None] = "step-in-backward"
    excludes: ClassVar[dict[str, str]] = others_excluded("low-bit-optimizer")

    def options(self, profile: Profile) -> Iterable[LowBitOptimizerSetting]:
        """Eight bits, float8 where the card has it, four bits; for Adam and AdamW with torchao installed."""
        if not is_adam(profile.optimizer) or importlib.util.find_spec("torchao") is None:
            return
        for bits in (StateBits.EIGHT, StateBits.FP8, StateBits.FOUR):
            if bits is StateBits.FP8 and profile.device_type == "cuda" and profile.capability < _FP8_FROM:
                continue
            if any(_fits(p, _BLOCK[bits]) for p in parameters_of(profile.optimizer)):
                yield LowBitOptimizerSetting(bits=bits)

    def promise(self, setting: LowBitOptimizerSetting) -> Promise:
        """Less precision in eight bits, an approximation in float8 and in four."""
        level = Numerics.PRECISION if setting.bits is StateBits.EIGHT else Numerics.APPROXIMATE
        kept = "float8" if setting.bits is StateBits.FP8 else f"{setting.bits.value} bits"
        return Promise(level, f"Adam's averages are kept in {kept} with a scale for each block")

    def attach(self, live: AttachedProgram, setting: LowBitOptimizerSetting) -> None:
        """Exchange the optimizer; hyperparameters, groups and states are taken over."""
        old = adam_of(live, self.name)
        if any(p.dtype not in (torch.float32, torch.bfloat16, torch.float16) for p in parameters_of(old)):
            raise UsageError(f"{self.name} is for parameters of at most 32 bits", "Leave it out")
        decoupled = {bool(group.get("decoupled_weight_decay")) for group in old.param_groups}
        if len(decoupled) > 1:
            raise UsageError(
                "some groups of the optimizer have Adam's weight decay and some AdamW's",
                "Use one of them for all",
            )
        _check_card(setting.bits, live.device)
        _check_block(setting)
        kind = _kind(setting.bits, decoupled=decoupled.pop())
        if all(parameter.device.type == "cpu" for parameter in parameters_of(old)):
            kind = _uncompiled(kind)
        made = kind(
            carried_groups(old, ("betas", "eps", "weight_decay", "amsgrad")),
            block_size=setting.block_size or _BLOCK[setting.bits],
            bf16_stochastic_round=setting.bf16_stochastic_round,
        )
        exchange(live, made, move=lambda parameter, states: _quantised(made, parameter, states))


def _fits(parameter: nn.Parameter, block: int) -> bool:
    return parameter.requires_grad and parameter.numel() >= _SMALLEST and parameter.numel() % block == 0


def _check_card(bits: StateBits, device: torch.device) -> None:
    if bits is StateBits.FP8 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_FROM:
            found = ".".join(map(str, capability))
            raise UsageError(
                f"float8 states need compute capability 8.9, and the card has {found}", "Use bits = 8"
            )


def _check_block(setting: LowBitOptimizerSetting) -> None:
    if setting.block_size < 0 or (setting.bits is StateBits.FOUR and setting.block_size % 2):
        raise UsageError(f"a block of {setting.block_size} elements is not possible", "Give 128 or 256")


def _kind(bits: StateBits, *, decoupled: bool) -> Any:
    try:
        from torchao import optim  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            "low-bit-optimizer needs torchao, which is not installed", "pip install vramfit[torchao]"
        ) from error
    return getattr(optim, f"Adam{'W' if decoupled else ''}{_SUFFIX[bits]}")


@functools.cache
def _uncompiled(kind: Any) -> Any:
    """The same optimizer with a step that runs as it is written."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        # Without the hooks of torch, which are put around this one.
        plain = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step
        with torch.compiler.set_stance("force_eager"):
            return plain(self, closure)

    return type(kind.__name__, (kind,), {"step": step, "__module__": __name__, "__doc__": kind.__doc__})


@torch.no_grad()
def _quantised(optimizer: Any, parameter: torch.Tensor, states: States) -> States | None:
    """A parameter's states in few bits."""
    if "exp_avg" not in states:
        return None
    made: States = {"step": torch.tensor(float(states["step"]))}
    for name, signed in _AVERAGES:
        if name in states:
            made[name] = optimizer._new_buffer(parameter, signed)
            made[name].copy_(states[name])
    return made
