"""Measures what formats cost in quality: the divergence of a model's logits from the plain ones, or the user's measure.

NOTE [Products]: the second-order term of KL(p || q) in the change ``d`` of the logits is half the variance of ``d``
under ``p`` (Kullback's relation to Fisher information). So each format of a layer leaves a vector,
``sqrt(p / 2n) (d - mean d)`` over n places, whose squared norm is about its divergence, and inner products of two of
them say what both do together. Vectors of more than 65,536 numbers are hashed to as many with random signs, which keeps
inner products in expectation (Charikar, Chen, Farach-Colton, 2002).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.half_inference.island_search import Float32Products
from vramfit.techniques.quantization.byte_program import Formats, LayerScores
from vramfit.techniques.quantization.quantised_layers import quantise_layers
from vramfit.techniques.quantization.weight_formats import WeightFormat
from vramfit.workload import Batch, call_model

_HASHED = 1 << 16

Progress = Callable[[str], None]


class QualityMeasure(Protocol):
    """What a changed model costs in quality; 0 for the plain one, and more for a worse one."""

    def cost(self, model: nn.Module) -> float:
        """The cost of a model as it is now."""
        ...

    def change(self) -> torch.Tensor | None:
        """What the last measured model changed, as a vector; None where only the cost is known."""
        ...


class LogitsDivergence:
    """The mean KL divergence of each place's distribution from the plain model's, in nats.

    Args:
        model: the plain model, with its values.
        batches: what it is called with; places that an ``attention_mask`` leaves out do not count.

    Raises:
        UsageError: the outputs are no logits.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self._batches = batches
        with torch.no_grad():
            self._plain = [torch.log_softmax(one, dim=-1) for one in self._logits(model)]
        self._places = sum(one.shape[0] for one in self._plain)
        self._change: torch.Tensor | None = None
        if not self._places:
            raise UsageError(
                "the batches have no places whose logits could be compared", "Give some that are not empty"
            )
        if not all(bool(one.isfinite().all()) for one in self._plain):
            raise UsageError(
                "the plain model's logits are not finite, so that nothing can be compared with them",
                "Give batches for which they are",
            )

    def cost(self, model: nn.Module) -> float:
        """The divergence of a model's logits; infinite where they are not finite."""
        total, parts = 0.0, []
        with torch.no_grad():
            for plain, logits in zip(self._plain, self._logits(model), strict=True):
                if not bool(logits.isfinite().all()):
                    self._change = None
                    return math.inf
                changed = torch.log_softmax(logits, dim=-1)
                probability = plain.exp()
                total += float((probability * (plain - changed)).sum())
                moved = changed - plain
                centred = moved - (probability * moved).sum(dim=-1, keepdim=True)
                parts.append((centred * (probability / (2 * self._places)).sqrt()).flatten())
        self._change = _hashed(torch.cat(parts))
        return max(0.0, total / self._places)

    def change(self) -> torch.Tensor | None:
        """The vector of the last model; see NOTE [Products]."""
        return self._change

    def _logits(self, model: nn.Module) -> list[torch.Tensor]:
        """Logits ``[places, classes]`` of each batch, in float64: divergences are small differences."""
        found = []
        for batch in self._batches:
            # Products of 16 bits are slow on CPUs, and tensor cores add them up in float32.
            with Float32Products() if _on_cpu(model) else nullcontext():
                outputs = call_model(model, batch)
            found.append(logits_of(outputs, batch).double())
        return found


class GivenQuality:
    """A user's own measure of a model, the larger the better.

    Raises:
        UsageError: it gives no number for the plain model.
    """

    def __init__(self, model: nn.Module, quality: Callable[[nn.Module], Any]) -> None:
        self._quality = quality
        self._plain = self._number(model)
        if not math.isfinite(self._plain):
            raise UsageError(
                f"quality gives {self._plain} for the plain model", "Let it return a finite number"
            )

    def cost(self, model: nn.Module) -> float:
        """How much worse a model is than the plain one; negative where it is better."""
        found = self._number(model)
        return math.inf if math.isnan(found) else self._plain - found

    def change(self) -> torch.Tensor | None:
        """None: one number says nothing of several layers together."""
        return None

    def _number(self, model: nn.Module) -> float:
        with torch.no_grad():
            found = self._quality(model)
        try:
            return float(found)
        except (TypeError, ValueError):
            raise UsageError(
                f"quality returned a {type(found).__name__}",
                "Let it return a number, the larger the better, such as an accuracy",
            ) from None


def _on_cpu(model: nn.Module) -> bool:
    return all(tensor.device.type == "cpu" for tensor in model.parameters())


def logits_of(outputs: Any, batch: Batch) -> torch.Tensor:
    """The logits of a model's outputs as ``[places, classes]``, without those that an ``attention_mask`` leaves out.

    Raises:
        UsageError: the outputs hold no logits.
    """
    found = getattr(outputs, "logits", None)
    if found is None and isinstance(outputs, Mapping):
        found = outputs.get("logits")
    if found is None and isinstance(outputs, torch.Tensor):
        found = outputs
    if not isinstance(found, torch.Tensor) or not found.is_floating_point() or found.dim() < 2:
        raise UsageError(
            f"the model returns a {type(outputs).__name__} without logits, whose divergence could be measured",
            "Give quality=, a function of the model that returns a number, the larger the better",
        )
    flat = found.reshape(-1, found.shape[-1])
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor) and mask.numel() == flat.shape[0]:
        flat = flat[mask.reshape(-1).bool()]
    return flat


@contextmanager
def with_formats(model: nn.Module, formats: Formats, device: torch.device) -> Iterator[nn.Module]:
    """A model with formats inside the block, as it was after it."""
    live = AttachedProgram(model, None)
    try:
        quantise_layers(live, formats, device)
        yield model
    finally:
        live.undo()


def measured(model: nn.Module, formats: Formats, measure: QualityMeasure, device: torch.device) -> float:
    """What formats cost together."""
    with with_formats(model, formats, device):
        return measure.cost(model)


def measured_alone(
    model: nn.Module,
    options: Mapping[str, Sequence[WeightFormat]],
    measure: QualityMeasure,
    device: torch.device,
    progress: Progress = lambda _text: None,
) -> LayerScores:
    """What each format of each layer costs by itself, and the products of their changes where those are known.

    Args:
        options: formats by layer.
    """
    alone: dict[tuple[str, WeightFormat], float] = {}
    changes: list[torch.Tensor | None] = []
    for number, (name, formats) in enumerate(options.items()):
        progress(f"quality of layer {number + 1} of {len(options)}")
        for one in formats:
            if one is WeightFormat.NONE:
                continue
            cost = measured(model, {name: one}, measure, device)
            if not math.isfinite(cost):
                continue
            alone[name, one] = cost
            change = measure.change()
            changes.append(None if change is None else change.cpu())
    known = [one for one in changes if one is not None]
    if not known or len(known) < len(changes):
        return LayerScores(alone=alone)
    stacked = torch.stack(known).double()
    return LayerScores(alone=alone, pairs=(stacked @ stacked.T).numpy())


def _hashed(values: torch.Tensor) -> torch.Tensor:
    if values.numel() <= _HASHED:
        return values.float()
    draws = torch.Generator(device="cpu").manual_seed(
        0
    )  # the same for every change, and nobody else's numbers
    places = torch.randint(_HASHED, (values.numel(),), generator=draws).to(values.device)
    signs = torch.randint(2, (values.numel(),), generator=draws).to(values.device) * 2 - 1
    found = torch.zeros(_HASHED, dtype=torch.float64, device=values.device)
    return found.index_add_(0, places, values * signs).float()
