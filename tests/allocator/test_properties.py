"""Random programs under every setting: no rule of bookkeeping is ever broken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.block import ALLOCATED, FREE, UNMAPPED
from vramfit.allocator.core import Rounding

from .programs import (
    POOL,
    Ledger,
    Runner,
    cards,
    check_figures,
    check_structure,
    configs,
    many,
    new_allocator,
    plain_programs,
    programs,
)


def _no_room(runner: Runner) -> None:
    """An OOM was inevitable: nothing whole is cached any more, and what is left is too little."""
    allocator, error = runner.allocator, runner.oom
    config = allocator.config
    segment = error.segment_bytes
    if error.allowed_bytes is not None and error.reserved_bytes + segment > error.allowed_bytes:
        if config.throw_on_cudamalloc_oom:
            return  # fails without any retry, by design
    elif config.expandable_segments:
        page = 2 * 2**20 if error.rounded_bytes <= 2**20 else config.large_segment_size
        assert error.free_bytes < -(-error.rounded_bytes // page) * page
    else:
        assert error.free_bytes < segment
    if runner.capturing:
        return  # torch keeps everything while a capture runs
    for block in allocator._blocks.values():
        owner = block.shelf.pool.owner
        if block.state == FREE and block.segment is None and (owner is None or owner.users == 0):
            assert block.is_split, "a whole cached segment was kept"


@many
@given(card=cards, config=configs, program=programs)
def test_every_step_keeps_the_books(card: int, config: AllocatorConfig, program: list[tuple]) -> None:
    ledger = Ledger()
    runner = Runner(new_allocator(card, config, ledger))
    for step in program:
        runner.run(step)
        if step[0] == "reset_peak":
            ledger.reset_peak()
        elif step[0] == "reset_accumulated":
            ledger.reset_accumulated()
        check_structure(runner.allocator, runner.live)
        check_figures(runner.allocator)
        ledger.check(runner.allocator.memory_stats_flat())
        if runner.oom is not None:
            _no_room(runner)


@many
@given(card=cards, program=st.one_of(plain_programs, programs))
def test_the_short_path_equals_the_full_one(card: int, program: list[tuple]) -> None:
    short = Runner(new_allocator(card, AllocatorConfig()))
    full = Runner(new_allocator(card, AllocatorConfig(), lambda *_: None))
    for step in program:
        short.run(step)
        full.run(step)
        assert not full.allocator.plain
        assert short.log == full.log
        assert short.allocator.memory_stats() == full.allocator.memory_stats()
    check_structure(short.allocator, short.live)
    assert short.allocator.segments() == full.allocator.segments()


@many
@given(card=cards, config=configs, program=programs)
def test_everything_can_be_given_back(card: int, config: AllocatorConfig, program: list[tuple]) -> None:
    runner = Runner(new_allocator(card, config))
    for step in program:
        runner.run(step)
    allocator = runner.allocator
    for address in runner.live:
        allocator.free(address)
    if runner.capturing:
        allocator.end_pool(POOL)
    for _ in range(runner.holds):
        allocator.release_pool(POOL)
    allocator.empty_cache()
    stats = allocator.memory_stats_flat()
    leftovers = {name: value for name, value in stats.items() if name.endswith(".current") and value}
    assert leftovers == {}
    assert allocator.segments() == []
    # Addresses that were reserved when memory had already run out stay reserved, as in torch.
    assert all(b.state == UNMAPPED and not b.is_split for b in allocator._blocks.values())
    assert allocator._private == {}
    assert allocator.driver.mapped_bytes == 0


@many
@given(card=cards, program=programs, changes=st.lists(configs, min_size=1, max_size=4))
def test_settings_may_change_at_run_time(
    card: int, program: list[tuple], changes: list[AllocatorConfig]
) -> None:
    runner = Runner(new_allocator(card, changes[0]))
    for index, step in enumerate(program):
        if index % 8 == 7:
            runner.allocator.config = changes[index // 8 % len(changes)]
        runner.run(step)
        check_structure(runner.allocator, runner.live)
        check_figures(runner.allocator)


@many
@given(card=cards, config=configs, program=programs)
def test_blocks_are_as_large_as_the_rules_say(
    card: int, config: AllocatorConfig, program: list[tuple]
) -> None:
    rounding = Rounding(config)
    runner = Runner(new_allocator(card, config))
    for step in program:
        before = len(runner.live)
        runner.run(step)
        if step[0] != "malloc" or len(runner.live) == before:
            continue
        size, address = step[1], runner.live[-1]
        block = runner.allocator._blocks[address]
        assert block.state == ALLOCATED and block.requested == size
        slack = block.size - rounding.block(size)
        if block.shelf.pool.small or config.expandable_segments:
            assert 0 <= slack < 512
        elif config.max_split_size is not None and rounding.block(size) >= config.max_split_size:
            assert 0 <= slack < max(config.max_non_split_rounding, 2 * 2**20)
        else:
            assert 0 <= slack <= 2**20
