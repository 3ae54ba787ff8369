"""What only reference cycles hold where memory runs out: held against what a collection then frees."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vramfit.analysis import verdict
from vramfit.capture import dead_memory
from vramfit.capture.dead_memory import DeadSearch
from vramfit.trace import DeadMemory, Run
from vramfit.units import GIB, MIB
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.op_call import Spare

WIDTH = 2048
WEIGHT = 4 * WIDTH * WIDTH
CARD = 512 * MIB


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")


def hooked() -> None:
    """As accelerate's hooks do: ``forward`` is replaced by a function that knows the module."""
    model = nn.Sequential(layer(), layer())
    old = model.forward

    @functools.wraps(old)
    def forward(*arguments: torch.Tensor) -> torch.Tensor:
        return model.old_forward(*arguments)

    model.old_forward, model.forward = old, forward


def closure() -> None:
    """Modules that know one another by a function's closure."""
    first, second = layer(), layer()
    first.after = lambda x: second(x)
    second.before = lambda x: first(x)


def exception() -> None:
    """An error that its own frame holds, which also holds the model."""
    model = layer()
    try:
        raise ValueError("a shape")
    except ValueError as error:
        kept = error
    assert model is not kept


def trainer() -> None:
    """A trainer and a module that know one another, as Lightning's do, with gradients and states."""
    model = layer()
    model.trainer = SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, WIDTH, device="cuda")).sum().backward()
    model.trainer.optimizer.step()


KINDS: dict[str, tuple[Callable[[], None], int]] = {
    "hooks": (hooked, 2 * WEIGHT),
    "closure": (closure, 2 * WEIGHT),
    "exception": (exception, WEIGHT),
    "trainer": (trainer, 4 * WEIGHT),
}


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Let nothing be collected but by the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ran_out(before: Callable[[], object]) -> tuple[Run, int]:
    """A run that runs out after something, and the bytes that a collection frees then."""
    with VirtualGPU(f"{CARD}B", context_bytes=0) as gpu:
        kept = before()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(GIB, device="cuda", dtype=torch.uint8)
        held = torch.cuda.memory_allocated()
        gc.collect()
        freed = held - torch.cuda.memory_allocated()
        del kept
    return gpu.run, freed


def dead_of(run: Run) -> DeadMemory:
    assert run.oom is not None
    assert run.oom.dead is not None
    return run.oom.dead


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_collection_frees_is_found(kind: str) -> None:
    program, size = KINDS[kind]
    run, freed = ran_out(program)
    assert dead_of(run).total_bytes == freed
    assert size <= freed < size + MIB


def test_what_it_was_for_is_told() -> None:
    run, _ = ran_out(trainer)
    found = dead_of(run).categories
    assert found["parameters"] == found["gradients"] == WEIGHT
    assert found["optimizer_state"] == 2 * WEIGHT


def living() -> object:
    model = nn.Sequential(layer(), layer())
    model(torch.ones(1, WIDTH, device="cuda")).sum().backward()
    model.itself = [model]  # a cycle that somebody holds
    return [model]


def half_dead() -> object:
    """Of two layers in cycles one is held; views and shared storages stay with what is alive."""
    kept, gone = layer(), layer()
    kept.itself, gone.itself = [kept], [gone]
    gone.shared = kept.weight.detach()
    return kept.weight


@pytest.mark.parametrize(("program", "size"), [(living, 0), (half_dead, WEIGHT)])
def test_what_is_alive_does_not_count(program: Callable[[], object], size: int) -> None:
    run, freed = ran_out(program)
    assert dead_of(run).total_bytes == size
    assert freed == size


def test_a_dead_result_says_how_much_its_graph_may_hold() -> None:
    """What a graph saved is held from C++ alone, and cannot be told from what a living graph saved."""

    def program() -> None:
        result = torch.relu(layer()(torch.ones(4096, WIDTH, device="cuda")))
        kept = [result]
        kept.append(kept)

    run, freed = ran_out(program)
    dead = dead_of(run)
    assert dead.graphs_bytes >= 4096 * WIDTH * 4
    assert dead.total_bytes <= freed <= dead.total_bytes + dead.graphs_bytes


def test_the_search_leaves_nothing_behind() -> None:
    """Neither does it keep what it saw, nor does it set off a collection."""

    class Held:
        pass

    held = Held()
    held.tensor = torch.ones(3)
    reference = weakref.ref(held)
    gc.enable()
    assert DeadSearch().storages() is not None
    assert gc.isenabled()
    gc.disable()
    del held
    assert reference() is None, "the search keeps it"
    gc.collect()
    DeadSearch().storages()
    assert gc.collect() == 0, "the search leaves a cycle"


def test_many_shortages_cost_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(dead_memory.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(dead_memory, "_dead_storages", lambda: calls.append(1))
    search = DeadSearch(12.0)
    for _ in range(10):
        search.storages()
    assert len(calls) == 3, "5 seconds each, until 12 are over"


def test_no_search_is_made_where_a_kernel_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with VirtualGPU(f"{CARD}B", context_bytes=0) as gpu:
        torch.ones(1, device="cuda")
        assert gpu.meter.temporary([Spare(GIB)], 0, "a kernel") == []
        assert gpu.meter.dead_search.seconds == 0
        monkeypatch.setattr(dead_memory, "_MOST_OBJECTS", 100)
        assert gpu.meter.dead_search.storages() is None, "there are too many objects"


def test_dead_memory_is_a_reason_and_not_needed() -> None:
    def program() -> None:
        for _ in range(8):
            hooked()

    with pytest.raises(torch.OutOfMemoryError), VirtualGPU(f"{CARD}B", context_bytes=0) as gpu:
        program()
        torch.empty(GIB, device="cuda", dtype=torch.uint8)
    judged = verdict(gpu.run)
    assert dead_of(gpu.run).total_bytes == 16 * WEIGHT
    assert judged.why[0] == (
        "256.00 MiB are held by reference cycles alone: the program cannot reach them any more, and gc.collect() "
        "frees them"
    )
    assert judged.needed == GIB
    assert judged.advice == ()
    assert judged.smallest_gpu is None
