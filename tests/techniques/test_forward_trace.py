"""What a watched pass says of modules, memory and who reads it."""

from __future__ import annotations

import gc

import torch
from torch import nn

from vramfit.techniques.core.forward_trace import trace_forward


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)
        self.inner = nn.Sequential(self.first, self.act)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        hidden = self.inner(x)
        self.kept = [hidden]
        return self.last(hidden + x), {"view": hidden.view(-1)}


def test_calls_reads_and_what_outlives_the_pass() -> None:
    model, x = Net(), torch.zeros(3, 4)
    trace = trace_forward(model, lambda: model(x), x)
    assert [call.path for call in trace.calls] == ["", "inner", "first", "act", "last"]
    root, inner, first, act, last = trace.calls
    assert (root.parent, inner.parent, first.parent, act.parent, last.parent) == (-1, 0, 1, 1, 0)
    assert trace.computing == {"", "first", "act", "last"}, "a Sequential computes nothing by itself"
    hidden = first.outputs[0]
    assert act.inputs[0].storage == act.outputs[0] == inner.outputs[0] == hidden
    assert act.inputs[0].shape == (3, 4) and act.inputs[0].dense
    given = root.inputs[0].storage
    assert trace.given == {given} and given not in trace.made and hidden in trace.made
    later = trace.read_later(hidden, act.ended)
    assert [trace.calls[read.call].path for read in later] == ["", ""], "the sum and the view"
    assert all(trace.inside(read, 0) and not trace.inside(read, 4) for read in later)
    assert hidden in trace.outlived and last.outputs[0] in trace.outlived
    assert last.inputs[0].storage not in trace.outlived


def test_nothing_is_left_on_the_model_and_nothing_is_kept_alive() -> None:
    model, x = Net(), torch.zeros(3, 4)
    trace = trace_forward(model, lambda: model(x), x)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.kept = []
    gc.collect()
    assert all(storage.expired() for storage in trace.made)


def test_spread_and_partial_inputs_are_not_dense() -> None:
    model = nn.ReLU()
    for x in (torch.zeros(1, 4).expand(3, 4), torch.zeros(4, 4)[:2]):
        trace = trace_forward(model, lambda x=x: model(x), x)  # type: ignore[misc]
        assert not trace.calls[0].inputs[0].dense
