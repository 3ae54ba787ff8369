"""Tiles with halos: the whole run's result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.inference.networks import HourGlass, Several, numbers, plain, whole
from torch import nn

import vramfit
from vramfit.errors import UsageError


@pytest.mark.parametrize("tile_batch", [1, 3])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_the_result_is_the_whole_runs(axes: int, batched: bool, tile_batch: int) -> None:
    lengths = (53, 31, 20)[:axes]
    x = numbers(*([2] if batched else []), 2, *lengths)
    model = plain(axes)
    found = vramfit.tiled(model, x, tile=16, halo=3, tile_batch=tile_batch)
    torch.testing.assert_close(found, whole(model, x), rtol=1e-5, atol=1e-6)
    assert not found.requires_grad and not found.is_inference()


def test_too_small_a_halo_is_seen() -> None:
    """So the comparison can fail."""
    x, model = numbers(2, 40, 40), plain(2)
    assert not torch.allclose(vramfit.tiled(model, x, tile=16, halo=2), whole(model, x), atol=1e-3)


@pytest.mark.parametrize("lengths", [(64, 64), (100, 36), (48, 132), (4, 200)])
def test_strides_keep_their_places(lengths: tuple[int, int]) -> None:
    x, model = numbers(1, 2, *lengths), HourGlass()
    found = vramfit.tiled(model, x, tile=63, halo=22)  # tile and halo become multiples of the stride
    torch.testing.assert_close(found, whole(model, x), rtol=1e-5, atol=1e-6)


def test_tiles_at_other_places_than_the_strides_are_seen() -> None:
    x, model = numbers(1, 2, 100, 100), HourGlass()
    found = vramfit.tiled(model, x, tile=64, halo=23, stride=1)
    assert found.shape == x.shape and not torch.allclose(found, whole(model, x), atol=1e-3)


@pytest.mark.parametrize("length", range(61, 70))
@pytest.mark.parametrize("ceil", [False, True])
def test_odd_lengths_of_a_smaller_result(length: int, ceil: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3, stride=2, padding=1),
        nn.MaxPool1d(2, ceil_mode=ceil),
        nn.Conv1d(3, 2, 3, padding=1),
    ).eval()
    x = numbers(2, 2, length)
    found = vramfit.tiled(model, x, tile=32, halo=10)
    torch.testing.assert_close(found, whole(model, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", range(29, 37))
@pytest.mark.parametrize("halo", [None, 8])
def test_lengths_that_a_model_rounds(length: int, halo: int | None) -> None:
    """Down by strides and up again without a crop: the result's length is another than the input's times the scale."""
    torch.manual_seed(0)
    middle = nn.Conv2d(2, 2, 3, padding=1)
    for model in (
        nn.Sequential(nn.Conv2d(2, 2, 3, stride=2, padding=1), middle, nn.ConvTranspose2d(2, 3, 2, stride=2)),
        nn.Sequential(nn.MaxPool2d(4), middle, nn.Upsample(scale_factor=4)),
        nn.Sequential(nn.Conv2d(2, 2, 3, stride=3), nn.ConvTranspose2d(2, 3, 3, stride=3)),
        nn.Sequential(
            nn.Conv2d(2, 8, 2, stride=2), nn.Conv2d(8, 64, 3, stride=2, padding=1), nn.PixelShuffle(8)
        ),
    ):
        x = numbers(1, 2, length, length + 1, dtype=torch.float64)
        found = vramfit.tiled(model.double().eval(), x, tile=28, halo=halo)
        torch.testing.assert_close(found, whole(model, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    model, x = plain(2, dtype=dtype), numbers(2, 45, 37, dtype=dtype)
    found = vramfit.tiled(model, x, tile=16, halo=3)
    assert found.dtype is dtype
    epsilon = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, whole(model, x), rtol=epsilon, atol=epsilon)


def test_pictures_of_eight_bits_are_brought_to_the_models_dtype() -> None:
    x = torch.randint(0, 256, (2, 45, 37), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model = plain(2, dtype=torch.float64)
    expected = whole(model, x.double())
    torch.testing.assert_close(vramfit.tiled(model, x, tile=16, halo=3), expected)
    torch.testing.assert_close(vramfit.tiled(model, x.float().numpy(), tile=16, halo=3), expected)
    halved = vramfit.tiled(model, x, tile=16, halo=3, prepare=lambda tiles: tiles.double() / 2)
    torch.testing.assert_close(halved, whole(model, x.double() / 2))


def test_tokens_stay_what_they_are() -> None:
    torch.manual_seed(0)
    embed = nn.Embedding(11, 4)
    tokens = torch.randint(0, 11, (1, 1, 50))
    found = vramfit.tiled(lambda given: embed(given[:, 0]).transpose(1, 2), tokens, tile=16, halo=0, dims=1)
    assert torch.equal(found, embed(tokens[:, 0]).transpose(1, 2))


def test_an_input_smaller_than_a_tile_is_run_whole() -> None:
    seen = []
    model = plain(2)
    x = numbers(1, 2, 9, 11)
    found = vramfit.tiled(lambda tiles: seen.append(tiles.shape) or model(tiles), x, tile=32, halo=3, dims=2)
    assert torch.equal(found, whole(model, x)) and seen == [(1, 2, 9, 11)]


def test_several_outputs_of_several_scales() -> None:
    x, model = numbers(3, 2, 52, 46), Several()
    found, expected = vramfit.tiled(model, x, tile=20, halo=2, stride=2), whole(model, x)
    assert list(found) == ["same", "half", "larger"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    out = {name: np.zeros(value.shape, np.float32) for name, value in expected.items()}
    again = vramfit.tiled(model, x, tile=20, halo=2, stride=2, out=out)
    assert all(again[name] is out[name] for name in out)
    assert all((out[name] == found[name].numpy()).all() for name in out)


def test_reductions_are_those_of_the_whole_result() -> None:
    x, model = numbers(2, 2, 40, 33), plain(2)
    expected = whole(model, x)
    kept = {"tile": 16, "halo": 3}
    labels = vramfit.tiled(model, x, reduce="argmax", **kept)
    assert labels.dtype is torch.uint8 and torch.equal(labels[:, 0], expected.argmax(1).to(torch.uint8))
    mask = vramfit.tiled(model, x, reduce="threshold=0.1", **kept)
    assert torch.equal(mask, (expected > 0.1).to(torch.uint8))
    bits = vramfit.tiled(model, x, reduce="uint8", **kept)
    assert bits.dtype is torch.uint8 and (bits.float() - expected.clamp(0, 1) * 255).abs().max() < 0.51
    best = vramfit.tiled(model, x, reduce="top-k=2", **kept)
    torch.testing.assert_close(best["values"], expected.topk(2, 1).values, rtol=1e-5, atol=1e-6)
    assert torch.equal(best["indices"].long(), expected.topk(2, 1).indices)
    mean = vramfit.tiled(model, x, reduce=lambda block: block.mean(1), **kept)
    torch.testing.assert_close(mean, expected.mean(1), rtol=1e-5, atol=1e-6)
    several = vramfit.tiled(Several(), x[..., :32], reduce={"same": "argmax"}, tile=20, halo=2, stride=2)
    assert several["same"].shape == (2, 1, 40, 32) and several["half"].dtype is torch.float32


def test_reductions_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.inference import reductions

    block = numbers(1, 7, 9, 10)
    whole_block = reductions.TopK(3)(block)
    monkeypatch.setattr(reductions, "_PIECE_BYTES", block.nbytes // 4)
    parts = reductions.reduced(block, reductions.TopK(3), axes=2)
    assert all(torch.equal(parts[name], whole_block[name]) for name in whole_block)


def test_the_input_is_left_as_it_is() -> None:
    x = numbers(1, 2, 30, 30)
    before = x.clone()
    vramfit.tiled(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(2, 1, 1)), x, tile=30, halo=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Conv2d(2, 3, 5), "edges cut off"),
        (nn.Sequential(nn.Conv2d(2, 3, 1), nn.AdaptiveAvgPool2d(1)), "needs its whole input"),
        (nn.Sequential(nn.Conv2d(2, 3, 1), nn.Flatten()), "its places are lost"),
        (lambda tiles: "no tensor", "where a tensor is wanted"),
        (lambda tiles: tiles[0], "the batch first"),
    ],
)
def test_results_that_cannot_be_joined(model: object, said: str) -> None:
    with pytest.raises(UsageError, match=said) as told:
        vramfit.tiled(model, numbers(3, 2, 40, 40), tile=16, halo=2, tile_batch=2, dims=2)
    assert "\n" not in str(told.value)


def test_a_scale_that_is_given_is_checked() -> None:
    model, x = nn.Conv2d(2, 3, 2, stride=2), numbers(2, 40, 40)
    assert vramfit.tiled(model, x, tile=16, halo=2, scale="1/2").shape == (3, 20, 20)
    with pytest.raises(UsageError, match="not a scale of 2"):
        vramfit.tiled(model, x, tile=16, halo=2, scale=2)
    with pytest.raises(UsageError, match="no scale for 2"):
        vramfit.tiled(model, x, tile=16, halo=2, scale="large")
