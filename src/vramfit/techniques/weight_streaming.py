"""Weights wait on the host, and come to the card for the calls of their layers: for inference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.host_lane import PINNED_ROUNDING
from vramfit.inference.streaming.layer_weights import LayerWeights, move_tensors, own_names, parts
from vramfit.inference.streaming.pinned_home import PinnedHome
from vramfit.inference.streaming.weight_stream import StreamedLayer, StreamedPart, WeightStream
from vramfit.techniques.activation_offload import chosen_modules
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Setting, Technique
from vramfit.techniques.support.blocks import best_blocks, find_blocks
from vramfit.techniques.support.inference_only import refuse_training
from vramfit.torch_internals.fake_tensors import FakeTensor

MOST_SLOTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightStreamingSetting(Setting):
    """Which layers, and through how many slots.

    Attributes:
        modules: names of the layers whose weights come and go; empty for all blocks that are found.
        slots: how many of them the card has memory for at once: with two or three, copies run beside computation.
    """

    modules: tuple[str, ...] = ()
    slots: int = 2


class WeightStreaming(Technique[WeightStreamingSetting]):
    """Weights wait in pinned memory, and come to the card layer by layer while the model is used.

    So a model is used that is larger than the card: of the chosen layers, only as many as there are slots have weights
    there. The slots are memory that is taken once. While a layer is computed, the one that follows is copied, beside
    the computation, and after the last layer the first again. Values are the plain program's, bit for bit: the same
    kernels read the same weights.

    Every weight that is not on the card crosses the link in every forward pass: a generated token takes at least the
    time in which they cross. It pays where the model does not fit otherwise, and costs little where a forward pass has
    much to compute, as for long prompts and large batches.

    Parameters stay the objects that they were, on the host. What two layers share (an embedding and a head), what lies
    outside of the chosen layers, buffers, the weights of recurrent layers and those of other classes, such as quantized
    ones, are on the card. No gradients are computed. `vramfit.streamed` finds how many layers can stay.

    See Sheng et al. 2023, FlexGen (arXiv:2303.06865).
    """

    name: ClassVar[str] = "weight-streaming"
    summary: ClassVar[str] = "weights live on the host and visit the card layer by layer, for inference"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    phase: ClassVar[AttachStage] = AttachStage.PLACEMENT
    setting_type = WeightStreamingSetting
    follows: ClassVar[str | None] = "parameter-offload"
    excludes: ClassVar[dict[str, str]] = {
        "parameter-offload": "that is the same for training",
        "compile": "a compiled graph holds the weights that it was made with",
    }

    def options(self, profile: Profile) -> Iterable[WeightStreamingSetting]:
        """A quarter of the blocks that have weights, then a half, three quarters and all; where the host has room."""
        cuda = profile.device_type == "cuda" and profile.link_bytes_per_second > 0
        if profile.trains or profile.optimizer is not None or not cuda:
            return
        weights = layer_bytes(profile.model, [block.path for block in profile.blocks])
        blocks = [block for block in profile.blocks if weights[block.path]]
        for quarters in (1, 2, 3, 4):
            count = -(-len(blocks) * quarters // 4)
            chosen = best_blocks(
                blocks, count, lambda block: weights[block.path], profile.link_bytes_per_second
            )
            needed = PINNED_ROUNDING * sum(weights[block.path] for block in chosen)
            if len(chosen) < 2 or needed > profile.host_bytes:
                continue
            yield WeightStreamingSetting(modules=tuple(block.path for block in chosen))

    def attach(self, live: AttachedProgram, setting: WeightStreamingSetting) -> None:
        """Place the model, with the chosen layers' weights on the host.

        Raises:
            UsageError: it trains, a name names nothing, or the layers have no weights of their own.
        """
        refuse_training(live, self.name)
        layers = streamed_layers(live.model, setting.modules)
        if not 1 <= setting.slots <= MOST_SLOTS:
            raise UsageError(f"slots of {self.name} is {setting.slots}", f"Give 1 to {MOST_SLOTS}")
        attach_stream(live, WeightStream(live.device, len(layers), setting.slots), layers)


class WeightHome(Protocol):
    """Where weights wait."""

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let parameters wait there."""
        ...

    def give_back(self) -> None:
        """Let them lie where they did before."""
        ...


def attach_stream(
    live: AttachedProgram,
    stream: WeightStream,
    layers: Sequence[tuple[nn.Module, tuple[str, ...]]],
    home: WeightHome | None = None,
) -> None:
    """Place a model with the weights of some layers on the host, and let a stream bring them.

    Args:
        layers: each with the names of its parameters that wait.
        home: where they wait; None for pinned memory beside a card, and beside the CPU for where they are.
    """
    weights = [stream.add(number, layer, names) for number, (layer, names) in enumerate(layers)]
    place_around(live, [parameter for one in weights for parameter in one.parameters], home)
    live.on_undo(stream.close)
    stream.open()
    for number, (layer, names) in enumerate(layers):
        live.surround(layer, StreamedLayer(stream, number, names))
        for path, part, inside in parts(layer, names):
            live.surround(part, StreamedPart(stream, number, path, names, inside))


def streamed_layers(model: nn.Module, names: Sequence[str]) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The layers of these names, or all blocks, each with the names of the parameters that can wait elsewhere.

    Raises:
        UsageError: a name names nothing, one is a part of another, or none has weights of its own.
    """
    chosen = tuple(names) or tuple(block.path for block in find_blocks(model))
    if not chosen:
        raise UsageError("weight-streaming finds no blocks in the model", "Name some with modules")
    for name in chosen:
        outer = next((other for other in chosen if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise UsageError(f"weight-streaming: {name} is a part of {outer}", "Leave one out")
    modules = chosen_modules(model, chosen, WeightStreaming.name)
    waiting = _waiting_names(model, modules)
    layers = [(module, inside) for module, inside in zip(modules, waiting, strict=True) if inside]
    if not layers:
        raise UsageError("weight-streaming: the chosen layers have no weights of their own", "Choose others")
    return layers


def layer_bytes(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Bytes of each layer's weights that can wait elsewhere, by its name; 0 where there are none."""
    modules = [model.get_submodule(name) for name in names]
    own = _waiting_names(model, modules)
    return {
        name: LayerWeights(module, inside).nbytes
        for name, module, inside in zip(names, modules, own, strict=True)
    }


def _waiting_names(model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[str, ...]]:
    """The names, in each layer, of the parameters that can wait elsewhere: its own, and of no class of its own."""
    found = []
    for module, own in zip(modules, own_names(model, modules), strict=True):
        owners = dict(module.named_parameters(remove_duplicate=False))
        found.append(tuple(name for name in own if type(owners[name]) in (nn.Parameter, FakeTensor)))
    return found


def place_around(live: AttachedProgram, away: list[nn.Parameter], home: WeightHome | None = None) -> None:
    """Put these parameters onto the host, and all else onto the device; each goes back to where it was."""
    ids = {id(parameter) for parameter in away}
    if home is None and live.device.type == "cuda":
        home = PinnedHome()
    if home is not None:
        live.on_undo(home.give_back)
        home.take(away)
    if live.placed:
        return
    live.set(live, "placed", True)
    before = [
        (held, name, tensor.device)
        for module in live.model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and id(tensor) not in ids and tensor.device != live.device
    ]
    live.on_undo(lambda: _move_back(live.model, before))
    move_tensors(live.model, live.device, lambda tensor: id(tensor) not in ids)


def _move_back(model: nn.Module, before: list[tuple[dict[str, Any], str, torch.device]]) -> None:
    for device in {device for _, _, device in before}:
        ids = {id(held.get(name)) for held, name, known in before if known == device}
        move_tensors(model, device, lambda tensor, ids=ids: id(tensor) in ids)  # type: ignore[misc]
