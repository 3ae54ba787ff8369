"""Each layer of a model over chunks of rows, at inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.layerwise import ChunkHeight, ChunkStore, run_layerwise
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.torch_internals.layers import ConvNd

_MIB = 1 << 20
_CHUNKS = (64 * _MIB, 16 * _MIB, 4 * _MIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerwiseChunkingSetting(Setting):
    """How much of a layer exists at a time.

    Attributes:
        chunk_bytes: the most that a chunk of a layer's input or output takes.
        rows: rows of a chunk in every layer, in place of `chunk_bytes`; 0 goes by bytes.
        store: where what has to be kept of layers lies meanwhile.
    """

    chunk_bytes: int = 16 * _MIB
    rows: int = 0
    store: ChunkStore = ChunkStore.DEVICE

    @property
    def height(self) -> ChunkHeight:
        """The height of chunks.

        Raises:
            UsageError: it is not positive.
        """
        return ChunkHeight(rows=self.rows) if self.rows else ChunkHeight(bytes=self.chunk_bytes)


class LayerwiseChunking(Technique[LayerwiseChunkingSetting]):
    """Computes each layer of a convolutional network over chunks of rows, each with the few rows more that it reaches.

    Of most layers only some rows exist at a time; what a norm has to see whole exists once, where the plain program
    holds it, its norm, the activation and the next layer's output, and the convolution's workspace beside them.
    Group and instance norms take their statistics in a pass before, so that, other than by tiles, the result is that of
    the whole input. No convolution is computed twice. Attention, and what else has no rule, gets its whole input.

    It pays where activations of convolutions are most of the peak: decoders of latent diffusion, super-resolution,
    segmentation of volumes. It costs kernels: small ones for each chunk, copies of the rows between two chunks, a
    second pass for norms. With `ChunkStore.HOST` what is kept crosses the link twice, and the host holds it, pinned.

    It is for inference: outputs come without gradients.
    """

    name: ClassVar[str] = "layerwise-chunking"
    summary: ClassVar[str] = "computes each layer over chunks of rows, norms of everything included"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = LayerwiseChunkingSetting
    follows: ClassVar[str | None] = "compile"
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "compile": "compiled code does not call its layers one by one",
            "parameter-offload": "layers are computed after their weights have gone",
        }
    )

    def options(self, profile: Profile) -> Iterable[LayerwiseChunkingSetting]:
        """For inference with convolutions: chunks of 64, 16 and 4 MiB that are small beside the peak; then the host."""
        if profile.trains or profile.own_step:
            return
        if not any(isinstance(module, ConvNd) for module in profile.model.modules()):
            return
        sizes = [size for size in _CHUNKS if size <= profile.peak_allocated_bytes // 8] or [_CHUNKS[-1]]
        for size in sizes:
            yield LayerwiseChunkingSetting(chunk_bytes=size)
        if profile.device_type == "cuda":
            yield LayerwiseChunkingSetting(chunk_bytes=sizes[-1], store=ChunkStore.HOST)

    def promise(self, setting: LayerwiseChunkingSetting) -> Promise:  # noqa: ARG002  # the same for all
        """Other sums."""
        return Promise(
            Numerics.ROUNDING, "statistics of norms are merged from chunks, and kernels are of other sizes"
        )

    def attach(self, live: AttachedProgram, setting: LayerwiseChunkingSetting) -> None:
        """Surround the model's forward pass.

        Raises:
            UsageError: the program trains, or a size is not positive.
        """
        if live.optimizer is not None:
            raise UsageError(
                "layerwise-chunking computes no gradients, and the program has an optimizer",
                "Leave it out, or use the model without an optimizer",
            )
        live.surround(live.model, ByLayers(setting.height, setting.store))


class ByLayers:
    """Runs a forward pass layer by layer."""

    def __init__(self, height: ChunkHeight, store: ChunkStore) -> None:
        self.height, self.store = height, store

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The forward pass over chunks of rows."""
        del module
        return run_layerwise(forward, args, kwargs, rows=self.height, store=self.store)
