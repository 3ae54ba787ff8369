"""Images as bytes: the same bits after normalisation, what is smaller, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.techniques.peaks import peak_bytes
from tests.techniques.samples import inference, output_of, profile_with
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import (
    AttachedProgram,
    Choice,
    Numerics,
    live_of,
    setting_from_plain,
    setting_to_plain,
)
from vramfit.techniques.half_inference import HalfInference, HalfInferenceSetting
from vramfit.techniques.mixed_precision import HalfType
from vramfit.techniques.uint8_inputs import (
    Uint8Inputs,
    Uint8InputsSetting,
    find_readers,
    normalised,
    normalised_on_device,
    to_bytes,
)
from vramfit.virtual.gpu import VirtualGPU

TECHNIQUE = Uint8Inputs()
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET = Uint8InputsSetting(mean=MEAN, std=STD)


def photos(count: int, side: int = 16) -> torch.Tensor:
    draw = torch.Generator().manual_seed(4)
    return torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=draw)


def on_host(
    images: torch.Tensor, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD
) -> torch.Tensor:
    """As torchvision does it: ToTensor, then Normalize (functional.to_tensor and functional.normalize)."""
    tensor = images.to(torch.float32).div(255)
    shape = (-1, 1, 1)
    return tensor.sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool, self.head = nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.stem(x)).relu())


class Skipping(Net):
    """Reads its input by itself too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x)).mean() + x.mean()


@pytest.mark.parametrize(
    ("mean", "std"), [(MEAN, STD), ((0.5,), (0.5,)), ((0.0, 0.1, 0.9), (1.0,)), ((0.13066,), (0.30812,))]
)
def test_bits_are_those_of_the_host_for_every_byte(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    setting = Uint8InputsSetting(mean=mean, std=std)
    assert torch.equal(normalised(every, setting), on_host(every, mean, std))
    assert torch.equal(to_bytes(on_host(every, mean, std), setting), every)


def test_other_layouts_and_divisors() -> None:
    images = photos(2)
    last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(normalised(last, IMAGENET), on_host(images))
    assert torch.equal(normalised(images[0], IMAGENET), on_host(images[0]))
    volume = images.unsqueeze(2)
    assert torch.equal(normalised(volume, IMAGENET)[:, :, 0], on_host(images))
    raw = Uint8InputsSetting(divisor=1.0)
    assert torch.equal(normalised(images, raw), images.float())
    assert torch.equal(to_bytes({"a": images.float(), "b": 3}, raw)["a"], images)


@torch.no_grad()
def test_a_model_takes_bytes_and_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    model, images = Net().eval(), photos(3)
    plain = model(on_host(images))
    assert find_readers(model, on_host(images)) == ("stem",)
    for sample in (None, on_host(images), on_host(images).to("meta")):
        if sample is not None and sample.is_meta:
            assert find_readers(copy.deepcopy(model).to("meta"), sample) == ("stem",)
            continue
        live = normalised_on_device(model, mean=MEAN, std=STD, sample=sample)
        assert torch.equal(model(images), plain)
        assert torch.equal(model(on_host(images)), plain), "what is float32 goes through"
        live.undo()
        assert type(model.stem) is nn.Conv2d


@torch.no_grad()
def test_a_model_that_reads_its_input_elsewhere_is_surrounded_as_a_whole() -> None:
    model, images = Skipping().eval(), photos(3)
    assert find_readers(model, on_host(images)) == ()
    plain = model(on_host(images))
    normalised_on_device(model, mean=MEAN, std=STD, sample=on_host(images))
    assert torch.equal(model(images), plain)


def test_a_workload_gives_the_same_bits() -> None:
    plain = inference(Net, lambda count: on_host(photos(count)))
    for modules in ((), ("stem",)):
        planned = TECHNIQUE.apply(plain, Uint8InputsSetting(mean=MEAN, std=STD, modules=modules))
        assert torch.equal(output_of(planned), output_of(plain))


def test_with_half_precision_it_is_normalised_in_float32_and_then_rounded() -> None:
    plain = inference(Net, lambda count: on_host(photos(count)))
    half = HalfInference().apply(plain, HalfInferenceSetting(dtype=HalfType.BFLOAT16))
    for modules in ((), ("stem",)):
        both = TECHNIQUE.apply(half, Uint8InputsSetting(mean=MEAN, std=STD, modules=modules))
        assert torch.equal(output_of(both), output_of(half))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (Uint8InputsSetting(std=(0.0,)), "std of uint8-inputs is 0"),
        (Uint8InputsSetting(divisor=0.0), "divisor of uint8-inputs is 0"),
        (Uint8InputsSetting(mean=(float("nan"),)), "mean of uint8-inputs is not finite"),
        (Uint8InputsSetting(modules=("stm",)), "no module 'stm'"),
    ],
)
def test_bad_settings_are_one_line(setting: Uint8InputsSetting, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TECHNIQUE.attach(AttachedProgram(Net(), None), setting)


def test_a_sample_of_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="the sample is of bytes"):
        normalised_on_device(nn.Conv2d(3, 4, 3), sample=torch.zeros(1, 3, 8, 8, dtype=torch.uint8))


def test_what_was_not_made_of_bytes_is_refused() -> None:
    other = inference(Net, lambda count: torch.randn(count, 3, 16, 16))
    planned = TECHNIQUE.apply(other, IMAGENET)
    state = planned.start("cpu")
    with pytest.raises(UsageError, match="no images that are made of bytes"):
        planned.run_step(state, planned.sizes)
    live = live_of(state)
    assert live is not None
    live.undo()
    assert live.preparing == []
    with pytest.raises(UsageError, match="has 3 values, and the images have 1 channels"):
        normalised(photos(1)[:, :1], IMAGENET)
    model = Net()
    with pytest.raises(UsageError, match="uint8-inputs is for inference"):
        AttachedProgram(model, torch.optim.SGD(model.parameters(), lr=0.1)).attach(
            [Choice(technique=TECHNIQUE, setting=IMAGENET)]
        )


def test_options_are_on_request_and_for_inference() -> None:
    assert TECHNIQUE.on_request
    model, images = Net().eval(), on_host(photos(2))
    assert list(TECHNIQUE.options(profile_with(model, images))) == [Uint8InputsSetting(modules=("stem",))]
    assert not list(TECHNIQUE.options(profile_with(model, images, trains=True)))
    assert setting_from_plain(TECHNIQUE, setting_to_plain(IMAGENET)) == IMAGENET
    assert TECHNIQUE.promise(IMAGENET).numerics is Numerics.BITWISE


def test_three_quarters_of_the_batch_are_saved_on_the_card(gpu: VirtualGPU) -> None:
    """While the model runs, after its first layer: the caller holds bytes, and nobody the float32 form."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.widen = nn.AvgPool2d(4), nn.Upsample(scale_factor=16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.widen(self.stem(x))

    images = photos(4, 256)
    plain = inference(Late, lambda count: on_host(images[:count]))
    planned = TECHNIQUE.apply(plain, Uint8InputsSetting(mean=MEAN, std=STD, modules=("stem",)))
    as_bytes = images.numel()
    assert peak_bytes(plain) - peak_bytes(planned) == 3 * as_bytes
    waiting = [images.cuda(), on_host(images).cuda()]
    assert [one.nbytes for one in waiting] == [as_bytes, 4 * as_bytes]
