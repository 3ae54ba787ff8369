"""Convolutional trainings that the authors of xMem measured, and the same trainings on a virtual GPU.

NOTE [The first sample]
The sampling began while the model was being moved to the card, and what was there by then is missing from the figures.
With model and optimizer added, the 24 trainings of ConvNeXt-Tiny on the RTX 3060 are predicted within 0.4 % in the
median, including those with Adagrad, whose state is made with the optimizer; as they stand, all of them are
predicted too high, by what the parameters take, and those with Adagrad by twice that. Where the model is large, only a
part of it may have been there. A figure is therefore reported as it is, and with all that is allocated before the first
batch; a model of more than 256 MiB counts as measured somewhere between the two.

NOTE [Where it was not noted]
When gradients were zeroed is not noted for 65 of the 81 trainings on the RTX 3060. One version of their code then
zeroes before the batch (mode 0), an older one before the backward pass (mode 1). Where the two differ, mode 0 agrees:
VGG16 at 543 comes out right in place of 3.7 % too high, ConvNeXt-Tiny at 425 is 0.1 % off in place of 4.1 %.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comparing import results
from comparing.results import ROOT, Results
from vramfit.cudnn.found_library import find_cudnn
from vramfit.errors import VramfitError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.launch.tasks import Task, in_order, run_all
from vramfit.trace import reserved_bar
from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU

DATA = Path(__file__).parents[1] / "measured_by_others.csv"
KEPT = ROOT / "build" / "measured-by-others"
PIXELS = 86
PARTLY = 256 * MIB
"""What stands before the first batch counts in full up to here; of more, a part may have been measured."""

TOTALS = {"RTX 3060": 12_622_168_064, "RTX 4060": 8_318_222_336}
"""Bytes of these very cards, as NVML told them to the authors of xMem: more than the catalogue has for the name."""

UNBOUNDED = 1 << 40
"""Bytes of a card on which nothing runs out of memory."""

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
class MeasuredTraining:
    """One training, measured and predicted. Sizes are in bytes.

    Attributes:
        run: its name in the data.
        card: the card.
        measured: what NVML told, less its first sample.
        before: reserved when model and optimizer were on the card.
        predicted: peak of reserved bytes; on a card without a limit where the training ran out of memory.
        below, above: its error bar.
        allocated: peak of allocated bytes.
        ran_out: the virtual card had no room for what the true one served.
    """

    run: str
    card: str
    measured: int
    before: int
    predicted: int
    below: int
    above: int
    allocated: int = 0
    ran_out: bool = False

    @property
    def whole(self) -> int:
        """The figure with what stood before."""
        return self.measured + self.before

    @property
    def least(self) -> int:
        """The least that the figure may stand for: all of it, or without a part of a large model."""
        return self.measured if self.before > PARTLY else self.whole

    @property
    def error(self) -> float:
        """Prediction beside the figure, as a share of it; 0 between the two where a part may have been measured."""
        nearest = min(max(self.predicted, self.least), self.whole)
        return self.predicted / nearest - 1

    @property
    def inside(self) -> bool:
        """Whether the figure lies within the bar; a training that ran out of memory is outside."""
        low, high = self.predicted - self.below, self.predicted + self.above
        return not self.ran_out and low <= self.whole and self.least <= high

    @property
    def plainly_inside(self) -> bool:
        """The same of the figure as it stands."""
        low, high = self.predicted - self.below, self.predicted + self.above
        return not self.ran_out and low <= self.measured <= high

    @property
    def width(self) -> float:
        """The bar, as a share of the prediction."""
        return (self.below + self.above) / self.predicted


def chosen(cards: Iterable[str] | None, patterns: Iterable[str] | None) -> Iterator[dict[str, str]]:
    """Lines of the data that are measurements: where the card was full, the figure is none."""
    with DATA.open(newline="") as file:
        for line in csv.DictReader(file):
            wanted = not patterns or any(fnmatch(line["run"], pattern) for pattern in patterns)
            if wanted and line["real_oom"] == "false" and (not cards or line["card"] in cards):
                yield line


def card_of(line: dict[str, str]) -> GpuSpec:
    """The card of a line, with the memory that was seen on it."""
    return replace(find_gpu(line["card"]), total_bytes=TOTALS[line["card"]])


def predicted(line: dict[str, str], kept: Results, cudnn: str = "none") -> MeasuredTraining:
    """Run one training on the virtual GPU, unless that was done before.

    Args:
        line: of the data.
        kept: finished results.
        cudnn: the cuDNN to be asked, see `VirtualGPU`.

    Raises:
        UsageError: there is no such cuDNN.
    """
    asked = "rules" if cudnn == "none" else f"cudnn-{find_cudnn(cudnn).version}"
    settings = f"{sorted(line.items())} {asked} {results.versions('torchvision')}"
    key = results.digest(results.of_vramfit(), Path(__file__), settings)
    name = f"training-{line['run']}-{asked}"
    found = kept.get(name, key)
    if found is None:
        found = asdict(_predicted(line, cudnn))
        kept.put(name, key, found)
    return MeasuredTraining(**found)


def work_out(
    lines: Sequence[dict[str, str]], kept: Results, cudnn: str = "none", jobs: int = 1
) -> Iterator[MeasuredTraining]:
    """Every training, in order; several at a time, in processes of their own.

    Raises:
        VramfitError: one failed.
    """
    tasks = [Task(key=line["run"], function=predicted, arguments=(line, kept, cudnn)) for line in lines]
    results = run_all(tasks, at_once=jobs, imports=("vramfit.virtual.gpu", "torchvision.models"))
    for result in in_order(tasks, results):
        if not result.has_value:
            raise result.error or VramfitError(f"{result.key}: {result.failure}", "Run it alone: --only NAME")
        yield result.value


def _predicted(line: dict[str, str], cudnn: str) -> MeasuredTraining:
    import torchvision.models as networks

    function, classes = NETWORKS[line["model"]]
    spec = card_of(line)
    gpu, before, ran_out = _run(getattr(networks, function), classes, line, spec, cudnn)
    if ran_out:
        spec = replace(spec, total_bytes=UNBOUNDED)
        gpu, before, _ = _run(getattr(networks, function), classes, line, spec, cudnn)
    run = gpu.run
    bar = reserved_bar(run.trace, 0, run.estimates)
    return MeasuredTraining(
        run=line["run"],
        card=line["card"],
        measured=int(line["measured_bytes"]),
        before=before,
        predicted=run.devices[0].peak_reserved_bytes,
        below=bar.below,
        above=bar.above,
        allocated=run.devices[0].peak_allocated_bytes,
        ran_out=ran_out,
    )


def _run(
    network: Callable[..., nn.Module], classes: int, line: dict[str, str], spec: GpuSpec, cudnn: str
) -> tuple[VirtualGPU, int, bool]:
    """One training: the card after it, bytes reserved before the first batch, and whether it ran out of memory."""
    before: list[int] = []
    gpu = VirtualGPU(spec, cudnn=cudnn)
    try:
        with gpu:
            train(network(weights=None, num_classes=classes), line, before)
    except torch.OutOfMemoryError:
        return gpu, before[0] if before else 0, True
    return gpu, before[0], False


def train(model: nn.Module, line: dict[str, str], before: list[int]) -> None:
    """Their loop: `outputs` and the loss stay alive into the next iteration."""
    batch, when = int(line["batch"]), line["zero_grad_mode"]
    model = model.to("cuda")
    optimizer: Any = getattr(torch.optim, line["optimizer"])(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7)
    before.append(torch.cuda.memory_reserved())
    for _ in range(int(line["iterations"]) + 1):
        if when in ("0", "null"):  # see NOTE [Where it was not noted]
            optimizer.zero_grad()
        images, labels = torch.empty(batch, 3, PIXELS, PIXELS), torch.zeros(batch, dtype=torch.long)
        images, labels = images.to("cuda"), labels.to("cuda")
        outputs = model(images)
        loss = nn.functional.cross_entropy(outputs, labels)
        if when == "1":  # mode 2 never zeroes
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.max(outputs, 1)
        scheduler.step()
