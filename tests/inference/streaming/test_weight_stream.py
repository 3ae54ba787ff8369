"""Weights that come and go: the plain model's values whenever copies come, and copies ordered by events alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.inference.streaming.lanes import DelayedLane, WrittenLane
from torch import nn

from vramfit.inference.host_lane import CopyLane, Lane
from vramfit.inference.streaming.weight_stream import WeightStream
from vramfit.techniques import AttachedProgram
from vramfit.techniques.weight_streaming import attach_stream, streamed_layers


class Block(nn.Module):
    """Two layers and a norm, with a buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Calls(nn.Module):
    """Calls its blocks in a given order, and a tied head."""

    def __init__(self, count: int, order: list[int] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.order = list(range(count)) if order is None else order

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


@contextmanager
def streaming(
    model: nn.Module, lane: Lane | None = None, *, slots: int = 2, names: tuple[str, ...] = ()
) -> Iterator[WeightStream]:
    """A model whose blocks' weights come by a lane."""
    live = AttachedProgram(model, None, torch.device("cpu"))
    layers = streamed_layers(model, names)
    stream = WeightStream(torch.device("cpu"), len(layers), slots, lane=lane or CopyLane())
    attach_stream(live, stream, layers)
    try:
        yield stream
    finally:
        live.undo()


def _made(count: int = 5, order: list[int] | None = None) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Calls(count, order).eval(), torch.arange(12).view(2, 6)


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seed", range(3))
def test_delayed_copies_give_the_plain_models_values(slots: int, seed: int) -> None:
    model, ids = _made()
    wanted = model(ids)
    with streaming(model, DelayedLane(seed), slots=slots) as stream:
        for _ in range(3):
            assert torch.equal(model(ids), wanted)
    assert stream.counts.calls == dict.fromkeys(range(5), 3)


def test_without_events_delayed_copies_are_seen() -> None:
    model, ids = _made()
    wanted = model(ids)
    with streaming(model, DelayedLane(0, longest=2e-2, waits=False)):
        assert not torch.equal(model(ids), wanted)


@settings(max_examples=25, deadline=None)
@given(
    order=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    slots=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_layers_in_any_order_and_called_any_number_of_times(order: list[int], slots: int, seed: int) -> None:
    model, ids = _made(5, order)
    wanted = model(ids)
    with streaming(model, DelayedLane(seed, longest=3e-4), slots=slots):
        assert torch.equal(model(ids), wanted)
        model.order = order[::-1]  # another way than the one that was learned
        backwards = model(ids)
    assert torch.equal(model(ids), backwards)


@settings(max_examples=50, deadline=None)
@given(order=st.lists(st.integers(0, 5), min_size=1, max_size=12), slots=st.integers(1, 4))
def test_a_slot_is_filled_after_all_that_was_computed_from_it(order: list[int], slots: int) -> None:
    model, ids = _made(6, order)
    lane = WrittenLane()
    with streaming(model, lane, slots=slots):
        for block in model.blocks:
            for layer in (block.up, block.down):
                layer.register_forward_pre_hook(lambda layer, _: lane.compute_from(layer.weight))
        model(ids)
        model.order = order[::-1]
        model(ids)
    assert lane.used


def test_one_layer_that_is_called_by_another_gets_its_own_memory() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first, self.hidden = nn.Linear(8, 8), [inner]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(self.hidden[0](self.first(x)))

    torch.manual_seed(0)
    inner = nn.Linear(8, 8)
    model = nn.ModuleDict({"inner": inner, "outer": Outer(inner)}).eval()
    x = torch.rand(3, 8)
    wanted = model["outer"](x)
    with streaming(model, DelayedLane(0), slots=1, names=("inner", "outer")):
        assert torch.equal(model["outer"](x), wanted)
        assert torch.equal(model["outer"](x), wanted)


def test_a_part_of_a_layer_may_be_called_alone() -> None:
    model, _ = _made()
    x = torch.rand(2, 8)
    wanted = model.blocks[2].up(x)
    with streaming(model, DelayedLane(0)):
        assert torch.equal(model.blocks[2].up(x), wanted)


def test_weights_that_are_changed_between_calls_are_brought_anew() -> None:
    model, ids = _made()
    other, _ = _made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    with streaming(model, DelayedLane(0), slots=3):
        model(ids)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(ids), other(ids))


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 4)), min_size=1, max_size=20),
    slots=st.integers(2, 4),
)
def test_layers_whose_weights_are_changed_while_another_is_called(
    steps: list[tuple[int, int | None]], slots: int
) -> None:
    model, _ = _made()
    plain = copy.deepcopy(model)
    x = torch.rand(2, 8)
    changes: list[int] = []

    def change(*_: object) -> None:
        for number in changes:
            for one in (model, plain):
                one.blocks[number].up.weight.add_(1.0)

    with streaming(model, slots=slots), torch.no_grad():
        for block in model.blocks:
            block.norm.register_forward_hook(change)
        for number, changed in [*((number, None) for number in (*range(5), *range(5))), *steps]:
            changes[:] = () if changed in (None, number) else [changed]
            ours = model.blocks[number](x)
            assert torch.equal(ours, plain.blocks[number](x))


@pytest.mark.parametrize("surrounding", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_each_mode_of_autograd_and_from_one_to_the_next(surrounding: type) -> None:
    model, ids = _made()
    wanted = model(ids)
    with streaming(model, slots=2):
        with surrounding():
            assert torch.equal(model(ids), wanted)
        with torch.inference_mode():
            assert torch.equal(model(ids), wanted)
        with torch.no_grad():
            assert torch.equal(model(ids), wanted)


def test_an_error_inside_a_layer_leaves_its_parameters_in_place() -> None:
    model, ids = _made()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with streaming(model, DelayedLane(0)):
        with pytest.raises(RuntimeError):
            model.blocks[1](torch.rand(3, 5))
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
        model(ids)


def test_the_undo_leaves_the_model_as_it_was() -> None:
    model, ids = _made()
    model.blocks[1].train()
    kinds = [type(module) for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    identities = [id(one) for one in (*model.parameters(), *model.buffers())]
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    with streaming(model):
        model(ids)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [id(one) for one in (*model.parameters(), *model.buffers())] == identities
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_copy_of_a_streamed_model_streams_by_itself() -> None:
    model, ids = _made()
    wanted = model(ids)
    with streaming(model, DelayedLane(0)):
        model(ids)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.blocks[0].up.weight.add_(1)
        assert not torch.equal(twin(ids), wanted)
        assert torch.equal(twin(ids), twin(ids))
        assert torch.equal(model(ids), wanted)


def test_each_layer_crosses_once_in_each_pass_and_only_the_first_is_awaited() -> None:
    model, ids = _made()
    with streaming(model, slots=2) as stream:
        for _ in range(4):
            model(ids)
        each = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
        assert stream.counts.awaited == 1
        assert stream.counts.copies == 4 * 5 + 2  # and two ahead
        assert stream.counts.nbytes == stream.counts.copies * each


def test_all_layers_in_slots_cross_once() -> None:
    model, ids = _made()
    with streaming(model, slots=5) as stream:
        for _ in range(4):
            model(ids)
        assert stream.counts.copies == 5


def test_strides_and_shared_parameters_inside_a_layer_stay() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last)
            self.again = nn.Conv2d(3, 3, 3)
            self.again.weight = self.conv.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self.conv.weight.stride(), self.again.weight is self.conv.weight))
            return self.again(self.conv(x))

    seen: list[tuple[object, bool]] = []
    torch.manual_seed(0)
    model = nn.Sequential(Shared(), Shared()).eval()
    x = torch.rand(1, 3, 9, 9)
    wanted = model(x)
    with streaming(model, DelayedLane(0), slots=1, names=("0", "1")):
        assert torch.equal(model(x), wanted)
    assert set(seen) == {((27, 1, 9, 3), True)}
