"""Networks layer by layer over chunks of rows, against torch's own whole run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.virtual.conftest import fit_interpreter, gpu
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vramfit.errors import UsageError
from vramfit.inference.layerwise import ChunkHeight, ChunkStore, layerwise, run_layerwise
from vramfit.virtual.gpu import VirtualGPU

__all__ = ["fit_interpreter", "gpu"]

Net = Callable[[Tensor], Any]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


IMAGE = numbers(2, 4, 13, 11)


def made(net: Net) -> Net:
    torch.manual_seed(0)
    return net.double().eval() if isinstance(net, nn.Module) else net


def error_of(net: Net, given: Tensor, rows: int | ChunkHeight, **options: Any) -> float:
    """The largest difference from the whole run, as a part of the largest output."""
    with torch.no_grad():
        expected = net(given)
    found = run_layerwise(net, (given,), rows=rows, **options)
    assert type(found) is Tensor and found.shape == expected.shape and found.dtype == expected.dtype
    return float((found - expected).abs().max() / expected.abs().max())


class SqueezeExcite(nn.Module):
    """A block with global means, a shortcut and much in place."""

    def __init__(self, *, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.c = nn.Conv2d(4, 4, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu_()
        gate = F.adaptive_avg_pool2d(h, 1) if self.pooled else h.mean((2, 3), keepdim=True)
        h = h * torch.sigmoid(self.b(gate))
        h += x
        y: Tensor = self.c(F.relu(h, inplace=True))
        y *= 2
        y.sub_(1)
        return y.permute(0, 2, 3, 1)[..., :2].permute(0, 3, 1, 2)


class GroupNormUNet(nn.Module):
    """Skips, pooling, upsampling, attention in the middle."""

    def __init__(self, *, mode: str = "nearest", attends: bool = True) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.SiLU(inplace=True)
            )

        self.one, self.two, self.three = block(3, 8), block(8, 16), block(24, 8)
        self.out, self.mode, self.attends = nn.Conv2d(8, 2, 1), mode, attends
        self.qkv = nn.Linear(16, 48)

    def attend(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        found = F.scaled_dot_product_attention(q, k, v)
        return found.transpose(1, 2).reshape(batch, channels, height, width)

    def forward(self, x: Tensor) -> dict[str, Any]:
        skip = self.one(x)
        low = self.two(F.max_pool2d(skip, 2))
        if self.attends:
            low = low + self.attend(low)
        align = None if self.mode == "nearest" else False
        high = F.interpolate(low, size=skip.shape[2:], mode=self.mode, align_corners=align)
        return {"image": self.out(self.three(torch.cat([skip, high], 1))), "skips": [skip]}


def image_of(net: Net) -> Net:
    return lambda x: net(x)["image"]


def convolution(**options: Any) -> nn.Module:
    return nn.Conv2d(4, 6, **{"kernel_size": 3, **options})


def transposed(size: int, stride: int, padding: int, output_padding: int, dilation: int) -> nn.Module:
    return nn.ConvTranspose2d(
        4, 6, size, stride=stride, padding=padding, output_padding=output_padding, dilation=dilation
    )


def after_conv(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3), *layers, nn.Conv2d(4, 4, 3, padding=1))


def upsampled(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.Upsample(**options))


NETS: dict[str, Callable[[], Net]] = {
    "conv": lambda: convolution(padding=1),
    "conv, stride": lambda: convolution(stride=2, padding=1),
    "conv, stride that leaves rows": lambda: convolution(stride=5, padding=1),
    "conv, dilation": lambda: convolution(dilation=2, padding=4, groups=2),
    "conv, padding beyond the filter": lambda: convolution(padding=5),
    "conv, same": lambda: convolution(padding="same", kernel_size=(5, 3)),
    "conv, reflect": lambda: convolution(kernel_size=5, padding=2, padding_mode="reflect"),
    "conv, replicate": lambda: convolution(kernel_size=5, padding=2, padding_mode="replicate"),
    "conv, circular": lambda: convolution(kernel_size=5, padding=2, padding_mode="circular"),
    "transposed 2 2": lambda: transposed(2, 2, 0, 0, 1),
    "transposed 4 2": lambda: transposed(4, 2, 1, 0, 1),
    "transposed 3 2": lambda: transposed(3, 2, 1, 1, 1),
    "transposed with gaps": lambda: transposed(1, 2, 0, 1, 1),
    "transposed 3 1": lambda: transposed(3, 1, 1, 0, 1),
    "transposed 5 3": lambda: transposed(5, 3, 2, 2, 2),
    "max pool": lambda: nn.MaxPool2d(3, 2, 1),
    "max pool, rounded up": lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "max pool, dilated": lambda: nn.MaxPool2d(3, 1, 1, dilation=2),
    "mean pool": lambda: nn.AvgPool2d(2),
    "mean pool, rounded up": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "mean pool, of values alone": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "nearest": lambda: upsampled(scale_factor=2),
    "nearest, odd": lambda: upsampled(scale_factor=1.7),
    "nearest, down": lambda: upsampled(size=(7, 9)),
    "nearest exact": lambda: upsampled(scale_factor=0.5, mode="nearest-exact"),
    "bilinear": lambda: upsampled(scale_factor=2, mode="bilinear"),
    "bilinear, odd": lambda: upsampled(scale_factor=1.7, mode="bilinear"),
    "bilinear, down": lambda: upsampled(size=(7, 9), mode="bilinear"),
    "bilinear, corners": lambda: upsampled(size=(29, 31), mode="bilinear", align_corners=True),
    "bicubic": lambda: upsampled(scale_factor=2, mode="bicubic"),
    "pixel shuffle": lambda: nn.Sequential(
        nn.Conv2d(4, 16, 3), nn.PixelShuffle(4), nn.Conv2d(1, 2, 3), nn.PixelUnshuffle(2)
    ),
    "group norm": lambda: after_conv(nn.GroupNorm(2, 4), nn.SiLU()),
    "instance norm": lambda: after_conv(nn.InstanceNorm2d(4, affine=True), nn.ReLU(inplace=True)),
    "batch norm": lambda: after_conv(nn.BatchNorm2d(4), nn.LeakyReLU(0.1, inplace=True)),
    "batch norm of the batch": lambda: after_conv(nn.BatchNorm2d(4, track_running_stats=False), nn.PReLU(4)),
    "squeeze and excite": lambda: SqueezeExcite(pooled=True),
    "global means": lambda: SqueezeExcite(pooled=False),
    "classifier": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ),
    "flatten and linear": lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(396, 3)),
    "pads and slices": lambda: (
        lambda x: F.pad(F.pad(x, (1, 2, 3, 1), value=2.0), (0, 1, 2, 0), mode="reflect")[:, :, 2:-1, ::2]
    ),
    "negative pads": lambda: lambda x: F.pad(x, (0, -1, -2, -3)) * 1.0,
    "parts of channels": lambda: (
        lambda x: torch.cat(
            [F.glu(x, 1) * x.chunk(2, 1)[0], x.softmax(1)[:, :1], torch.ones_like(x)[:, 1:2], x[:, 3, None]],
            1,
        ).transpose(1, 2)
    ),
    "channels last norm": lambda: lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),
    "places and maxima": lambda: (
        lambda x: x + torch.arange(13.0).view(1, 1, 13, 1).double() * x.amax((1, 2), keepdim=True)
    ),
    "gates upon gates": lambda: lambda x: _gated(x, 12),
    "sums over rows": lambda: lambda x: x.sum(2) + x.max() + x.argmax(1).double().mean((1, 2))[:, None, None],
    "normalised by hand": lambda: lambda x: (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True),
}


def _gated(x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = x * torch.sigmoid(x)
    return x


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("name", NETS)
def test_each_layer_is_that_of_the_whole(name: str, rows: int) -> None:
    given = numbers(1, 4, 13, 14) if name == "pixel shuffle" else IMAGE
    assert error_of(made(NETS[name]()), given, rows) < 1e-13


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_unet_with_attention_in_the_middle(mode: str, rows: int) -> None:
    net = made(GroupNormUNet(mode=mode))
    given = numbers(2, 3, 21, 18)
    assert error_of(image_of(net), given, rows) < 1e-12
    found = run_layerwise(net, (given,), rows=rows)
    with torch.no_grad():
        expected = net(given)
    torch.testing.assert_close(found["skips"][0], expected["skips"][0], rtol=1e-12, atol=1e-12)


def test_signals_and_volumes() -> None:
    signal = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ConvTranspose1d(4, 4, 4, 2, 1),
        nn.Upsample(scale_factor=2, mode="linear"),
        nn.AvgPool1d(3, 2),
    )
    assert error_of(made(signal), numbers(1, 2, 33), 4) < 1e-13
    volume = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.InstanceNorm3d(4),
        nn.PReLU(4),
        nn.ConvTranspose3d(4, 4, 2, 2),
        nn.MaxPool3d(3, 2, 1),
        nn.Conv3d(4, 2, 1),
    )
    assert error_of(made(volume), numbers(1, 2, 9, 8, 7), 2) < 1e-13


@pytest.mark.parametrize("kind", ["UNet", "DynUNet"])
def test_monai_networks_with_instance_norm(kind: str) -> None:
    networks = pytest.importorskip("monai.networks.nets")
    if kind == "UNet":
        net = networks.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1)
    else:
        net = networks.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8], res_block=True)
    given = numbers(1, 1, 16, 12, 20)
    net = made(net)
    assert error_of(net, given, 3) < 1e-12
    assert error_of(net, given, ChunkHeight(bytes=4096)) < 1e-12


def autoencoder(*channels: int, groups: int = 4) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that diffusers looks for
        diffusers = pytest.importorskip("diffusers")
        return diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            block_out_channels=channels,
            layers_per_block=1,
            norm_num_groups=groups,
        ).eval()


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_chunks_that_lie_in_the_padding_as_a_whole(rows: int) -> None:
    for pads in ((1, 2, 1, 2), (0, 0, 0, 3), (2, 2, 5, 5), (0, 0, -1, 4)):
        assert error_of(lambda x, pads=pads: F.pad(x, pads, value=3.0), IMAGE, rows) == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_means_of_a_volume_over_fewer_rows_than_a_window(rows: int) -> None:
    """torch refuses rows that are fewer than a window of ``avg_pool3d``, its padding left out, and of no other."""
    volume = numbers(1, 2, 9, 5, 7)
    for size, stride, padding in ((2, 2, 0), (3, 1, 1), (3, 2, 1), (2, 3, 1), (4, 3, 2)):
        for rounds_up in (False, True):
            for counts in (False, True):
                pool = nn.AvgPool3d(size, stride, padding, ceil_mode=rounds_up, count_include_pad=counts)
                assert error_of(pool, volume, rows) == 0


def test_a_latent_decoder_computes_nothing_twice() -> None:
    torch.manual_seed(0)
    vae = autoencoder(8, 16).double()
    latents = numbers(1, 4, 18, 15)
    with torch.no_grad(), FlopCounterMode(display=False) as plain:
        expected = vae.decode(latents).sample
    with FlopCounterMode(display=False) as chunked:
        found = run_layerwise(vae.decode, (latents,), rows=5).sample
    assert chunked.get_total_flops() == plain.get_total_flops()
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-12
    # In float32 the plain run itself is off by about as much.
    vae.float()
    with torch.no_grad():
        plain_error = (vae.decode(latents.float()).sample - expected).abs().max()
    error = (run_layerwise(vae.decode, (latents.float(),), rows=5).sample - expected).abs().max()
    assert float(error) < max(2 * float(plain_error), 1e-6 * float(expected.abs().max()))
    image = expected.float().clamp(-1, 1)
    with torch.no_grad():
        mean = vae.encode(image).latent_dist.mean
    with layerwise(rows=7) as by_rows:
        found = by_rows(lambda x: vae.encode(x).latent_dist.mean, image)
    torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype) -> None:
    net, given = made(GroupNormUNet()), numbers(1, 3, 20, 16)
    with torch.no_grad():
        exact = net(given)["image"]
        net, given = net.to(dtype), given.to(dtype)
        plain = net(given)["image"]
    found = run_layerwise(net, (given,), rows=3)["image"]
    assert found.dtype == dtype
    scale = float(exact.abs().max())
    bound = max(2 * float((plain - exact).abs().max()), 1e-6 * scale)
    assert float((found - exact).abs().max()) < bound


def test_statistics_do_not_cancel() -> None:
    net = made(nn.GroupNorm(1, 4)).float()  # type: ignore[attr-defined]
    given = (numbers(1, 4, 64, 64) + 1000).float()
    exact = F.group_norm(given.double(), 1)
    found = run_layerwise(lambda x: net(x) * 1, (given,), rows=5)
    with torch.no_grad():
        plain = (net(given) - exact).abs().max()
    assert float((found - exact).abs().max()) < 4 * float(plain)  # sums of squares are off by 0.06


def test_channels_last_stays_so() -> None:
    net = made(after_conv(nn.GroupNorm(2, 4), nn.Upsample(scale_factor=2))).float()  # type: ignore[attr-defined]
    given = IMAGE.float().to(memory_format=torch.channels_last)
    assert error_of(net, given, 3) < 1e-6
    assert run_layerwise(net, (given,), rows=3).is_contiguous(memory_format=torch.channels_last)


def test_running_statistics_in_training_mode_move_as_in_the_plain_run() -> None:
    plain = made(after_conv(nn.BatchNorm2d(4))).train()  # type: ignore[attr-defined]
    other = copy.deepcopy(plain)
    with torch.no_grad():
        expected = plain(IMAGE)
    torch.testing.assert_close(run_layerwise(other, (IMAGE,), rows=3), expected)
    torch.testing.assert_close(other[1].running_var, plain[1].running_var)
    assert int(other[1].num_batches_tracked) == 1


def test_autocast_is_that_of_the_call() -> None:
    net = made(GroupNormUNet()).float()  # type: ignore[attr-defined]

    def cast(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x)["image"]

    given = numbers(1, 3, 20, 16).float()
    with torch.no_grad():
        expected = cast(given)
    found = run_layerwise(cast, (given,), rows=3)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


# -- in place -------------------------------------------------------------------------------------------------------


def test_the_callers_tensor_stays() -> None:
    before = IMAGE.clone()
    found = run_layerwise(lambda x: x.mul_(2).add_(1) + 0, (IMAGE,), rows=3)
    assert torch.equal(IMAGE, before)
    assert torch.equal(found, before * 2 + 1)


def test_an_earlier_reader_sees_the_value_before() -> None:
    def net(x: Tensor) -> Tensor:
        doubled = x * 2
        first = doubled + 1
        doubled += 10
        doubled[:, :1] = 0
        return torch.cat([first, doubled], 1)

    assert error_of(net, IMAGE, 3) == 0


def test_a_plain_tensor_that_changes_is_read_before() -> None:
    def net(x: Tensor) -> Tensor:
        shift = torch.ones(4, 1, 1, dtype=torch.float64)
        first = x + shift
        shift.mul_(5)
        return first + shift

    assert error_of(net, IMAGE, 3) == 0


def test_a_change_that_views_would_share_is_refused() -> None:
    def net(x: Tensor) -> Tensor:
        y = x * 2
        part = y[:, :2]
        part += 1
        return y

    with pytest.raises(UsageError, match="changes in place a tensor that has views"):
        run_layerwise(net, (IMAGE,), rows=3)


def test_values_can_be_asked_for_midway() -> None:
    def net(x: Tensor) -> Tensor:
        y = x.relu()
        if y.mean() > 100 or y.shape[0] != len(y) or y.max().item() < 0:
            return x
        return y * y.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + torch.fft.fft(y, dim=2).real

    assert error_of(net, IMAGE, 3) < 1e-13


def test_what_profilers_ask_computes_nothing() -> None:
    def net(x: Any) -> Any:
        y = x * 2
        assert y.untyped_storage().nbytes() == y.nbytes == IMAGE.nbytes
        assert y.dtype == torch.float64 and y.stride() == IMAGE.stride() and "RowTensor" in repr(y)
        assert y.node.full is None
        return y

    assert torch.equal(run_layerwise(net, (IMAGE,), rows=3), IMAGE * 2)


def test_dropout_draws_what_the_plain_run_draws() -> None:
    def net(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.dropout(F.dropout(x, training=False) * 2, 0.5)

    assert error_of(net, IMAGE, 3) == 0


@pytest.mark.parametrize("rows", [0, -1, 1.5, True])
def test_heights_that_are_none(rows: Any) -> None:
    with pytest.raises(UsageError, match="rows="):
        run_layerwise(nn.Identity(), (IMAGE,), rows=rows)


def test_a_height_is_in_rows_or_in_bytes() -> None:
    with pytest.raises(UsageError, match="rows or in bytes"):
        ChunkHeight()
    with pytest.raises(UsageError, match="rows or in bytes"):
        ChunkHeight(rows=1, bytes=1)
    assert ChunkHeight(bytes=100).of(30) == 3
    assert ChunkHeight(bytes=100).of(1000) == 1
    with pytest.raises(UsageError, match="no place for chunks"):
        run_layerwise(nn.Identity(), (IMAGE,), rows=1, store="disk")  # type: ignore[arg-type]


def test_deep_networks_do_not_exhaust_the_stack() -> None:
    net = made(nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(600))))
    with torch.no_grad():
        expected = net(numbers(1, 1, 9, 3))
    torch.testing.assert_close(run_layerwise(net, (numbers(1, 1, 9, 3),), rows=4), expected)


# -- on the virtual card --------------------------------------------------------------------------------------------


def peaks(run: Callable[[], Any]) -> tuple[int, int]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()


def test_a_latent_decoder_takes_far_less_on_the_card(gpu: VirtualGPU) -> None:
    vae = autoencoder(32, 64, groups=32).to(torch.float16).cuda()
    latents = torch.zeros(1, 4, 256, 256, dtype=torch.float16, device="cuda")
    with torch.no_grad():
        plain = peaks(lambda: vae.decode(latents))
    height = ChunkHeight(bytes=2 << 20)
    found = peaks(lambda: run_layerwise(vae.decode, (latents,), rows=height))
    hosted = peaks(lambda: run_layerwise(vae.decode, (latents,), rows=height, store=ChunkStore.HOST))
    assert found[1] < 0.6 * plain[1]
    assert hosted[0] < found[0] < 0.55 * plain[0]


def test_a_network_without_global_norms_takes_windows_alone(gpu: VirtualGPU) -> None:
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.Conv2d(16, 1, 1)).cuda().eval()
    image = torch.zeros(1, 3, 1024, 256, device="cuda")
    found, _ = peaks(lambda: run_layerwise(net, (image,), rows=16))
    layer = 16 * 1024 * 256 * 4
    output = 1024 * 256 * 4
    assert found < output + layer // 2  # the whole run takes three layers' outputs at a time
