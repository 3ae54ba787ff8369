"""What a forward pass writes outside of parameters: each kind is seen, and put back."""

from __future__ import annotations

import array
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from vramfit.techniques.core.forward_state import ForwardState

TABLE = np.zeros(2)


class Slotted:
    """Its one attribute lies in no dictionary."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Shared:
    """What every model writes to."""

    calls = 0


class Writer(nn.Module):
    """Calls what writes, then a layer."""

    calls = 0

    def __init__(self, write: Callable[[Writer], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.write = write
        self.numbers = np.zeros(2)
        self.doubles = array.array("d", [0.0])
        self.bits = bytearray(2)
        self.view = memoryview(bytearray(2))
        self.slotted = Slotted()
        self.namespace = types.SimpleNamespace(calls=0)
        self.default: defaultdict[str, int] = defaultdict(int)
        self.ordered: OrderedDict[str, int] = OrderedDict()
        self.counter: Counter[str] = Counter()
        self.recent: deque[int] = deque([1, 2, 3], maxlen=3)
        self.nested = {"a": [{"b": [{"c": 0}]}]}
        self.bank = [torch.zeros(2)] * 12_000 + [torch.zeros(2)]
        self.scale = lambda: 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return self.layer(inputs)


def _add(values: object, key: object = 0) -> None:
    values[key] += 1  # type: ignore[index]


def _count(owner: object) -> None:
    owner.calls = getattr(owner, "calls", 0) + 1  # type: ignore[attr-defined]


WRITES: dict[str, Callable[[Writer], object]] = {
    "array of NumPy": lambda model: _add(model.numbers),
    "array of Python": lambda model: _add(model.doubles),
    "bytes": lambda model: _add(model.bits),
    "view of memory": lambda model: _add(model.view),
    "array that a function names": lambda model: _add(TABLE),
    "slot": lambda model: _count(model.slotted),
    "namespace": lambda model: _count(model.namespace),
    "attribute of the model's class": lambda model: _count(type(model)),
    "attribute of another class": lambda model: _count(Shared),
    "attribute of a function": lambda model: _count(model.scale),
    "new key of a defaultdict": lambda model: _add(model.default, "calls"),
    "new key of an OrderedDict": lambda model: model.ordered.update(calls=1),
    "counter": lambda model: model.counter.update(["calls"]),
    "queue that is full": lambda model: model.recent.append(1),
    "end of a long list": lambda model: model.bank[-1].add_(1),
    "deep inside": lambda model: _add(model.nested["a"][0]["b"][0], "c"),
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_a_pass_writes_is_seen_and_put_back(kind: str) -> None:
    model = Writer(WRITES[kind])
    state = ForwardState(model, lambda model, inputs: model(inputs).sum())
    assert not state.written()
    model(torch.ones(1, 2))
    assert state.written()
    state.restore()
    assert not state.written()


READ_ONLY = {
    "broadcast": lambda: np.broadcast_to(np.zeros(1), (3,)),
    "from bytes": lambda: np.frombuffer(b"abcd", dtype=np.uint8),
    "strided view": lambda: memoryview(bytearray(4))[::2],
    "empty view": lambda: memoryview(bytearray()),
    "bytes": lambda: memoryview(b"abcd"),
}


@pytest.mark.parametrize("kind", READ_ONLY)
def test_arrays_that_cannot_be_written_are_left_alone(kind: str) -> None:
    model = Writer(lambda model: model.namespace)
    model.table = READ_ONLY[kind]()
    state = ForwardState(model, lambda model, inputs: model(inputs).sum())
    model(torch.ones(1, 2))
    state.restore()
    assert not state.written()
