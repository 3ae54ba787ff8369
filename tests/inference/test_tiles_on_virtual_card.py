"""What tiles take on a card: a bare tile's memory, and copies beside the computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.inference.networks import CONV
from torch import nn

import vramfit
from vramfit.inference.arrays import Blank
from vramfit.inference.tile_settings import Stitch, TileSettings
from vramfit.inference.tiled_inference import make_job, rehearse
from vramfit.virtual.gpu import VirtualGPU

SIDE, TILE = 80, 32


class Volume(nn.Module):
    """Down and up again, as segmentation networks; its last layers take most."""

    def __init__(self) -> None:
        super().__init__()
        conv = CONV[3]
        self.down = nn.Sequential(conv(1, 16, 3, stride=2, padding=1), nn.ReLU(), conv(16, 32, 3, padding=1))
        self.middle = nn.Sequential(*(conv(32, 32, 3, padding=1) for _ in range(6)))
        self.up = nn.Sequential(
            nn.ConvTranspose3d(32, 16, 2, stride=2), nn.ReLU(), conv(16, 16, 3, padding=1)
        )
        self.last = conv(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.up(self.middle(self.down(x))))


def taken(use: Callable[[nn.Module], Any], make: Callable[[], nn.Module] = Volume) -> tuple[int, float, int]:
    """Peak bytes of the card, simulated seconds, and pinned bytes."""
    with VirtualGPU("RTX 4090") as gpu:
        model = make().eval().cuda()
        torch.cuda.synchronize()
        began = gpu.run.seconds_simulated
        with torch.inference_mode():
            use(model)
        torch.cuda.synchronize()
        run = gpu.run
    return run.devices[0].peak_allocated_bytes, run.seconds_simulated - began, run.host_pinned_peak_bytes


def bare(model: nn.Module) -> None:
    model(torch.zeros(1, 1, TILE, TILE, TILE, device="cuda"))


def over(**how: Any) -> Callable[[nn.Module], Any]:
    return lambda model: vramfit.tiled(model, torch.zeros(1, 1, SIDE, SIDE, SIDE), tile=TILE, **how)


BLENDED: dict[str, Any] = {"overlap": 0.25}


def test_tiles_take_no_more_than_one_and_copies_run_beside() -> None:
    (one, alone, _), (peak, seconds, pinned) = taken(bare), taken(over(**BLENDED))
    assert one <= peak <= one + (1 << 16)
    count = 3**3
    sent = 8 * TILE**3 * 4
    assert pinned <= 2 * (sent + 2 * TILE**3 * 4)  # pinned blocks are rounded up to a power of two
    spec = vramfit.gpus.find_gpu("RTX 4090")
    copies = count * sent / spec.host_link
    assert 0.9 * count * alone < seconds < count * alone + copies / 2


def test_no_mode_of_monai_is_better_in_both() -> None:
    inferers = pytest.importorskip("monai.inferers")
    host = {"sw_device": "cuda", "device": "cpu"}

    def monai(batch: int = 1, **how: Any) -> Callable[[nn.Module], Any]:
        place = "cpu" if "device" in how else "cuda"
        x = torch.zeros(1, 1, SIDE, SIDE, SIDE)
        return lambda model: inferers.sliding_window_inference(
            x.to(place), (TILE,) * 3, batch, model, 0.25, **how
        )

    peak, seconds, _ = taken(over(**BLENDED))
    for mode in (monai(), monai(buffer_steps=1, buffer_dim=0, **host), monai(**host)):
        other, time, _ = taken(mode)
        assert peak < other and seconds < time
    other, time, _ = taken(monai(4))
    assert peak < other


def test_halos_and_labels_take_no_more() -> None:
    one, _, _ = taken(bare)
    for how in (
        {"halo": 4, "stride": 2},
        {"halo": 4, "stride": 2, "reduce": "argmax"},
        {**BLENDED, "reduce": "argmax"},
        {"halo": 4, "stride": 2, "reduce": "top-k=3"},
    ):
        peak, _, _ = taken(over(**how))
        assert peak <= one + (1 << 16), how


def test_a_window_on_the_card_is_a_part_of_the_result() -> None:
    one, _, _ = taken(bare)
    peak, _, _ = taken(over(**BLENDED, stitch="device"))
    labels, _, pinned = taken(over(**BLENDED, stitch="device", reduce="argmax"))
    result = 8 * SIDE**3 * 4
    assert peak - one < result / 2 and labels <= peak
    assert pinned < result / 8


def test_a_result_may_stay_on_the_card() -> None:
    def make(model: nn.Module, *, tiles: bool) -> None:
        x = torch.zeros(1, 1, SIDE, SIDE, SIDE, device="cuda")
        out = torch.zeros(1, 8, SIDE, SIDE, SIDE, device="cuda")
        if tiles:
            assert vramfit.tiled(model, x, tile=TILE, halo=4, stride=2, out=out) is out
        else:
            bare(model)

    peak, _, pinned = taken(lambda model: make(model, tiles=True))
    one, _, _ = taken(lambda model: make(model, tiles=False))
    next_tile = TILE**3 * 4
    assert peak <= one + next_tile + (1 << 16) and pinned == 0


@pytest.mark.parametrize("stitch", Stitch)
@pytest.mark.parametrize("settings", [{"overlap": 0.25}, {"halo": 4, "stride": 2}], ids=str)
def test_a_few_batches_take_what_all_take(settings: dict[str, Any], stitch: Stitch) -> None:
    def first(batches: int) -> tuple[int, int, int]:
        held = []

        def use(model: nn.Module) -> None:
            job = make_job(
                model, Blank((1, SIDE, SIDE, SIDE)), TileSettings(tile=TILE, stitch=stitch, **settings)
            )
            held.append(rehearse(job, batches).host_bytes)

        peak, _, pinned = taken(use)
        return peak, pinned, held[0]

    few, all_ = first(3), first(10**6)
    assert few[:2] == all_[:2] and 0.9 * all_[2] < few[2] <= all_[2]


class Early(nn.Module):
    """Takes most in the beginning, and has time afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.Conv2d(64, 4, 1))
        self.long = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(60)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.long(self.wide(x))


def test_the_next_input_comes_where_there_is_room() -> None:
    """Uploads are then beside the computation too, at no more memory."""

    def use(tiles: int) -> Callable[[nn.Module], Any]:
        x = torch.zeros(1, 8, 256 * tiles, 256)
        return lambda model: vramfit.tiled(model, x, tile=256, overlap=0.0)

    one, first, _ = taken(use(1), Early)
    many, seconds, _ = taken(use(9), Early)
    upload = 8 * 256 * 256 * 4 / vramfit.gpus.find_gpu("RTX 4090").host_link
    download = upload / 2
    alone = first - upload - download
    assert many <= one + (1 << 16)
    # Two forward passes have to be over before the third input can come early: the first is only watched.
    assert seconds < 9 * alone + 3 * upload + 2 * download


def test_a_function_without_modules_waits_for_its_results() -> None:
    def use(model: nn.Module) -> None:
        vramfit.tiled(
            lambda tiles: model(tiles),
            torch.zeros(1, 1, SIDE, SIDE, SIDE),
            tile=TILE,
            overlap=0.25,
            device="cuda",
            dims=3,
        )

    one, _, _ = taken(bare)
    peak, seconds, _ = taken(use)
    _, beside, _ = taken(over(**BLENDED))
    assert peak <= one + (1 << 16) and seconds > beside
