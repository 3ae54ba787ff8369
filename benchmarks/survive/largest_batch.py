"""The largest batch: ours on 50 cases of a virtual card, and beside Accelerate's and Lightning's ways to find it.

    python benchmarks/survive/largest_batch.py [CASES]

Each case is a network with an optimizer on a card of some size. The prediction is a run of its own; then a live process
on a virtual card of that size is asked. What is right is told by plain loops on fresh cards: the size fits, the next
does not. Virtual cards compute nothing, so this says nothing of what a real card does otherwise than the virtual one.

Accelerate and Lightning are given a step on the CPU that runs out of memory above 5,000 entries.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import vramfit
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.planner.batch_prediction import BatchQuestion, largest_on
from vramfit.planner.devices.virtual_backend import VirtualBackend

TRUTH = 5000
BUDGETS = (1.25, 1.5, 2.0, 3.0, 4.0)
"""GiB of the cards, the context included."""


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(64, 256, num_layers=2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(256, 8000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.embed(ids)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.1), nn.Linear(4096, 1024)),
        lambda size: torch.rand(size, 1024),
    ),
    "convolutions": (Convolutions, lambda size: torch.rand(size, 3, 64, 64)),
    "LSTM": (Recurrent, lambda size: torch.rand(size, 32, 64)),
    "transformer, 64 tokens": (Texts, lambda size: torch.zeros(size, 64, dtype=torch.long)),
    "transformer, 200 tokens": (Texts, lambda size: torch.zeros(size, 200, dtype=torch.long)),
}
OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A network with its optimizer and the step of a loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def training(network: str, optimizer: str, device: str = "cpu") -> Training:
    model = NETWORKS[network][0]().to(device)
    return Training(model=model, optimizer=OPTIMIZERS[optimizer](model))


def plainly_fits(card: GpuSpec, network: str, optimizer: str, size: int) -> bool:
    """Whether some steps of a plain loop fit on a fresh card."""
    with vramfit.VirtualGPU(card):
        try:
            there = training(network, optimizer, "cuda")
            for _ in range(3):
                there.step(NETWORKS[network][1](size).to("cuda"))
        except torch.OutOfMemoryError:
            return False
    return True


def case(network: str, optimizer: str, gib: float) -> tuple[str, int, int]:
    """One case: a line, the trials, and how far from right the size is."""
    card = replace(find_gpu("RTX 4090"), total_bytes=round(gib * (1 << 30)))
    make = NETWORKS[network][1]

    def fresh() -> BatchQuestion:
        there = training(network, optimizer)
        return BatchQuestion(
            step=there.step,
            make_batch=(make,),
            models=(there.model,),
            optimizers=(there.optimizer,),
            start=1,
            most=1 << 20,
            steps=3,
        )

    limit = card.total_bytes - card.typical_context_bytes
    predicted = largest_on(VirtualBackend(card), fresh, limit).size
    with vramfit.VirtualGPU(card):
        live = training(network, optimizer, "cuda")
        before = torch.cuda.memory_allocated()
        found = vramfit.largest_batch(
            live.step, lambda size: make(size).to("cuda"),
            model=live.model, optimizer=live.optimizer, predicted=predicted, margin=0.0,
        )  # fmt: skip
        left = torch.cuda.memory_allocated() - before
    right = plainly_fits(card, network, optimizer, found.size) and not plainly_fits(
        card, network, optimizer, found.size + 1
    )
    line = f"{network:24} {optimizer:6} {gib:5.2f} GiB {predicted:9,} {found.size:9,} {len(found.trials):7}"
    return f"{line} {'yes' if right else 'NO':>6} {left:12,}", len(found.trials), int(not right)


def longer_inputs() -> None:
    """A second epoch with texts three times as long, in the middle of a training."""
    card = replace(find_gpu("RTX 4090"), total_bytes=3 << 30)
    with vramfit.VirtualGPU(card):
        live = training("transformer, 64 tokens", "AdamW", "cuda")
        short, long = (NETWORKS[f"transformer, {tokens} tokens"][1] for tokens in (64, 200))
        sizes = []
        for make in (short, long):
            found = vramfit.largest_batch(
                live.step, lambda size, make=make: make(size).to("cuda"), model=live.model, optimizer=live.optimizer,
                predict="never", margin=0.0,
            )  # fmt: skip
            sizes.append(found)
            for _ in range(2):
                live.step(make(found.size).to("cuda"))
        try:
            live.step(long(sizes[0].size).to("cuda"))
            again = "fits"
        except torch.OutOfMemoryError:
            again = "runs out of memory"
    print(
        f"first epoch, 64 tokens: {sizes[0].size} in {len(sizes[0].trials)} trials without a prediction; second epoch, "
        f"200 tokens: {sizes[1].size} in {len(sizes[1].trials)}; the first size {again} there",
        flush=True,
    )


# -- others --------------------------------------------------------------------------------------------------------


def short_step(size: int, seen: list[int]) -> torch.Tensor:
    if not seen or seen[-1] != size:
        seen.append(size)
    if size > TRUTH:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a simulated one)")
    return torch.zeros(())


def by_accelerate(start: int) -> tuple[int, list[int]]:
    from accelerate.utils import find_executable_batch_size

    seen: list[int] = []

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> int:
        short_step(batch_size, seen)
        return batch_size

    return train(), seen


def by_lightning(mode: str) -> tuple[int, list[int]]:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    seen: list[int] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.weight = 2, nn.Parameter(torch.ones(1))

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(20_000, 1), batch_size=self.batch_size)

        def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
            return (batch * self.weight).mean() + short_step(len(batch), seen)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        found = Tuner(trainer).scale_batch_size(module, mode=mode, steps_per_trial=1)
    return int(found or 0), seen


def by_vramfit(predicted: int | None) -> tuple[int, list[int]]:
    seen: list[int] = []
    found = vramfit.largest_batch(
        lambda size: short_step(size, seen), model=nn.Linear(1, 1), predicted=predicted, predict="never"
    )
    return found.size, [trial.size for trial in found.trials]


def others() -> None:
    print(f"\n{TRUTH:,} entries fit, {TRUTH + 1:,} do not")
    print(f"{'':46} {'found':>7} {'trials':>7} {'was run and fits':>17}")
    ways: dict[str, Callable[[], tuple[int, list[int]]]] = {
        "accelerate, from twice as many": lambda: by_accelerate(2 * TRUTH),
        "accelerate, from ten times as many": lambda: by_accelerate(10 * TRUTH),
        'Lightning, mode="power"': lambda: by_lightning("power"),
        'Lightning, mode="binsearch"': lambda: by_lightning("binsearch"),
        "vramfit, predicted": lambda: by_vramfit(TRUTH),
        "vramfit, a prediction that is 1 off": lambda: by_vramfit(TRUTH + 1),
        "vramfit, a prediction that is 5 % off": lambda: by_vramfit(round(0.95 * TRUTH)),
        "vramfit, without a prediction, no peaks known": lambda: by_vramfit(None),
    }
    for name, way in ways.items():
        found, seen = way()
        fits = "yes" if found in seen and found <= TRUTH else "NO"
        print(f"{name:46} {found:7,} {len(seen):7} {fits:>17}", flush=True)


def main(count: int = 50) -> None:
    warnings.simplefilter("ignore")
    for name in ("vramfit.largest_batch", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Virtual cards first: they need a process in which nothing has gone backward yet.
    longer_inputs()
    columns = f"{'card':>9} {'predicted':>9} {'found':>9} {'trials':>7} {'right':>6} {'bytes behind':>12}"
    print(f"\n{'network':24} {'':6} {columns}", flush=True)
    trials: Counter[int] = Counter()
    wrong = 0
    cases = list(itertools.product(NETWORKS, OPTIMIZERS, BUDGETS))
    for chosen in cases[:: max(1, len(cases) // count)][:count]:
        line, count_of_trials, error = case(*chosen)
        trials[count_of_trials] += 1
        wrong += error
        print(line, flush=True)
    print(f"{wrong} of {trials.total()} wrong; cases by trials: {dict(sorted(trials.items()))}")
    others()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
