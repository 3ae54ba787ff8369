"""Thirty networks at five budgets each: is the chosen tile as quick as the best of brute force, and does it fit?

    python benchmarks/inference/tile_budgets.py [--only PATTERN ...] [--json FILE] [--card NAME]

Budgets are 1/2, 1/4, 1/8, 1/16 and 1/32 of what the whole image reserves, those left out that no tile keeps. Brute
force runs up to 60 tiles of all sizes, with 1 to 16 together. Two formulas stand beside it: chaiNNer's, which
multiplies the model's bytes by the image's (backend/src/nodes/impl/upscale/auto_split_tiles.py), and ComfyUI's, which
begins with tiles of 512 and halves them each time it runs out (comfy_extras/nodes_upscale_model.py); their
tiles are run with the same engine, in the same run. Bytes are what torch reserves on the virtual card, seconds are
simulated on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from local_networks import NETWORKS, LocalNetwork
from torch import nn

from vramfit.gpus import find_gpu
from vramfit.inference.tile_needs import probe_needs
from vramfit.inference.tile_settings import TileSettings
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.tile_search import TileCost, TileOption, TileSearch
from vramfit.planner.tile_trial import TileQuestion, TileTrial, options_of
from vramfit.units import MIB

PARTS = (2, 4, 8, 16, 32)
"""What the whole image's bytes are divided by."""

MOST = 60
"""Tiles that brute force runs."""

TOGETHER = 16
"""Most tiles that brute force runs together."""

ENDLESS = 1 << 50


@dataclass(frozen=True, kw_only=True)
class Row:
    """A network at a budget.

    Attributes:
        budget: bytes that torch may reserve.
        tile: chosen, with how many together.
        reserved: bytes with it.
        fits: whether it ran on a card of that size.
        seconds: for the whole image.
        best: seconds of the best of brute force.
        runs: tiles that the search ran.
        chainner: seconds with chaiNNer's tile; None where it runs out.
        comfyui: seconds with ComfyUI's tile; None where it runs out with the smallest too.
        comfyui_ooms: how often it ran out before.
    """

    network: str
    budget: int
    tile: str
    reserved: int
    fits: bool
    seconds: float
    best: float
    runs: int
    chainner: float | None
    comfyui: float | None
    comfyui_ooms: int


class Bench:
    """One network on a card, with all tiles that were run."""

    def __init__(self, network: LocalNetwork, card: str) -> None:
        self.network, self.device = network, VirtualBackend(find_gpu(card))
        model = network.make()
        self.model_bytes = sum(one.nbytes for one in model.parameters())
        needs = probe_needs(model, network.channels, len(network.shape), torch.device("cpu"))
        self.question = TileQuestion(
            shape=(network.channels, *network.shape),
            dtype=torch.float32,
            dims=len(network.shape),
            settings=TileSettings(halo=needs.halo, stride=needs.stride),
        )
        self.options = options_of(self.question)
        self.seen: dict[TileOption, TileCost] = {}

    def make(self) -> nn.Module:
        """A model of the network."""
        return self.network.make()

    def cost(self, option: TileOption) -> TileCost:
        """What a tile costs on a card without a limit."""
        if option not in self.seen:
            self.seen[option] = TileTrial(self.device, self.make, self.question, ENDLESS).cost(option)
        return self.seen[option]

    def within(self, budget: int) -> Callable[[TileOption], TileCost]:
        """What tiles cost within a budget."""

        def cost(option: TileOption) -> TileCost:
            found = self.cost(option)
            return TileCost(
                fits=found.total_bytes <= budget, total_bytes=found.total_bytes, seconds=found.seconds
            )

        return cost

    def brute(self) -> list[TileOption]:
        """Tiles of all sizes, evenly."""
        options = [option for option in self.options if option.batch <= TOGETHER]
        ordered = sorted(options, key=lambda option: option.elements)
        step = max(1.0, len(ordered) / MOST)
        return [ordered[int(number * step)] for number in range(min(MOST, len(ordered)))]

    def square(self, side: int) -> TileOption:
        """The tile of this side that the engine takes, one at a time."""
        halo = max(self.question.settings.halo)  # type: ignore[type-var]
        tile = tuple(min(size, side + 2 * halo) for size in self.network.shape)
        near = [option for option in self.options if option.batch == 1]
        return min(near, key=lambda option: sum(abs(a - b) for a, b in zip(option.tile, tile, strict=True)))


def chainner_side(bench: Bench, budget: int) -> int:
    """The side of chaiNNer's tile: the largest power of two whose square is told to fit 80 % of what is free."""
    shape = bench.network.shape
    area = 1
    for size in shape:
        area *= size
    needed = bench.model_bytes / (1024 * 52) * area * bench.network.channels * 4
    inside = area * 0.8 * (budget - bench.model_bytes) / needed
    return 1 << max(0, int(max(inside, 1) ** (1 / len(shape))).bit_length() - 1)


def rows_of(name: str, bench: Bench) -> Iterator[Row]:
    """The network at each budget."""
    whole = bench.cost(bench.options[0]).total_bytes
    brute = bench.brute()
    for part in PARTS:
        budget = whole // part
        cost = bench.within(budget)
        fitting = [cost(option).seconds for option in brute if cost(option).fits]
        search = TileSearch(bench.options, cost, budget)
        found = search.best()
        if found is None:
            print(f"{name}, {budget / MIB:,.0f} MiB: no tile; of brute force {len(fitting)} fit", flush=True)
            continue
        option, seen = found
        checked = TileTrial(bench.device, bench.make, bench.question, budget).cost(option)
        guess = cost(bench.square(chainner_side(bench, budget)))
        comfy, ooms, side = None, 0, 512
        while side >= 128 and comfy is None:
            tried = cost(bench.square(side))
            comfy, ooms, side = (tried.seconds, ooms, side) if tried.fits else (None, ooms + 1, side // 2)
        yield Row(
            network=name,
            budget=budget,
            tile=f"{' x '.join(map(str, option.tile))}, {option.batch} together",
            reserved=seen.total_bytes,
            fits=checked.fits,
            seconds=seen.seconds,
            best=min(fitting, default=seen.seconds),
            runs=len(search.seen),
            chainner=guess.seconds if guess.fits else None,
            comfyui=comfy,
            comfyui_ooms=ooms,
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the rows and their summary; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="networks by their names")
    parser.add_argument("--card", default="RTX 4090")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    print(
        "| network | budget | tile | reserved | seconds | best of brute force | runs | chaiNNer | ComfyUI |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, network in NETWORKS.items():
        if options.only and not any(fnmatch(name, pattern) for pattern in options.only):
            continue
        for row in rows_of(name, Bench(network, options.card)):
            rows.append(row)
            print(told(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    ratios = [row.seconds / row.best for row in rows]
    print()
    if not rows:
        return 0
    print(
        f"{len(rows)} rows; ran out: {sum(not row.fits for row in rows)}; seconds over the best: median "
        f"{statistics.median(ratios):.3f}, worst {max(ratios):.3f}, above 1.05: {sum(one > 1.05 for one in ratios)}; "
        f"chaiNNer ran out: {sum(row.chainner is None for row in rows)}, ComfyUI's smallest: "
        f"{sum(row.comfyui is None for row in rows)}"
    )
    return 0


def told(row: Row) -> str:
    """A row in Markdown."""
    chainner = "ran out" if row.chainner is None else f"{row.chainner / row.seconds:.2f} x"
    comfyui = "ran out" if row.comfyui is None else f"{row.comfyui / row.seconds:.2f} x"
    comfyui += f" after {row.comfyui_ooms} times out" if row.comfyui_ooms and row.comfyui else ""
    return (
        f"| {row.network} | {row.budget / MIB:,.0f} MiB | {row.tile} | {row.reserved / MIB:,.0f} MiB"
        f"{'' if row.fits else ' (ran out)'} | {row.seconds:.4f} | {row.seconds / row.best:.3f} x | {row.runs} "
        f"| {chainner} | {comfyui} |"
    )


if __name__ == "__main__":
    sys.exit(main())
