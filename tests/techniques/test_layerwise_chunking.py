"""Layers over chunks of rows as a technique: settings, results, memory on the virtual card, the undo."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.techniques.peaks import peak_bytes
from tests.techniques.toys import numbers, sgd
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.layerwise import ChunkStore
from vramfit.techniques import AttachedProgram, Numerics, Profile, setting_from_plain, setting_to_plain
from vramfit.techniques.layerwise_chunking import LayerwiseChunking, LayerwiseChunkingSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(inplace=True))
        for _ in range(4)
    ]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 1, 1)).eval()


WORKLOAD = Workload(
    model=net, batch=lambda image_size: torch.zeros(1, 3, image_size, image_size), sizes={"image_size": 256}
)


def profile(model: nn.Module, **given: object) -> Profile:
    known = {"optimizer": None, "sizes": {}, "trains": False, "peak_allocated_bytes": 1 << 30}
    return Profile(model=model, **{**known, **given})  # type: ignore[arg-type]


def test_results_and_undo() -> None:
    model, image = net(), numbers(2, 3, 20, 16)
    with torch.no_grad():
        expected = model(image)
    keys, kind = list(model.state_dict()), type(model)
    live = AttachedProgram(model, None)
    LayerwiseChunking().attach(live, LayerwiseChunkingSetting(rows=3))
    for found in (model(image), copy.deepcopy(model)(image)):
        assert not found.requires_grad
        torch.testing.assert_close(found, expected)
    assert list(model.state_dict()) == keys
    live.undo()
    assert type(model) is kind and model(image).requires_grad


def test_it_takes_less_on_the_card(gpu: VirtualGPU) -> None:
    plain = peak_bytes(WORKLOAD, steps=1)
    technique = LayerwiseChunking()
    small = technique.apply(WORKLOAD, LayerwiseChunkingSetting(chunk_bytes=128 << 10))
    hosted = technique.apply(WORKLOAD, LayerwiseChunkingSetting(chunk_bytes=128 << 10, store=ChunkStore.HOST))
    layer = 8 * 256 * 256 * 4
    assert peak_bytes(hosted, steps=1) < peak_bytes(small, steps=1) < 2 * layer < plain - layer


def test_options_are_for_inference_with_convolutions() -> None:
    technique = LayerwiseChunking()
    found = list(technique.options(profile(net())))
    assert [one.chunk_bytes >> 20 for one in found] == [64, 16, 4, 4]
    assert [one.store for one in found] == [ChunkStore.DEVICE] * 3 + [ChunkStore.HOST]
    assert [
        one.chunk_bytes >> 20 for one in technique.options(profile(net(), peak_allocated_bytes=1 << 20))
    ] == [
        4,
        4,
    ]
    assert not list(technique.options(profile(net(), trains=True)))
    assert not list(technique.options(profile(nn.Linear(2, 2))))
    assert technique.promise(found[0]).numerics is Numerics.ROUNDING


def test_settings_go_through_a_plan_file() -> None:
    technique = LayerwiseChunking()
    setting = LayerwiseChunkingSetting(rows=8, store=ChunkStore.HOST)
    plain = setting_to_plain(setting)
    assert plain == {"rows": 8, "store": "host"}
    assert setting_from_plain(technique, plain) == setting
    assert technique.describe(setting) == "rows 8, store host"


def test_programs_that_train_and_sizes_that_are_none() -> None:
    model = net()
    live = AttachedProgram(model, sgd(model.parameters()))
    with pytest.raises(UsageError, match="computes no gradients"):
        LayerwiseChunking().attach(live, LayerwiseChunkingSetting())
    with pytest.raises(UsageError, match="leaves no memory"):
        LayerwiseChunking().attach(AttachedProgram(model, None), LayerwiseChunkingSetting(chunk_bytes=0))
