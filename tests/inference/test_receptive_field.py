"""The probe against networks whose receptive field is known, and against tiles."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.virtual.conftest import fit_interpreter, gpu
from torch import Tensor, nn

from vramfit.errors import UsageError
from vramfit.inference.receptive_field import HaloEvidence, Locality, LocalityKind, probe
from vramfit.virtual.gpu import VirtualGPU

__all__ = ["fit_interpreter", "gpu"]

LOCAL, NORMS, WHOLE = LocalityKind.LOCAL, LocalityKind.GLOBAL_NORMS, LocalityKind.WHOLE
IMAGE = torch.zeros(1, 4, 64, 64)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def conv(size: Any = 3, **options: Any) -> nn.Module:
    return nn.Conv2d(4, 4, size, **options)


@pytest.mark.parametrize(
    ("net", "halo", "alignment"),
    [
        (nn.Sequential(conv(padding=1), nn.ReLU(), conv(padding=1)), (2, 2), 1),
        (conv(), (0, 2), 1),
        (conv(padding=8, dilation=8), (8, 8), 1),
        (conv(7, padding=3, padding_mode="reflect"), (3, 3), 1),
        (conv(5, padding=2, padding_mode="replicate"), (2, 2), 1),
        (conv(stride=2, padding=1), (1, 0), 2),
        # Two strides down and two up, of which the last overlaps: 7 rows before a block of 4, and 4 after.
        (
            nn.Sequential(
                conv(stride=2, padding=1),
                conv(stride=2, padding=1),
                nn.ConvTranspose2d(4, 4, 2, 2),
                nn.ConvTranspose2d(4, 4, 4, 2, 1),
            ),
            (7, 4),
            4,
        ),
        (nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)), (0, 0), 2),
        (nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(2)), (1, 1), 1),
        (nn.Sequential(conv(padding=1), nn.BatchNorm2d(4)).eval(), (1, 1), 1),
        (nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(16, 16, 3, padding=1), nn.PixelShuffle(2)), (2, 2), 2),
    ],
)
def test_local_networks(net: nn.Module, halo: tuple[int, int], alignment: int) -> None:
    read, measured = probe(net, IMAGE), probe(net, (IMAGE,))  # arguments in a tuple are always computed with
    assert (read.kind, read.evidence, read.why) == (LOCAL, HaloEvidence.STRUCTURE, "")
    assert (measured.kind, measured.evidence, measured.why) == (LOCAL, HaloEvidence.MEASURED, "")
    for found in (read, measured):
        assert found.halo == (halo, halo)
        assert found.alignment == (alignment, alignment)
        assert not found.mixes_batch
    assert (read.scales, read.shrink) == (measured.scales, measured.shrink)


class Turned(nn.Module):
    """A network behind something that does not say which rows it reads."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flip(-1).flip(-1))


@pytest.mark.parametrize(("stride", "before"), [(3, 1), (5, 1), (7, 1), ((2, 3), 1)])
@pytest.mark.parametrize("evidence", [HaloEvidence.STRUCTURE, HaloEvidence.MEASURED])
def test_strides_that_are_no_powers_of_two(stride: Any, before: int, evidence: HaloEvidence) -> None:
    torch.manual_seed(0)
    net = conv(stride=stride, padding=1)
    found = probe(net if evidence is HaloEvidence.STRUCTURE else Turned(net), IMAGE)
    steps = stride if isinstance(stride, tuple) else (stride, stride)
    assert (found.kind, found.alignment, found.evidence) == (LOCAL, steps, evidence)
    assert all(
        low == before and high == max(0, 2 - step)
        for (low, high), step in zip(found.halo, steps, strict=True)
    )
    assert found.scales == (tuple(Fraction(1, step) for step in steps),)


def test_a_halo_of_half_the_smallest_input_is_measured() -> None:
    torch.manual_seed(0)
    # A block begins at every other row; beyond it the strided layer sees 1 row, and the dilated one 4 times 2.
    net = nn.Sequential(
        nn.Conv3d(1, 2, 3, stride=2, padding=1),
        nn.Conv3d(2, 1, 3, padding=4, dilation=4),
        nn.Upsample(scale_factor=2),
    )
    found = probe(Turned(net), torch.zeros(1, 1, 32, 32, 32))
    assert (found.kind, found.halo[0], found.alignment[0]) == (LOCAL, (9, 8), 2)


def test_each_dimension_has_its_own() -> None:
    found = probe(conv((1, 7), padding=(0, 3), stride=(1, 2)), IMAGE)
    assert found.halo == ((0, 0), (3, 2)) and found.alignment == (1, 2)
    assert found.scales == ((Fraction(1), Fraction(1, 2)),)


def test_scales_and_what_is_cut() -> None:
    net = nn.Sequential(conv(), nn.Conv2d(4, 16, 3), nn.PixelShuffle(2))
    found = probe(net, IMAGE)
    assert found.scales == ((Fraction(2), Fraction(2)),) and found.shrink == ((8, 8),)
    assert found.halo == ((0, 4), (0, 4))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(padding=1), conv(5, stride=2, padding=2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"fine": self.a(x), "coarse": self.b(x)}

    found = probe(Two(), IMAGE)
    assert found.scales == ((Fraction(1), Fraction(1)), (Fraction(1, 2), Fraction(1, 2)))
    assert found.halo == ((2, 1), (2, 1)) and found.alignment == (2, 2)


class SkipNet(nn.Module):
    """A small U-Net."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.one = nn.Sequential(conv(padding=1), norm(4), nn.ReLU(inplace=True))
        self.two = nn.Sequential(conv(padding=1), norm(4), nn.ReLU(inplace=True))
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.one(x)
        low = self.two(F.max_pool2d(skip, 2))
        found: Tensor = self.out(torch.cat([skip, self.up(low)], 1))
        return found


def test_norms_are_told_by_their_mode() -> None:
    local = probe(SkipNet(nn.BatchNorm2d).eval(), IMAGE)
    trained = probe(SkipNet(nn.BatchNorm2d).train(), IMAGE)
    instance = probe(SkipNet(nn.InstanceNorm2d), IMAGE)
    assert (local.kind, trained.kind, instance.kind) == (LOCAL, NORMS, NORMS)
    assert trained.mixes_batch and not instance.mixes_batch
    assert local.halo == instance.halo == trained.halo == ((5, 5), (5, 5))
    assert local.alignment == (2, 2)
    assert "batch_norm" in trained.why and "instance_norm" in instance.why


def test_tiles_by_the_halo_are_exact_and_by_less_are_not() -> None:
    net = SkipNet(nn.BatchNorm2d).eval().double()
    found = probe(net, IMAGE)
    image = torch.rand(1, 4, 40, 8, dtype=torch.float64)
    with torch.no_grad():
        whole = net(image)[:, :, 16:24]
        before, after = found.halo[0]
        wide = net(image[:, :, 16 - before - 1 : 24 + after + 1])  # rounded up to the alignment
        torch.testing.assert_close(wide[:, :, before + 1 :][:, :, :8], whole)
        less = net(image[:, :, 16 - before + 1 : 24 + after - 1])
    assert (less[:, :, before - 1 :][:, :, :8] - whole).abs().max() > 1e-6


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(padding=1), conv(1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h * torch.sigmoid(self.b(F.adaptive_avg_pool2d(h, 1)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        found = F.scaled_dot_product_attention(q, k, v)
        return found.transpose(1, 2).reshape(batch, channels, height, width)


class Placed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[2], dtype=x.dtype).view(-1, 1)


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Gate(), "adaptive_avg_pool2d"),
        (Attention(), "scaled_dot_product_attention"),
        (nn.Sequential(conv(stride=2), nn.Upsample(size=(32, 32))), "extent"),
        (
            nn.Sequential(conv(), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
            "count from",
        ),
        (Placed(), "count from"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4 * 64 * 64, 5)), "extent"),
        (nn.Sequential(conv(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), "extent"),
    ],
)
def test_what_needs_the_whole_input(net: nn.Module, why: str) -> None:
    found = probe(net, IMAGE)
    assert found.kind in (WHOLE, LocalityKind.BATCH_ONLY)
    assert why in found.why and found.evidence is HaloEvidence.NONE and found.halo == ()


class Windows(nn.Module):
    """Attention in windows of 4 x 4, shifted by 2 with the mask of Swin."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.qkv, self.shift = nn.Linear(4, 12), shift

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        y = x.permute(0, 2, 3, 1)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        grid = (batch, height // 4, 4, width // 4, 4, channels)
        tokens = y.reshape(grid).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels)
        q, k, v = self.qkv(tokens).chunk(3, -1)
        weights = q @ k.transpose(1, 2) / 2
        if self.shift:
            weights = weights + self.mask(height, width).repeat(batch, 1, 1)
        y = (weights.softmax(-1) @ v).reshape(batch, height // 4, width // 4, 4, 4, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + y.permute(0, 3, 1, 2)

    def mask(self, height: int, width: int) -> Tensor:
        def regions(count: int) -> Tensor:
            found = torch.zeros(count)
            found[-4:-2], found[-2:] = 1, 2
            return found

        places = regions(height)[:, None] * 3 + regions(width)
        parts = places.view(height // 4, 4, width // 4, 4).permute(0, 2, 1, 3).reshape(-1, 16)
        return (parts[:, None] != parts[:, :, None]).double() * -100.0


def test_windowed_attention_is_local_with_its_windows_as_alignment() -> None:
    plain = probe(Windows(0), IMAGE)
    assert (plain.kind, plain.alignment, plain.halo) == (LOCAL, (4, 4), ((0, 0), (0, 0)))
    shifted = probe(nn.Sequential(Windows(0), Windows(2)), IMAGE)
    assert (shifted.kind, shifted.alignment, shifted.halo) == (LOCAL, (4, 4), ((4, 4), (4, 4)))
    assert shifted.evidence is HaloEvidence.VALUES  # nan goes through masks


def test_weights_of_zero_hide_nothing() -> None:
    net = conv(5, padding=2)
    nn.init.zeros_(net.weight)  # type: ignore[arg-type]
    assert probe(net, IMAGE).halo == ((2, 2), (2, 2))
    assert not net.weight.any()  # type: ignore[operator]


def test_signals_volumes_and_other_arguments() -> None:
    assert probe(nn.Conv1d(2, 2, 9, padding=4), torch.zeros(3, 2, 100)).halo == ((4, 4),)
    volume = nn.Conv3d(1, 2, (1, 3, 5), padding=(0, 1, 2))
    assert probe(volume, torch.zeros(1, 1, 16, 16, 16)).halo == ((0, 0), (1, 1), (2, 2))

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = conv(padding=1)

        def forward(self, sample: Tensor, timestep: Tensor, scale: float = 1.0) -> tuple[Tensor]:
            return (self.a(sample.to(torch.float32)) * timestep.view(-1, 1, 1, 1) * scale,)

    example = {"sample": IMAGE.half(), "timestep": torch.ones(1), "scale": 2.0}
    assert probe(Conditioned(), example).halo == ((1, 1), (1, 1))
    assert probe(lambda x: x * 2, IMAGE).halo == ((0, 0), (0, 0))
    assert "no spatial dimensions" in probe(nn.Linear(3, 3), torch.zeros(2, 3)).why


def test_the_model_and_the_random_numbers_stay() -> None:
    net = SkipNet(nn.BatchNorm2d).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    probe(net, IMAGE)
    assert torch.equal(torch.rand(3), expected)
    assert net.training and net.one[0].weight.dtype == torch.float32
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_it_stops_in_time() -> None:
    found = probe(SkipNet(nn.BatchNorm2d).eval(), (IMAGE,), seconds=0.01)
    assert (found.kind, found.why) == (WHOLE, "the probe would take more than 0.01 s")
    with pytest.raises(UsageError, match="seconds"):
        probe(conv(), IMAGE, seconds=-1)
    assert isinstance(found, Locality)


def test_a_model_of_the_virtual_card_is_probed_with_drawn_weights(gpu: VirtualGPU) -> None:
    net = SkipNet(nn.BatchNorm2d).cuda().eval()
    found = probe(net, torch.zeros(1, 4, 64, 64, device="cuda"))
    assert (found.kind, found.halo) == (LOCAL, ((5, 5), (5, 5)))
    allocated = torch.cuda.memory_allocated()
    probe(net, torch.zeros(1, 4, 64, 64, device="cuda"))
    assert torch.cuda.max_memory_allocated() <= allocated + (2 << 20)
