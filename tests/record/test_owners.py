"""Owner chains: each way of keeping a tensor alive is found and told in words."""

from __future__ import annotations

import collections
import functools
import gc
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vramfit.record.chains import OwnerChain, Root, Through
from vramfit.record.owners import owner_chains, storage_owners

HERE = __name__
held: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    gc.collect()
    yield
    held.clear()
    Registry.entries.clear()
    remember.cache_clear()
    remember_few.cache_clear()
    gc.collect()


def key(tensor: Tensor) -> int:
    """The storage of a tensor, without a variable that holds it."""
    return tensor.untyped_storage()._cdata


def first(storage: int) -> OwnerChain:
    return storage_owners(storage, limit=1)[0]


class Registry:
    entries: list[Tensor] = []  # noqa: RUF012  # a mutable class attribute is the leak


class Slotted:
    __slots__ = ("value",)


class Bag:
    pass


@functools.cache
def remember(size: int) -> Tensor:
    return torch.ones(size)


@functools.lru_cache(maxsize=4)
def remember_few(size: int) -> Tensor:
    return torch.ones(size)


def in_a_list() -> int:
    held["history"] = [{}, {"loss": torch.ones(3)}]
    return key(held["history"][1]["loss"])


def in_a_class() -> int:
    Registry.entries.append(torch.ones(3))
    return key(Registry.entries[0])


def in_a_graph() -> int:
    layer = nn.Linear(4, 4)
    hidden = layer(torch.ones(2, 4)).relu()
    held["loss"] = (hidden * hidden).mean()
    return key(hidden)


def in_a_deep_graph() -> int:
    start = torch.ones(3, requires_grad=True)
    value = start.sin()
    for _ in range(30):
        value = (value * 1.01).sin()
    held["last"] = value
    return key(start)


def in_a_closure() -> int:
    cache: list[Tensor] = []

    def step() -> None:
        cache.append(torch.ones(3))

    step()
    held["step"] = step
    return key(cache[0])


def in_a_cache() -> int:
    return key(remember(3))


def in_a_bounded_cache() -> int:
    return key(remember_few(3))


def in_a_traceback() -> int:
    found = []

    def fails() -> None:
        batch = torch.ones(3)
        found.append(key(batch))
        raise ValueError("no")

    try:
        fails()
    except ValueError as error:
        held["errors"] = [error]
    return found[0]


def in_a_thread_local() -> int:
    held["local"] = threading.local()
    held["local"].buffer = [torch.ones(3)]
    return key(held["local"].buffer[0])


def in_a_generator() -> int:
    found = []

    def batches() -> Generator[None]:
        batch = torch.ones(3)
        found.append(key(batch))
        yield
        del batch

    held["loader"] = batches()
    next(held["loader"])
    return found[0]


class Pause:
    def __await__(self) -> Generator[None]:
        yield


def in_a_coroutine() -> int:
    found = []

    async def serve() -> None:
        batch = torch.ones(3)
        found.append(key(batch))
        await Pause()
        del batch

    held["task"] = serve()
    held["task"].send(None)
    return found[0]


def in_a_hook() -> int:
    layer = held["layer"] = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, inputs, output, kept=[]: kept.append(output))
    output = layer(torch.ones(1, 2))
    return key(output)


def in_a_buffer() -> int:
    held["model"] = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return key(held["model"][1].running_mean)


def in_a_gradient() -> int:
    held["model"] = nn.Linear(2, 2, bias=False)
    held["model"](torch.ones(1, 2)).sum().backward()
    return key(held["model"].weight.grad)


def in_optimizer_state() -> int:
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    held["optimizer"] = torch.optim.Adam([parameter])
    held["optimizer"].step()
    return key(held["optimizer"].state[parameter]["exp_avg"])


def in_a_slot() -> int:
    held["slotted"] = Slotted()
    held["slotted"].value = torch.ones(3)
    return key(held["slotted"].value)


def in_a_queue() -> int:
    held["queue"] = queue.Queue()
    held["queue"].put(torch.ones(3))
    return key(held["queue"].queue[0])


def in_a_partial() -> int:
    held["call"] = functools.partial(print, torch.ones(3))
    return key(held["call"].args[0])


def in_a_weakref_callback() -> int:
    held["watched"] = Bag()
    held["reference"] = weakref.ref(held["watched"], functools.partial(print, torch.ones(3)))
    return key(held["reference"].__callback__.args[0])


def packed_by_a_hook() -> int:
    found = []

    def pack(tensor: Tensor) -> tuple[int, Tensor]:
        copy = tensor.detach().clone()
        found.append(key(copy))
        return 1, copy

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
        held["loss"] = torch.ones(3, requires_grad=True).exp().sum()
    return found[0]


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.scratch = value * 3
        held["storage"] = key(ctx.scratch)
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def in_a_context() -> int:
    held["output"] = Keeps.apply(torch.ones(3, requires_grad=True)).sum()  # type: ignore[no-untyped-call]
    return int(held["storage"])


def through_a_view() -> int:
    whole = torch.ones(100)
    held["view"] = whole[3:5].reshape(2, 1)
    return key(whole)


WAYS: list[tuple[Callable[[], int], Root, str, set[Through]]] = [
    (in_a_list, Root.GLOBAL, "held['history'][1]['loss']", set()),
    (in_a_class, Root.CLASS, "Registry.entries[0]", set()),
    (in_a_graph, Root.GLOBAL, "held['loss'] -> grad_fn MeanBackward0 -> MulBackward0 saved", {Through.AUTOGRAD}),
    (in_a_deep_graph, Root.GLOBAL,
     "held['last'] -> grad_fn SinBackward0 -> MulBackward0 -> … -> SinBackward0 saved self", {Through.AUTOGRAD}),
    (in_a_closure, Root.GLOBAL, "held['step'] -> closure cache[0]", {Through.CLOSURE}),
    (in_a_cache, Root.GLOBAL, "remember -> cached result", {Through.CACHE}),
    (in_a_bounded_cache, Root.GLOBAL, "remember_few -> cached result", {Through.CACHE}),
    (in_a_traceback, Root.GLOBAL, "held['errors'][0] ValueError traceback -> in_a_traceback.<locals>.fails()",
     {Through.TRACEBACK}),
    (in_a_thread_local, Root.GLOBAL, "held['local'].buffer[0]", {Through.THREAD_LOCAL}),
    (in_a_generator, Root.GLOBAL, "held['loader'] -> suspended in_a_generator.<locals>.batches()",
     {Through.GENERATOR}),
    (in_a_coroutine, Root.GLOBAL, "held['task'] -> suspended in_a_coroutine.<locals>.serve()", {Through.GENERATOR}),
    (in_a_hook, Root.GLOBAL, "held['layer']._forward_hooks[", {Through.HOOK, Through.DEFAULT, Through.MODULE}),
    (in_a_buffer, Root.GLOBAL, "held['model'].1.running_mean", {Through.MODULE}),
    (in_a_gradient, Root.GLOBAL, "held['model'].weight.grad", {Through.MODULE, Through.GRADIENT}),
    (in_optimizer_state, Root.GLOBAL, "held['optimizer'].state[<Parameter (2, 3)>]['exp_avg']", {Through.OPTIMIZER}),
    (in_a_slot, Root.GLOBAL, "held['slotted'].value", set()),
    (in_a_queue, Root.GLOBAL, "held['queue'].queue[0]", set()),
    (in_a_partial, Root.GLOBAL, "held['call'] -> partial arguments[0]", set()),
    (in_a_weakref_callback, Root.GLOBAL, "held['reference'] -> callback of a weak reference -> partial arguments[0]",
     {Through.WEAKREF_CALLBACK}),
    (packed_by_a_hook, Root.GLOBAL,
     "held['loss'] -> grad_fn SumBackward0 -> ExpBackward0 saved result (packed by a hook)[1]", {Through.AUTOGRAD}),
    (in_a_context, Root.GLOBAL, "held['output'] -> grad_fn SumBackward0 -> KeepsBackward.scratch", {Through.AUTOGRAD}),
    (through_a_view, Root.GLOBAL, "held['view']", set()),
]  # fmt: skip


@pytest.mark.parametrize(("way", "root", "text", "through"), WAYS, ids=[way[0].__name__ for way in WAYS])
def test_each_way_is_found_and_named(
    way: Callable[[], int], root: Root, text: str, through: set[Through]
) -> None:
    chain = first(way())
    assert chain.root is root
    assert chain.text.startswith(f"{HERE}.{text}")
    assert chain.through == through
    assert str(chain) == chain.text
    assert chain.links


def test_names_of_locals_are_told_for_tracebacks_and_generators() -> None:
    assert first(in_a_traceback()).text.endswith("local batch")
    assert first(in_a_generator()).text.endswith("local batch")


def test_an_uncaught_exception_is_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = in_a_traceback()
    monkeypatch.setattr(sys, "last_exc", held.pop("errors")[0], raising=False)
    assert first(storage).text.startswith("sys.last_exc ValueError traceback ->")


def test_a_variable_of_a_running_function_is_an_owner() -> None:
    mine = torch.ones(3)
    chains = owner_chains(mine)
    assert (chains[0].root, chains[0].text.rpartition(" ")[2]) == (Root.LOCAL, "mine")


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


def test_several_owners_are_told_shortest_first() -> None:
    storage = in_a_list()
    Registry.entries.append(held["history"][1]["loss"])
    held["also"] = held["history"][1]["loss"]
    texts = [chain.text.removeprefix(f"{HERE}.") for chain in storage_owners(storage)]
    assert texts[0] == "held['also']" or "Registry.entries[0]" in texts
    assert len(texts) >= 2
    assert storage_owners(storage, limit=1)[0].text in [chain.text for chain in storage_owners(storage)]


# -- nothing holds it ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
class TestCycles:
    def test_a_dead_cycle_is_told_with_its_objects(self) -> None:
        def make() -> int:
            one, two = Bag(), Bag()
            one.other, two.other = two, one  # type: ignore[attr-defined]
            one.tensor = torch.ones(3)  # type: ignore[attr-defined]
            return key(one.tensor)  # type: ignore[attr-defined]

        chain = first(make())
        assert chain.root is Root.DEAD_CYCLE
        assert f"{HERE}.Bag" in chain.cycle
        assert chain.text.startswith("dead reference cycle of ")
        assert chain.text.endswith(".tensor")

    def test_a_cycle_that_something_holds_is_not_dead(self) -> None:
        bag = held["bag"] = Bag()
        bag.me, bag.tensor = bag, torch.ones(3)
        storage = key(bag.tensor)
        del bag
        assert first(storage).text == f"{HERE}.held['bag'].tensor"

    def test_a_cycle_through_the_graph_is_never_collected(self) -> None:
        def make() -> tuple[int, weakref.ref[Tensor]]:
            value = torch.ones(3, requires_grad=True).sin()
            result = value.cos()
            value.me = result  # type: ignore[attr-defined]
            held["break"] = weakref.ref(value)
            return key(result), weakref.ref(result)

        storage, reference = make()
        chain = first(storage)
        gc.collect()
        assert reference() is not None
        assert chain.root is Root.GRAPH_CYCLE
        assert "CosBackward0" in chain.cycle
        del held["break"]().me

    def test_a_cycle_through_a_custom_function_is_collected(self) -> None:
        def make() -> tuple[int, weakref.ref[Tensor]]:
            output = Keeps.apply(torch.ones(3, requires_grad=True))  # type: ignore[no-untyped-call]
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

    def test_the_search_itself_collects_nothing(self) -> None:
        gc.enable()
        bag = Bag()
        bag.me, bag.tensor = bag, torch.ones(3)  # type: ignore[attr-defined]
        alive, storage = weakref.ref(bag), key(bag.tensor)  # type: ignore[attr-defined]
        gc.disable()
        del bag
        assert first(storage).root is Root.DEAD_CYCLE
        assert alive() is not None
        assert not gc.isenabled()


# -- it changes nothing, and nothing disturbs it -----------------------------------------------------------------------


def test_nothing_is_kept_alive() -> None:
    storage = in_a_graph()
    tensor = weakref.ref(held["loss"])
    assert first(storage).root is Root.GLOBAL
    held.clear()
    assert tensor() is None


def test_variables_of_functions_are_not_kept_alive() -> None:
    def inner() -> weakref.ref[Tensor]:
        mine = torch.ones(3)
        storage_owners(in_a_list())
        reference = weakref.ref(mine)
        del mine
        return reference if reference() is not None else weakref.ref(Bag())  # type: ignore[return-value]

    assert inner()() is None


def test_what_locals_gave_is_left_alone() -> None:
    mine = 3
    mapping = locals()
    storage_owners(in_a_list())
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
def test_objects_that_answer_nothing_are_passed(wrap: Callable[[Tensor], object]) -> None:
    tensor = torch.ones(3)
    storage = key(tensor)
    held["odd"] = wrap(tensor)
    del tensor
    chain = first(storage)
    assert chain.text.startswith(f"{HERE}.held['odd']")
    assert chain.root is Root.GLOBAL


def test_other_containers_are_named() -> None:
    tensor = torch.ones(3)
    storage = key(tensor)
    held["odd"] = collections.OrderedDict({(1, "a"): collections.deque([frozenset([tensor])])})
    del tensor
    assert first(storage).text == f"{HERE}.held['odd'][(1, 'a')][0] -> member"


def test_the_time_is_bounded() -> None:
    storage = in_a_graph()
    began = time.monotonic()
    chains = storage_owners(storage, seconds=0.0)
    assert time.monotonic() - began < 5
    assert chains[0].root in (Root.UNFINISHED, Root.GLOBAL)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit 0"):
        owner_chains(torch.ones(1), limit=0)
