"""What a pass or a step writes outside of parameters: each kind is seen, and put back."""

from __future__ import annotations

import argparse
import array
import queue
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vramfit.training_state.container_kinds import MAPPING
from vramfit.training_state.forward_state import ForwardState
from vramfit.training_state.reach import reached_from
from vramfit.training_state.state_notes import FarNote, StateNote

TABLE = np.zeros(2)
MEMORY = torch.zeros(2)
settings = types.ModuleType("settings")
settings.calls = 0


class Slotted:
    """Its one attribute lies in no dictionary."""

    __slots__ = ("calls", "more")

    def __init__(self) -> None:
        self.calls = 0


class Shared:
    """What every model writes to."""

    calls = 0
    recent: list[int] = []  # noqa: RUF012  # programs do it


@torch.no_grad()
def _averaged(model: Writer, seen: list[int] = []) -> None:  # noqa: B006  # programs do it
    global MEMORY
    seen.append(1)
    MEMORY = MEMORY + 1


def _closing_over() -> Callable[[], None]:
    last = torch.zeros(2)

    def write() -> None:
        nonlocal last
        last = last + 1

    return write


class Static:
    """Its function belongs to no object."""

    @staticmethod
    def write(_model: object) -> None:
        settings.calls += 1


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
        self.options = argparse.Namespace(calls=0)
        self.waiting: queue.Queue[int] = queue.Queue()
        self.closing_over = _closing_over()
        self.deeper = {"a": [{"b": [{"c": [{"d": [{"e": 0}]}]}]}]}
        self.kinds = [Shared]
        self.frozen = nn.Embedding(2, 2).requires_grad_(False)
        self.growing = torch.zeros(2)
        self.register_buffer("unknown", torch.tensor([0.0, float("nan")]))

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
    "attributes of an argparse.Namespace": lambda model: _count(model.options),
    "queue of Python": lambda model: model.waiting.put(1),
    "variable of a closure": lambda model: model.closing_over(),
    "global and default, behind a decorator of torch": lambda model: _averaged(model),
    "name in a module of the program": Static.write,
    "list of a class, replaced": lambda model: setattr(Shared, "recent", [*Shared.recent, 1]),
    "new attribute of a class": lambda model: setattr(Shared, "more", 1),
    "slot that was empty": lambda model: setattr(model.slotted, "more", 1),
    "frozen parameter, replaced": lambda model: setattr(
        model.frozen, "weight", nn.Parameter(model.frozen.weight + 1, requires_grad=False)
    ),
    "tensor of another size": lambda model: setattr(model.growing, "data", torch.ones(3)),
    "value beside NaN": lambda model: model.unknown.data[0].add_(1),
    "very deep inside": lambda model: _add(model.deeper["a"][0]["b"][0]["c"][0]["d"][0], "e"),
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


@pytest.mark.parametrize("kind", WRITES)
def test_a_step_that_is_put_back_leaves_none_of_it(kind: str) -> None:
    """The same walk and the same notes, as whole steps are taken back."""
    model = Writer(WRITES[kind])

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).sum()

    reached = reached_from([model, loss])
    before = ForwardState(model, loss)
    far = None if reached.far is None else FarNote(reached.far)
    note = StateNote(reached, reached.tensors, (), torch.device("cpu"), arrays=reached.arrays)
    model(torch.ones(1, 2))
    assert before.written()
    note.restore()
    assert far is not None
    is_far = kind == "end of a long list"  # which is compared, and not copied
    assert bool(before.written()) is is_far
    assert far.differs() is is_far
    before.restore()


def test_a_function_counts_in_its_own_attribute() -> None:
    def loss(inputs: torch.Tensor) -> torch.Tensor:
        loss.calls += 1  # type: ignore[attr-defined]
        return inputs.sum()

    loss.calls = 0  # type: ignore[attr-defined]
    reached = reached_from([loss])
    assert any(one is loss.__dict__ for one in reached.of(MAPPING))
    note = StateNote(reached, (), (), torch.device("cpu"))
    loss(torch.ones(1))
    note.restore()
    assert loss.calls == 0  # type: ignore[attr-defined]


def test_what_a_dictionary_forbids_is_put_back_all_the_same() -> None:
    class Strict(OrderedDict[str, int]):
        def update(self, *_: object, **__: object) -> None:
            raise TypeError("not that")

        clear = update

    model = Writer(lambda model: _add(model.strict, "calls"))
    model.strict = Strict()
    model.strict["calls"] = 0
    state = ForwardState(model)
    model(torch.ones(1, 2))
    state.restore()
    assert model.strict["calls"] == 0


class Registry(OrderedDict[str, type]):
    """Makes an object of what it holds, as the activations of transformers do (``ACT2FN``)."""

    def __getitem__(self, name: str) -> object:
        return super().__getitem__(name)()


class Wrapped(dict[str, type]):
    def items(self) -> Any:
        return [(name, kind()) for name, kind in super().items()]

    __getitem__ = Registry.__getitem__


class Listed(list[type]):
    def __iter__(self) -> Any:
        return iter([kind() for kind in super().__iter__()])


class Grouped(set[type]):
    def __iter__(self) -> Any:
        return iter([kind() for kind in super().__iter__()])


class Queued(deque[type]):
    def __iter__(self) -> Any:
        return iter([kind() for kind in super().__iter__()])


GIVING = {
    "ordered": lambda: Registry(act=nn.ReLU),
    "dictionary": lambda: Wrapped(act=nn.ReLU),
    "list": lambda: Listed([nn.ReLU]),
    "set": lambda: Grouped([nn.ReLU]),
    "deque": lambda: Queued([nn.ReLU]),
}


def held(container: Any) -> list[Any]:
    """What it holds, whatever it gives."""
    base = next(base for base in (OrderedDict, dict, list, deque, set) if isinstance(container, base))
    return list(base.items(container) if issubclass(base, dict) else base.__iter__(container))


@pytest.mark.parametrize("kind", GIVING)
def test_what_gives_something_else_than_it_holds_is_left_as_it_is(kind: str) -> None:
    """Both users: nothing is written where a pass writes nothing, and what is written is put back."""
    container = GIVING[kind]()
    before = held(container)
    base = OrderedDict if kind == "ordered" else dict
    add: Any = {"list": list.append, "deque": deque.append, "set": set.add}.get(
        kind, lambda owner, value: base.__setitem__(owner, "more", value)
    )
    model = Writer(lambda model: None)
    model.registry = container
    state = ForwardState(model, lambda model, inputs: model(inputs).sum())
    model(torch.ones(1, 2))
    assert not state.written()
    state.restore()
    assert held(container) == before
    reached = reached_from([model])
    note = StateNote(reached, (), (), torch.device("cpu"))
    assert not note.containers.differs()
    add(container, nn.Tanh)
    assert note.containers.differs()
    note.restore()
    assert held(container) == before
    add(container, nn.Tanh)
    state.restore()
    assert held(container) == before


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
