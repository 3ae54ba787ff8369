"""Formats of weights by bytes: budgets that are kept, the program beside brute force, and beside two other ways.

    python benchmarks/language/quantization.py [--part budgets|eight|peers] [--budgets N] [--layers N]

A small language model (byte_model.py) that learns for a minute, in bfloat16. Bytes are those of a virtual RTX 4090,
exact; the divergence is that of the logits from the plain model's, on the CPU, in nats, where int4 and fp8 are
replaced by equivalents of the same values.

- budgets: random budgets between the smallest choice and the plain model. Each choice is run again on a card that has
  just the budget beside its context.
- eight: the eight linear layers of one block and its head. The program's sum of scores beside that of all choices, and
  the divergence that was measured for all layers together beside that of all choices in two formats or three.
- peers: at the bytes of each uniform format, and at random budgets beside a program with gradient scores, as NVIDIA's
  modelopt makes them (``_get_auto_quantize_score``: squared gradients of a layer's output times the squared change of
  it, summed), within the same bytes. Text that no score saw is measured too.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from benchmarks.language.byte_model import batch, config, trained
from benchmarks.language.virtual_formats import BytesHere
from rich.console import Console
from rich.table import Table

import vramfit
from vramfit.planner.quantization.format_choice import FormatSearch
from vramfit.planner.quantization.format_trial import ModelUse
from vramfit.techniques.quantization.byte_program import FormatProgram, FormatTable, LayerScores
from vramfit.techniques.quantization.quality import LogitsDivergence, measured, with_formats
from vramfit.techniques.quantization.weight_formats import (
    WeightFormat,
    packed_weight,
    quantisable,
    rounded_weight,
)
from vramfit.units import MIB

CARD = "RTX 4090"
HOST = torch.device("cpu")
FORMATS = (WeightFormat.INT8_DYNAMIC, WeightFormat.INT8, WeightFormat.FP8, WeightFormat.INT4)

console = Console(width=150)


def search_for(layers: int, steps: int, formats: tuple[WeightFormat, ...] = FORMATS) -> FormatSearch:
    """A trained model with everything that is measured of it once."""
    import transformers

    began = time.time()
    model = trained(layers, steps)
    question = ModelUse(batches=(batch(0),))

    def make() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            return transformers.LlamaForCausalLM(config(layers)).bfloat16().eval().requires_grad_(False)

    bytes_of = BytesHere(make, question, CARD)
    search = FormatSearch(
        model,
        question,
        bytes_of,
        card=bytes_of.spec,
        formats=formats,
    )
    _ = search.program
    console.print(f"{len(search.table.layers)} linear layers, ready after {time.time() - began:.0f} s")
    for name, size in search.whole_table.uniform.items():
        console.print(f"  all in {name}: {size / MIB:,.1f} MiB reserved")
    for words in search._settings[1]:
        console.print(f"  refused: {words}")
    return search


def kept_budgets(search: FormatSearch, count: int) -> None:
    """Random budgets."""
    here: Any = search._bytes
    least = search._least[1]
    plain = search.whole_table.uniform["none"]
    draws = random.Random(0)
    kept = fits = exact = 0
    used, errors, runs = [], [], []
    for _ in range(count):
        budget = draws.randint(least, plain - 1)
        choice = search.choice(budget)
        allocated, reserved = here.allocated(choice.formats)
        kept += reserved <= budget
        exact += reserved == choice.reserved_bytes
        fits += here.runs_within(choice.formats, budget)
        used.append(reserved / budget)
        errors.append(choice.predicted_bytes / allocated - 1)
        runs.append(choice.runs)
    table = Table(title=f"{count} random budgets from {least / MIB:,.1f} to {plain / MIB:,.1f} MiB")
    for head in (
        "kept",
        "ran on a card of just that",
        "figure exact",
        "of the budget used",
        "program's peak off by",
    ):
        table.add_column(head)
    table.add_row(
        f"{kept} of {count}",
        f"{fits} of {count}",
        f"{exact} of {count}",
        f"{np.median(used):.1%} in the median, {min(used):.1%} at least",
        f"{min(errors):+.2%} to {max(errors):+.2%}",
    )
    console.print(table)
    console.print(
        f"runs on the virtual card for a budget: {np.median(runs):.0f} in the median, {max(runs)} at most"
    )


# -- eight layers -----------------------------------------------------------------------------------------------------


def eight_layers(steps: int, limits: int, together: tuple[WeightFormat, ...]) -> None:
    """The program beside all choices."""
    search = search_for(1, steps, (WeightFormat.INT8_DYNAMIC, WeightFormat.INT8, WeightFormat.INT4))
    table, scores = search.table, search.scores
    draws = random.Random(1)
    least = table.peak(FormatProgram(table, scores).smallest())
    within = [draws.randint(least, table.peak({}) - 1) for _ in range(limits)]
    everything = list(all_choices(table))
    peaks = np.array([table.peak(chosen) for chosen in everything])
    sums = np.array([sum(scores.alone.get(item, 0.0) for item in chosen.items()) for chosen in everything])
    equal = 0
    for limit in within:
        chosen = search.program.additive(limit)
        best = sums[peaks <= limit].min()
        equal += chosen is not None and abs(search.program.cost(chosen) - best) <= 1e-12
    console.print(
        f"the program's sum equals the least of {len(everything):,} choices: {equal} of {limits} limits"
    )
    joint_brute_force(search, within, together)


def joint_brute_force(search: FormatSearch, within: list[int], several: tuple[WeightFormat, ...]) -> None:
    """All choices of some formats, measured with all layers together."""
    formats = ("none", *(one.value for one in several))
    table = search.table
    small = FormatTable(
        layers=tuple(
            type(one)(
                name=one.name,
                weight={name: one.weight[name] for name in formats if name in one.weight},
                calls=one.calls,
                packing=one.packing,
            )
            for one in table.layers
        ),
        outside=table.outside,
    )
    everything = list(all_choices(small))
    began = time.time()
    costs = np.array(list(joint_costs(search, everything)))
    peaks = np.array([small.peak(chosen) for chosen in everything])
    known = {key(chosen): cost for chosen, cost in zip(everything, costs, strict=True)}
    keys = [item for item in search.scores.alone if item[1].value in formats]
    rows = [list(search.scores.alone).index(item) for item in keys]
    scores = LayerScores(
        alone={item: search.scores.alone[item] for item in keys},
        pairs=np.asarray(search.scores.pairs)[np.ix_(rows, rows)],
    )
    program = FormatProgram(small, scores)
    same, ratios, sums = 0, [], []
    for limit in within:
        best = costs[peaks <= limit].min()
        found = min(known[key(chosen)] for chosen in program.near_optimal(limit, 6)[:4])
        added = known[key(program.additive(limit) or {})]
        same += found == best
        ratios.append(found / best if best else 1.0)
        sums.append(added / best if best else 1.0)
    console.print(
        f"measured together, {len(everything):,} choices of {', '.join(formats)} in {time.time() - began:.0f} s: "
        f"the best of four programs is the best of all at {same} of {len(within)} limits, "
        f"{np.median(ratios):.3f} times its divergence in the median, {max(ratios):.3f} at worst; "
        f"by sums of scores alone {np.median(sums):.3f} and {max(sums):.3f}"
    )


def all_choices(table: FormatTable) -> Iterator[dict[str, WeightFormat]]:
    """Every choice of one format for each layer."""
    names = [[WeightFormat(name) for name in layer.weight] for layer in table.layers]
    for picked in itertools.product(*names):
        yield {
            layer.name: one
            for layer, one in zip(table.layers, picked, strict=True)
            if one is not WeightFormat.NONE
        }


def joint_costs(search: FormatSearch, choices: list[dict[str, WeightFormat]]) -> Iterator[float]:
    """Divergences of choices, with weights that were packed once."""
    layers = quantisable(search._model)
    plain = {name: layer.weight for name, layer in layers.items()}
    packed = {
        (name, one): torch.nn.Parameter(rounded_weight(weight.detach(), one), requires_grad=False)
        if one is WeightFormat.INT4
        else packed_weight(weight.detach(), one)
        for name, weight in plain.items()
        for one in (WeightFormat.INT8, WeightFormat.INT4)
    }  # int8-dynamic is left out, whose products of integers are slow here
    try:
        for chosen in choices:
            for name, layer in layers.items():
                layer.weight = packed[name, chosen[name]] if name in chosen else plain[name]
            yield search.measure.cost(search._model)
    finally:
        for name, layer in layers.items():
            layer.weight = plain[name]


def key(chosen: Mapping[str, WeightFormat]) -> tuple[tuple[str, str], ...]:
    """A choice as what a dict can have for a key."""
    return tuple(sorted((name, one.value) for name, one in chosen.items()))


# -- peers ------------------------------------------------------------------------------------------------------------


def peers(search: FormatSearch, count: int) -> None:
    """Uniform formats and gradient scores, at equal bytes."""
    model: Any = search._model
    fresh = LogitsDivergence(model, [batch(number) for number in range(1, 3)])
    table = Table(title="at the bytes of a uniform format")
    for head in ("format", "MiB", "uniform", "vramfit", "unseen text: uniform", "vramfit"):
        table.add_column(head)
    for name, budget in search.whole_table.uniform.items():
        alike = {
            layer.name: WeightFormat(name) for layer in search.whole_table.layers if name in layer.weight
        }
        if name == "none" or budget < search._least[1]:
            continue
        choice = search.choice(budget)
        table.add_row(
            name,
            f"{budget / MIB:,.1f}",
            f"{search.cost(alike):.3g}",
            f"{choice.cost:.3g}",
            f"{measured(model, alike, fresh, HOST):.3g}",
            f"{measured(model, choice.formats, fresh, HOST):.3g}",
        )
    console.print(table)
    graded = FormatProgram(search.table, gradient_scores(search))
    plain, least = search.whole_table.uniform["none"], search._least[1]
    draws = random.Random(2)
    ratios, unseen = [], []
    for _ in range(count):
        choice = search.choice(draws.randint(least, plain - 1))
        other = graded_choice(search, graded, choice.budget)
        ratios.append((search.cost(other) + 1e-12) / (choice.cost + 1e-12))
        unseen.append(
            (measured(model, other, fresh, HOST) + 1e-12)
            / (measured(model, choice.formats, fresh, HOST) + 1e-12)
        )
    console.print(
        f"{count} budgets beside gradient scores within the same bytes: no worse at "
        f"{sum(one >= 1 for one in ratios)}; their divergence is {np.median(ratios):.2f} times ours in the median, "
        f"{min(ratios):.2f} to {max(ratios):.2f}; on unseen text {np.median(unseen):.2f}, {min(unseen):.2f} to "
        f"{max(unseen):.2f}"
    )


def graded_choice(search: FormatSearch, graded: FormatProgram, budget: int) -> Mapping[str, WeightFormat]:
    """The program with other scores, within the same budget of reserved bytes."""
    within = budget
    while True:
        chosen = graded.additive(within)
        if chosen is None:
            return search._least[0]
        [reserved] = search._bytes.reserved([chosen], budget, 1)
        if reserved <= budget:
            return chosen
        within -= max(512, min(reserved - budget, within // 8))


def gradient_scores(search: FormatSearch) -> LayerScores:
    """modelopt/torch/quantization/algorithms.py, ``AutoQuantizeGradientSearcher``: the loss is the language model's."""
    model: Any = search._model
    layers = quantisable(model)
    names = [layer.name for layer in search.table.layers]
    given = batch(0)
    outputs: dict[str, torch.Tensor] = {}
    inputs: dict[str, torch.Tensor] = {}
    with hooks(layers, names, inputs, outputs):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        loss = model(**given, labels=given["input_ids"]).loss
        gradients = torch.autograd.grad(loss, [outputs[name] for name in names])
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    alone = {}
    for layer, gradient in zip(search.table.layers, gradients, strict=True):
        for name in layer.weight:
            one = WeightFormat(name)
            if one is WeightFormat.NONE:
                continue
            with torch.no_grad(), with_formats(model, {layer.name: one}, HOST):
                changed = layers[layer.name](inputs[layer.name])
            change = changed.float() - outputs[layer.name].detach().float()
            alone[layer.name, one] = float((gradient.float() ** 2 * change**2).sum())
    return LayerScores(alone=alone)


@contextmanager
def hooks(
    layers: Mapping[str, torch.nn.Linear],
    names: list[str],
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
) -> Iterator[None]:
    """Layers' inputs and outputs inside the block."""

    def note(name: str) -> Any:
        def hook(_module: Any, args: Any, result: torch.Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach(), result

        return hook

    held = [layers[name].register_forward_hook(note(name)) for name in names]
    try:
        yield
    finally:
        for one in held:
            one.remove()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("budgets", "eight", "peers"), help="one part alone")
    parser.add_argument("--budgets", type=int, default=100)
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model; `eight` has one")
    parser.add_argument("--steps", type=int, default=30, help="steps that the model learns")
    parser.add_argument(
        "--all", action="store_true", help="measure 6,561 choices together, and not 256 (ten minutes)"
    )
    parser.add_argument("--formats", nargs="+", default=[one.value for one in FORMATS])
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with vramfit.VirtualGPU(CARD):  # before the first backward pass of this process
        pass
    if arguments.part in (None, "eight"):
        together = (WeightFormat.INT8, WeightFormat.INT4) if arguments.all else (WeightFormat.INT4,)
        eight_layers(arguments.steps, min(20, arguments.budgets), together)
    if arguments.part in (None, "budgets", "peers"):
        formats = tuple(WeightFormat(one) for one in arguments.formats)
        search = search_for(arguments.layers, arguments.steps, formats)
        if arguments.part != "peers":
            kept_budgets(search, arguments.budgets)
        if arguments.part != "budgets":
            peers(search, min(20, arguments.budgets))


if __name__ == "__main__":
    main()
