"""Many micro-batches, looked at by a few."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.made import block, op, step_profile

from vramfit.planner.devices.cost import PROFILED_MICRO_BATCHES, scaled_up, with_fewer_micro_batches
from vramfit.techniques import Choice, find_technique
from vramfit.techniques.micro_batching import MicroBatchingSetting


def _micro(count: int) -> Choice:
    return Choice(technique=find_technique("micro-batching"), setting=MicroBatchingSetting(count=count))


def test_pieces_keep_their_size() -> None:
    choices, sizes, times = with_fewer_micro_batches(
        (_micro(16),), {"batch_size": 64, "sequence_length": 8}, PROFILED_MICRO_BATCHES
    )
    assert sizes == {"batch_size": 12, "sequence_length": 8}
    assert choices[0].setting == MicroBatchingSetting(count=PROFILED_MICRO_BATCHES)
    assert times == pytest.approx(16 / 3)


@pytest.mark.parametrize("count", [2, 3])
def test_few_pieces_are_run_as_they_are(count: int) -> None:
    choices = (_micro(count),)
    assert with_fewer_micro_batches(choices, {"batch_size": 64}, PROFILED_MICRO_BATCHES) == (
        choices,
        {"batch_size": 64},
        1.0,
    )
    assert with_fewer_micro_batches((), {"batch_size": 64}, PROFILED_MICRO_BATCHES) == (
        (),
        {"batch_size": 64},
        1.0,
    )


def test_the_optimizer_steps_once_however_many_there_are() -> None:
    seen = replace(step_profile([block(0, [op(10, 5.0)])]), seconds=7.0, tail_seconds=1.0, flops=60)
    many = scaled_up(seen, 2.5)
    assert many.seconds == 16.0
    assert many.flops == 150
    assert many.blocks[0].calls == round(2.5 * seen.blocks[0].calls)
