"""Inference mode beside no_grad: the same bytes and bits, and techniques work inside of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from tests.techniques.resnet import ResNet
from tests.techniques.toys import Residual, Unet, numbers
from torch import nn

from vramfit.techniques import AttachedProgram, Choice, Setting, Technique
from vramfit.techniques.batch_norm_folding import BatchNormFolding, find_foldable
from vramfit.techniques.half_inference import HalfInference, HalfInferenceSetting
from vramfit.techniques.tensor_sharing import TensorSharing, TensorSharingSetting
from vramfit.techniques.uint8_inputs import Uint8Inputs, Uint8InputsSetting
from vramfit.virtual.gpu import VirtualGPU

MODES: tuple[Callable[[], AbstractContextManager[object]], ...] = (torch.no_grad, torch.inference_mode)


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet((1, 1, 1, 1), 16, 10).eval()


@pytest.mark.parametrize(
    ("make", "shape"), [(small_resnet, (4, 3, 64, 64)), (Unet, (2, 1, 16, 16, 16))], ids=["resnet", "unet-3d"]
)
def test_bytes_are_those_of_no_grad(
    make: Callable[[], nn.Module], shape: tuple[int, ...], gpu: VirtualGPU
) -> None:
    peaks = []
    for mode in MODES:
        model, x = make().eval().cuda(), torch.zeros(shape, device="cuda")
        with mode():
            model(x)
            torch.cuda.reset_peak_memory_stats()
            model(x)
        peaks.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
    assert peaks[0] == peaks[1] > 0


def test_bits_are_those_of_no_grad() -> None:
    model, x = small_resnet(), numbers(2, 3, 32, 32)
    results = []
    for mode in MODES:
        with mode():
            results.append(model(x))
    assert torch.equal(*results)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        results[1].add_(1)


class Doubled(nn.Module):
    """Two equal networks and a head that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.unused = Residual(), Residual(), nn.Linear(64, 64)
        self.other.load_state_dict(self.one.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.other(x)


SHARED = {f"other.blocks.{block}.0.weight": f"one.blocks.{block}.0.weight" for block in range(3)}


@pytest.mark.parametrize(
    ("technique", "setting"),
    [
        (BatchNormFolding(), find_foldable(Doubled().eval(), numbers(2, 3, 8, 8))),
        (HalfInference(), HalfInferenceSetting(islands=("one.stem",))),
        (TensorSharing(), TensorSharingSetting(shared=SHARED, unused=("unused",))),
        (Uint8Inputs(), Uint8InputsSetting(modules=("one.stem", "other.stem"))),
    ],
    ids=lambda value: value.name if isinstance(value, Technique) else "",
)
def test_techniques_do_in_it_what_they_do_outside(technique: Technique[Setting], setting: Setting) -> None:
    model = Doubled().eval()
    AttachedProgram(model, None).attach([Choice(technique=technique, setting=setting)])
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    x = images if isinstance(technique, Uint8Inputs) else images.float() / 255
    with torch.no_grad():
        plain = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), plain)
