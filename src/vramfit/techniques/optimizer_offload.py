"""The optimizer's states and its step on the CPU: torchao's offload in the place of a step on the card."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.techniques.optimizer_kernel import (
    Implementation,
    OptimizerKernel,
    OptimizerKernelSetting,
    implementation_refused,
)
from vramfit.techniques.support.optimizer_exchange import (
    Optimizer,
    exchange,
    exchangeable,
    is_separable,
    others_excluded,
    parameters_of,
    state_tensors,
)
from vramfit.techniques.support.optimizer_offload_host import HostOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerOffloadSetting(Setting):
    """What leaves the card.

    Attributes:
        offload_gradients: whether each gradient goes to the host in the backward pass and leaves the card at once.
        minimal_size: parameters with fewer elements keep their states on the card.
    """

    offload_gradients: bool = False
    minimal_size: int = 4096


class OptimizerOffload(Technique[OptimizerOffloadSetting]):
    """torchao's ``CPUOffloadOptimizer``: the states lie in host memory, and the CPU takes the step.

    Gradients are copied to pinned memory while the backward pass goes on; at the step the CPU updates its own copy of
    each parameter, which is copied back. (torchao/optim/README.md, after ZeRO-Offload,
    https://arxiv.org/abs/2101.06840.) The card loses all states of large parameters, and with ``offload_gradients`` all
    gradients but the one at work.

    It pays where states are a large part of the memory and steps are long beside them: large batches, accumulated
    micro-batches. It costs host memory of parameters, gradients and states, two passes over the link, and the CPU's
    time for the step, which nothing overlaps: about as long as the host needs to read and write them.

    On a model that is on the CPU it leaves all in its place, and takes the kernel that the step would have there.

    Clip gradients with ``step(clip_norm=...)``: those that are used lie on the host. Loss scaling is refused. With
    ``offload_gradients`` nothing can accumulate, so micro-batches are refused.
    """

    name: ClassVar[str] = "optimizer-offload"
    summary: ClassVar[str] = "keep the optimizer's states on the host and step there"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.OPTIMIZER
    setting_type = OptimizerOffloadSetting
    follows: ClassVar[str | None] = "low-bit-optimizer"
    excludes: ClassVar[dict[str, str]] = others_excluded("optimizer-offload") | {
        "step-in-backward": "the step needs the CPU, and waits for the end of the backward pass",
    }

    def options(self, profile: Profile) -> Iterable[OptimizerOffloadSetting]:
        """With gradients left on the card, then without; where there are states, and the host has room for them."""
        optimizer = profile.optimizer
        if optimizer is None or profile.device_type != "cuda" or not _offloadable(optimizer):
            return
        if importlib.util.find_spec("torchao") is None:
            return
        setting = OptimizerOffloadSetting()
        moved = [p for p in parameters_of(optimizer) if p.requires_grad and p.numel() >= setting.minimal_size]
        states = sum(_state_bytes(optimizer, parameter) for parameter in moved)
        # Parameters and gradients are pinned, in blocks of powers of two (ATen/core/CachingHostAllocator.h).
        needed = states + 2 * sum(1 << (parameter.nbytes - 1).bit_length() for parameter in moved)
        if not states or needed > profile.host_bytes:
            return
        yield setting
        if not profile.own_step:
            yield OptimizerOffloadSetting(offload_gradients=True)

    def promise(self, setting: OptimizerOffloadSetting) -> Promise:  # noqa: ARG002
        """The CPU rounds otherwise than the card."""
        return Promise(self.numerics, "the optimizer's step may round differently in the last bits")

    def attach(self, live: AttachedProgram, setting: OptimizerOffloadSetting) -> None:
        """Exchange the optimizer; its states move to the host, and come back with the undo."""
        old = exchangeable(live, self.name)
        _check(live, old)
        if all(parameter.device.type == "cpu" for parameter in parameters_of(old)):
            if implementation_refused(old, Implementation.FUSED) is None:
                OptimizerKernel().attach(live, OptimizerKernelSetting(implementation=Implementation.FUSED))
            return
        host = HostOptimizer(
            old, offload_gradients=setting.offload_gradients, minimal_size=setting.minimal_size
        )
        host.take_states(old)

        def check() -> None:
            if live.scaler is not None:
                raise _scaled()
            if live.splitter is not None and setting.offload_gradients:
                raise UsageError(
                    "gradients that are offloaded one by one cannot accumulate over micro-batches",
                    "Give optimizer-offload offload_gradients=False, or leave micro-batches out",
                )

        exchange(live, host)
        live.on_undo(lambda: host.give_back(old))
        live.keep_pageable(host.pageable)
        live.after(AttachStage.STEP, check)
        live.before_step.append(check)
        live.on_undo(lambda: live.before_step.remove(check))
        live.set(live, "clip", host.clip)


def _offloadable(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's that can step on the CPU parameter by parameter."""
    return type(optimizer).__module__.startswith("torch.optim.") and is_separable(optimizer)


def _check(live: AttachedProgram, old: Optimizer) -> None:
    if live.scaler is not None:
        raise _scaled()
    if not _offloadable(old):
        raise UsageError(
            f"{type(old).__name__} cannot be offloaded",
            "Use one of torch.optim's that step each parameter on its own",
        )
    places = sorted({parameter.device.type for parameter in parameters_of(old)})
    if places not in (["cuda"], ["cpu"]):
        raise UsageError(
            f"optimizer-offload is for a model on one CUDA device, and parameters are on {' and '.join(places)}",
            "Leave it out",
        )
    if isinstance(live.model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "optimizer-offload cannot wait for the gradients of other processes", "Leave it out with DDP"
        )
    if importlib.util.find_spec("torchao") is None:
        raise UsageError(
            "optimizer-offload needs torchao, which is not installed", "pip install vramfit[torchao]"
        )


def _scaled() -> UsageError:
    return UsageError(
        "optimizer-offload cannot go with loss scaling: gradients reach the host before they are divided again",
        "Train in bfloat16, or leave one of them out",
    )


def _state_bytes(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Bytes of a parameter's states; before the first step what its optimizer will make."""
    if optimizer.state.get(parameter):
        return sum(value.nbytes for value in state_tensors(optimizer, parameter) if value.numel() > 1)
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    if isinstance(optimizer, torch.optim.SGD):
        return parameter.nbytes if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.Adafactor):
        return 0  # a row and a column
    return 2 * parameter.nbytes
