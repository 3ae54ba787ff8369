"""What folding, half precision with islands, bytes as inputs and shared tensors save, and what they do to outputs.

    python benchmarks/inference/precision_modes.py [--gpu NAME] [--json FILE]

Networks are those of transformers, with drawn weights. Bytes and seconds are the virtual card's, in the second pass of
a workload, before and after; seconds are simulated. Errors are those of the CPU, at small sizes: the norm of the
difference of the outputs as a part of their norm. Beside half precision with islands stands ``model.half()``.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

from vramfit.techniques import Choice, with_choices
from vramfit.techniques.batch_norm_folding import BatchNormFolding, find_foldable
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.half_inference import HalfInference, half_setting
from vramfit.techniques.half_inference.island_search import products_in_float32, relative_error
from vramfit.techniques.tensor_sharing import TensorSharing, find_shareable
from vramfit.techniques.uint8_inputs import Uint8Inputs, Uint8InputsSetting, find_readers
from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload, call_model

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOUD = 3e4
"""What one layer's weights are multiplied with, for activations above 65,504."""


@dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """One network before and after.

    Attributes:
        before, after: peak bytes of tensors, of reserved memory, and microseconds of a pass.
        inputs: bytes of the batch on the device, before and after.
        error: of the outputs on the CPU.
        note: what else was seen.
    """

    technique: str
    network: str
    before: tuple[int, int, float]
    after: tuple[int, int, float]
    inputs: tuple[int, int]
    error: float
    note: str = ""


class Output(nn.Module):
    """A model of transformers that returns one tensor."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self._call = inner, call

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The first tensor of the output."""
        found: torch.Tensor = self._call(self.inner, batch)
        return found


def images(count: int, side: int = 224) -> torch.Tensor:
    """Photographs as torchvision normalises them."""
    draw = torch.Generator().manual_seed(0)
    made = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=draw).float().div(255)
    return made.sub_(torch.tensor(MEAN).view(-1, 1, 1)).div_(torch.tensor(STD).view(-1, 1, 1))


def tokens(count: int, length: int) -> torch.Tensor:
    """The same tokens each time."""
    return torch.randint(1000, (count, length), generator=torch.Generator().manual_seed(0))


def resnet() -> nn.Module:
    """ResNet-50, with statistics as after some training."""
    return _with_statistics(
        Output(
            transformers.ResNetForImageClassification(transformers.ResNetConfig()),
            lambda model, batch: model(batch).logits,
        )
    )


def mobilenet() -> nn.Module:
    """MobileNetV2, with statistics as after some training."""
    return _with_statistics(
        Output(
            transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config()),
            lambda model, batch: model(batch).logits,
        )
    )


def vit() -> nn.Module:
    """ViT-B/16."""
    config = transformers.ViTConfig()
    return Output(transformers.ViTModel(config), lambda model, batch: model(batch).last_hidden_state)


def t5() -> nn.Module:
    """The encoder of T5-base, with one feed-forward whose activations float16 does not hold."""
    config = transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, d_kv=64)
    model = transformers.T5EncoderModel(config)
    with torch.no_grad():
        layer = model.encoder.block[5].layer[1].DenseReluDense
        layer.wi.weight.mul_(LOUD)
        layer.wo.weight.mul_(100 / LOUD)
    return Output(model, lambda model, batch: model(batch).last_hidden_state)


def untied_gpt2() -> nn.Module:
    """GPT-2 as it comes from a file that stores its embedding and its head apart."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.transformer.wte.weight)
    return Output(model, lambda model, batch: model(batch, use_cache=False).logits)


def clip_images() -> nn.Module:
    """CLIP ViT-B/32, of which only the images' half is used."""
    model = transformers.CLIPModel(transformers.CLIPConfig())
    return Output(model, lambda model, batch: model.vision_model(batch).pooler_output)


def _with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)
    return model


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model each time, in evaluation mode."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return make().eval()

    return made


def measured(workload: Workload, gpu: str) -> tuple[int, int, float]:
    """Peak bytes of tensors, of reserved memory, and microseconds of a pass on a virtual card."""
    with VirtualGPU(gpu) as card:
        state = workload.start("cuda")
        workload.run_step(state, workload.sizes)
        torch.cuda.reset_peak_memory_stats()
        began = card._machine.clock_us
        workload.run_step(state, workload.sizes)
        peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return *peak, card._machine.clock_us - began


@torch.no_grad()
def error_of(choice: Choice, model: nn.Module, batch: torch.Tensor) -> float:
    """The error of the outputs on the CPU; products in float16 are added up in float32, as on a card."""
    plain = call_model(model, batch)
    live = AttachedProgram(model, None)
    live.attach([choice])
    with products_in_float32(torch.float16):
        found = relative_error(call_model(model, live.prepared(batch)), plain)
    live.undo()
    return found


def row(
    network: str,
    make: Callable[[], nn.Module],
    batch: Callable[[int], torch.Tensor],
    count: int,
    find: Callable[[nn.Module, torch.Tensor], Choice],
    gpu: str,
    note: Callable[[nn.Module, Choice], str] = lambda _model, _choice: "",
) -> PrecisionRow:
    """A network before and after; what is chosen is found on two examples."""
    model, small = seeded(make)(), batch(2)
    choice = find(model, small)
    plain = Workload(
        model=seeded(make), batch=lambda batch_size: batch(batch_size), sizes={"batch_size": count}
    )
    whole = batch(count)
    as_bytes = isinstance(choice.setting, Uint8InputsSetting)
    return PrecisionRow(
        technique=choice.name,
        network=network,
        before=measured(plain, gpu),
        after=measured(with_choices(plain, (choice,)), gpu),
        inputs=(whole.nbytes, whole.numel() if as_bytes else whole.nbytes),
        error=error_of(choice, model, small),
        note=note(model, choice),
    )


def rows(gpu: str) -> Iterator[PrecisionRow]:
    """All of them."""

    def folding(model: nn.Module, batch: torch.Tensor) -> Choice:
        return Choice(technique=BatchNormFolding(), setting=find_foldable(model, batch))

    def half(model: nn.Module, batch: torch.Tensor) -> Choice:
        return Choice(technique=HalfInference(), setting=half_setting(model, batch, seconds=300))

    def uint8(model: nn.Module, batch: torch.Tensor) -> Choice:
        setting = Uint8InputsSetting(mean=MEAN, std=STD, modules=find_readers(model, batch))
        return Choice(technique=Uint8Inputs(), setting=setting)

    def sharing(model: nn.Module, batch: torch.Tensor) -> Choice:
        return Choice(technique=TensorSharing(), setting=find_shareable(model, batch))

    yield row("ResNet-50, 32 x 224^2", resnet, images, 32, folding, gpu, _words)
    yield row("MobileNetV2, 32 x 224^2", mobilenet, images, 32, folding, gpu, _words)
    yield row("ViT-B/16, 64 x 224^2", vit, images, 64, half, gpu, _islands)
    yield row(
        "T5-base encoder, 16 x 512", t5, lambda n: tokens(n, 512 if n > 2 else 64), 16, half, gpu, _islands
    )
    yield row("ResNet-50, 256 x 224^2", resnet, images, 256, uint8, gpu, _words)
    yield row("GPT-2, untied, 4 x 256", untied_gpt2, lambda n: tokens(n, 256), 4, sharing, gpu, _words)
    yield row("CLIP ViT-B/32, images", clip_images, images, 16, sharing, gpu, _words)


def _words(_model: nn.Module, choice: Choice) -> str:
    return choice.technique.describe(choice.setting)


def _islands(model: nn.Module, choice: Choice) -> str:
    islands = getattr(choice.setting, "islands", ())
    batch = (
        images(2)
        if isinstance(getattr(model.inner, "config", None), transformers.ViTConfig)
        else tokens(2, 64)
    )
    plain = copy.deepcopy(model).half()
    cast = batch.half() if batch.is_floating_point() else batch
    with torch.no_grad(), products_in_float32(torch.float16):
        error = relative_error(plain(cast), model(batch))
    kept = ", ".join(islands) if islands else "no islands"
    return f"{kept}; model.half(): {error:.1e}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="RTX 4090")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    table = Table(title=f"Precision and modes, {given.gpu} (virtual, times simulated)")
    for name in ("technique", "network", "allocated MiB", "reserved MiB", "batch MiB", "ms", "error", ""):
        table.add_column(name)
    found = []
    for one in rows(given.gpu):
        found.append(asdict(one))
        pairs = [
            f"{one.before[place] / unit:.1f} → {one.after[place] / unit:.1f}"
            for place, unit in ((0, MIB), (1, MIB), (2, 1e3))
        ]
        batch = " → ".join(f"{size / MIB:.1f}" for size in dict.fromkeys(one.inputs))
        table.add_row(one.technique, one.network, *pairs[:2], batch, pairs[2], f"{one.error:.1e}", one.note)
    Console().print(table)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
