"""Sequences against their lengths for one card: how many a cache holds beside the weights, as a picture.

    python benchmarks/language/card.py [--card "RTX 4090"] [--write docs/language.svg]

The model has the shape of Llama 3 8B in bfloat16. Lengths of a batch are drawn between a sixteenth and the whole of the
length that is shown, seed 0, 32 tokens of them generated. Counts of `BlockCache` are those of `sequences_that_fit`; a
`DynamicCache` holds the padded batch, and one layer of it twice while it grows. What a step computes is not counted;
1 GiB is set aside for it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from llama3_cache import llama_8b, weights_on_card

from vramfit.inference.kv_cache.capacity import sequences_that_fit
from vramfit.report.drawing import Area, Drawing, Label, Line, Shape, to_svg
from vramfit.units import GIB
from vramfit.writing import write_text

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 30, 64, 52
_GRID, _TEXT = "#d9dde3", "#3b4350"
_ASIDE = GIB
_NEW, _MOST = 32, 1024
LENGTHS = tuple(2**power for power in range(8, 16))

Series = dict[str, tuple[str, list[tuple[int, int]]]]


def drawn(longest: int) -> list[int]:
    """Prompts of a batch."""
    draw = random.Random(0)
    return [max(1, draw.randint(longest // 16, longest) - _NEW) for _ in range(_MOST)]


def padded(prompts: Sequence[int], budget: int) -> int:
    """Sequences that a `DynamicCache` holds: all as long as the longest, and one layer twice."""
    config = llama_8b()
    layer = 2 * config.num_key_value_heads * config.head_dim * 2
    fits = 0
    for count in range(1, len(prompts) + 1):
        columns = max(prompts[:count]) + _NEW - 1
        if count * columns * layer * (config.num_hidden_layers + 1) > budget:
            break
        fits = count
    return fits


def series(budget: int) -> Series:
    """Counts by lengths for each cache, with its colour."""
    ways = {
        "BlockCache, int8, by blocks": ("#0b6bcb", {"reading": "blocks", "numbers": "int8"}),
        "BlockCache, by blocks": ("#2f9e44", {"reading": "blocks"}),
        "BlockCache, gathered": ("#e8890c", {}),
    }
    found: Series = {}
    for name, (colour, options) in ways.items():
        points = []
        for length in LENGTHS:
            fits = sequences_that_fit(
                llama_8b(), drawn(length), budget=budget, new_tokens=_NEW, dtype=torch.bfloat16, **options
            )
            points.append((length, fits.sequences))
        found[name] = colour, points
    found["DynamicCache, padded"] = (
        "#c92a2a",
        [(length, padded(drawn(length), budget)) for length in LENGTHS],
    )
    return found


def picture(title: str, lines: Series) -> str:
    """The drawing as SVG; both axes are logarithmic."""
    counts = [max(1, count) for _, points in lines.values() for _, count in points]
    low, high = math.log2(min(counts)) - 0.3, math.log2(max(counts)) + 0.3
    first, last = math.log2(LENGTHS[0]) - 0.2, math.log2(LENGTHS[-1]) + 0.2

    def at(length: float, count: float) -> tuple[float, float]:
        across = (math.log2(length) - first) / (last - first)
        up = (math.log2(max(1, count)) - low) / (high - low)
        return (
            round(_LEFT + (_WIDTH - _RIGHT - _LEFT) * across, 1),
            round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * up, 1),
        )

    shapes: list[Shape] = [Label(at=(_LEFT, 24), text=title, colour=_TEXT, size=14, bold=True)]
    for length in LENGTHS:
        x = at(length, 1)[0]
        shapes.append(Line(points=((x, _TOP), (x, _HEIGHT - _BOTTOM)), colour=_GRID))
        shapes.append(
            Label(at=(x, _HEIGHT - _BOTTOM + 18), text=f"{length:,}", colour=_TEXT, anchor="middle")
        )
    for power in range(math.ceil(low), math.floor(high) + 1):
        y = at(LENGTHS[0], 2**power)[1]
        shapes.append(Line(points=((_LEFT, y), (_WIDTH - _RIGHT, y)), colour=_GRID))
        shapes.append(Label(at=(_LEFT - 8, y + 4), text=f"{2**power:,}", colour=_TEXT, anchor="end"))
    middle = ((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12)
    shapes.append(Label(at=middle, text="tokens of the longest sequence", colour=_TEXT, anchor="middle"))
    for number, (name, (colour, points)) in enumerate(lines.items()):
        shapes.append(Line(points=[at(*point) for point in points], colour=colour, width=1.5))
        for length, count in points:
            x, y = at(length, count)
            told = f"{name}: {count:,} sequences of up to {length:,} tokens"
            disc = [
                (
                    round(x + 3.5 * math.cos(math.pi * turn / 6), 1),
                    round(y + 3.5 * math.sin(math.pi * turn / 6), 1),
                )
                for turn in range(12)
            ]
            shapes.append(Area(rings=[disc], colour=colour, title=told))
        shapes.append(Label(at=(_LEFT + 172 * number, 48), text=name, colour=colour))
    told = "How many sequences fit beside the weights, by the length of the longest, for four caches."
    return to_svg(Drawing(width=_WIDTH, height=_HEIGHT, title=title, description=told, shapes=shapes))


def main(arguments: list[str] | None = None) -> int:
    """Print the counts, and draw them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--card", default="RTX 4090")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the picture")
    options = parser.parse_args(arguments)
    weights, context, total = weights_on_card(options.card)
    budget = total - weights - context - _ASIDE
    lines = series(budget)
    print(f"{budget / GIB:.2f} GiB for the cache")
    for name, (_, points) in lines.items():
        print(f"{name}: " + ", ".join(f"{length:,}: {count:,}" for length, count in points))
    if options.write:
        title = f"Llama 3 8B on an {options.card}: sequences that fit beside the weights"
        write_text(options.write, picture(title, lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
