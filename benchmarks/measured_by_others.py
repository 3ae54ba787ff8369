"""Convolutional trainings that others measured on two cards: how far off is the prediction, and does its bar hold?

    python benchmarks/measured_by_others.py [--card 'RTX 3060'] [--only PATTERN ...] [--json FILE] [--rows]

Needs torchvision. ``measured_by_others.csv`` holds figures that the authors of xMem measured (their repository
Stone-ResearchLife/xMem, files ``plot/data/**/evaluation_result.json``, MIT licence, copyright 2025 Jiabo Shi), copied
figure by figure: the most memory in use according to NVML, less its first sample. Programs and settings are in
benchmarks/README.md.

NOTE [The first sample]
The sampling began while the model was being moved to the card, and what was there by then is missing from the figures.
With model and optimizer added, the 24 trainings of ConvNeXt-Tiny on the RTX 3060 are predicted within 0.3 % in the
median, including those with Adagrad, whose state is made with the optimizer; as they stand, all but one of them are
predicted too high, by what the parameters take, and those with Adagrad by twice that. Where the model is large, only a
part of it may have been there. A figure is therefore reported as it is, and with all that is allocated before the first
batch; a model of
more than 256 MiB counts as measured somewhere between the two.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vramfit.trace import reserved_bar
from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU

DATA = Path(__file__).with_suffix(".csv")
PIXELS = 86
PARTLY = 256 * MIB
"""What stands before the first batch counts in full up to here; of more, a part may have been measured."""

NETWORKS = {
    "ConvNeXtTiny": ("convnext_tiny", 1000),
    "ConvNeXtBase": ("convnext_base", 1000),
    "MobeNetV3Large": ("mobilenet_v3_large", 10),
    "MobeNetV3Small": ("mobilenet_v3_small", 10),
    "MnasNet": ("mnasnet1_0", 10),
    "MobileNetV2": ("mobilenet_v2", 1000),
    "RegNetX400MF": ("regnet_x_400mf", 1000),
    "RegNetY400MF": ("regnet_y_400mf", 1000),
    "VGG16": ("vgg16", 1000),
    "VGG19": ("vgg19", 1000),
    "ResNet101": ("resnet101", 1000),
    "ResNet152": ("resnet152", 1000),
}
"""What the table calls them: the function of torchvision, and the classes."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training.

    Attributes:
        run: its name in the data.
        card: the card.
        measured: bytes that NVML told, less its first sample.
        before: bytes reserved when model and optimizer were on the card.
        predicted: peak of reserved bytes.
        below, above: its error bar.
    """

    run: str
    card: str
    measured: int
    before: int
    predicted: int
    below: int
    above: int

    @property
    def whole(self) -> int:
        """The figure with what stood before."""
        return self.measured + self.before

    @property
    def error(self) -> float:
        """Prediction beside the figure, as a share of it; 0 between the two where a part may have been measured."""
        least = self.measured if self.before > PARTLY else self.whole
        nearest = min(max(self.predicted, least), self.whole)
        return self.predicted / nearest - 1

    @property
    def inside(self) -> bool:
        """Whether the figure lies within the bar."""
        least = self.measured if self.before > PARTLY else self.whole
        return self.predicted - self.below <= self.whole and least <= self.predicted + self.above

    @property
    def plainly_inside(self) -> bool:
        """The same of the figure as it stands."""
        return self.predicted - self.below <= self.measured <= self.predicted + self.above

    @property
    def width(self) -> float:
        """The bar, as a share of the prediction."""
        return (self.below + self.above) / self.predicted


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--card", action="append", help="of these cards (default: both)")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="runs by their names in the data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args(arguments)
    try:
        import torchvision.models as networks
    except ImportError:
        sys.exit("the networks are torchvision's, which is not installed\nTry: pip install torchvision")
    rows = []
    for line in chosen(options.card, options.only):
        rows.append(predicted(line, getattr(networks, NETWORKS[line["model"]][0])))
        if options.rows:
            print(told(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print("\n".join(table(rows)))
    return 0


def chosen(cards: Iterable[str] | None, patterns: Iterable[str] | None) -> Iterator[dict[str, str]]:
    """Lines of the data that are measurements: where the card was full, the figure is none."""
    with DATA.open(newline="") as file:
        for line in csv.DictReader(file):
            wanted = not patterns or any(fnmatch(line["run"], pattern) for pattern in patterns)
            if wanted and line["real_oom"] == "false" and (not cards or line["card"] in cards):
                yield line


def predicted(line: dict[str, str], network: Callable[..., nn.Module]) -> Row:
    """Run one training on the virtual GPU."""
    classes = NETWORKS[line["model"]][1]
    before: list[int] = []
    with VirtualGPU(line["card"]) as gpu:
        train(network(weights=None, num_classes=classes), line, before)
    run = gpu.run
    bar = reserved_bar(run.trace, 0, run.estimates)
    return Row(
        run=line["run"],
        card=line["card"],
        measured=int(line["measured_bytes"]),
        before=before[0],
        predicted=run.devices[0].peak_reserved_bytes,
        below=bar.below,
        above=bar.above,
    )


def train(model: nn.Module, line: dict[str, str], before: list[int]) -> None:
    """Their loop: `outputs` and the loss stay alive into the next iteration."""
    batch, when = int(line["batch"]), line["zero_grad_mode"]
    model = model.to("cuda")
    optimizer: Any = getattr(torch.optim, line["optimizer"])(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7)
    before.append(torch.cuda.memory_reserved())
    for _ in range(int(line["iterations"]) + 1):
        if when == "0":
            optimizer.zero_grad()
        images, labels = torch.empty(batch, 3, PIXELS, PIXELS), torch.zeros(batch, dtype=torch.long)
        images, labels = images.to("cuda"), labels.to("cuda")
        outputs = model(images)
        loss = nn.functional.cross_entropy(outputs, labels)
        if when in ("1", "null"):  # their default where it was not noted; mode 2 never zeroes
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.max(outputs, 1)
        scheduler.step()


def told(row: Row) -> str:
    """A row in words."""
    least, most = (row.predicted - row.below) // MIB, (row.predicted + row.above) // MIB
    return (
        f"{row.run:34} {row.card} measured {row.measured // MIB:6,}, with what stood before {row.whole // MIB:6,}; "
        f"predicted {row.predicted // MIB:6,} [{least:,}, {most:,}] {row.error:+.1%}"
        + ("" if row.inside else " outside")
    )


def table(rows: list[Row]) -> Iterator[str]:
    """Per card and in all: errors, bars, and how many lie within."""
    yield "| card | trainings | median error | worst | within the bar | as they stand | median width | widest |"
    yield "|---|---|---|---|---|---|---|---|"
    cards = list(dict.fromkeys(row.card for row in rows))
    for name, part in [(card, [row for row in rows if row.card == card]) for card in cards] + [("all", rows)]:
        if part:
            errors = [abs(row.error) for row in part]
            widths = [row.width for row in part]
            yield (
                f"| {name} | {len(part)} | {statistics.median(errors):.2%} | {max(errors):.1%} "
                f"| {sum(row.inside for row in part)} | {sum(row.plainly_inside for row in part)} "
                f"| {statistics.median(widths):.1%} | {max(widths):.1%} |"
            )


if __name__ == "__main__":
    sys.exit(main())
