"""A model whose weights take fewer bits, so that it stays within a budget of bytes, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from vramfit.arguments import call_argument, shown
from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec
from vramfit.inference.step_progress import step_progress
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.quantization.format_choice import (
    FormatChoice,
    FormatSearch,
    bytes_elsewhere,
    refuse_by_weights,
)
from vramfit.planner.quantization.format_trial import ModelUse
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.quantization.fused_experts import split_experts
from vramfit.techniques.quantization.quantised_layers import quantise_layers
from vramfit.techniques.quantization.weight_formats import WeightFormat, parse_format, quantisable
from vramfit.workload.given_device import device_argument


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """A model with formats of weights, in place.

    Attributes:
        model: the same object that was given.
        choice: what was chosen, and by what; None where the formats were given.
        formats: of layers, by name, as texts; others stay as they are. Can be written down and given again.
    """

    model: nn.Module
    choice: FormatChoice | None
    formats: Mapping[str, str]
    _live: AttachedProgram
    _split: AttachedProgram

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self.model(*args, **kwargs)

    def undo(self) -> None:
        """Give the model its own weights back, bit for bit, where the packed ones are."""
        self._live.undo()
        self._split.undo()

    def __enter__(self) -> QuantizedModel:
        """The same; the end of the block undoes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo it."""
        self.undo()


def quantized(
    model: nn.Module,
    batches: Any = None,
    *,
    budget: int | str | None = None,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    formats: Sequence[WeightFormat | str] | Mapping[str, WeightFormat | str] | None = None,
    quality: Callable[[nn.Module], Any] | None = None,
    use: Callable[[nn.Module, Any], Any] | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | bool | None = None,
) -> QuantizedModel:
    """Give the linear layers of a model formats of fewer bits, so that it stays within a budget of bytes.

    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)).eval()
    >>> live = vramfit.quantized(model, formats={"0": "int8", "2": "int8"})
    >>> type(model[0].weight.data).__name__
    'Int8Tensor'
    >>> live.undo()
    >>> type(model[0].weight.data).__name__
    'Tensor'

    The model runs on a virtual card in a process of its own, without its weights, once in each format: that says what
    each layer's weight takes, and what its calls take beside it. Here, each layer runs in each format, and the outputs
    are compared. An integer program then finds the formats that cost least in quality among those whose predicted peak
    stays within the budget; its best solutions are run on the virtual card, those that fit are measured with all layers
    together, and the best of them is put onto the model.

    Experts of a mixture that transformers keeps in one parameter count as one layer for each projection, such as
    ``model.layers.0.mlp.experts.down_proj``; transformers' plain loop over experts runs then.

    Args:
        model: with its values, on the CPU or on a card; in evaluation mode while it is measured.
        batches: what the model is called with: a tensor, a tuple of arguments or a dict of named ones, or a list of
            such batches. What is measured holds for inputs like these.
        budget: what torch may reserve on the card, the model included, as ``"4GiB"``; None is what is free there, less
            2 %.
        gpu: the card that it is for; None is the one that is there.
        formats: those to choose from: ``"int8"``, ``"int8-dynamic"``, ``"int4"``, ``"fp8"``, ``"fp8-weight-only"``;
            None for all that the card has but the last. A mapping from names of layers to formats is applied as it is,
            without a search.
        quality: a function of the model that returns a number, the larger the better, such as an accuracy; None is the
            KL divergence of the logits from the plain model's.
        use: given the model and a batch, what is done with them where memory is measured, such as ``model.generate``;
            None calls the model.
        device: where the model goes; None is where it is. A model on the CPU goes to a card layer by layer, so that
            the card never holds it in floating point. On the CPU int4 and fp8 are replaced by equivalents of the same
            values, which save nothing there.
        progress: called with a line for each thing that is done; None shows them on standard error, False does not.

    Returns:
        the changed model, the choice with its figures, and the undo.

    Raises:
        UsageError: an argument is none, the model has no values, the card has a format not, there is nothing to
            quantise, or the smallest choice does not fit. The model is as it was then, and after any other error.
        VramfitError: the model fails on the virtual card.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model={shown(model)} is no module", "Give a torch.nn.Module")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError("the model is on the device meta, and has no values", "Give it its values first")
    where = _device_of(model) if device is None else device_argument("device", device)
    split = AttachedProgram(model, None)
    try:
        split_experts(split)
        if isinstance(formats, Mapping):
            chosen = {name: parse_format(one) for name, one in formats.items()}
            return _changed(split, chosen, where, None)
        named = None if formats is None else _parsed(formats)
        live = LiveModel(model=model, device=where, budget=budget, gpu=gpu)
        choice = _found(live, _question(batches, use), named, quality, progress)
        return _changed(split, choice.formats, where, choice)
    except BaseException:
        split.undo()
        raise


def _found(
    live: LiveModel,
    question: ModelUse,
    named: list[WeightFormat] | None,
    quality: Any,
    progress: Any,
) -> FormatChoice:
    with step_progress(progress, "quantized") as told:
        return _chosen(live, question, named, quality, told)


def _parsed(formats: Any) -> list[WeightFormat]:
    if isinstance(formats, str) or not isinstance(formats, Collection):
        raise UsageError(
            f"formats={shown(formats)} is neither a list of formats nor formats of layers by name",
            'Give such as formats=["int8", "int4"]',
        )
    return [parse_format(one) for one in formats]


def _question(batches: Any, use: Any) -> ModelUse:
    if batches is None:
        raise UsageError("nothing says what the model is called with", "Give a batch, or a list of them")
    given = tuple(batches) if isinstance(batches, list) else (batches,)
    if not given:
        raise UsageError("batches=[] holds no batch", "Give a batch, or a list of them")
    return ModelUse(
        batches=given,
        use=None if use is None else call_argument("use", use),
    )


def _chosen(
    live: LiveModel,
    question: ModelUse,
    formats: list[WeightFormat] | None,
    quality: Any,
    told: Callable[[str], None],
) -> FormatChoice:
    if not quantisable(live.model):
        raise UsageError(
            "the model has no linear layers whose weights could be quantised",
            "It is for torch.nn.Linear in float32, float16 or bfloat16, not quantised yet",
        )
    memory = live.memory()
    if memory.gpu is None:
        raise UsageError("nothing says for which card formats are chosen", 'Give one, such as gpu="RTX 4090"')
    measure = None if quality is None else call_argument("quality", quality)
    refuse_by_weights(live.model, memory.gpu, memory.budget, formats)
    with bytes_elsewhere(live, question, told) as bytes_of:
        search = FormatSearch(
            live.model,
            question,
            bytes_of,
            card=memory.gpu,
            formats=formats,
            quality=measure,
            progress=told,
        )
        return search.choice(memory.budget)


def _changed(
    split: AttachedProgram,
    formats: Mapping[str, WeightFormat],
    where: torch.device,
    choice: FormatChoice | None,
) -> QuantizedModel:
    model: nn.Module = split.model
    home = _device_of(model)
    live = AttachedProgram(model, None)
    try:
        quantise_layers(live, formats, where)
        if where != home:
            _move(model, where, home)
    except BaseException:
        live.undo()
        raise
    return QuantizedModel(
        model=model,
        choice=choice,
        formats={name: one.value for name, one in formats.items() if one is not WeightFormat.NONE},
        _live=live,
        _split=split,
    )


def _move(model: nn.Module, where: torch.device, home: torch.device) -> None:
    """Bring a model to a device; if that fails, back to where it was."""
    try:
        model.to(where)
    except BaseException:
        model.to(home)
        raise


def _device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
