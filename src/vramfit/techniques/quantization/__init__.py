"""Weights of linear layers in eight or four bits, for inference: a format for each layer, by torchao."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.samples import Samples
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.techniques.quantization.byte_program import (
    FormatProgram,
    FormatTable,
    LayerBytes,
    LayerScores,
)
from vramfit.techniques.quantization.quality import (
    LogitsDivergence,
    measured,
    measured_alone,
)
from vramfit.techniques.quantization.quantised_layers import quantise_layers
from vramfit.techniques.quantization.weight_formats import (
    DEFAULT_FORMATS,
    WeightFormat,
    group_size,
    has_format,
    quantisable,
    shared_weights,
    why_not,
)
from vramfit.techniques.support.evaluation import in_evaluation
from vramfit.techniques.support.inference_only import refuse_training

_LEVELS = (0.25, 0.5, 0.75)
"""Between the smallest weights and those of today: how much is left of what could be saved."""

_MOST_RUNS = 600
"""Passes of a sample that are made to measure layers one by one; with more layers, formats are for all alike."""

_MILD = frozenset({WeightFormat.NONE, WeightFormat.INT8, WeightFormat.INT8_DYNAMIC})
"""Formats with which outputs stay within what is allowed for lower precision; four bits and e4m3's three bits of
mantissa change them by more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightQuantizationSetting(Setting):
    """Which layers have which format.

    Attributes:
        formats: of linear layers, by name; the others stay as they are.
        divergence: the mean KL divergence of a sample's logits from the plain program's, in nats; None where it was
            not measured.
    """

    formats: Mapping[str, WeightFormat] = field(default_factory=dict)
    divergence: float | None = None


class WeightQuantization(Technique[WeightQuantizationSetting]):
    """Weights of linear layers in int8, int4 or fp8 with scales, as torchao keeps them, for inference.

    A weight takes a half or a quarter of its bytes in bfloat16. What a product takes beside it depends on the format:
    int8 for weights alone widens the whole weight for each product, int8 with dynamic inputs copies it, and with up to
    16 rows widens it to float32; int4 in tiles reads it as it is, and pads rows to 1,024. So a format may raise the
    peak of a layer that it makes smaller, and the planner runs what it chooses.

    Which layers have which is found on a sample, on the CPU: each layer in each format by itself, by the divergence of
    the logits, then an integer program for several sizes of the weights. A model that is too large or too slow for that
    here gets one format for all layers, and the promise says that nothing was measured. `vramfit.quantized` does more:
    its program knows the peak of each call, and its best choices are measured together.

    Weights are packed one by one: the card never holds the model in floating point. Those of before wait on the host
    for the undo.
    """

    name: ClassVar[str] = "weight-quantization"
    summary: ClassVar[str] = "for inference: weights of linear layers in int8, int4 or fp8"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[AttachStage] = AttachStage.PLACEMENT
    setting_type = WeightQuantizationSetting
    follows: ClassVar[str | None] = "half-inference"
    least: ClassVar[Numerics] = Numerics.PRECISION
    excludes: ClassVar[dict[str, str]] = {
        "parameter-offload": "packed weights have no floating-point form that could be fetched",
        "parameter-sharing": "a shared weight cannot be packed by itself",
    }

    def options(self, profile: Profile) -> Iterable[WeightQuantizationSetting]:
        """Formats for several sizes of the weights, the mildest first; nothing for training, or without torchao."""
        if profile.trains or not has_torchao():
            return
        formats = [
            one
            for one in DEFAULT_FORMATS
            if profile.device_type == "cpu" or has_format(one, profile.capability)
        ]
        if profile.device_type == "cpu":  # where int4 and fp8 have no kernels here
            formats = [one for one in formats if one in (WeightFormat.INT8, WeightFormat.INT8_DYNAMIC)]
        table = _weights_table(profile.model, formats)
        if not table.layers:
            return
        found = None if profile.samples is None else _searched(profile.samples, table)
        seen: set[tuple[tuple[str, WeightFormat], ...]] = set()
        for setting in _alike(table, formats) if found is None else found:
            key = tuple(sorted(setting.formats.items(), key=lambda item: item[0]))
            if setting.formats and key not in seen:
                seen.add(key)
                yield setting

    def promise(self, setting: WeightQuantizationSetting) -> Promise:
        """What has fewer bits, and what that was seen to do."""
        note = f"weights have fewer bits ({_counted(setting.formats)})"
        if setting.divergence is None:
            note += "; what that does to the outputs was not measured"
        else:
            note += f"; logits of a sample diverged by {setting.divergence:.2g} nats"
        mild = all(one in _MILD for one in setting.formats.values())
        return Promise(Numerics.PRECISION if mild else Numerics.APPROXIMATE, note)

    def describe(self, setting: WeightQuantizationSetting) -> str:
        """How many layers have which format."""
        return _counted(setting.formats)

    def attach(self, live: AttachedProgram, setting: WeightQuantizationSetting) -> None:
        """Pack the weights, and place the model.

        Raises:
            UsageError: nothing is named, a layer is not there or cannot have its format, or the program trains.
        """
        if not any(one is not WeightFormat.NONE for one in setting.formats.values()):
            raise UsageError(
                "weight-quantization names no layers", "Find them with vramfit.quantized(model, batch)"
            )
        refuse_training(live, self.name)
        quantise_layers(live, setting.formats, live.device)


def has_torchao() -> bool:
    """Whether torchao is installed."""
    import importlib.util

    return importlib.util.find_spec("torchao") is not None


def _counted(formats: Mapping[str, WeightFormat]) -> str:
    counts = Counter(one.value for one in formats.values() if one is not WeightFormat.NONE)
    return ", ".join(f"{count} in {name}" for name, count in sorted(counts.items())) or "no layers"


def _weights_table(model: nn.Module, formats: Iterable[WeightFormat]) -> FormatTable:
    """Bytes of the weights alone, by the formats' definitions: what a product takes beside is found by running it."""
    shared = shared_weights(model)
    layers = []
    for name, layer in quantisable(model).items():
        if id(layer.weight) in shared:
            continue
        plain = layer.weight.nbytes
        sizes = {WeightFormat.NONE.value: plain}
        for one in formats:
            size = _bytes_in(layer, one)
            if not why_not(layer, one) and size < plain:
                sizes[one.value] = size
        if len(sizes) > 1:
            layers.append(LayerBytes(name=name, weight=sizes, calls=()))
    return FormatTable(layers=tuple(layers), outside=0)


def _bytes_in(layer: nn.Linear, one: WeightFormat) -> int:
    """What a weight takes with its scales, as torchao's tensors keep them."""
    rows, columns = layer.weight.shape
    if one is WeightFormat.INT4:  # padded to 1,024 columns and 8 rows; two numbers of 16 bits for a group
        wide, high = -(-columns // 1024) * 1024, -(-rows // 8) * 8
        return high * wide // 2 + high * wide // (group_size(columns) or wide) * 4
    if one is WeightFormat.FP8 and layer.weight.dtype is not torch.bfloat16:
        return rows * columns + 4  # one scale for all
    if one in (WeightFormat.INT8, WeightFormat.INT8_DYNAMIC):
        return rows * columns + 5 * rows  # a float32 and a zero point of eight bits for each row
    return rows * columns + 4 * rows


def _alike(table: FormatTable, formats: Iterable[WeightFormat]) -> list[WeightQuantizationSetting]:
    """One format for all layers that can have it, the largest first."""
    found = []
    for one in formats:
        chosen = {layer.name: one for layer in table.layers if one.value in layer.weight}
        found.append(WeightQuantizationSetting(formats=chosen))
    return sorted(found, key=lambda setting: -table.weight_bytes(setting.formats))


class _OutOfTime(Exception):
    """Measuring takes longer than may be spent on it."""


def _searched(samples: Samples, table: FormatTable) -> list[WeightQuantizationSetting] | None:
    """Settings for several sizes of the weights, by what layers cost on a sample; None where nothing was measured."""

    def search() -> list[WeightQuantizationSetting] | None:
        options = {
            layer.name: [WeightFormat(one) for one in layer.weight if one != WeightFormat.NONE.value]
            for layer in table.layers
        }
        sample = samples.small() if sum(map(len, options.values())) <= _MOST_RUNS else None
        if sample is None:
            return None
        host, end = torch.device("cpu"), time.monotonic() + sample.seconds

        def check_time(_text: str) -> None:
            if time.monotonic() > end:
                raise _OutOfTime

        with in_evaluation(sample.model):
            try:
                measure = LogitsDivergence(sample.model, [sample.batch])
            except UsageError:  # no logits: nothing that could be compared without a word of the user's
                return None
            try:
                scores = measured_alone(sample.model, options, measure, host, check_time)
            except _OutOfTime:
                return None
            return [
                replace(one, divergence=float(f"{measured(sample.model, one.formats, measure, host):.3g}"))
                for one in _by_sizes(table, scores)
            ]

    return samples.once("weight-quantization", search)


def _by_sizes(table: FormatTable, scores: LayerScores) -> list[WeightQuantizationSetting]:
    program = FormatProgram(table, scores)
    largest, least = table.weight_bytes({}), table.weight_bytes(program.smallest())
    limits = [round(least + part * (largest - least)) for part in (*reversed(_LEVELS), 0.0)]
    found = []
    for limit in limits:
        chosen = program.near_optimal(limit, 1)
        if chosen:
            found.append(WeightQuantizationSetting(formats=chosen[0]))
    return found
