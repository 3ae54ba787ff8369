"""A training from a data set in mapped files, its batches brought to the card while steps are computed.

    python examples/survive/feeding_a_card.py [--samples 2000] [--epochs 2] [--folder DIR]

The data set is written once, sample by sample, and read at random: workers of a DataLoader would share its pages. On a
machine without a card the batches are read ahead on the CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import vramfit
from vramfit.units import format_bytes


def samples(count: int) -> Iterator[dict[str, object]]:
    """Pictures as bytes, and their labels, as another program would read them from its files."""
    for number in range(count):
        label = number % 10
        yield {"image": torch.full((3, 32, 32), 20 * label, dtype=torch.uint8), "label": label}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--folder", default=None, help="where the data set is written; a temporary one otherwise"
    )
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).to(
        device
    )
    model(torch.zeros(1, 3, 32, 32, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = vramfit.MappedDataset.write_samples(Path(folder) / "pictures", samples(options.samples))
        # Lists of numbers give whole batches, gathered at once; with num_workers= the workers get the path alone.
        loader = DataLoader(
            data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 50, drop_last=True)
        )
        batches = vramfit.prefetch(loader, device)
        for epoch in range(options.epochs):
            for batch in batches:
                images = batch["image"].float() / 255  # a quarter of the bytes went over the link
                loss = functional.cross_entropy(model(images), batch["label"])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            report = batches.report
            print(
                f"epoch {epoch + 1}: {report.batches} batches, {report.depth} at once, "
                f"{format_bytes(report.peak_bytes)} at most, {format_bytes(report.pinned_bytes)} pinned"
            )
        cached = data.cached()
        if cached is not None:
            print(f"{cached.hit_rate:.0%} of {cached.pages} pages are in the page cache")


if __name__ == "__main__":
    main()
