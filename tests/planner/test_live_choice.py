"""Tiles and chunks chosen for live models, in a process of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.inference.arrays import Blank
from vramfit.inference.input_chunks import ChunkSettings
from vramfit.inference.tile_settings import TileSettings
from vramfit.planner.chunk_choice import choose_chunk
from vramfit.planner.packed_model import pack, unpacked
from vramfit.planner.tile_choice import choose_tile
from vramfit.units import MIB


class Tied(nn.Module):
    """Two layers that share a weight, a buffer that says where to look, and a function that no module names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)
        self.second.weight = self.first.weight
        self.register_buffer("places", torch.tensor([2, 0, 1]))
        self.scale = lambda x: 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.second(self.first(x))[:, self.places])  # type: ignore[index]


def test_a_packed_model_has_its_structure_and_not_its_weights(tmp_path: Path) -> None:
    model = Tied().eval().half()
    target = pack(model, (torch.rand(7, 300), {"kept": torch.arange(3)}), tmp_path)
    assert (tmp_path / "packed.pickle").stat().st_size < 20_000 < model.first.weight.nbytes
    workload = unpacked(target.rpartition(":")[0])
    made = workload.model()
    assert isinstance(made, nn.Module)
    assert made.second.weight is made.first.weight  # type: ignore[union-attr]
    assert made.places.tolist() == [2, 0, 1]  # type: ignore[union-attr,operator]
    assert not made.training
    assert {name: (value.shape, value.dtype) for name, value in made.state_dict().items()} == {
        name: (value.shape, value.dtype) for name, value in model.state_dict().items()
    }
    x, more = workload.batch(batch_size=1)
    assert x.shape == (7, 300)
    assert more["kept"].tolist() == [0, 1, 2]


def test_what_cannot_leave_the_process_is_told_in_a_line(tmp_path: Path) -> None:
    model = Tied()
    model.file = (tmp_path / "open").open("w")  # type: ignore[assignment]
    with pytest.raises(UsageError, match="cannot go to another process"):
        pack(model, torch.rand(1), tmp_path)
    model.file.close()  # type: ignore[operator,union-attr]


def _blur() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 3, 5, padding=2)).eval()


def test_a_tile_is_chosen_and_its_budget_kept() -> None:
    told: list[str] = []
    found = choose_tile(
        _blur(),
        Blank((3, 4000, 3000)),
        TileSettings(),
        budget="64MiB",
        gpu="RTX 4090",
        progress=told.append,
    )
    assert found.reserved_bytes <= 64 * MIB
    assert found.tiles > 1
    assert max(found.tile) < 3000
    assert 0 < len(told) <= found.runs  # what is told at once may be told over
    assert all(words.startswith("tiles of ") for words in told)
    # A budget that the smallest tile needs more than is refused with what it takes.
    with pytest.raises(UsageError, match=r"more than the budget of 1\.00 MiB"):
        choose_tile(_blur(), Blank((3, 64, 64)), TileSettings(), budget="1MiB", gpu="RTX 4090")


def test_a_size_of_chunks_is_chosen_from_python() -> None:
    model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 16)).eval()
    x = torch.rand(20_000, 256)
    call = ((x,), {})
    found = choose_chunk(model, call, ChunkSettings(size=1), budget="128MiB", gpu="RTX 4090")
    assert 1 < found.size < 20_000
    assert found.reserved_bytes <= 128 * MIB
    small = x[:500]
    torch.testing.assert_close(vramfit.chunked(model, small, size=found.size), model(small).detach())


def test_without_a_card_and_a_budget_nothing_can_be_chosen() -> None:
    with pytest.raises(UsageError, match="how large the parts"):
        vramfit.tiled(_blur(), torch.rand(3, 64, 64))
    with pytest.raises(UsageError, match="for a module"):
        vramfit.chunked(lambda x: x, torch.rand(4), budget="1GiB", gpu="RTX 4090")


class Scores(nn.Module):
    """Attention that is written out, so that pairs of tokens count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(100, 256), nn.Linear(256, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        scores = (x @ x.mT).masked_fill(attention_mask[:, None] == 0, -1e9)
        return self.out((scores.softmax(-1) @ x)[:, 0])  # type: ignore[no-any-return]


def test_batches_by_tokens_are_measured_and_keep_their_budget() -> None:
    lengths = [1000, 31, 30, 990, 250, 29, 240, 500] * 6
    budget = 48 * MIB
    told: list[str] = []
    plan = vramfit.batches(
        lengths, model=Scores().eval(), budget=budget, gpu="RTX 4090", max_padding=0.1, progress=told.append
    )
    shapes = {(len(batch), batch.length) for batch in plan}
    assert sorted(number for batch in plan for number in batch) == list(range(len(lengths)))
    assert max(items for items, _ in shapes) > min(items for items, _ in shapes)
    assert told
    longest = max(length for _, length in shapes)
    for items, length in shapes:
        with vramfit.VirtualGPU("RTX 4090", alloc_conf="", profile="none") as gpu, torch.no_grad():
            model = Scores().eval().cuda()
            ids = torch.zeros(items, length, dtype=torch.long, device="cuda")
            model(ids, torch.ones_like(ids))
        assert gpu.report.peak_reserved_bytes <= budget
    one_more = plan.largest(longest) + 1
    with vramfit.VirtualGPU("RTX 4090", alloc_conf="", profile="none") as gpu, torch.no_grad():
        model = Scores().eval().cuda()
        ids = torch.zeros(2 * one_more, longest, dtype=torch.long, device="cuda")
        model(ids, torch.ones_like(ids))
    assert gpu.report.peak_reserved_bytes > budget


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either peak= or model="),
        ({"model": nn.Linear(2, 2), "peak": lambda _items, _length: 1}, "either peak= or model="),
        ({"model": len, "budget": "1GiB"}, "is no module"),
        ({"model": nn.Linear(2, 2), "window": 4}, "shapes of a stream"),
        ({"peak": lambda _items, _length: 1}, "budget is missing"),
    ],
)
def test_batches_that_cannot_be_measured_are_told_in_a_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        vramfit.batches([3, 4], **arguments)
