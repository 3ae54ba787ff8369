"""Activations on the host between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Setting, Technique
from vramfit.techniques.support.host_lane import PINNED_ROUNDING, CudaLane, Lane
from vramfit.techniques.support.offload_ledger import Ledger
from vramfit.techniques.support.paying import best_blocks
from vramfit.techniques.support.saved import (
    Kept,
    Packed,
    held_storages,
    in_backward,
    is_leaf_of_training,
    is_plain,
    packing,
    span,
    storage_key,
)
from vramfit.units import format_bytes

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationOffloadSetting(Setting):
    """Which activations, and how many bytes may be under way.

    Attributes:
        modules: names of the submodules whose saved tensors go; empty for the whole model.
        min_bytes: smaller tensors stay: a copy takes some ten microseconds however small it is.
        window: most bytes on their way to the host, and most bytes back ahead of their use. Both lie on the card, so
            that a larger window hides more of the copies and saves less. 0 makes the computation wait for each copy.
    """

    modules: tuple[str, ...] = ()
    min_bytes: int = 256 * _KIB
    window: int = 128 * _MIB


class ActivationOffload(Technique[ActivationOffloadSetting]):
    """What autograd saves goes to pinned host memory during the forward pass, and comes back before its use.

    Copies run on streams of their own, beside the computation: out while the next layers run, back while the backward
    passes of the layers behind run. A storage that several tensors view crosses once. Parameters, buffers, and what
    a module was given and nothing computed (its batch, its masks) stay: they live on anyway.

    It pays where a block computes for longer than its activations need to cross the link: large hidden sizes, long
    sequences, a fast link. A block of a transformer of width d in 16 bits does 24 d FLOPs for 34 bytes that it saves
    (Korthikanti et al. 2022, arXiv:2205.05198, with attention that saves no scores). Where the link is slower than
    that, the computation waits for it: offload some of the blocks, and recompute or keep the others. What the last
    blocks save is needed at once, so leave these out. It costs host memory, each tensor rounded up to a power of two.

    With checkpointing, what a checkpoint keeps (the inputs of its blocks) is what goes. Tensors on the CPU stay.

    See torch.autograd.graph.save_on_cpu, which copies on the stream of the computation; torchtune's
    OffloadActivations, and Rhu et al. 2016, vDNN (arXiv:1602.08124), of which the prefetching is.
    """

    name: ClassVar[str] = "activation-offload"
    summary: ClassVar[str] = "saved tensors wait for the backward pass in pinned host memory"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = ActivationOffloadSetting
    follows: ClassVar[str | None] = "activation-checkpointing"

    def describe(self, setting: ActivationOffloadSetting) -> str:
        """How many blocks, and the window."""
        count = len(setting.modules)
        which = f"{count} block{'s' * (count > 1)}" if count else "the whole model"
        return f"{which}, window {format_bytes(setting.window)}"

    def options(self, profile: Profile) -> Iterable[ActivationOffloadSetting]:
        """A quarter, half, three quarters and all of the blocks that pay, those that hide their copies best first."""
        if not (profile.trains and profile.device_type == "cuda" and profile.link_bytes_per_second > 0):
            return
        blocks = [block for block in profile.blocks[:-1] if block.kept_bytes >= _MIB]
        for part in (1, 2, 3, 4):
            count = -(-len(blocks) * part // 4)
            chosen = best_blocks(blocks, count, lambda block: block.kept_bytes, profile.link_bytes_per_second)
            if (
                not chosen
                or PINNED_ROUNDING * sum(b.kept_bytes * b.calls for b in chosen) > profile.host_bytes
            ):
                return
            yield ActivationOffloadSetting(
                modules=tuple(block.path for block in chosen),
                window=max(block.kept_bytes for block in chosen),
            )

    def attach(self, live: AttachedProgram, setting: ActivationOffloadSetting) -> None:
        """See `Technique.attach`."""
        if setting.window < 0 or setting.min_bytes < 0:
            raise UsageError("window and min_bytes of activation-offload are bytes", "Give 0 or more")
        modules = chosen_modules(live.model, setting.modules, self.name)
        ledger = Ledger(lane_of, setting.window)
        for module in modules:
            live.surround(module, Offloading(ledger, setting.min_bytes))


def lane_of(device: torch.device) -> Lane | None:
    """The lane to the host: cards have one."""
    return CudaLane(device) if device.type == "cuda" else None


def chosen_modules(model: nn.Module, names: tuple[str, ...], technique: str) -> list[nn.Module]:
    """The submodules of these names, once each; the model itself where none is given.

    Raises:
        UsageError: there is no such submodule.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in known:
            raise UsageError(
                f"{technique}: the model has no module {name!r}", "Give names as in model.named_modules()"
            )
    return list({id(known[name]): known[name] for name in names}.values()) or [model]


class Offloading:
    """Surrounds a module whose saved tensors go to the host."""

    def __init__(self, ledger: Ledger, min_bytes: int) -> None:
        self._ledger, self._min_bytes = ledger, min_bytes

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass under hooks."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        held = held_storages(module, args, kwargs)
        with packing(partial(self._take, held, in_backward())):
            return forward(*args, **kwargs)

    def _take(self, held: frozenset[int], recomputing: bool, tensor: torch.Tensor) -> Packed | None:
        lane = self._ledger.lane(tensor.device)
        if lane is None or not is_plain(tensor) or is_leaf_of_training(tensor) or storage_key(tensor) in held:
            return None
        first, last = span(tensor)
        if (last - first) * tensor.element_size() < self._min_bytes:
            return None
        # What is recomputed is needed at once.
        return Kept(tensor) if recomputing else self._ledger.send(tensor, lane)
