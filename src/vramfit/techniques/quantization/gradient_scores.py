"""Scores formats of layers by gradients, in one pass: a second opinion beside what each costs by itself.

The score of a layer's format is the sum of the squared gradients of its output times the squared change of that output,
as NVIDIA's modelopt scores them (modelopt/torch/quantization/algorithms.py, ``_get_auto_quantize_score``). It is a
diagonal Fisher estimate: cheap, and blind to how the changes of numbers go together. What it chooses is at times better
than what sums of single layers choose, and which of the two it is only a joint measurement tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from vramfit.techniques.quantization.byte_program import LayerScores
from vramfit.techniques.quantization.quality import logits_of, with_formats
from vramfit.techniques.quantization.weight_formats import WeightFormat, quantisable
from vramfit.workload import Batch, call_model


def gradient_scores(
    model: nn.Module,
    options: Mapping[str, Sequence[WeightFormat]],
    batches: Sequence[Batch],
    device: torch.device,
    room: int | None = None,
) -> LayerScores | None:
    """What formats cost by the gradients of a loss.

    The loss is the cross entropy of the next token where a batch has ``input_ids`` with as many logits, and that of
    classes drawn from the model's own distribution elsewhere, whose expected score is the Fisher information.

    Args:
        model: in evaluation mode; its parameters get no gradients.
        options: formats by layer.
        device: where layers with a format compute, as for `measured`.
        room: bytes that tensors saved for the backward pass may take; None is without a limit.

    Returns:
        None where the model cannot be differentiated, as with operations that have no backward, or without memory for
        what a backward pass needs.
    """
    alone = {(name, one): 0.0 for name, formats in options.items() for one in formats}
    alone = {key: cost for key, cost in alone.items() if key[1] is not WeightFormat.NONE}
    layers = quantisable(model)
    watched = {name: layers[name] for name in options}
    for batch in batches:
        try:
            with torch.enable_grad(), _outputs_noted(watched) as calls, _saved_within(room):
                loss = _loss(call_model(model, batch), batch)
                reached = [one for one in calls if one[2].requires_grad]
                gradients = torch.autograd.grad(loss, [one[2] for one in reached], allow_unused=True)
        except (
            _NoRoom,
            RuntimeError,
            NotImplementedError,
        ):  # torch's: no backward, written in place, no memory
            return None
        with torch.no_grad():
            _add(alone, model, options, watched, reached, gradients, device)
    return LayerScores(alone=alone)


class _NoRoom(Exception):
    """More would be saved for the backward pass than may be."""


def _saved_within(room: int | None) -> AbstractContextManager[Any]:
    """Ends a forward pass that saves more bytes than there is room for: the host's kernel would end the process."""
    if room is None:
        return nullcontext()
    seen: dict[int, torch.UntypedStorage] = {}
    held = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal held
        if not isinstance(tensor, nn.Parameter) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen[storage._cdata] = storage  # held, so that its address is nobody else's
                held += storage.nbytes()
                if held > room:
                    raise _NoRoom
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


_Call = tuple[str, torch.Tensor, torch.Tensor]
"""A layer's name, its input and its output."""


def _add(
    alone: dict[tuple[str, WeightFormat], float],
    model: nn.Module,
    options: Mapping[str, Sequence[WeightFormat]],
    layers: Mapping[str, nn.Linear],
    calls: Sequence[_Call],
    gradients: Sequence[torch.Tensor | None],
    device: torch.device,
) -> None:
    """Add the scores of one batch."""
    for name, formats in options.items():
        own = [(call, grad) for call, grad in zip(calls, gradients, strict=True) if call[0] == name]
        for one in formats:
            if one is WeightFormat.NONE or not own:
                continue
            with with_formats(model, {name: one}, device):
                for (_, given, plain), gradient in own:
                    if gradient is not None:
                        change = layers[name](given).float() - plain.float()
                        alone[name, one] += float((gradient.float().square() * change.square()).sum())


def _loss(outputs: Any, batch: Batch) -> torch.Tensor:
    """What the right class costs, on average over places; see `gradient_scores`."""
    named = batch if isinstance(batch, Mapping) else {}
    tokens, mask, logits = (
        named.get("input_ids"),
        named.get("attention_mask"),
        getattr(outputs, "logits", None),
    )
    if (
        isinstance(tokens, torch.Tensor)
        and isinstance(logits, torch.Tensor)
        and logits.shape[:-1] == tokens.shape
        and tokens.dim() == 2
        and tokens.shape[1] > 1
    ):
        right = tokens[:, 1:].clone()
        if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
            right[mask[:, 1:] == 0] = -100  # cross_entropy leaves these out
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), right.flatten())
    flat = logits_of(outputs, batch).float()
    draws = torch.Generator(flat.device).manual_seed(0)  # nobody else's numbers
    with torch.no_grad():
        drawn = torch.multinomial(flat.softmax(-1), 1, generator=draws).squeeze(-1)
    return nn.functional.cross_entropy(flat, drawn)


@contextmanager
def _outputs_noted(layers: Mapping[str, nn.Linear]) -> Iterator[list[_Call]]:
    """The calls of layers inside the block; their outputs have gradients, whatever their parameters have."""
    calls: list[_Call] = []

    def note(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, result: torch.Tensor) -> None:
            if not result.requires_grad:
                result.requires_grad_(True)
            given = args[0] if args else kwargs["input"]
            calls.append((name, given.detach(), result))

        return hook

    held = [layer.register_forward_hook(note(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for one in held:
            one.remove()
