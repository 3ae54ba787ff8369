"""Activations in place: the same gradients, half the memory, and nobody's tensor overwritten."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from tests.techniques.peaks import kept_bytes
from tests.techniques.toys import all_toys, classes, gradients, losses, numbers
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Numerics, Profile
from vramfit.techniques.in_place_activations import InPlaceActivations, InPlaceSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

ALL = InPlaceSetting(smooth=True)


class Critic(nn.Module):
    """Convolutions, norms and dropout in nested chains, with a skip connection around one of them."""

    def __init__(self, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), act())
        self.body = nn.Sequential(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)),
            act(),
            nn.Dropout(0.1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.InstanceNorm2d(8),
            nn.Dropout(0.1),
            act(),
        )
        self.head = nn.Sequential(act(), nn.Linear(8, 16), act(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.stem(x)
        return self.head((seen + self.body(seen)).permute(0, 2, 3, 1)).mean((1, 2))


def critic(act: Callable[[], nn.Module]) -> Workload:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Critic(act)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Workload(
        model=model,
        batch=lambda batch_size: (numbers(batch_size, 3, 8, 8), classes(10, batch_size)),
        sizes={"batch_size": 4},
        loss=loss,
        optimizer=torch.optim.AdamW,
    )


def chain(act: Callable[[], nn.Module], size: int = 64) -> Workload:
    """Six times a convolution, a batch norm and an activation, of 1 MiB of output each at batch 4."""
    return Workload(
        model=lambda: nn.Sequential(
            *(
                layer
                for _ in range(6)
                for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), act())
            )
        ),
        batch=lambda batch_size: torch.zeros(batch_size, 16, size, size),
        sizes={"batch_size": 4},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD,
    )


def count_in_place(model: nn.Module, x: torch.Tensor) -> int:
    """How many of its activations overwrite their input."""
    found = 0

    def look(module: nn.Module) -> None:
        nonlocal found
        found += bool(getattr(module, "inplace", False))

    kinds = {nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU}
    plain = {kind: kind.forward for kind in kinds}
    try:
        for kind in kinds:

            def forward(self: nn.Module, value: torch.Tensor, own: object = plain[kind]) -> torch.Tensor:
                look(self)
                return own(self, value)  # type: ignore[operator,no-any-return]

            kind.forward = forward  # type: ignore[method-assign]
        model(x)
    finally:
        for kind, own in plain.items():
            kind.forward = own  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU])
def test_gradients_of_exact_activations_are_the_same_bit_for_bit(act: Callable[[], nn.Module]) -> None:
    plain = critic(act)
    expected, found = (
        gradients(plain, steps=3),
        gradients(InPlaceActivations().apply(plain, InPlaceSetting()), steps=3),
    )
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


@pytest.mark.parametrize("act", [nn.ELU, nn.CELU, nn.SELU])
def test_gradients_of_smooth_activations_are_the_same_but_for_rounding(act: Callable[[], nn.Module]) -> None:
    plain = critic(act)
    expected, found = gradients(plain), gradients(InPlaceActivations().apply(plain, ALL))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("toy", ["mlp", "frozen-trunk"])
def test_toys_train_the_same_bit_for_bit(toy: str) -> None:
    plain = all_toys()[toy]
    applied = InPlaceActivations().apply(plain, InPlaceSetting())
    assert losses(plain, steps=5) == losses(applied, steps=5)


def test_all_that_can_run_in_place_do() -> None:
    live, x = AttachedProgram(Critic(nn.LeakyReLU), None), numbers(2, 3, 8, 8)
    assert count_in_place(live.model, x) == 0
    InPlaceActivations().attach(live, InPlaceSetting())
    assert count_in_place(live.model, x) == 4, "all but the one that is given its chain's input"
    assert count_in_place(live.model.eval(), x) == 4
    assert not any(getattr(module, "inplace", False) for module in live.model.modules()), "only while it runs"
    live.undo()
    assert count_in_place(live.model, x) == 0


def test_a_chain_that_is_run_layer_by_layer_keeps_its_taps() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LeakyReLU(), nn.Conv2d(4, 4, 3), nn.LeakyReLU())
    x = numbers(2, 3, 8, 8)

    def taps() -> list[torch.Tensor]:
        seen, value = [], x
        for layer in layers:
            value = layer(value)
            seen.append(value)
        return seen

    expected = [tap.detach().clone() for tap in taps()]
    InPlaceActivations().attach(AttachedProgram(layers, None), InPlaceSetting())
    assert all(torch.equal(a, b) for a, b in zip(taps(), expected, strict=True))


@pytest.mark.parametrize("where", ["0", "1", "2"])
def test_what_a_hook_saw_is_not_overwritten(where: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Dropout(0.5), nn.LeakyReLU()).eval()
    InPlaceActivations().attach(AttachedProgram(model, None), InPlaceSetting())
    seen: list[torch.Tensor] = []
    inner = model[0][0] if where == "0" else model.get_submodule(where)  # type: ignore[index]
    if where == "2":
        inner.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    else:
        inner.register_forward_hook(lambda _m, _i, output: seen.append(output))
    x = numbers(3, 4)
    model(x)
    assert torch.equal(seen[0], model[0](x)), "as the linear layer made it"


def test_layers_whose_output_another_needs_come_before_nothing_in_place() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).sigmoid()  # keeps its output

    model = nn.Sequential(Own(4, 4), nn.LeakyReLU(), nn.Sigmoid(), nn.ReLU())
    with pytest.raises(UsageError, match="no activation can run in place"):
        InPlaceActivations().attach(AttachedProgram(model, None), InPlaceSetting())


def test_an_activation_that_falls_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(-0.1))
    with pytest.raises(UsageError, match="no activation"):
        InPlaceActivations().attach(AttachedProgram(model, None), InPlaceSetting())


def test_names_copies_and_pickles_stay() -> None:
    model, x = Critic(nn.LeakyReLU).eval(), numbers(2, 3, 8, 8)
    keys = list(model.state_dict())
    live = AttachedProgram(model, None)
    InPlaceActivations().attach(live, InPlaceSetting())
    assert list(model.state_dict()) == keys
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert count_in_place(other, x) == 4
        assert torch.equal(other(x), model(x))
    live.undo()
    assert type(model.stem) is nn.Sequential


@pytest.mark.parametrize(("act", "saved"), [(nn.LeakyReLU, 6), (nn.ELU, 6), (nn.ReLU, 0)])
def test_one_tensor_of_two_is_left_on_the_card(
    gpu: VirtualGPU, act: Callable[[], nn.Module], saved: int
) -> None:
    plain = chain(act)
    applied = InPlaceActivations().apply(plain, ALL)
    assert kept_bytes(plain) - kept_bytes(applied) == saved << 20


def test_options_are_what_could_pay() -> None:
    technique = InPlaceActivations()

    def options(model: nn.Module, *, trains: bool = True) -> list[InPlaceSetting]:
        profile = Profile(model=model, optimizer=None, sizes={}, trains=trains)
        return list(technique.options(profile))

    assert options(Critic(nn.LeakyReLU)) == [InPlaceSetting()]
    assert options(Critic(nn.ELU)) == [ALL]
    assert options(Critic(nn.ReLU)) == []
    assert options(Critic(nn.ReLU), trains=False) == [InPlaceSetting()]
    assert options(nn.Linear(2, 2)) == []
    assert technique.promise(InPlaceSetting()).numerics is Numerics.BITWISE
    assert technique.promise(ALL).numerics is Numerics.ROUNDING
