"""Inference with attention scores, and what feed-forward layers hold in between, some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.row_deferral import InRowChunks, RowChunks
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique

_SLICES = (64 << 20, 16 << 20, 4 << 20)
"""Bytes of a result that exist at once: from what fills any card to what is still a product worth a kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChunkingSetting(Setting):
    """What is computed in parts.

    Attributes:
        slice_bytes: of each large result that exists at once.
        attention: whether scores of attention are.
        feed_forward: whether wide linear layers are, with what follows up to the next one.
    """

    slice_bytes: int = 16 << 20
    attention: bool = True
    feed_forward: bool = True


class AttentionChunking(Technique[AttentionChunkingSetting]):
    """Lets a model that does not train compute large results some rows at a time, without naming any of its layers.

    Attention that is written out holds batch x heads x length x length scores, several times over; here they are
    deferred until they are multiplied with the values, and then computed for some examples, heads and queries at once.
    The same goes for the wide layer of a feed-forward part. Scaling, masks, biases, softmax and activations in between
    are those of the model, whoever wrote it; what does anything else gets the whole, as ever (see
    `vramfit.inference.row_deferral`). Calls of ``scaled_dot_product_attention`` that no fused kernel takes are computed
    in steps, so that they are reached too; what a fused kernel takes is left to it. ``nn.MultiheadAttention`` and
    ``nn.TransformerEncoder`` in evaluation run in kernels of their own and are not reached.

    It pays for long sequences where attention cannot be fused (relative biases, weights that are read, float64, cards
    without such kernels); where it can be, `attention-backend` is quicker. The same arithmetic runs in more kernels,
    and keys are read again for each part of their queries.
    """

    name: ClassVar[str] = "attention-chunking"
    summary: ClassVar[str] = "attention scores and wide layers some rows at a time"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = AttentionChunkingSetting
    follows: ClassVar[str | None] = "attention-backend"
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"compile": "the compiler would trace the recipes of the rows, and not what they compute"}
    )

    def options(self, profile: Profile) -> Iterable[AttentionChunkingSetting]:
        """Slices of some sizes below what activations take, for models with linear layers."""
        if profile.trains or profile.own_step:
            return
        if not any(isinstance(module, nn.Linear) for module in profile.model.modules()):
            return
        held = profile.peak_allocated_bytes - profile.categories.get("parameters", 0)
        for slice_bytes in _SLICES:
            if 2 * slice_bytes <= held:
                yield AttentionChunkingSetting(slice_bytes=slice_bytes)

    def attach(self, live: AttachedProgram, setting: AttentionChunkingSetting) -> None:
        """Surround the model.

        Raises:
            UsageError: it trains, or nothing is to be deferred.
        """
        if live.optimizer is not None:
            raise UsageError(
                "attention-chunking is for models that do not train",
                "Take activation-checkpointing or attention-backend",
            )
        if not (setting.attention or setting.feed_forward):
            raise UsageError("attention-chunking has nothing to do", "Set attention or feed_forward")
        chunks = RowChunks(
            slice_bytes=setting.slice_bytes, attention=setting.attention, feed_forward=setting.feed_forward
        )
        live.surround(live.model, InRowChunks(chunks))

    def promise(self, setting: AttentionChunkingSetting) -> Promise:  # noqa: ARG002  # the same for all
        """Other kernels may be chosen."""
        return Promise(Numerics.ROUNDING, "products of fewer rows may sum in another order")
