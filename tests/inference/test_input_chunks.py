"""Calls in chunks: equal to the whole, in any containers, with no more than the outputs and one chunk."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.input_chunks import ChunkSettings, call_in_chunks
from vramfit.virtual.gpu import VirtualGPU


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Outputs:
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]
    table: torch.Tensor
    name: str


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3)).double().eval()


def run(function: Any, *args: Any, out: Any = None, named: Any = None, **settings: Any) -> Any:
    return call_in_chunks(function, (args, dict(named or {})), ChunkSettings(**settings), out=out)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_it_equals_the_whole(size: int) -> None:
    model, x = net(), torch.randn(7, 6, dtype=torch.double)
    torch.testing.assert_close(run(model, x, size=size), model(x).detach(), rtol=0, atol=1e-15)


def test_containers_are_rebuilt_and_arguments_without_the_size_go_whole() -> None:
    table = torch.randn(5)
    x = torch.randn(6, 4)

    def function(pair: Pair, scale: torch.Tensor, *, bias: dict[str, Any]) -> Outputs:
        assert scale.shape == (3, 1, 4) and bias["row"].shape == (1, 4)
        y = pair.left * pair.right * scale[0] + bias["row"] + bias["each"][:, None]
        return Outputs(logits=y, states=(y, y + 1), table=table, name="x")

    arguments = (Pair(x, x + 1), torch.randn(3, 1, 4))
    named = {"bias": {"row": torch.randn(1, 4), "each": torch.randn(6), "flag": None}}
    found = run(function, *arguments, named=named, size=4)
    expected = function(*arguments, **named)
    assert isinstance(found, Outputs) and found.table is table and found.name == "x"
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.states[1], expected.states[1])
    assert found.states[0] is found.logits  # one tensor stays one


def test_the_sequence_can_be_cut_and_the_layout_stays() -> None:
    x = torch.randn(2, 9, 4)
    found = run(lambda x: (x * 2).transpose(1, 2).contiguous().transpose(1, 2), x, size=4, dim=1)
    assert torch.equal(found, x * 2) and found.stride() == (36, 1, 9)
    assert torch.equal(run(lambda x: x + 1, x, size=3, dim=-1), x + 1)


def test_an_argument_that_only_has_the_size_is_named() -> None:
    x, table = torch.randn(5, 4), torch.randn(5, 4)
    function = lambda x, table: x @ table.T  # noqa: E731
    with pytest.raises(UsageError, match=r"depend on other entries.*name in whole="):
        run(function, x, table, size=2)
    torch.testing.assert_close(run(function, x, table, size=2, whole=("1",)), x @ table.T)


def test_outputs_go_where_they_are_given() -> None:
    model, x = net(), torch.randn(5, 6, dtype=torch.double)
    room = {"y": torch.full((5, 3), -1.0, dtype=torch.double)}
    found = run(lambda x: {"y": model(x)}, x, size=2, out=room)
    assert found["y"] is room["y"] and torch.allclose(room["y"], model(x).detach())
    with pytest.raises(UsageError, match=r"out.y is torch.float32 of shape \[5, 3\]"):
        run(lambda x: {"y": model(x)}, x, size=2, out={"y": torch.empty(5, 3)})
    with pytest.raises(UsageError, match="out has z, which is no output"):
        run(lambda x: {"y": model(x)}, x, size=2, out={**room, "z": room["y"]})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.sum(), r"the output of shape \[\] for 2 entries has no entry for each"),
        (lambda x: {"y": x, "loss": x.mean()}, r"output loss of shape \[\]"),
        (lambda x: x - x.mean(0), "depend on other entries of the batch"),
        (lambda x: x.flip(0), "depend on other entries"),
        (lambda x: x.cumsum(0), "depend on other entries"),
        (lambda x: x + torch.arange(len(x))[:, None], "depend on where it stands"),
        (lambda x: x / len(x), "depend on where it stands"),
        (lambda x: x + torch.rand(1), "two equal calls give different outputs"),
        (nn.BatchNorm1d(4), "the model is a BatchNorm1d that normalises with the statistics"),
        (nn.Sequential(nn.Dropout(0.5)), "two equal calls give different outputs"),
    ],
)
def test_what_couples_entries_is_refused(function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(function, torch.randn(6, 4), size=2)


def test_without_the_trial_outputs_that_cannot_be_joined_are_refused() -> None:
    for function in (lambda x: x.sum(), lambda x: float(x[0, 0])):
        with pytest.raises(UsageError, match="chunks cannot be joined"):
            run(function, torch.randn(6, 4), size=2, check=False)


def test_the_trial_names_the_part_and_leaves_no_trace() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attend = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.first(x)
            return x + self.attend(x, x, x)[0]

    model, x = Mixed().eval(), torch.randn(3, 8, 4)
    state = torch.get_rng_state()
    with pytest.raises(UsageError, match=r"along dimension 1.*first in attend, a MultiheadAttention"):
        run(model, x, size=2, dim=1)
    assert float(model.calls) == 0 and torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(run(model, x, size=2), model(x).detach())


def test_bad_input_is_one_line() -> None:
    for settings, message in (({"size": 0}, "size=0"), ({"size": 2, "dim": 9}, "dim=9")):
        with pytest.raises(UsageError, match=message):
            ChunkSettings(**settings)
    with pytest.raises(UsageError, match="no argument is a tensor with a dimension 3"):
        run(net(), torch.randn(2, 6), size=1, dim=3)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(UsageError, match="packed sequence"):
        run(lambda x: x, packed, size=1)
    assert run(lambda x: x + 1, torch.empty(0, 3), size=2).shape == (0, 3)
    for odd in (torch.eye(4).to_sparse(), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)):
        with pytest.raises(UsageError, match="sparse or nested"):
            run(lambda x: x, odd, size=1)
    with pytest.raises(UsageError, match="out is expanded"):
        call_in_chunks(
            lambda x: x, ((torch.ones(4, 2),), {}), ChunkSettings(size=2), out=torch.ones(1, 2).expand(4, 2)
        )


def test_outputs_that_are_no_tensors_are_those_of_every_chunk() -> None:
    x = torch.randn(6, 4)
    found = run(lambda x: {"x": x, "names": np.arange(3), "score": float("nan")}, x, size=4)
    assert (
        torch.equal(found["x"], x) and list(found["names"]) == [0, 1, 2] and found["score"] != found["score"]
    )
    with pytest.raises(UsageError, match="chunks cannot be joined") as told:
        run(lambda x: x.numpy(), x, size=4)
    assert "\n" not in str(told.value)


def test_the_card_holds_the_outputs_and_one_chunk(gpu: VirtualGPU) -> None:
    width, entries, size = 1 << 18, 16, 2
    x = torch.zeros(entries, width)  # on the host: 16 MiB
    function = lambda x: (x.exp() + 1, x.sum(1))  # noqa: E731
    settings = {"size": size, "device": torch.device("cuda")}
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(function, x, **settings)
    peak = torch.cuda.max_memory_allocated() - before
    row = 4 * width
    # All outputs, and of a chunk its input, the exponential and the output; all sums together take a block.
    assert peak == entries * row + 3 * size * row + 512
    del found
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    found = run(function, x, output_device=torch.device("cpu"), **settings)
    assert found[0].device.type == "cpu" and found[0].shape == (entries, width)
    assert torch.cuda.max_memory_allocated() - before == 3 * size * row
