"""What `vramfit.survive` costs where nothing fails: time and peak memory, as ratios to the plain loop.

    python benchmarks/survive/without_a_fault.py [--blocks 12] [--json FILE]

Three models with torch's optimizers, of which the first has three million parameters, and one of them with an optimizer
that is not torch's. Blocks of steps with and without `survive` alternate; each ratio is the median over pairs of
neighbouring blocks. On a card, time is the clock's and peaks are the card's. Without one, time is the process' own on
one CPU thread, which other processes do not disturb, and peaks are those of the virtual GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from tests.runtime.trainings_of_optimizers import MasterWeights
from torch import nn

import vramfit

STEPS = 8
"""Of a block."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training: ratios of `survive` to the plain loop.

    Attributes:
        parameters: of the model.
        seconds: of a step of the plain loop.
        time, peak: ratios; 1 is the plain loop's.
        copying: how many times as long the optimizer's step takes with its copies.
        equal: whether both have the same parameters after as many steps, bit for bit.
    """

    training: str
    device: str
    parameters: int
    seconds: float
    time: float
    peak: float
    copying: float
    equal: bool


class Attending(nn.Module):
    """A language model of three million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, 0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(256, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 128), (128, 256)):
        layers += [
            nn.Conv2d(before, after, 3, 1 if before == after else 2, 1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def _embedding() -> nn.Module:
    return nn.Sequential(
        nn.EmbeddingBag(200_000, 64, mode="sum"), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def _tokens(device: str) -> Any:
    return torch.randint(0, 1000, (8, 64), device=device), torch.randint(0, 1000, (8, 64), device=device)


def _images(device: str) -> Any:
    return torch.randn(16, 3, 32, 32, device=device), torch.randint(0, 10, (16,), device=device)


def _bags(device: str) -> Any:
    return torch.randint(0, 200_000, (64, 8), device=device), torch.randint(0, 10, (64,), device=device)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    return F.cross_entropy(out.flatten(0, -2), batch[1].flatten())


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], Callable[[str], Any]]] = {
    "transformer, AdamW": (Attending, lambda given: torch.optim.AdamW(given, lr=1e-3), _tokens),
    "batch norm, SGD with momentum": (
        _convolutional,
        lambda given: torch.optim.SGD(given, lr=1e-2, momentum=0.9),
        _images,
    ),
    "large embedding, Adam": (_embedding, lambda given: torch.optim.Adam(given, lr=1e-3), _bags),
    "transformer, an optimizer not torch's": (Attending, lambda given: MasterWeights(given, 1e-3), _tokens),
}


class Loop:
    """A training with or without `survive`."""

    def __init__(self, name: str, device: str, *, survives: bool) -> None:
        make, optimizer_of, batch_of = TRAININGS[name]
        torch.manual_seed(0)
        self.model = make().to(device)
        self.batch = batch_of(device)
        self.optimizer = optimizer_of(self.model.parameters())
        self.survivor = vramfit.survive(self.model, self.optimizer, loss=_loss) if survives else None
        self._on_card = device == "cuda"

    def block(self) -> float:
        """Seconds of a step, over a block."""
        self._wait()
        clock = time.perf_counter if self._on_card else time.process_time
        began = clock()
        for _ in range(STEPS):
            if self.survivor is not None:
                self.survivor.step(self.batch)
                continue
            self.optimizer.zero_grad()
            _loss(self.model, self.batch).backward()
            self.optimizer.step()
        self._wait()
        return (clock() - began) / STEPS

    def _wait(self) -> None:
        if self._on_card:
            torch.cuda.synchronize()


def peak_of(name: str, *, survives: bool) -> int:
    """The largest memory of three steps on the card, in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loop = Loop(name, "cuda", survives=survives)
    for _ in range(3):
        if loop.survivor is None:
            loop.optimizer.zero_grad()
            _loss(loop.model, loop.batch).backward()
            loop.optimizer.step()
        else:
            loop.survivor.step(loop.batch)
    return torch.cuda.max_memory_allocated() - before


def peaks_of(names: Iterable[str]) -> dict[str, float]:
    """The ratio of peaks of each training; before autograd has run on the CPU, after which it takes no virtual GPU."""
    ratios = {}
    for name in names:
        with (
            contextlib.nullcontext()
            if torch.cuda.is_available()
            else vramfit.VirtualGPU("RTX 4090", profile="none")
        ):
            peak_of(name, survives=False)  # with what libraries keep from their first call on
            plain, mine = (peak_of(name, survives=survives) for survives in (False, True))
        ratios[name] = mine / plain
    return ratios


def row_of(name: str, blocks: int, peak: float) -> Row:
    """Measure the times of one training."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain, mine = (Loop(name, device, survives=survives) for survives in (False, True))
    times = []
    for number in range(blocks + 1):
        torch.manual_seed(number)
        first = plain.block()
        torch.manual_seed(number)
        times.append((first, mine.block()))
    equal = all(map(torch.equal, plain.model.parameters(), mine.model.parameters()))
    seconds = statistics.median(first for first, _ in times[1:])
    ratio = statistics.median(second / first for first, second in times[1:])
    assert mine.survivor is not None
    copying = mine.survivor.copying_ratio
    parameters = sum(one.numel() for one in plain.model.parameters())
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU; peak of the virtual GPU"
    return Row(
        training=name,
        device=where,
        parameters=parameters,
        seconds=seconds,
        time=ratio,
        peak=peak,
        copying=copying,
        equal=equal,
    )


def main() -> int:
    """Measure all, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    rows = []
    peaks = peaks_of(TRAININGS)
    for name, peak in peaks.items():
        row = row_of(name, given.blocks, peak)
        rows.append(row)
        print(
            f"{row.training}: {row.parameters / 1e6:.1f} M parameters, {row.seconds * 1e3:.1f} ms a step; time x "
            f"{row.time:.3f}, peak x {row.peak:.4f}, optimizer's step with copies x {row.copying:.2f}, "
            f"{'equal' if row.equal else 'DIFFERENT'} ({row.device})",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.equal for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
