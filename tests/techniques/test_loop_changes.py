"""What changes a training's loop says so: a program's own loop is never given it in silence."""

from __future__ import annotations

from contextlib import suppress

import pytest
from tests.techniques.gradients.architectures import all_architectures
from tests.techniques.gradients.settings import choices

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, find_technique, setting_from_plain

BY_HAND = (
    ("micro-batching", {"count": 2}),
    ("mixed-precision", {"dtype": "float16"}),
    ("parameter-offload", {"gradients": "device"}),
)


def loop_changed(live: AttachedProgram) -> bool:
    wanted = (live.splitter, live.scaler, live.steps_in_backward or None, live.gathering or None)
    return any(one is not None for one in wanted)


@pytest.mark.parametrize("name", ["decoder"])
def test_whatever_a_technique_asks_of_the_loop_is_declared(name: str) -> None:
    by_hand = [
        Choice(technique=find_technique(one), setting=setting_from_plain(find_technique(one), values))
        for one, values in BY_HAND
    ]
    workload = all_architectures()[name].workload()
    changing = set()
    for choice in (*choices(name), *by_hand):
        model = workload.make_model()
        live = AttachedProgram(model, workload.make_optimizer(model))
        with suppress(UsageError):  # not for this model
            live.attach([choice])
            if loop_changed(live):
                changing.add(choice.name)
                assert choice.loop_change is not None, choice.words
        live.undo()
    assert changing >= {"micro-batching", "mixed-precision", "parameter-offload", "step-in-backward"}
