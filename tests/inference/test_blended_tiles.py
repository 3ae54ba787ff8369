"""Tiles that overlap: MONAI's sliding windows, bit for bit, and brute force where MONAI has nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.inference.networks import CONV, Several, numbers, plain
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.inference.blending import weights
from vramfit.inference.tile_grid import make_layout
from vramfit.inference.tile_settings import Blend, TileSettings


def monai_result(x: torch.Tensor, roi: Any, batch: int, model: Any, overlap: Any, **how: Any) -> Any:
    inferers = pytest.importorskip("monai.inferers")
    with torch.no_grad():
        return inferers.sliding_window_inference(x, roi, batch, model, overlap, **how)


@pytest.mark.parametrize("mode", ["constant", "gaussian"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("lengths", "roi", "overlap"),
    [
        ((41,), (16,), (0.5,)),
        ((37, 50), (16, 12), (0.25, 0.6)),
        ((30, 25), (16, 32), (0.25, 0.25)),  # smaller than a tile along one axis
        ((9, 7), (16, 16), (0.25, 0.25)),  # and along both
        ((20, 17, 24), (8, 8, 10), (0.25, 0.0, 0.7)),
        ((8, 20, 8), (8, 9, 16), (0.3, 0.3, 0.3)),
    ],
)
def test_results_are_those_of_monai(
    mode: str, batch: int, lengths: tuple[int, ...], roi: tuple[int, ...], overlap: tuple[float, ...]
) -> None:
    x, model = numbers(2, 2, *lengths), plain(len(lengths))
    found = vramfit.tiled(model, x, tile=roi, overlap=overlap, blend=mode, tile_batch=batch)
    assert torch.equal(found, monai_result(x, roi, batch, model, overlap, mode=mode))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_are_added_up_as_by_monai(dtype: torch.dtype) -> None:
    x, model = numbers(1, 2, 40, 30, dtype=dtype), plain(2, dtype=dtype)
    found = vramfit.tiled(model, x, tile=16, overlap=0.5, blend="gaussian", sigma=0.2)
    expected = monai_result(x, (16, 16), 1, model, 0.5, mode="gaussian", sigma_scale=0.2)
    assert found.dtype is dtype and torch.equal(found, expected)


def test_a_small_unet_of_monai() -> None:
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    model = nets.UNet(3, 1, 8, channels=(4, 8, 8), strides=(2, 2), num_res_units=1).eval()
    x = numbers(1, 1, 40, 40, 40)
    for mode in ("constant", "gaussian"):
        found = vramfit.tiled(model, x, tile=16, overlap=0.25, blend=mode, tile_batch=4)
        assert torch.equal(found, monai_result(x, (16,) * 3, 4, model, 0.25, mode=mode))


@pytest.mark.parametrize("padding", ["zeros", "reflect", "replicate", "circular"])
def test_padding_of_a_small_input(padding: str) -> None:
    x, model = numbers(1, 2, 13, 40), plain(2)
    found = vramfit.tiled(model, x, tile=(16, 20), overlap=0.25, padding=padding)
    mode = "constant" if padding == "zeros" else padding
    assert torch.equal(found, monai_result(x, (16, 20), 1, model, 0.25, padding_mode=mode))
    with pytest.raises(UsageError, match="cannot be padded by reflect") as told:
        vramfit.tiled(model, x[:, :, :2], tile=(16, 20), overlap=0.25, padding="reflect")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("mode", ["constant", "gaussian"])
def test_outputs_of_other_scales(mode: str) -> None:
    x, model = numbers(1, 2, 40, 28), Several()
    found = vramfit.tiled(model, x, tile=16, overlap=0.25, blend=mode)
    for name in ("same", "larger"):
        alone = lambda tiles, name=name: model(tiles)[name]  # noqa: E731
        assert torch.equal(found[name], monai_result(x, (16, 16), 1, alone, 0.25, mode=mode))
    small = lambda tiles: model(tiles)["half"][:, None]  # noqa: E731  # MONAI wants channels
    assert torch.equal(found["half"][:, None], monai_result(x, (16, 16), 1, small, 0.25, mode=mode))


def test_places_between_steps_of_the_result_are_refused() -> None:
    with pytest.raises(UsageError, match="no whole place in a result of scale 1/2"):
        vramfit.tiled(nn.Conv2d(2, 1, 2, stride=2), numbers(2, 40, 40), tile=10, overlap=0.5)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("overlap", [0.2, 0.6, 0.9])
def test_raised_cosines_by_brute_force(axes: int, overlap: float) -> None:
    lengths, tile = (23, 19, 17)[:axes], 8
    x, model = numbers(1, 2, *lengths, dtype=torch.float64), plain(axes, dtype=torch.float64)
    found = vramfit.tiled(model, x, tile=tile, overlap=overlap, blend="cosine")
    line = torch.sin((torch.arange(tile) + 0.5) * torch.pi / tile) ** 2
    weight = line.double()
    for _ in range(axes - 1):
        weight = weight[..., None] * line
    weight = weight.clamp(min=1e-3)
    sums, counts = torch.zeros(1, 3, *lengths, dtype=torch.float64), torch.zeros(lengths, dtype=torch.float64)
    step = max(int(tile * (1 - overlap)), 1)
    starts = [sorted({min(at, n - tile) for at in range(0, n, step)}) for n in lengths]
    for place in itertools.product(*starts):
        part = (..., *(slice(at, at + tile) for at in place))
        with torch.no_grad():
            sums[part] += model(x[part]) * weight
        counts[part[1:]] += weight
    torch.testing.assert_close(found, sums / counts, rtol=1e-6, atol=1e-7)


def test_weights_are_as_their_names_say() -> None:
    assert weights((8, 8), Blend.CONSTANT, (0.1, 0.1), torch.float32) is None
    gaussian = weights((5, 7), Blend.GAUSSIAN, (0.125, 0.125), torch.float32)
    assert gaussian is not None and gaussian.argmax() == 5 * 7 // 2 and gaussian.min() == pytest.approx(1e-3)
    cosine = weights((64,), Blend.COSINE, (0.0,), torch.float64)
    assert cosine is not None and float(cosine.min()) == pytest.approx(1e-3)
    torch.testing.assert_close(
        cosine + cosine.roll(32), torch.ones(64, dtype=torch.float64), atol=2e-3, rtol=0
    )


def test_labels_are_those_of_the_whole_sum() -> None:
    torch.manual_seed(0)
    model, x = CONV[3](2, 20, 3, padding=1).eval(), numbers(1, 2, 24, 20, 22)
    full = vramfit.tiled(model, x, tile=8, overlap=0.25)
    labels = vramfit.tiled(model, x, tile=8, overlap=0.25, reduce="argmax")
    assert torch.equal(labels[:, 0].long(), full.argmax(1))


def test_what_waits_is_a_fraction_of_the_picture() -> None:
    from vramfit.inference.tiled_inference import make_job, rehearse

    x, model = numbers(1, 2, 56, 640), plain(2)
    job = make_job(model, x, TileSettings(tile=32, overlap=0.25))
    result = 3 * 56 * 640 * 4
    whole_rows = (
        (32 - 24) * 640 * 4 * 4
    )  # of sums and their weights, for the rows that two rows of tiles share
    assert rehearse(job, 10**6).host_bytes == whole_rows + 32 * 32 * 4 * 4 < result / 3


def test_a_grid_is_blended_by_a_blend_alone() -> None:
    found = make_layout((1, 64), 1, False, TileSettings(tile=16, blend=Blend.COSINE))
    assert [tile.start for tile in found.axes[0]] == [0, 12, 24, 36, 48]
