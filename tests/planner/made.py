"""Observations made by hand: blocks in a row, each with a few operations."""

from __future__ import annotations

import random
from dataclasses import replace

from vramfit.planner.step_profiler import BETWEEN, StepInterval, StepProfile
from vramfit.techniques import BlockOp, ModelBlock
from vramfit.techniques.core.model_profile import Saved

MIB = 1 << 20


def op(mib: int, ms: float, *, kept: bool = True, flops: int = 0, mutated: bool = False) -> BlockOp:
    """An operation with results of so many MiB that takes so many milliseconds."""
    return BlockOp(
        name="mm",
        bytes=mib * MIB,
        seconds=ms / 1e3,
        flops=flops,
        kept=kept,
        mutated=mutated,
        own_bytes=mib * MIB if kept else 0,
    )


def block(index: int, ops: list[BlockOp], *, input_mib: int = 1) -> ModelBlock:
    """A block of these operations."""
    return ModelBlock(
        path=f"layers.{index}",
        kind="Layer",
        index=index,
        like=index,
        ops=tuple(ops),
        input_bytes=input_mib * MIB,
        new_input_bytes=input_mib * MIB,
        saves=_saves(ops),
        kept_bytes=sum(one.bytes for one in ops if one.kept),
        forward_seconds=sum(one.seconds for one in ops),
        backward_seconds=2 * sum(one.seconds for one in ops),
    )


def chained(ops: list[BlockOp]) -> list[BlockOp]:
    """The same operations, each of which reads the results of the one before."""
    return [replace(one, reads=(number - 1,) if number else ()) for number, one in enumerate(ops)]


def _saves(ops: list[BlockOp]) -> tuple[Saved, ...]:
    """Results are saved as soon as they are there, and needed before what follows them goes backward."""
    ran, total, found = 0.0, sum(one.seconds for one in ops), []
    for one, following in zip(ops, (*ops[1:], None), strict=True):
        ran += one.seconds
        later = ran + (following.seconds if following is not None else 0.0)
        if one.kept:
            found.append(Saved(one.bytes, ran, 2 * (total - later)))
    return tuple(found)


def step_profile(blocks: list[ModelBlock], *, base_mib: int = 100, head_mib: int = 20) -> StepProfile:
    """A step in which the blocks run one after another, with a head between forward and backward pass."""
    held, intervals = base_mib * MIB, []
    for one in blocks:
        held += one.kept_bytes
        intervals.append(StepInterval(one.index, False, held))
    intervals.append(StepInterval(BETWEEN, False, held + head_mib * MIB))
    for one in reversed(blocks):
        intervals.append(StepInterval(one.index, True, held + 5 * MIB))
        held -= one.kept_bytes
    intervals.append(StepInterval(BETWEEN, True, held))
    seconds = sum(one.forward_seconds + one.backward_seconds for one in blocks)
    return StepProfile(
        blocks=tuple(blocks), intervals=tuple(intervals), seconds=seconds, flops=0, logits_bytes=0
    )


def step_profile_inside(seed: int, *, blocks: int = 2, ops: int = 4) -> StepProfile:
    """A step of random blocks whose operations read one another's results, looked at within their passes too."""
    draw = random.Random(seed)
    made = []
    for index in range(blocks):
        drawn = [
            replace(
                op(draw.randint(1, 30), draw.uniform(0.1, 9), kept=draw.random() < 0.7),
                reads=tuple(earlier for earlier in range(number) if draw.random() < 0.6),
                last_read=draw.randint(number, ops),
                last_saved=draw.randint(number, ops + 1),
                fixed=draw.random() < 0.1,
                shared=draw.random() < 0.1,
            )
            for number in range(ops)
        ]
        made.append(block(index, drawn, input_mib=draw.randint(0, 3)))
    held, intervals = 100 * MIB, []
    for one in made:
        for number, operation in enumerate(one.ops):
            held += operation.own_bytes
            intervals.append(
                StepInterval(one.index, False, held + draw.randint(0, 20) * MIB, one.index, number)
            )
    intervals.append(StepInterval(BETWEEN, False, held + 10 * MIB))
    for one in reversed(made):
        for position in reversed(range(ops + 1)):
            peak = held + draw.randint(0, 20) * MIB
            intervals.append(StepInterval(one.index, True, peak, one.index, position))
            held -= one.ops[position].own_bytes if position < ops else 0
    seconds = sum(one.forward_seconds + one.backward_seconds for one in made)
    return StepProfile(
        blocks=tuple(made), intervals=tuple(intervals), seconds=seconds, flops=0, logits_bytes=0
    )


def random_step_profile(seed: int, *, blocks: int = 3, ops: int = 3) -> StepProfile:
    """A step of random blocks."""
    draw = random.Random(seed)
    made = [
        block(
            index,
            chained(
                [op(draw.randint(1, 30), draw.uniform(0.1, 9), kept=draw.random() < 0.8) for _ in range(ops)]
            ),
            input_mib=draw.randint(0, 3),
        )
        for index in range(blocks)
    ]
    return step_profile(made)
