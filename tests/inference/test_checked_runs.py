"""A check of tiles by values is made once for a model, its weights and the sizes of an input, and again for others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.inference import checked_runs
from vramfit.inference.trial_ways import CheckedRun


class Switched(nn.Module):
    """Local, until its attribute says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.centred = nn.Conv2d(2, 2, 3, padding=1), False
        self.drop = nn.Dropout(0.5)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.drop(self.conv(x))
        return found - found.mean() if self.centred else found


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes that were checked."""
    sizes: list[tuple[int, ...]] = []
    check = checked_runs.check_tiles

    def counted(run: CheckedRun, seconds: float | None) -> None:
        sizes.append(run.layout.spatial)
        check(run, seconds)

    monkeypatch.setattr(checked_runs, "check_tiles", counted)
    return sizes


def picture(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(2, *sizes, generator=torch.Generator().manual_seed(0)).to(dtype)


def _another_weight(net: Switched) -> None:
    net.conv.weight = nn.Parameter(net.conv.weight.detach().clone())


def _written(net: Switched) -> None:
    with torch.no_grad():
        net.conv.weight.mul_(2)


def test_equal_sizes_are_checked_once_whatever_the_values(checked: list[tuple[int, ...]]) -> None:
    net = Switched()
    for x in (picture(34, 20), picture(34, 20) * 3, picture(34, 20)[None], picture(35, 20), picture(35, 20)):
        vramfit.tiled(net, x, tile=16)
    assert checked == [(34, 20), (35, 20)]
    vramfit.tiled(net, picture(34, 20), tile=12)  # cut in other tiles
    vramfit.tiled(net, picture(34, 20, dtype=torch.float64), tile=16)
    vramfit.tiled(net, torch.stack([picture(34, 20)] * 2), tile=16)  # examples that could change each other
    assert len(checked) == 5
    vramfit.tiled(net, torch.stack([picture(34, 20)] * 3), tile=16)
    assert len(checked) == 5


@pytest.mark.parametrize("change", [_another_weight, _written, lambda net: net.double()])
def test_other_weights_are_checked_again(
    checked: list[tuple[int, ...]], change: Callable[[Switched], None]
) -> None:
    net = Switched()
    for _ in range(2):
        vramfit.tiled(net, picture(34, 20), tile=16)
    change(net)
    for _ in range(2):
        vramfit.tiled(net, picture(34, 20), tile=16)
    assert len(checked) == 2


def test_what_was_passed_once_is_refused_when_the_model_changes() -> None:
    net = Switched()
    vramfit.tiled(net, picture(34, 20), tile=16)
    net.drop.train()
    with pytest.raises(UsageError, match=r"dropout|two equal calls"):
        vramfit.tiled(net, picture(34, 20), tile=16)
    net.eval()
    net.centred = True
    with pytest.raises(UsageError, match="mean"):
        vramfit.tiled(net, picture(34, 20), tile=16)
    net.centred = False
    vramfit.tiled(net, picture(34, 20), tile=16)


def test_functions_are_checked_every_time(checked: list[tuple[int, ...]]) -> None:
    net = Switched()
    for _ in range(2):
        vramfit.tiled(lambda tiles: net(tiles), picture(34, 20), tile=16)
    assert len(checked) == 2


def test_models_are_not_kept_alive() -> None:
    net = Switched()
    vramfit.tiled(net, picture(34, 20), tile=16)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
