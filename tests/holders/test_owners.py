"""Owner chains: each way of keeping a tensor alive is found and told in words."""

from __future__ import annotations

import collections
import gc
import importlib.util
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from vramfit.holders.chains import OwnerChain, Root
from vramfit.holders.heap import Heap
from vramfit.holders.owners import owner_chains, owners_in

WAYS = Path(__file__).with_name("ways.py")


pytestmark = pytest.mark.torch_versions  # each Python has its own heap


@pytest.fixture(autouse=True)
def ways() -> Iterator[ModuleType]:
    """The ways, anew. What the test process has already is set aside: searches pass over the whole heap."""
    gc.freeze()
    spec = importlib.util.spec_from_file_location("ways", WAYS)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["ways"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    vars(sys.modules.pop("ways")).clear()
    gc.collect()


def key(tensor: Tensor) -> int:
    """The storage of a tensor, without a variable that holds it."""
    return tensor.untyped_storage()._cdata


def storage_owners(storage: int, *, limit: int = 5, seconds: float = 5.0) -> tuple[OwnerChain, ...]:
    with Heap.now(seconds) as heap:
        return owners_in(heap, storage, limit=limit)


def first(storage: int) -> OwnerChain:
    return storage_owners(storage, limit=1)[0]


def test_each_way_is_found_and_named(ways: Any) -> None:
    """All at once: the heap is looked at once, which takes longer than a search."""
    storages = [way[0]() for way in ways.WAYS]
    with Heap.now(60) as heap:
        found = [owners_in(heap, storage, limit=1)[0] for storage in storages]
    for (way, root, text, through), chain in zip(ways.WAYS, found, strict=True):
        assert chain.root is root, way.__name__
        assert chain.text.startswith(f"ways.{text}"), way.__name__
        assert chain.through == through, way.__name__
        assert str(chain) == chain.text
        assert chain.links
    texts = {way[0].__name__: chain.text for way, chain in zip(ways.WAYS, found, strict=True)}
    assert texts["in_a_traceback"].endswith("local batch")
    assert texts["in_a_generator"].endswith("local batch")


def test_an_uncaught_exception_is_an_owner(monkeypatch: pytest.MonkeyPatch, ways: Any) -> None:
    storage = ways.in_a_traceback()
    gc.unfreeze()  # the owner is a module that was there before
    monkeypatch.setattr(sys, "last_exc", ways.held.pop("errors")[0], raising=False)
    with Heap.now(60) as heap:  # among all that other tests have left
        (chain,) = owners_in(heap, storage, limit=1)
    assert chain.text.startswith("sys.last_exc ValueError traceback ->")


def test_an_exception_being_handled_is_an_owner() -> None:
    found: list[int] = []

    def fails() -> None:
        batch = torch.ones(3)
        found.append(key(batch))
        raise ValueError("no")

    try:
        fails()
    except ValueError:
        chain = first(found[0])
    assert chain.text.startswith("the exception being handled, ValueError traceback -> ")
    assert chain.text.endswith("local batch")


def test_a_variable_of_a_running_function_is_an_owner() -> None:
    mine = torch.ones(3)
    chains = owner_chains(mine)
    assert (chains[0].root, chains[0].text.rpartition(" ")[2]) == (Root.LOCAL, "mine")


def test_a_search_keeps_nothing_that_is_running_alive() -> None:
    """With the collector off: no frame of the search may be part of a circle, for it leads to all that called it."""

    class Argument:
        pass

    def called(argument: Argument) -> None:
        with Heap.now(5.0):
            pass

    gc.collect()
    gc.disable()
    try:
        argument = Argument()
        alive = weakref.ref(argument)
        called(argument)
        del argument
        assert alive() is None
    finally:
        gc.enable()


def test_a_variable_of_another_thread_is_an_owner() -> None:
    ready, done, found = threading.Event(), threading.Event(), []

    def work() -> None:
        batch = torch.ones(3)
        found.append(key(batch))
        ready.set()
        done.wait(20)
        del batch

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(20)
    chain = first(found[0])
    done.set()
    thread.join()
    assert (chain.root, chain.text.rpartition(" ")[2]) == (Root.LOCAL, "batch")


def test_a_numpy_array_that_shares_the_memory_is_an_owner(ways: Any) -> None:
    """The collector knows neither arrays nor what they hold; a view of one leads there as well."""
    ways.held["arrays"] = []
    storages = []
    for cut in (slice(None), slice(1, None)):
        tensor = torch.ones(8, 8)
        storages.append(key(tensor))
        ways.held["arrays"].append(tensor.numpy()[cut].T)
        del tensor
    for index, storage in enumerate(storages):
        chain = first(storage)
        assert (chain.root, chain.text) == (Root.GLOBAL, f"ways.held['arrays'][{index}] -> numpy array")


def test_objects_that_tell_no_edge_leave_no_empty_arrows(ways: Any) -> None:
    tensor = torch.ones(8)
    storage = key(tensor)
    gone, ways.held["tee"] = itertools.tee(iter([tensor]))
    next(gone)
    del tensor, gone
    text = first(storage).text
    assert text.startswith("ways.held['tee'] -> itertools._tee")
    assert "-> ->" not in text
    assert not text.endswith("->")


def test_several_owners_are_told_shortest_first(ways: Any) -> None:
    storage = ways.in_a_list()
    ways.Registry.entries.append(ways.held["history"][1]["loss"])
    ways.first = [ways.held["history"][1]["loss"]]
    ways.second = ways.first[0]
    ways.held["also"] = ways.held["history"][1]["loss"]
    texts = [chain.text for chain in storage_owners(storage)]
    assert set(texts) == {"ways.first[0]", "ways.second", "ways.held['also']", "ways.Registry.entries[0]"}
    assert texts[0] == "ways.second"
    assert [chain.text for chain in storage_owners(storage, limit=1)] == texts[:1]


# -- nothing holds it ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
class TestCycles:
    def test_a_dead_cycle_is_told_with_its_objects(self, ways: Any) -> None:
        def make() -> int:
            one, two = ways.Bag(), ways.Bag()
            one.other, two.other = two, one  # type: ignore[attr-defined]
            one.tensor = torch.ones(3)  # type: ignore[attr-defined]
            return key(one.tensor)  # type: ignore[attr-defined]

        chain = first(make())
        assert chain.root is Root.DEAD_CYCLE
        assert "ways.Bag" in chain.cycle
        assert chain.text.startswith("dead reference cycle of ")
        assert chain.text.endswith(".tensor")

    def test_a_cycle_that_something_holds_is_not_dead(self, ways: Any) -> None:
        bag = ways.held["bag"] = ways.Bag()
        bag.me, bag.tensor = bag, torch.ones(3)
        storage = key(bag.tensor)
        del bag
        assert first(storage).text == "ways.held['bag'].tensor"

    def test_a_cycle_through_the_graph_is_never_collected(self, ways: Any) -> None:
        def make() -> tuple[int, weakref.ref[Tensor]]:
            value = torch.ones(3, requires_grad=True).sin()
            result = value.cos()
            value.me = result  # type: ignore[attr-defined]
            ways.held["break"] = weakref.ref(value)
            return key(result), weakref.ref(result)

        storage, reference = make()
        chain = first(storage)
        gc.collect()
        assert reference() is not None
        assert chain.root is Root.GRAPH_CYCLE
        assert "CosBackward0" in chain.cycle
        del ways.held["break"]().me

    def test_a_cycle_through_a_custom_function_is_collected(self, ways: Any) -> None:
        def make() -> tuple[int, weakref.ref[Tensor]]:
            output = ways.Keeps.apply(torch.ones(3, requires_grad=True))  # type: ignore[no-untyped-call]
            output.grad_fn.result = output
            return key(output), weakref.ref(output)

        storage, reference = make()
        chain = first(storage)
        gc.collect()
        assert reference() is None
        assert chain.root is Root.DEAD_CYCLE
        assert chain.text.endswith("KeepsBackward.result")

    def test_what_cpp_holds_is_said_to_be_hidden(self) -> None:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        value = [torch.ones(3)]
        storage = key(value[0])
        future.set_result(value)
        del value
        chain = first(storage)
        assert chain.root is Root.HIDDEN
        assert chain.text.startswith("held by C++ or a torch object")
        assert chain.text.endswith("list[0]")
        del future

    def test_the_search_itself_collects_nothing(self, ways: Any) -> None:
        gc.enable()
        bag = ways.Bag()
        bag.me, bag.tensor = bag, torch.ones(3)  # type: ignore[attr-defined]
        alive, storage = weakref.ref(bag), key(bag.tensor)  # type: ignore[attr-defined]
        gc.disable()
        del bag
        assert first(storage).root is Root.DEAD_CYCLE
        assert alive() is not None
        assert not gc.isenabled()


# -- it changes nothing, and nothing disturbs it -----------------------------------------------------------------------


def test_nothing_is_kept_alive(ways: Any) -> None:
    storage = ways.in_a_graph()
    tensor = weakref.ref(ways.held["loss"])
    assert first(storage).root is Root.GLOBAL
    ways.held.clear()
    assert tensor() is None


def test_variables_of_functions_are_not_kept_alive(ways: Any) -> None:
    def inner() -> bool:
        mine = torch.ones(3)
        reference = weakref.ref(mine)
        storage_owners(ways.in_a_list())
        del mine
        return reference() is None

    assert inner()


def test_what_locals_gave_is_left_alone(ways: Any) -> None:
    mine = 3
    mapping = locals()
    storage_owners(ways.in_a_list())
    assert mapping["mine"] == mine


class Hostile:
    """Raises at every question that Python lets an object answer."""

    def __init__(self, tensor: Tensor) -> None:
        object.__setattr__(self, "tensor", tensor)

    def refuse(self, *_: object) -> Any:
        raise RuntimeError("not to be asked")

    __eq__ = __repr__ = __str__ = __bool__ = __len__ = __getattr__ = __getattribute__ = refuse
    __hash__ = __iter__ = __contains__ = __setattr__ = __class_getitem__ = refuse

    @property
    def __class__(self) -> Any:
        raise RuntimeError("not to be asked")


class HostileDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("not to be asked")

    __iter__ = __len__ = __contains__ = __eq__ = __getitem__ = items  # type: ignore[assignment]


class HostileList(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("not to be asked")

    __len__ = __eq__ = __getitem__ = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize("wrap", [Hostile, lambda t: HostileDict(x=t), lambda t: HostileList([t])])
def test_objects_that_answer_nothing_are_passed(wrap: Callable[[Tensor], object], ways: Any) -> None:
    tensor = torch.ones(3)
    storage = key(tensor)
    ways.held["odd"] = wrap(tensor)
    del tensor
    chain = first(storage)
    assert chain.text.startswith("ways.held['odd']")
    assert chain.root is Root.GLOBAL


def test_other_containers_are_named(ways: Any) -> None:
    tensor = torch.ones(3)
    storage = key(tensor)
    ways.held["odd"] = collections.OrderedDict({(1, "a"): collections.deque([frozenset([tensor])])})
    del tensor
    assert first(storage).text == "ways.held['odd'][(1, 'a')][0] -> member"


def test_the_time_is_bounded(ways: Any) -> None:
    storage = ways.in_a_graph()
    began = time.monotonic()
    chains = storage_owners(storage, seconds=0.0)
    assert time.monotonic() - began < 5
    assert chains[0].root in (Root.UNFINISHED, Root.GLOBAL)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit 0"):
        owner_chains(torch.ones(1), limit=0)
