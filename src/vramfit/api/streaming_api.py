"""A model that is larger than the card, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from vramfit.arguments import path_argument, shown, text_argument, whole_argument
from vramfit.errors import UsageError
from vramfit.inference.step_progress import step_progress
from vramfit.inference.streaming.checkpoint import (
    check_folder,
    given_values,
    has_no_memory,
    located,
    removed,
    require,
    stored_layers,
)
from vramfit.inference.streaming.disk_home import DiskHome, FileSource
from vramfit.inference.streaming.weight_files import StoredTensor, stored_tensors
from vramfit.inference.streaming.weight_placement import WeightPlacement
from vramfit.inference.streaming.weight_stream import StreamCounts, WeightStream
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.placement_choice import place_weights
from vramfit.planner.placement_trial import PlacementQuestion
from vramfit.techniques import AttachedProgram
from vramfit.techniques.weight_streaming import MOST_SLOTS, attach_stream, place_around, streamed_layers
from vramfit.workload.given_device import device_or_default


class Offload(Enum):
    """Whether layers may wait on the host.

    Attributes:
        AUTO: those for which the card has no room.
        NEVER: none; what does not fit is said.
    """

    AUTO = "auto"
    NEVER = "never"


class StreamedModel:
    """A model whose layers come to the card when they are called; a context manager whose end is the undo.

    Attributes:
        model: the same object as was given, to be used as ever.
        placement: which layers stay on the card, and the figures that led to it.
    """

    def __init__(
        self, model: nn.Module, placement: WeightPlacement, live: AttachedProgram, stream: WeightStream | None
    ) -> None:
        self.model, self.placement = model, placement
        self._live, self._stream = live, stream

    @property
    def counts(self) -> StreamCounts:
        """What was carried so far."""
        return StreamCounts() if self._stream is None else self._stream.counts

    def undo(self) -> None:
        """Leave the model as it was: on its device, in plain memory, its forward passes its own."""
        self._live.undo()

    def __enter__(self) -> StreamedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def streamed(
    model: nn.Module,
    example: Any = None,
    *,
    method: str = "forward",
    budget: int | str | None = None,
    gpu: Any = None,
    device: Any = None,
    offload: Offload | str = Offload.AUTO,
    slots: int | None = None,
    placement: WeightPlacement | str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | bool | None = None,
) -> StreamedModel:
    """Let a model compute on a card that it does not fit: its weights come layer by layer, in time for their layer.

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).eval()
    >>> x = torch.rand(4, 2048)
    >>> before = model(x)
    >>> with vramfit.streamed(model, x, budget="100MiB", gpu="RTX 4090") as streaming:
    ...     after = model(x)
    >>> 0 < len(streaming.placement.streamed) < 8, torch.equal(before, after)
    (True, True)

    How many layers stay on the card is found by running the example on the virtual GPU, in a process of its own: so its
    cache and activations count as they will. The layers that do not stay wait in pinned memory and take turns in a few
    slots; the next one is copied while one is computed. The results are those of the plain model, bit for bit.

    No gradients are computed. Weights are the model's own parameters, on the host, and may be changed between calls.
    One thread at a time may use the model. Where the model computes on the CPU the same is done there, without a card's
    memory to save.

    Args:
        model: on the CPU or on the card; it is changed in place, and `StreamedModel.undo` changes it back.
        example: what it is called with in the largest use that has to fit: a tensor, a list of arguments or a dict of
            named ones; or a function of the model and the device that uses it, such as
            ``lambda model, device: model.generate(ids.to(device), max_new_tokens=100)``.
        method: the model's method that is called with it, such as ``"generate"``.
        budget: what torch may reserve on the card, all included, as ``"4GiB"``; None is what is free there, less 2 %.
        gpu: the card that is asked about; None is the one that is there.
        device: where the model computes; None is the card, if there is one.
        offload: ``"never"`` lets all layers stay, and says with figures what does not fit.
        slots: how many waiting layers the card has memory for at once; None tries two, one and three.
        placement: what was found before, as `WeightPlacement`, as its JSON, or as a file of that; then no example is
            needed and nothing is run.
        weights: a safetensors file, or a folder of these or of ``NAME.npy`` files, with the model's weights by their
            names: the layers that do not stay are read from there each time, and take no memory of the host. The model
            may have been made without memory, on the device ``meta``.
        folder: where layers that do not stay are written, to be read from there each time; the undo reads them back and
            removes them. A model has a folder of its own: files of these names that are there are refused.
        progress: called with what is tried; None shows it on standard error, False does not.

    Raises:
        UsageError: the example does not fit with one layer on the card at a time, a file cannot be read, or the
            arguments contradict each other; nothing has been changed then.
        WriteError: the folder cannot be written to.
        VramfitError: the model fails.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model={shown(model)} is not a module", "Give an nn.Module")
    where = device_or_default("device", device)
    files = _files(model, weights, folder)
    if placement is None:
        if example is None:
            raise UsageError(
                "nothing says what the model is to be used for",
                "Give an example of the largest call, or a placement that was found before",
            )
        question = PlacementQuestion(
            example=example,
            method=_method(model, example, method),
            never=_offload(offload) is Offload.NEVER,
            slots=None if slots is None else whole_argument("slots", slots, least=1, most=MOST_SLOTS),
        )
        live_model = LiveModel(model=model, device=where, budget=budget, gpu=gpu)
        with step_progress(progress, "streamed") as told:
            placement = place_weights(live_model, question, told)
    else:
        placement = _placement(placement)
    live = AttachedProgram(model, None, where)
    try:
        stream = _attached(live, placement, files)
    except BaseException:
        live.undo()
        raise
    return StreamedModel(model, placement, live, stream)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """Where weights wait on disk.

    Attributes:
        weights: where they are; None where they are written.
        stored: what is there.
        folder: where they are written.
    """

    weights: Path | None = None
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    folder: Path | None = None


def _files(model: nn.Module, weights: Any, folder: Any) -> _Files | None:
    if weights is not None and folder is not None:
        raise UsageError("weights and folder are both given", "Weights in files need not be written again")
    if weights is not None:
        path = Path(path_argument("weights", weights))
        return _Files(weights=path, stored=stored_tensors(path))
    if has_no_memory(model):
        raise UsageError(
            "the model was made without values, on the device meta", "Say where they are with weights="
        )
    if folder is not None:
        check_folder(Path(path_argument("folder", folder)))
        return _Files(folder=Path(folder))
    return None


def _attached(live: AttachedProgram, placement: WeightPlacement, files: _Files | None) -> WeightStream | None:
    """Place a model as was decided."""
    known: dict[int, StoredTensor] = {}
    if files is not None and files.weights is not None:
        known = located(live.model, files.stored)
        without = [parameter for parameter in live.model.parameters() if parameter.device.type == "meta"]
        require(live.model, without, known, files.weights)
        live.on_undo(given_values(live.model, known))
        known = located(live.model, files.stored)
    if not placement.streamed:
        place_around(live, [])
        return None
    layers = streamed_layers(live.model, placement.streamed)
    if files is None:
        stream = WeightStream(live.device, len(layers), placement.slots)
        attach_stream(live, stream, layers)
        return stream
    if files.folder is not None:
        known, written = stored_layers(files.folder, layers)
        live.on_undo(lambda: removed(written))
    else:
        assert files.weights is not None
        waiting = [layer.get_parameter(name) for layer, names in layers for name in names]
        require(live.model, waiting, known, files.weights)
    home = DiskHome(known)
    source = FileSource(known, pinned=live.device.type == "cuda", written=home.written)
    stream = WeightStream(live.device, len(layers), placement.slots, source=source)
    attach_stream(live, stream, layers, home)
    return stream


def _offload(given: Any) -> Offload:
    try:
        return given if isinstance(given, Offload) else Offload(given)
    except ValueError:
        raise UsageError(f"offload={shown(given)} is no way to place layers", "Give auto or never") from None


def _method(model: nn.Module, example: Any, given: Any) -> str:
    name = text_argument("method", given)
    if not callable(example) and not callable(getattr(model, name, None)):
        raise UsageError(
            f"method={shown(given)}: a {type(model).__name__} has no such method", "Name one that it has"
        )
    return name


def _placement(given: Any) -> WeightPlacement:
    if isinstance(given, WeightPlacement):
        return given
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return WeightPlacement.from_json(given)
    try:
        return WeightPlacement.from_json(Path(given).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise UsageError(
            f"placement={shown(given)} cannot be read: {error}", "Give what was found before, or its file"
        ) from error
