"""torch.profiler's memory events with our categories: the same bytes as torch's own timeline, nothing guessed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.profiler._memory_profiler import Action, MemoryProfile

import vramfit
from vramfit.errors import UsageError
from vramfit.record.profilers import ProfiledEvent, ProfiledMemory, _match, join_profile
from vramfit.trace import Category, EventKind, MemoryTrace, TraceBuilder

pytestmark = pytest.mark.torch_versions


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))


@pytest.fixture(scope="module")
def exported(
    recorded: tuple[Any, MemoryTrace, ProfiledMemory], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """torch.profiler's own Chrome trace: it exports only once."""
    path = tmp_path_factory.mktemp("profile") / "torch.json"
    recorded[0].export_chrome_trace(str(path))
    return path


@pytest.fixture(scope="module")
def recorded() -> tuple[Any, MemoryTrace, ProfiledMemory]:
    """Two steps of training, profiled and recorded at once."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with vramfit.track(model=model, optimizer=optimizer, device="cpu") as tracked:
        options = {"profile_memory": True, "record_shapes": True, "with_stack": True, "acc_events": True}
        with profile(activities=[ProfilerActivity.CPU], **options) as profiled:
            for _ in range(2):
                model(torch.randn(32, 128)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return profiled, tracked.trace, join_profile(profiled, tracked.trace)


def test_the_bytes_are_those_of_torchs_own_timeline(
    recorded: tuple[Any, MemoryTrace, ProfiledMemory],
) -> None:
    profiled, _, joined = recorded
    signs = {Action.CREATE: 1, Action.DESTROY: -1}
    # Its timeline leaves out allocations that belong to no tensor that it knows; all others must be ours.
    torchs = sorted(
        (time, signs[action] * size)
        for time, action, _, size in MemoryProfile(profiled.profiler.kineto_results).timeline
        if action in signs and time >= 0
    )
    ours = sorted((event.time_ns, event.nbytes) for event in joined.events)
    assert len(torchs) > 100
    assert torchs == ours


def test_what_is_alive_agrees_with_the_profilers_own_counter(
    recorded: tuple[Any, MemoryTrace, ProfiledMemory], exported: Path
) -> None:
    events = [
        event for event in json.loads(exported.read_text())["traceEvents"] if event["name"] == "[memory]"
    ]
    first, *_, last = sorted(events, key=lambda event: event["ts"])
    before = first["args"]["Total Allocated"] - first["args"]["Bytes"]
    assert last["args"]["Total Allocated"] - before == sum(event.nbytes for event in recorded[2].events)


def test_nearly_all_bytes_have_a_category(recorded: tuple[Any, MemoryTrace, ProfiledMemory]) -> None:
    _, _, joined = recorded
    assert joined.matched_bytes > 0.99 * joined.allocated_bytes


def test_categories_hold_what_the_model_says(recorded: tuple[Any, MemoryTrace, ProfiledMemory]) -> None:
    """Gradients and AdamW's two moments are the size of the parameters, one and two times."""
    _, _, joined = recorded
    parameters = sum(parameter.nbytes for parameter in Net().parameters())
    made = dict.fromkeys(Category, 0)
    for event in joined.events:
        if event.nbytes > 0 and event.category is not None:
            made[event.category] += event.nbytes
    assert made[Category.GRADIENTS] == 2 * parameters  # zero_grad drops them: new ones in each step
    steps = 4 * len(list(Net().parameters()))  # a counter of four bytes for each parameter
    assert made[Category.OPTIMIZER_STATE] == 2 * parameters + steps
    assert made[Category.PARAMETERS] == 0  # made before the profile


def test_modules_phases_and_lines(recorded: tuple[Any, MemoryTrace, ProfiledMemory]) -> None:
    _, _, joined = recorded
    assert {"Net.0", "Net.1", "Net.2"} <= set(joined.modules())
    activation = next(e for e in joined.events if e.module == "Net.1" and e.nbytes == 32 * 256 * 4)
    assert activation.phase == "step 1/forward"
    assert activation.line is not None
    assert activation.line.filename == __file__


def test_a_release_is_told_as_its_allocation(recorded: tuple[Any, MemoryTrace, ProfiledMemory]) -> None:
    _, _, joined = recorded
    held: dict[int, ProfiledEvent] = {}
    for event in joined.events:
        if event.nbytes > 0:
            held[event.address] = event
        elif event.address in held:
            born = held.pop(event.address)
            assert (event.category, event.module, event.nbytes) == (born.category, born.module, -born.nbytes)


def test_the_peak_sums_to_the_highest_total(recorded: tuple[Any, MemoryTrace, ProfiledMemory]) -> None:
    _, _, joined = recorded
    totals = np.cumsum([event.nbytes for event in joined.events])
    assert sum(joined.peak("cpu").values()) == totals.max()
    assert joined.peak("cuda:0") == {}


def test_the_chrome_trace(
    recorded: tuple[Any, MemoryTrace, ProfiledMemory], exported: Path, tmp_path: Path
) -> None:
    _, _, joined = recorded
    joined.write_chrome_trace(exported, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    assert len(memory) == len(joined.events)
    assert all("Category" in event["args"] for event in memory)
    assert {"gradients", "optimizer state", "activations"} <= {event["args"]["Category"] for event in memory}
    counters = [event for event in events if event["ph"] == "C" and event["pid"] == "vramfit"]
    alive = sum(event.nbytes for event in joined.events)
    assert sum(counters[-1]["args"].values()) == alive
    spans = [event["ts"] for event in memory]
    assert min(spans) <= counters[0]["ts"] <= counters[-1]["ts"] <= max(spans)


def test_the_profiler_itself_exports_once(tmp_path: Path) -> None:
    with vramfit.track(device="cpu") as tracked, profile(profile_memory=True, acc_events=True) as profiled:
        torch.ones(1000).sum()
    joined = join_profile(profiled, tracked.trace)
    joined.write_chrome_trace(profiled, tmp_path / "one.json")
    assert '"vramfit: bytes by category (cpu)"' in (tmp_path / "one.json").read_text()
    with pytest.raises(UsageError, match="Give the file"):
        joined.write_chrome_trace(profiled, tmp_path / "two.json")
    (tmp_path / "bad.json").write_text("[]")
    for bad in ("bad.json", "missing.json"):
        with pytest.raises(UsageError):
            joined.write_chrome_trace(tmp_path / bad, tmp_path / "two.json")
    assert not (tmp_path / "two.json").exists()


def test_a_profile_without_memory(recorded: tuple[Any, MemoryTrace, ProfiledMemory]) -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as empty:
        torch.ones(3)
    with pytest.raises(UsageError, match="profile_memory=True"):
        join_profile(empty, recorded[1])
    with pytest.raises(UsageError, match="no profile that has run"):
        join_profile(profile(profile_memory=True), recorded[1])


def test_a_trace_of_another_program_matches_nothing(
    recorded: tuple[Any, MemoryTrace, ProfiledMemory],
) -> None:
    with vramfit.track(device="cpu") as other:
        torch.ones(77).sum()
    joined = join_profile(recorded[0], other.trace)
    assert joined.matched_bytes <= 4  # a lone scalar may look alike
    assert sum(event.nbytes for event in joined.events) == sum(event.nbytes for event in recorded[2].events)


def card_trace(blocks: list[tuple[int, int, int]], source: str = "card") -> MemoryTrace:
    """A recording of a card: address, size and time of each allocation."""
    builder = TraceBuilder(meta={"source": source})
    for address, size, time in blocks:
        builder.append(EventKind.ALLOC, device=0, address=address, size=size - 12, block=size, time_us=time)
    return builder.finish(devices=())


def test_blocks_of_a_card_are_found_by_address_size_and_time() -> None:
    """The clocks are 5 s apart; an address is used again; one block is of another stretch of time."""
    trace = card_trace([(512, 1024, 100), (2048, 512, 200), (512, 1024, 900_000), (512, 1024, 9_000_000)])
    events = [
        ProfiledEvent(time_ns=5_000_110_000, device="cuda:0", address=512, nbytes=1024),
        ProfiledEvent(time_ns=5_000_205_000, device="cuda:0", address=2048, nbytes=512),
        ProfiledEvent(time_ns=5_000_300_000, device="cuda:0", address=512, nbytes=-1024),
        ProfiledEvent(time_ns=5_000_400_000, device="cuda:1", address=2048, nbytes=512),
        ProfiledEvent(time_ns=5_900_003_000, device="cuda:0", address=512, nbytes=1024),
    ]
    rows = np.flatnonzero(trace.kind == EventKind.ALLOC)
    offset, found = _match(events, trace, rows, exact=True)
    assert offset == pytest.approx(-5e6, abs=20)
    assert {position: int(np.searchsorted(rows, row)) for position, row in found.items()} == {
        0: 0,
        1: 1,
        4: 2,
    }
