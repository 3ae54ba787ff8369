from __future__ import annotations

from dataclasses import replace

from tests.trace.test_rehearsal import Tape

from vramfit.trace.address_bar import NO_ADDRESS_BAR, address_bar
from vramfit.units import GIB, MIB


def which_segment_decides(conf: str = "", total: int = 8 * GIB) -> Tape:
    """A request that finds equal room in two segments; what is asked for next finds room after one choice only."""
    tape = Tape(total, conf)
    malloc, free = tape.allocator.malloc, tape.allocator.free
    first, second, _third, fourth = (malloc(8 * MIB) for _ in range(4))  # two in each segment of 20 MiB
    free(second)
    free(fourth)
    malloc(5 * MIB)  # into either of two rooms of 12 MiB
    free(first)
    malloc(20 * MIB)  # into the first segment, where that is free as a whole
    return tape


def test_what_addresses_decide_is_within_the_bar() -> None:
    tape = which_segment_decides()
    reserved = tape.allocator.peak_reserved_bytes
    bar = address_bar(tape.finish(), 0)
    other = {40 * MIB: 60 * MIB, 60 * MIB: 40 * MIB}[reserved]
    assert reserved - bar.reserved_below <= other <= reserved + bar.reserved_above
    assert bar.reserved_below + bar.reserved_above == 2 * 20 * MIB  # what was seen, twice


def test_there_is_no_bar_where_addresses_decide_nothing() -> None:
    tape = Tape(GIB)
    kept = [tape.allocator.malloc(size * MIB) for size in (20, 30, 40)]
    for address in kept:
        tape.allocator.free(address)
    assert address_bar(tape.finish(), 0) == NO_ADDRESS_BAR


def test_expandable_segments_have_addresses_of_their_own() -> None:
    tape = which_segment_decides("expandable_segments:True")
    assert address_bar(tape.finish(), 0) == NO_ADDRESS_BAR


def test_the_same_trace_has_the_same_bar() -> None:
    trace = which_segment_decides().finish()
    assert address_bar(trace, 0) == address_bar(trace, 0)


def test_a_replay_that_runs_out_counts_with_what_it_would_have_taken() -> None:
    """A request that is not served takes nothing; the bar reaches beyond the card instead."""
    total = 50 * MIB
    tape = which_segment_decides(total=total)
    assert tape.allocator.peak_reserved_bytes == 40 * MIB
    found = tape.finish()
    cards = tuple(replace(card, total_bytes=total) for card in found.devices)
    bar = address_bar(replace(found, meta={**found.meta, "source": "virtual"}, devices=cards), 0)
    assert bar.reserved_above == 2 * 20 * MIB
    assert bar.allocated_below == 0
