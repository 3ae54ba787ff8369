"""Channels last: layouts, results, and what it costs."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.techniques.peaks import peak_bytes
from tests.techniques.toys import all_toys, gradients, numbers, sgd
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Numerics, Profile
from vramfit.techniques.channels_last import ChannelsLast, ChannelsLastSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

PLAIN = ChannelsLastSetting()


class Net(nn.Module):
    """Two convolutions that note the layout of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, pair: dict[str, torch.Tensor]) -> torch.Tensor:
        self.last = pair["image"].is_contiguous(memory_format=torch.channels_last)
        return self.b(self.a(pair["image"]).relu()) * pair["scale"]


def attached(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **setting: bool
) -> AttachedProgram:
    live = AttachedProgram(model, optimizer)
    ChannelsLast().attach(live, ChannelsLastSetting(**setting))
    return live


def is_last(tensor: torch.Tensor) -> bool:
    order = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=order)


@pytest.mark.parametrize("toy", ["batch-norm", "unet-3d"])
def test_gradients_are_the_same_but_for_rounding(toy: str) -> None:
    plain = all_toys()[toy]
    expected, found = gradients(plain, steps=2), gradients(ChannelsLast().apply(plain, PLAIN), steps=2)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_filters_and_inputs_are_converted_and_converted_back() -> None:
    model, pair = Net(), {"image": numbers(2, 3, 8, 8), "scale": torch.ones(())}
    expected = model(pair)
    live = attached(model)
    torch.testing.assert_close(model(pair), expected)
    assert model.last and is_last(model.a.weight) and is_last(model.b.weight)
    live.undo()
    assert torch.equal(model(pair), expected)
    assert not model.last and model.b.weight.is_contiguous()
    attached(model, inputs=False)
    model(pair)
    assert not model.last


def test_gradients_and_states_of_a_running_program_follow() -> None:
    model = Net()
    optimizer = sgd(model.parameters())
    model({"image": numbers(2, 3, 8, 8), "scale": torch.ones(())}).sum().backward()
    optimizer.step()
    live = attached(model, optimizer)
    momentum = optimizer.state[model.b.weight]["momentum_buffer"]
    assert is_last(momentum) and model.b.weight.grad is not None and is_last(model.b.weight.grad)
    optimizer.step()
    live.undo()
    assert optimizer.state[model.b.weight]["momentum_buffer"].is_contiguous()


def test_a_parametrized_filter_is_converted() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3))
    attached(model)
    assert is_last(model.parametrizations.weight.original1)


def test_names_copies_and_pickles_stay() -> None:
    model, pair = Net(), {"image": numbers(2, 3, 8, 8), "scale": torch.ones(())}
    keys, parameters = list(model.state_dict()), list(model.parameters())
    attached(model)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(pair), model(pair)) and other.last and is_last(other.b.weight)


def test_a_model_without_images_is_refused() -> None:
    with pytest.raises(UsageError, match="no convolutions in two or three dimensions"):
        attached(nn.Conv1d(3, 4, 3))


def test_it_costs_the_copy_of_the_input_on_the_card(gpu: VirtualGPU) -> None:
    plain = Workload(
        model=lambda: nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(4))),
        batch=lambda batch_size: torch.zeros(batch_size, 16, 64, 64),
        sizes={"batch_size": 4},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=sgd,
    )
    converted = ChannelsLast().apply(plain, PLAIN)
    assert is_last(next(converted.start("cuda").model.parameters()))
    assert peak_bytes(converted) - peak_bytes(plain) == 4 * 16 * 64 * 64 * 4
    ready = Workload(
        model=plain.model,
        batch=lambda batch_size: plain.batch(batch_size=batch_size).contiguous(
            memory_format=torch.channels_last
        ),
        sizes=plain.sizes,
        loss=plain.loss,
        optimizer=sgd,
    )
    assert peak_bytes(ChannelsLast().apply(ready, PLAIN)) == peak_bytes(plain)


def test_options_are_for_tensor_cores() -> None:
    def count(model: nn.Module, device: str = "cuda", capability: tuple[int, int] = (8, 0)) -> int:
        profile = Profile(
            model=model, optimizer=None, sizes={}, trains=True, device_type=device, capability=capability
        )
        return len(list(ChannelsLast().options(profile)))

    assert count(Net()) == 1
    assert count(Net(), "cpu") == count(Net(), capability=(6, 1)) == count(nn.Linear(2, 2)) == 0
    assert ChannelsLast().promise(PLAIN).numerics is Numerics.ROUNDING
