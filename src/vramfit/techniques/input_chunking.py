"""Inference in chunks of the batch: the model is called on parts of its inputs, and the outputs are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.input_chunks import ChunkSettings, call_in_chunks, moved
from vramfit.inference.neighbours import coupled_by_structure
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.techniques.micro_batching import batch_size_name


@dataclass(frozen=True, kw_only=True, slots=True)
class InputChunkingSetting(Setting):
    """How inputs are cut.

    Attributes:
        size: entries of the dimension in a chunk.
        dim: the dimension, 0 for the batch; 1 is the sequence of most models, for those that treat each position alone.
        whole: arguments of the model that every chunk gets as they are, by name or number.
        host_inputs: whether inputs stay on the host and are brought over chunk by chunk.
        host_outputs: whether outputs are joined on the host.
        check: whether the first call tries on a few entries that none depends on others, see `NeighbourReport`.
    """

    size: int = 1
    dim: int = 0
    whole: tuple[str, ...] = ()
    host_inputs: bool = False
    host_outputs: bool = False
    check: bool = True


class InputChunking(Technique[InputChunkingSetting]):
    """Calls a model that does not train on parts of its inputs, and joins the outputs.

    What a call holds in between is that of a part; outputs are written into their places among those of the whole,
    which are allocated once, so that the peak is the outputs and the work of one part. With inputs and outputs on the
    host the device holds neither.

    It pays where activations are most of the peak, and costs little while a part still fills the device. It saves
    nothing of the parameters. Batch norm with the statistics of its input, and whatever else couples examples, forbids
    it: the structure of the model is looked at when it is attached, and the first call with values tries a few entries.
    Such a trial sees what couples those few, and nothing that needs more of them.
    """

    name: ClassVar[str] = "input-chunking"
    summary: ClassVar[str] = "calls the model on parts of its inputs, and joins the outputs"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = InputChunkingSetting
    follows: ClassVar[str | None] = "attention-chunking"

    def options(self, profile: Profile) -> Iterable[InputChunkingSetting]:
        """Half of the batch, a quarter, and so on to single examples; these also with all but a chunk on the host."""
        if profile.trains or profile.own_step or coupled_by_structure(profile.model) is not None:
            return
        size = profile.sizes[batch_size_name(profile.sizes)]
        while size > 1:
            size = -(-size // 2)
            yield InputChunkingSetting(size=size)
        if profile.device_type == "cuda":
            yield InputChunkingSetting(size=size, host_inputs=True, host_outputs=True)

    def attach(self, live: AttachedProgram, setting: InputChunkingSetting) -> None:
        """Surround the model.

        Raises:
            UsageError: it trains, or its structure couples examples.
        """
        if live.optimizer is not None:
            raise UsageError(
                "input-chunking is for models that do not train", "Take micro-batching, which keeps gradients"
            )
        if (found := coupled_by_structure(live.model)) is not None:
            found.demand_none()
        settings = ChunkSettings(
            size=setting.size,
            dim=setting.dim,
            whole=setting.whole,
            device=live.device if setting.host_inputs else None,
            output_device=torch.device("cpu") if setting.host_outputs else None,
            check=setting.check,
        )
        live.surround(live.model, InChunks(settings))
        if setting.host_inputs:
            live.set(live, "host_inputs", True)

    def promise(self, setting: InputChunkingSetting) -> Promise:  # noqa: ARG002  # the same for all
        """Other kernels may be chosen."""
        return Promise(Numerics.ROUNDING, "kernels for smaller inputs may sum in another order")


class InChunks:
    """Runs a forward pass in chunks where no gradients are computed."""

    def __init__(self, settings: ChunkSettings) -> None:
        self.settings = settings
        self.checked = False

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The outputs of all entries."""
        settings = self.settings
        if torch.is_grad_enabled():
            if settings.device is not None:
                args, kwargs = moved((args, kwargs), settings.device)
            return forward(*args, **kwargs)
        found = call_in_chunks(
            forward, (args, kwargs), settings.unchecked() if self.checked else settings, model=module
        )
        self.checked = True
        return found
