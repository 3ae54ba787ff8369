"""Observations made by hand: blocks in a row, each with a few operations."""

from __future__ import annotations

import random

from vramfit.planner.observing import BETWEEN, Observation, Stretch
from vramfit.techniques import Block, BlockOp

MIB = 1 << 20


def op(mib: int, ms: float, *, kept: bool = True, flops: int = 0, mutated: bool = False) -> BlockOp:
    """An operation with results of so many MiB that takes so many milliseconds."""
    return BlockOp(name="mm", bytes=mib * MIB, seconds=ms / 1e3, flops=flops, kept=kept, mutated=mutated)


def block(index: int, ops: list[BlockOp], *, input_mib: int = 1) -> Block:
    """A block of these operations."""
    return Block(
        path=f"layers.{index}",
        kind="Layer",
        index=index,
        like=index,
        ops=tuple(ops),
        input_bytes=input_mib * MIB,
        new_input_bytes=input_mib * MIB,
        kept_bytes=sum(one.bytes for one in ops if one.kept),
        forward_seconds=sum(one.seconds for one in ops),
        backward_seconds=2 * sum(one.seconds for one in ops),
    )


def observation(blocks: list[Block], *, base_mib: int = 100, head_mib: int = 20) -> Observation:
    """A step in which the blocks run one after another, with a head between forward and backward pass."""
    held, stretches = base_mib * MIB, []
    for one in blocks:
        held += one.kept_bytes
        stretches.append(Stretch(one.index, False, held))
    stretches.append(Stretch(BETWEEN, False, held + head_mib * MIB))
    for one in reversed(blocks):
        stretches.append(Stretch(one.index, True, held + 5 * MIB))
        held -= one.kept_bytes
    stretches.append(Stretch(BETWEEN, True, held))
    seconds = sum(one.forward_seconds + one.backward_seconds for one in blocks)
    return Observation(
        blocks=tuple(blocks), stretches=tuple(stretches), seconds=seconds, flops=0, logits_bytes=0
    )


def random_observation(seed: int, *, blocks: int = 3, ops: int = 3) -> Observation:
    """A step of random blocks."""
    draw = random.Random(seed)
    made = [
        block(
            index,
            [op(draw.randint(1, 30), draw.uniform(0.1, 9), kept=draw.random() < 0.8) for _ in range(ops)],
            input_mib=draw.randint(0, 3),
        )
        for index in range(blocks)
    ]
    return observation(made)
