"""Tiling: results, memory, and a program that is left as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.inference.networks import HourGlass, numbers, plain, whole
from tests.techniques.peaks import peak_bytes
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference import checked_runs, tile_needs
from vramfit.inference.receptive_field import Locality, LocalityKind
from vramfit.inference.tile_settings import Blend
from vramfit.inference.trial_ways import CheckedRun
from vramfit.techniques import AttachedProgram, Numerics, Profile, setting_from_plain, setting_to_plain
from vramfit.techniques.tiling import Tiling, TilingSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

EXACT = TilingSetting(tile=(24, 24), halo=(3, 3), stride=(1, 1))


class Guided(nn.Module):
    """Takes a picture by name, and a strength beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(2)

    def forward(self, strength: torch.Tensor, *, picture: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"map": self.net(picture) * strength}


def test_results_are_those_of_the_whole_run_and_the_undo_is_whole() -> None:
    model, x = plain(2), numbers(2, 2, 50, 61)
    kind, expected = type(model), whole(model, x)
    live = AttachedProgram(model, None)
    Tiling().attach(live, EXACT)
    assert live.host_inputs
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    live.undo()
    assert type(model) is kind and not live.host_inputs
    assert torch.equal(whole(model, x), expected)


def test_pictures_by_name_and_other_arguments() -> None:
    model, x = Guided().eval(), numbers(1, 2, 40, 40)
    with torch.no_grad():
        expected = model(torch.tensor(2.0), picture=x)["map"]
        live = AttachedProgram(model, None)
        Tiling().attach(live, EXACT)
        torch.testing.assert_close(model(torch.tensor(2.0), picture=x)["map"], expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(UsageError, match="no argument of Guided"):
            model(torch.tensor(2.0), picture=x[0])


class Coordinates(nn.Module):
    """Adds each column's place in the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x) + torch.linspace(0, 1, x.shape[-1])
        return found


def test_tiles_of_a_plan_are_checked_by_values() -> None:
    model, x = Coordinates().eval(), numbers(1, 2, 40, 40)
    live = AttachedProgram(model, None)
    Tiling().attach(live, EXACT)
    with (
        torch.no_grad(),
        pytest.raises(UsageError, match="tiles would give another result than the whole run"),
    ):
        model(x)
    live.undo()


def test_a_plans_tiles_are_checked_once_for_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = plain(2), []
    check = checked_runs.check_tiles

    def counted(run: CheckedRun, seconds: float | None) -> None:
        sizes.append(run.layout.spatial)
        check(run, seconds)

    monkeypatch.setattr(checked_runs, "check_tiles", counted)
    live = AttachedProgram(model, None)
    Tiling().attach(live, EXACT)
    with torch.no_grad():
        for x in (numbers(1, 2, 40, 40), numbers(1, 2, 40, 40), numbers(1, 2, 41, 40)):
            model(x)
    live.undo()
    assert sizes == [(40, 40), (41, 40)]


def test_promises_and_words() -> None:
    blended = TilingSetting(tile=(24, 24), overlap=0.25, blend=Blend.GAUSSIAN)
    assert Tiling().promise(EXACT).numerics is Numerics.ROUNDING
    assert Tiling().promise(blended).numerics is Numerics.APPROXIMATE
    for setting in (EXACT, blended):
        assert setting_from_plain(Tiling(), setting_to_plain(setting)) == setting


def test_what_it_cannot_be_attached_to() -> None:
    for model, said in (
        (nn.Linear(2, 2), "no convolutions of one kind"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1)), "no convolutions of one kind"),
        (plain(3), "2 lengths"),
    ):
        live = AttachedProgram(model, None)
        with pytest.raises(UsageError, match=said):
            Tiling().attach(live, EXACT)
        live.undo()
        assert not live.host_inputs


def work(side: int = 512) -> Workload:
    return Workload(
        model=lambda: HourGlass().eval(),
        batch=lambda batch_size, side: torch.zeros(batch_size, 2, side, side),
        sizes={"batch_size": 1, "side": side},
    )


def test_a_workload_takes_less_on_a_card() -> None:
    setting = TilingSetting(tile=(128, 128), halo=(24, 24), stride=(4, 4))
    with VirtualGPU("RTX 4090"):
        assert peak_bytes(Tiling().apply(work(), setting)) < peak_bytes(work()) / 8


def test_a_workload_is_run_in_tiles_on_the_cpu() -> None:
    setting = TilingSetting(tile=(64, 64), halo=(24, 24), stride=(4, 4))
    tiled = Tiling().apply(work(128), setting)
    state = tiled.start("cpu")
    tiled.run_step(state, dict(tiled.sizes))  # which checks the tiles by values, with other inputs
    seen: list[Any] = []
    state.model.first.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    tiled.run_step(state, dict(tiled.sizes))
    assert set(seen) == {(1, 2, 64, 64)}


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[Locality]:
    """A probe that finds the last that it is told to."""
    found = [Locality(kind=LocalityKind.LOCAL, halo=((22, 20), (21, 22)), alignment=(4, 4), shrink=((0, 0),))]
    monkeypatch.setattr(tile_needs, "probe", lambda model, example, seconds: found[-1])
    return found


def profile(model: nn.Module, **facts: Any) -> Profile:
    return Profile(
        model=model, optimizer=None, device_type="cpu", **{"trains": False, "sizes": {"side": 512}, **facts}
    )


def test_options_are_halves_of_the_picture_down_to_the_halo(probed: list[Locality]) -> None:
    found = list(Tiling().options(profile(HourGlass())))
    assert [setting.tile for setting in found] == [(256, 256), (128, 128), (64, 64)]
    assert all(setting.halo == (22, 22) and setting.stride == (4, 4) for setting in found)
    assert not list(Tiling().options(profile(HourGlass(), trains=True)))
    assert not list(Tiling().options(profile(nn.Linear(2, 2))))
    probed.append(Locality(kind=LocalityKind.WHOLE))
    assert not list(Tiling().options(profile(HourGlass())))


def test_tiled_asks_the_probe_for_the_halo(probed: list[Locality]) -> None:
    import vramfit

    model, x = HourGlass(), numbers(1, 2, 100, 100)
    torch.testing.assert_close(vramfit.tiled(model, x, tile=64), whole(model, x), rtol=1e-5, atol=1e-6)
    for name, value, said in (
        ("mixes_batch", True, "other examples"),
        ("shrink", ((0, 4),), "cuts edges off"),
        ("kind", LocalityKind.WHOLE, "more than its surroundings"),
    ):
        probed.append(replace(probed[-1], **{name: value}))
        with pytest.raises(UsageError, match=said) as told:
            vramfit.tiled(model, x, tile=64)
        assert "\n" not in str(told.value)
