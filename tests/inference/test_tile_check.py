"""Tiles with a probed halo give what the whole run gives, or are refused with the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vramfit
from vramfit.errors import UsageError


class Net(nn.Module):
    """Two convolutions, used as a function says."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], channels: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(channels, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.use = use
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class UNet(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last, self.mode = nn.Conv2d(8, 3, 3, padding=1), mode

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.first(x))
        low = self.second(F.max_pool2d(wide, 2))
        found: Tensor = self.last(
            torch.cat([wide, F.interpolate(low, size=wide.shape[-2:], mode=self.mode)], 1)
        )
        return found


def coordinates(net: Net, x: Tensor) -> Tensor:
    places = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype).expand(len(x), 1, *x.shape[-2:])
    found: Tensor = net.first(torch.cat([x, places], 1))
    return found


def grid(net: Net, x: Tensor) -> Tensor:
    down, along = torch.meshgrid(
        *(torch.linspace(-1, 1, length, dtype=x.dtype) for length in x.shape[-2:]), indexing="ij"
    )
    found: Tensor = net.first(
        torch.cat((x, torch.stack([down, along]).expand(len(x), 2, *x.shape[-2:])), dim=1)
    )
    return found


def positions(net: Net, x: Tensor) -> Tensor:
    table = net.second.weight[None, 0].to(x.dtype)
    found: Tensor = net.first(x + F.interpolate(table, size=x.shape[-2:], mode="bicubic"))
    return found


def pyramid(net: Net, x: Tensor) -> Tensor:
    wide = net.first(x)
    found: Tensor = net.second(wide + F.interpolate(F.adaptive_avg_pool2d(wide, 2), size=wide.shape[-2:]))
    return found


def cropped_transposed(net: Net, x: Tensor) -> Tensor:
    low = F.relu(F.conv2d(x, net.first.weight, stride=2, padding=1))
    high = F.conv_transpose2d(low, net.second.weight, stride=2, padding=1, output_padding=1)
    found: Tensor = net.first(x) + high[..., : x.shape[-2], : x.shape[-1]]
    return found


def padded_to_eight(net: Net, x: Tensor) -> Tensor:
    padded = F.pad(x, (0, -x.shape[-1] % 8, 0, -x.shape[-2] % 8), mode="reflect")
    low = F.relu(F.avg_pool2d(net.first(padded), 8))
    found: Tensor = net.first(x) + F.interpolate(low, scale_factor=8)[..., : x.shape[-2], : x.shape[-1]]
    return found


def densely(net: Net, x: Tensor) -> Tensor:
    wide = x
    for _ in range(2):
        wide = F.leaky_relu(net.first(torch.cat([wide, x], 1)[:, ::2]), 0.2) * 0.2 + wide
    return F.pixel_shuffle(torch.cat([wide, net.second(wide)], 1)[:, :4], 2)


def mirrored(net: Net, x: Tensor) -> Tensor:
    found: Tensor = net.first(x) + net.first(x.flip(-1)).flip(-1)
    return found


def by_size(net: Net, x: Tensor) -> Tensor:
    found: Tensor = net.first(x) if x.shape[-1] * x.shape[-2] < 2000 else net.second(net.first(x))
    return found


def by_brightness(net: Net, x: Tensor) -> Tensor:
    found: Tensor = net.first(x if x.max() <= 1.5 else x / 255)
    return found


def picture(*sizes: int) -> Tensor:
    return torch.rand(3, *sizes, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("use", "cause"),
    [
        (lambda net, x: net.first(x - x.mean()), "mean"),
        (lambda net, x: net.first(x / x.amax()), "amax"),
        (lambda net, x: net.first(x / x.abs().sum()), "sum"),
        (lambda net, x: net.first(x / x.std()), "std"),
        (lambda net, x: net.first(x) * F.adaptive_avg_pool2d(x, 1).sigmoid(), "adaptive_avg_pool2d"),
        (lambda net, x: net.first(x / torch.quantile(x.flatten(), 0.9)), "through all of"),
        (lambda net, x: net.first(x) * torch.histc(x, 8)[0], "histc"),
        (by_brightness, "max"),
        (lambda net, x: net.first(x.roll(3, -1)), "roll"),
        (lambda net, x: net.first(x) / x.shape[-1], "size"),
        (lambda net, x: net.second(net.first(x).flatten(2).softmax(-1).view_as(x)), "softmax"),
        (lambda net, x: net.first(F.normalize(x.flatten(1), dim=1).view_as(x)), "through all of"),
        (lambda net, x: net.first(x - x[..., :1, :1]), "rows|through|borders"),
        (lambda net, x: net.second(net.first(x).cumsum(-1)), "cumsum"),
        (pyramid, "adaptive_avg_pool2d"),
        (positions, "count from the borders"),
    ],
)
def test_what_looks_at_all_of_its_input_is_refused(use: Any, cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as told:
        vramfit.tiled(Net(use), picture(66, 48), tile=24)
    assert "overlap=" in str(told.value) and "\n" not in str(told.value)


def test_the_brightest_pixel_in_every_tile_hides_nothing() -> None:
    x = picture(66, 48)
    x[:, ::4, ::4] = 1.0
    with pytest.raises(UsageError, match="amax takes all rows together"):
        vramfit.tiled(Net(lambda net, x: net.first(x / x.amax())), x, tile=24)


def test_coordinates_that_are_concatenated_are_refused() -> None:
    for use, channels in ((coordinates, 4), (grid, 5)):
        with pytest.raises(UsageError, match="count from the borders"):
            vramfit.tiled(Net(use, channels=channels), picture(66, 48), tile=24)


def test_what_decides_by_the_size_is_refused_though_small_inputs_do_not_show_it() -> None:
    with pytest.raises(UsageError, match="place or the input's size changes it"):
        vramfit.tiled(Net(by_size), picture(66, 48), tile=24)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_a_skip_at_an_odd_size_is_refused_and_at_an_even_one_exact(mode: str) -> None:
    net, even = UNet(mode).eval(), picture(66, 48)
    found = vramfit.tiled(net, even, tile=24)
    torch.testing.assert_close(found, net(even[None])[0].detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(
        UsageError, match=r"length 65 is no multiple of 2.*interpolate \(test_tile_check.py:\d+\)"
    ):
        vramfit.tiled(net, picture(65, 48), tile=24)


@pytest.mark.parametrize("size", [(66, 48), (65, 47)])
@pytest.mark.parametrize(
    "use",
    [
        lambda net, x: net.second(F.relu(net.first(x))),
        lambda net, x: net.first(x) / (net.first(x).norm(dim=1, keepdim=True) + 1e-6),
        lambda net, x: net.first(x - F.avg_pool2d(x, 5, 1, 2)),
        lambda net, x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), net.first.weight),
        lambda net, x: F.conv2d(x, net.first.weight, padding=4, dilation=4),
        lambda net, x: net.first(x).argmax(1, keepdim=True).to(x.dtype),
        lambda net, x: F.interpolate(net.first(x)[..., ::2, ::2], scale_factor=2),
        lambda net, x: net.first(x * (torch.arange(x.shape[-1], dtype=x.dtype) % 4)),
        cropped_transposed,
        padded_to_eight,
        densely,
        mirrored,
    ],
)
def test_local_networks_are_not_refused(use: Any, size: tuple[int, int]) -> None:
    net, x = Net(use), picture(*size)
    found = vramfit.tiled(net, x, tile=24)
    with torch.no_grad():
        torch.testing.assert_close(found, net(x[None])[0], rtol=1e-5, atol=1e-6)


def test_functions_and_pictures_of_eight_bits_are_checked_in_the_models_dtype() -> None:
    net = Net(lambda net, x: net.first(x))
    x = (picture(66, 48) * 255).to(torch.uint8)
    found = vramfit.tiled(lambda tiles: net(tiles), picture(66, 48), tile=24)
    torch.testing.assert_close(found, net(picture(66, 48)[None])[0].detach(), rtol=1e-5, atol=1e-6)
    found = vramfit.tiled(net, x, tile=24, prepare=lambda tiles: tiles.float() / 255)
    torch.testing.assert_close(found, net(x[None].float() / 255)[0].detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(
        UsageError, match=r"what lies beyond the halo.*first in (max|amax) \(test_tile_check.py"
    ):
        vramfit.tiled(net, x, tile=24, prepare=lambda tiles: tiles.float() / tiles.max())


def test_random_outputs_and_neighbours_in_the_batch_are_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drawn = nn.Conv2d(3, 3, 1), torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.first(x) + torch.rand(
                1, generator=torch.Generator().manual_seed(torch.seed() % 99)
            )
            return found

    with pytest.raises(UsageError, match=r"depends on|two equal calls"):
        vramfit.tiled(Noisy().eval(), picture(66, 48), tile=24)
    with pytest.raises(UsageError, match="other examples of its batch"):
        vramfit.tiled(
            Net(lambda net, x: net.first(x - x.mean(0))), picture(66, 48)[None].repeat(2, 1, 1, 1), tile=24
        )


def test_a_probe_without_time_says_so() -> None:
    with pytest.raises(
        UsageError, match=r"could not be found: the probe would take more than 1e-06 s.*seconds="
    ):
        vramfit.tiled(
            Net(lambda net, x: net.first(x.flip(-1).flip(-1))), picture(66, 48), tile=24, seconds=1e-6
        )
    with pytest.raises(UsageError, match=r"could not be checked in 1e-06 s. Pass seconds=.*halo=1, stride=1"):
        vramfit.tiled(Net(lambda net, x: net.first(x)), picture(66, 48), tile=24, seconds=1e-6)
    with pytest.raises(UsageError, match="seconds"):
        vramfit.tiled(Net(lambda net, x: net.first(x)), picture(66, 48), tile=24, seconds=-1)


def test_no_tile_larger_than_the_picture_is_advised() -> None:
    with pytest.raises(UsageError, match="no tile shorter than the input's 48 will do"):
        vramfit.tiled(nn.Conv2d(3, 3, 49, padding=24), picture(48, 48), tile=40)
    with pytest.raises(UsageError, match="Pass a tile of 49 or more"):
        vramfit.tiled(nn.Conv2d(3, 3, 49, padding=24), picture(99, 99), tile=40)


def test_random_numbers_and_buffers_stay() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)).eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    vramfit.tiled(net, picture(66, 48), tile=24)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
