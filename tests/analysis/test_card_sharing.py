"""What programs take side by side: sums by hand, sets against brute force, limits and emptied caches against runs."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.virtual.conftest import fit_interpreter
from torch import nn

from analysis.synthetic import Recorder, quick_run, virtual_run
from vramfit.analysis import CardSharing, SharedProcess, SharingOutcome, run_from_trace, share_card
from vramfit.analysis.card_sharing import MPS_MORE, MPS_SERVER, largest_sets, shared_fractions
from vramfit.analysis.process_limits import LeastLimit, parked
from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.trace import Rehearsal, Run
from vramfit.units import GIB, MIB
from vramfit.virtual.gpu import VirtualGPU

__all__ = ["fit_interpreter"]

CARD = find_gpu("RTX 4090")


def shared(count: int = 2, card: GpuSpec = CARD) -> CardSharing:
    return share_card([quick_run()] * count, [f"p{at}" for at in range(count)], card)


def card_of(total: int) -> GpuSpec:
    """The same card with another size; the runs are taken for its own."""
    return replace(CARD, total_bytes=total)


def test_contexts_and_reserved_memory_add_up() -> None:
    found = shared()
    (device,) = quick_run().devices
    each = device.context_bytes + found.processes[0].reserved
    assert found.total == 2 * each
    assert found.free == CARD.total_bytes - 2 * each
    assert found.outcome is SharingOutcome.FITS
    assert found.fitting == ((0, 1),)


def test_mps_saves_no_context_from_volta_on() -> None:
    found = shared(3)
    assert found.mps == (found.total + MPS_SERVER, found.total + MPS_SERVER + 3 * MPS_MORE)


def test_one_context_at_least_is_shared_before_volta() -> None:
    found = shared(3, replace(CARD, compute_capability=(6, 1)))
    context = found.processes[0].context
    assert found.mps == (found.total - 2 * context + MPS_SERVER, found.total + MPS_SERVER)


def test_time_slicing_adds_up_the_seconds() -> None:
    run = replace(quick_run(), seconds_simulated=1.5)
    assert share_card([run, run], ["a", "b"], CARD).seconds_in_turns == 3.0


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.integers(0, 30))
def test_the_largest_sets_are_those_that_no_other_fits_beside(sizes: list[int], room: int) -> None:
    found = largest_sets(sizes, room)
    fits = {
        chosen
        for count in range(1, len(sizes) + 1)
        for chosen in combinations(range(len(sizes)), count)
        if sum(sizes[at] for at in chosen) <= room
    }
    assert set(found) == {one for one in fits if not any(set(one) < set(other) for other in fits)}


PROCESSES = st.builds(
    lambda context, least, more: SharedProcess(
        name="p",
        context=context,
        reserved=least + more,
        allocated=1,
        least=LeastLimit(bytes=least, retries=0),
    ),
    st.integers(0, GIB),
    st.integers(1, 4 * GIB),
    st.integers(0, GIB),
)


@given(st.lists(PROCESSES, min_size=2, max_size=6), st.integers(-MIB, 8 * GIB))
def test_fractions_give_each_what_it_needs_and_no_more_than_there_is(
    processes: list[SharedProcess], spare: int
) -> None:
    total = max(MIB, sum(one.context + one.smallest for one in processes) + spare)
    rounding = len(processes) * (total // 10**6 + 1)
    fractions = shared_fractions(processes, total)
    room = total - sum(one.context for one in processes)
    if fractions is None:
        assert room < sum(one.smallest for one in processes) + 2 * rounding
        return
    given_bytes = [int(fraction * total) for fraction in fractions]
    assert all(size >= one.smallest for size, one in zip(given_bytes, processes, strict=True))
    assert sum(given_bytes) <= room
    if room >= sum(one.reserved for one in processes) + 2 * rounding:
        assert all(size >= one.reserved for size, one in zip(given_bytes, processes, strict=True))


def test_the_joint_peak_names_who_holds_what() -> None:
    found = shared(3)
    peak = found.processes[0].allocated
    assert found.worst.bytes == 3 * peak == sum(found.worst.parts)
    assert all(moment is not None and moment.phase for moment in found.worst.moments)


def test_equal_steps_keep_their_shift_and_others_drift() -> None:
    found = shared().steps
    assert found is not None
    assert found.keeps
    assert found.apart <= found.together <= found.sum_of_peaks
    assert found.meet_every_seconds is None


@pytest.mark.parametrize("count", [0, 1, 13])
def test_too_few_and_too_many_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match="cannot be looked at together"):
        shared(count)


def test_a_run_of_another_card_is_refused() -> None:
    with pytest.raises(UsageError, match=r"p1 is of another card: RTX 4090 with .* not RTX 3090"):
        share_card([quick_run()] * 2, ["p1", "p2"], find_gpu("RTX 3090"))


def test_a_run_without_a_card_and_one_of_two_are_refused() -> None:
    empty = Recorder()
    with pytest.raises(UsageError, match="none never used a card"):
        share_card([virtual_run(empty.finish()), quick_run()], ["none", "b"], CARD)
    run = quick_run()
    two = replace(run, devices=(run.devices[0], replace(run.devices[0], index=1)))
    with pytest.raises(UsageError, match="two uses 2 cards"):
        share_card([two, run], ["two", "b"], CARD)


# -- against runs on the virtual GPU ---------------------------------------------------------------------------


def training(*, empties: Container[int] = ()) -> list[int]:
    """Four steps; gives what is reserved after each."""
    reserved = []
    block = [nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(4)]
    model = nn.Sequential(*block).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        model(torch.randn(4096, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in empties:
            torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    return reserved


def trained(alloc_conf: str = "") -> Run:
    with VirtualGPU("RTX 4090", alloc_conf=alloc_conf) as gpu:
        training()
        torch.cuda.synchronize()
    return gpu.run


@pytest.fixture(scope="module")
def plain(fit_interpreter: None) -> Run:
    return trained()


def test_a_program_runs_within_its_least_limit_with_as_many_flushes(plain: Run) -> None:
    found = share_card([plain] * 2, ["a", "b"], CARD).processes[0]
    assert found.least is not None
    assert found.allocated <= found.smallest < found.reserved
    fraction = (found.smallest * 10**6 // CARD.total_bytes + 1) / 10**6
    limited = trained(f"per_process_memory_fraction:{fraction:.6f}")
    (device,) = limited.devices
    assert limited.oom is None
    assert device.peak_reserved_bytes <= fraction * CARD.total_bytes
    assert device.peak_allocated_bytes == found.allocated
    assert device.stats["num_alloc_retries"] == found.least.retries > 0


def test_limits_are_given_where_the_peaks_do_not_fit(plain: Run) -> None:
    context = plain.devices[0].context_bytes
    least = share_card([plain] * 2, ["a", "b"], CARD).processes[0].smallest
    found = share_card([plain] * 2, ["a", "b"], card_of(2 * (least + context) + 4 * MIB))
    assert found.outcome is SharingOutcome.WITH_LIMITS
    assert found.with_limits == 2 * (least + context)
    smaller = share_card([plain] * 2, ["a", "b"], card_of(2 * (least + context) - 1))
    assert smaller.outcome is SharingOutcome.IN_TURNS
    assert smaller.in_turns is not None
    assert smaller.in_turns <= smaller.card_bytes
    none = share_card([plain] * 2, ["a", "b"], card_of(smaller.in_turns - 1))
    assert none.outcome is SharingOutcome.DOES_NOT_FIT


def test_emptied_caches_are_replayed_as_they_run(plain: Run) -> None:
    with VirtualGPU("RTX 4090", alloc_conf="") as gpu:
        left = training(empties=range(4))
    found = parked(plain.trace, 0, Rehearsal(plain.trace, 0))
    assert found is not None
    assert found.replayed
    assert found.emptied == max(left[:-1])  # the last one is after the last step
    assert found.peak == gpu.run.devices[0].peak_reserved_bytes
    once = parked(plain.trace)
    assert once is not None
    assert (once.replayed, once.allocated, once.reserved) == (False, found.allocated, found.reserved)
    assert once.peak == plain.devices[0].peak_reserved_bytes


def test_what_one_emptying_leaves_is_what_the_program_reads(plain: Run) -> None:
    with VirtualGPU("RTX 4090", alloc_conf=""):
        before, left = training()[2], training(empties=[2])[2]
    found = parked(plain.trace)
    assert found is not None
    assert (found.reserved, found.emptied) == (before, left)


def test_expandable_segments_are_replayed_as_they_run(plain: Run) -> None:
    (device,) = trained("expandable_segments:True").devices
    found = share_card([plain] * 2, ["a", "b"], CARD).processes[0]
    assert found.expandable == device.peak_reserved_bytes


def test_the_trace_alone_gives_the_same(plain: Run) -> None:
    whole = share_card([plain] * 2, ["a", "b"], CARD)
    alone = share_card([run_from_trace(plain.trace)] * 2, ["a", "b"], CARD)
    same = [replace(one, seconds=0.0) for one in alone.processes]
    assert same == [replace(one, seconds=0.0) for one in whole.processes]
    assert alone.worst == whole.worst
    assert Rehearsal(plain.trace, 0).recorded.peak_reserved == whole.processes[0].reserved
