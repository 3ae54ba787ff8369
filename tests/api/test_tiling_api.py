"""`vramfit.tiled`: arguments that are wrong, and what is found where they are left out."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from tests.inference.networks import numbers, plain
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.inference.tile_needs import probe_needs, strides_by_modules

X = numbers(1, 2, 40, 40)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tile": 8, "halo": 4}, "leaves nothing of a tile"),
        ({"tile": 16, "halo": 2, "overlap": 0.5}, "do not overlap"),
        ({"tile": 16, "overlap": 0.5, "blend": "linear"}, "is none of 'constant', 'gaussian', 'cosine'"),
        ({"tile": 16, "overlap": 0.5, "stitch": "disk"}, "is none of 'host', 'device'"),
        ({"tile": 16, "overlap": 0.5, "padding": "mirror"}, "is none of"),
        ({"tile": 16, "overlap": 0.5, "blend": "gaussian", "sigma": 0}, "sigma=0"),
        ({"tile": 16, "overlap": "half"}, "overlap='half'"),
        ({"tile": 16, "halo": 2, "tile_batch": 1.5}, "tile_batch=1.5"),
        ({"tile": 16, "halo": 2, "reduce": "median"}, "no reduction"),
        ({"tile": 16, "halo": 2, "reduce": "top-k=0"}, "no number for it"),
        ({"tile": 16, "halo": 2, "reduce": "argmax=1"}, "no reduction"),
        ({"tile": 16, "halo": 2, "reduce": ("argmax", None)}, "2 entries for 1"),
        ({"tile": 16, "halo": 2, "reduce": {"labels": "argmax"}}, "which the model does not give"),
        ({"tile": 16, "halo": 2, "dims": 4}, "dims=4"),
        ({"tile": 16, "halo": 2, "dims": 1}, "neither"),
        ({"tile": 16, "halo": 2, "dims": 2.0}, "dims=2.0"),
        ({"tile": 16, "halo": 2, "scale": float("inf")}, "scale=inf"),
        ({"tile": 16, "halo": 2, "reduce": "threshold=nan"}, "no number for it"),
        ({"tile": 16, "halo": 2, "device": [1]}, "no device"),
        ({"tile": 16, "halo": 2, "device": "tpu9"}, "no device"),
        ({"tile": 16, "halo": 2, "device": "meta"}, "the model is on cpu"),
        ({"tile": 16, "halo": 2, "progress": 7}, "progress=7"),
        ({"tile": 16, "halo": 2, "prepare": 7}, "prepare=7"),
        ({"tile": 16, "halo": 2, "journal": 7}, "journal=7"),
        ({"tile": 16, "halo": 2, "budget": "1GiB"}, "both given"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as told:
        vramfit.tiled(plain(2), X, **wrong)
    assert "\n" not in str(told.value)


def test_wrong_inputs_and_models() -> None:
    for x, said in (([[1.0]], "without shape"), (X[0, 0], "neither"), (np.zeros((2, 0, 4)), "empty")):
        with pytest.raises(UsageError, match=said):
            vramfit.tiled(plain(2), x, tile=16, halo=3)
    with pytest.raises(UsageError, match="cannot be called"):
        vramfit.tiled("model", X, tile=16, halo=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no dtype"):
        vramfit.tiled(plain(2), np.zeros((2, 8, 8), "U1"), tile=16, halo=3)
    with pytest.raises(UsageError, match=r"model\.eval"):
        vramfit.tiled(nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)), X, tile=16, halo=3)
    with pytest.raises(UsageError, match="read in two ways"):
        vramfit.tiled(lambda tiles: tiles, X, tile=16, halo=3)


def test_axes_are_found() -> None:
    same = lambda tiles: tiles  # noqa: E731
    for x, how in (
        (X, {"tile": (16, 16)}),
        (X[0], {"tile": 16}),
        (X[None], {"tile": 16}),
        (X, {"tile": 16, "dims": 3}),
        (X, {"tile": 16, "dims": 2}),
    ):
        assert torch.equal(vramfit.tiled(same, x, halo=2, **how), x)


def test_strides_of_modules() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3, stride=(2, 1)), nn.MaxPool2d(3), nn.ConvTranspose2d(1, 1, 2, stride=2)
    )
    assert strides_by_modules(model, 2) == (6, 3) and strides_by_modules(lambda x: x, 2) == (1, 1)
    assert strides_by_modules(nn.Conv2d(1, 1, 3, stride=(2, 3)), 2) == (2, 3)
    assert strides_by_modules(nn.Conv2d(1, 1, 3, stride=(2, 3)), 3) == (6, 6, 6)  # of a volume's slices
    others = nn.Sequential(nn.LPPool2d(2, 5), nn.PixelUnshuffle(2), nn.Upsample(scale_factor=(0.5, 2.0)))
    assert strides_by_modules(others, 2) == (20, 10)


class ThirdsAndBack(nn.Module):
    """Other strides along each axis, and back to the input's length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Conv2d(2, 3, 3, stride=(2, 3), padding=1)
        self.up = nn.ConvTranspose2d(3, 2, (2, 3), stride=(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))[..., : x.shape[-2], : x.shape[-1]]


@pytest.mark.parametrize("halo", [None, 3])
def test_strides_of_each_axis_are_kept(halo: int | None) -> None:
    model, x = ThirdsAndBack().double().eval(), numbers(1, 2, 50, 49, dtype=torch.float64)
    with torch.no_grad():
        whole = model(x)
    assert torch.allclose(vramfit.tiled(model, x, tile=14, halo=halo), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex128])
def test_models_of_every_dtype_are_probed_by_their_operations(dtype: torch.dtype) -> None:
    needs = probe_needs(nn.Conv2d(2, 2, 3, padding=1, dtype=dtype), 2, 2, torch.device("cpu"))
    assert needs.halo == (1, 1) and needs.stride == (1, 1)


def test_what_a_model_does_not_take_is_told() -> None:
    model = plain(2)
    tries: list[tuple[torch.Tensor, dict[str, Any], str]] = [
        (X.long(), {}, "does not take tiles of int64 .*prepare=lambda"),
        (X > 0, {}, "does not take tiles of bool .*prepare=lambda"),
        (numbers(1, 5, 40, 40), {}, r"does not take tiles of float32 \[1, 5, 16, 16\].*channels"),
        (X, {"dims": 3}, "dims="),
    ]
    for x, how, said in tries:
        with pytest.raises(UsageError, match=said) as told:
            vramfit.tiled(model, x, tile=16, halo=3, **how)
        assert "\n" not in str(told.value)
    half_read = ShortArray(X.numpy())
    with pytest.raises(UsageError, match=r"x gives \[2, 8, 16\] for slices of \[16, 16\]"):
        vramfit.tiled(model, half_read, tile=16, halo=3)


class ShortArray:
    """An array that gives half of what it is asked for."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __getitem__(self, key: Any) -> Any:
        found = self.values[key]
        return found[:, : found.shape[1] // 2]


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    vramfit.tiled(plain(2), X, tile=20, halo=3, progress=lambda *now: told.append(now))
    assert told[-1] == (9, 9) and told == sorted(told) and len(told) == 9
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    vramfit.tiled(plain(2), X, tile=20, halo=3, progress=True)
    assert "9/9" in shown.getvalue()


def test_without_a_tile_something_has_to_choose_it() -> None:
    with pytest.raises(UsageError, match="nothing says how large"):
        vramfit.tiled(plain(2), X, halo=3)
