"""Which layers stay on the card: as many as fit, by the virtual GPU's own count, and figures where none do."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import find_gpu
from vramfit.inference.streaming.weight_placement import WeightPlacement
from vramfit.planner import placement_trial
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.placement_trial import PlacementQuestion, candidate_layers, found_placement, spread
from vramfit.planner.planner_job import DeviceMemory

CARD = find_gpu("RTX 4090")
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks of different sizes, one of which is called again and again, an embedding and a head."""

    def __init__(self, inner: tuple[int, ...], again: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 512)
        self.blocks = nn.ModuleList(Block(512, one) for one in inner)
        self.head = nn.Linear(512, 4000, bias=False)
        self.again = again

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(self.again):
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x[:, -1])


EQUAL, UNEQUAL = (4096,) * 6, (4096, 8192, 3072, 4096, 6144, 3072)


def find(
    budget: int, model: Callable[[], nn.Module], never: bool = False, slots: int | None = None
) -> WeightPlacement:
    question = PlacementQuestion(example=(torch.zeros(8, 64, dtype=torch.long),), never=never, slots=slots)
    memory = DeviceMemory(device="cuda", gpu=CARD, budget=budget)
    return found_placement(VirtualBackend(CARD), model, question, memory)


def reserved(model: Callable[[], nn.Module], streamed: tuple[str, ...], slots: int) -> int:
    """What torch reserves with these layers on the host."""
    memory = DeviceMemory(device="cuda", gpu=CARD, budget=1 << 40)
    question = PlacementQuestion(example=(torch.zeros(8, 64, dtype=torch.long),))
    search = placement_trial._Search(VirtualBackend(CARD), model, question, memory, lambda _: None)
    return search._run(streamed, slots).reserved


@pytest.mark.parametrize("inner", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_what_is_found_fits_and_no_layer_more_does(inner: tuple[int, ...]) -> None:
    def model() -> nn.Module:
        return Stack(inner).eval()

    layers, _ = candidate_layers(model())
    least, most = reserved(model, tuple(layers), 2), reserved(model, (), 0)
    for budget in (random.Random(0).randint(least, most), most - 1):
        found = find(budget, model, slots=2)
        assert found.peak_reserved_bytes <= budget
        assert found.peak_reserved_bytes == reserved(model, found.streamed, found.slots)
        one_of_each_size = {layers[name]: name for name in found.streamed}.values()
        for name in one_of_each_size if len(found.streamed) > 2 else ():
            rest = tuple(one for one in found.streamed if one != name)
            assert reserved(model, rest, 2) > budget


def test_all_stay_where_all_fit() -> None:
    found = find(400 * MIB, lambda: Stack(EQUAL).eval())
    assert (found.streamed, found.slots, found.carried_bytes, found.runs) == ((), 0, 0, 1)


def test_one_slot_where_two_do_not_fit() -> None:
    def model() -> nn.Module:
        return Stack(EQUAL).eval()

    layers, _ = candidate_layers(model())
    found = find(reserved(model, tuple(layers), 2) - 1, model)
    assert found.slots == 1


def test_what_is_called_most_often_for_its_bytes_stays_first() -> None:
    def model() -> nn.Module:
        return Stack(EQUAL, again=5).eval()

    layers, _ = candidate_layers(model())
    found = find(reserved(model, tuple(layers), 2) + 16 * MIB, model)
    calls = {layer.name: layer.calls for layer in found.layers}
    assert calls["blocks.0"] == 5
    assert "blocks.0" not in found.streamed


def test_the_figures_add_up() -> None:
    found = find(90 * MIB, lambda: Stack(EQUAL).eval())
    sizes = {layer.name: layer.nbytes for layer in found.layers}
    assert sizes == {**{f"blocks.{n}": 2 * 512 * 4096 * 4 for n in range(6)}, "head": 512 * 4000 * 4}
    assert found.other_bytes == 1000 * 512 * 4
    assert found.weight_bytes == sum(parameter.nbytes for parameter in Stack(EQUAL).parameters())
    # As many bytes cross as wait, but for what stays in a slot from the end of one pass to the next.
    assert found.carried_bytes == found.streamed_bytes
    assert found.transfer_seconds == found.carried_bytes / CARD.host_link


def test_a_budget_below_one_layer_and_one_that_is_too_small_are_said_with_figures() -> None:
    def model() -> nn.Module:
        return Stack(EQUAL).eval()

    with pytest.raises(
        UsageError, match=r"a budget of 3\.00 MiB is below the weights of one layer: blocks\.0 has 16"
    ):
        find(3 * MIB, model)
    with pytest.raises(UsageError, match=r"with 1 of 7 layers on the card at once the example reserves \d+"):
        find(17 * MIB, model)
    with pytest.raises(
        UsageError,
        match=r"weights of 105\.77 MiB, 25\.13 MiB of .* in segments .* more than the budget of 100\.00 MiB",
    ):
        find(100 * MIB, model, never=True)


def test_a_program_that_reads_a_heads_weights_itself_keeps_the_head() -> None:
    class Tied(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.blocks[1](self.blocks[0](self.embed(ids)))
            return torch.nn.functional.linear(x, self.head.weight)

    found = find(80 * MIB, lambda: Tied((4096,) * 4).eval())
    assert "head" not in {layer.name for layer in found.layers}


def test_candidates_are_blocks_and_large_modules_but_not_the_first() -> None:
    layers, singles = candidate_layers(Stack(EQUAL))
    assert (list(layers), singles) == ([*(f"blocks.{n}" for n in range(6)), "head"], {"head"})
    layers, singles = candidate_layers(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    assert list(layers) == ["0", "1", "2"]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 33])
def test_each_beginning_of_the_order_is_spread(count: int) -> None:
    order = spread(count)
    assert sorted(order) == list(range(count))
    for end in range(2, count + 1):
        gaps = [b - a for a, b in zip(sorted(order[:end]), sorted(order[:end])[1:], strict=False)]
        assert max(gaps) <= 2 * -(-count // end) + 1
