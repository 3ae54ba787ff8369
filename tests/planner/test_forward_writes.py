"""What forward passes write beside gradients, in pieces of a batch and in comparisons."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.planner.test_gradient_check import _plan
from tests.planner.writers import (
    Centre,
    Codebook,
    Counter,
    LastOutput,
    LastUse,
    OwnDraw,
    Queue,
    Seen,
    Teacher,
    annealed,
    layers,
    workload,
)
from torch import nn

from vramfit.errors import UsageError
from vramfit.planner.gradient_check import check_promises
from vramfit.planner.whole_and_pieces import LargeBatch, NoPiecesError, try_encoders, try_pieces
from vramfit.techniques import with_choices
from vramfit.techniques.core.technique import Choice
from vramfit.techniques.micro_batching import BatchNormalisation, MicroBatching, MicroBatchingSetting
from vramfit.workload import Workload


def _step(given: Workload, steps: int = 2) -> nn.Module:
    """The model after some steps."""
    state = given.start("cpu")
    for number in range(steps):
        torch.manual_seed(number)
        given.run_step(state, given.sizes)
    return state.model


KEPT: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[str, ...]]]] = {
    "centre": (Centre, {"averaged": ("centre",)}),
    "counter": (Counter, {"once": ("steps",)}),
    "attributes": (Seen, {"once": ("steps",), "summed": ("seen",), "averaged": ("smoothed",)}),
    "teacher": (Teacher, {"once": tuple(f"teacher.{n}" for n, _ in layers(8).named_parameters())}),
    "generator": (partial(OwnDraw, each=False), {"once": ("draws",)}),
    "last output": (LastOutput, {}),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_a_pass_writes_is_written_once_a_step_in_pieces(kind: str) -> None:
    make, names = KEPT[kind]
    given = workload(make)
    found = try_pieces(given, large=LargeBatch(examples=64)).setting
    assert {key: set(getattr(found, key)) for key in ("once", "averaged", "summed")} == {
        key: set(names.get(key, ())) for key in ("once", "averaged", "summed")
    }
    setting = replace(found, count=3)
    technique = MicroBatching()
    cut = with_choices(given, (Choice(technique=technique, setting=setting),))
    whole, pieces = _step(given), _step(cut)
    for (name, expected), value in zip(whole.state_dict().items(), pieces.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, msg=name)
    for attribute in ("steps", "seen", "smoothed"):
        if type(getattr(whole, attribute, None)) in (int, float):
            assert getattr(pieces, attribute) == pytest.approx(getattr(whole, attribute))
    if isinstance(whole, OwnDraw):
        assert torch.equal(whole.draws.get_state(), pieces.draws.get_state())


@pytest.mark.parametrize(
    ("make", "name"),
    [(Queue, "queue"), (Codebook, "codes"), (LastUse, "last")],
    ids=["queue", "codebook", "last use"],
)
def test_what_pieces_cannot_write_has_no_pieces(make: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(NoPiecesError, match=f"a forward pass writes {name}, and pieces of a batch do not"):
        try_pieces(workload(make))
    assert try_encoders(workload(make)).modules == ("layers",)


def test_draws_of_an_own_generator_for_each_example_have_no_pieces() -> None:
    with pytest.raises(NoPiecesError, match="do not give its gradients"):
        try_pieces(workload(partial(OwnDraw, each=True)))


def test_what_a_loss_counts_itself_is_put_back_and_has_no_pieces() -> None:
    loss = annealed()
    given = workload(layers, loss)
    with pytest.raises(NoPiecesError, match="a forward pass writes calls of loss, and pieces"):
        try_pieces(given)
    counted = loss.__closure__
    assert counted is not None
    assert [cell.cell_contents for cell in counted] == [0]


def test_batches_of_batch_norm_are_counted_once_a_step() -> None:
    given = workload(
        lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)), lambda m, b: m(b[0]).square().mean()
    )
    setting = MicroBatchingSetting(count=4, batch_norm=BatchNormalisation.PER_PIECE)
    model = _step(with_choices(given, (Choice(technique=MicroBatching(), setting=setting),)), steps=3)
    assert int(model[1].num_batches_tracked) == 3


def test_a_write_that_a_setting_does_not_name_is_refused() -> None:
    given = workload(Counter)
    cut = with_choices(given, (Choice(technique=MicroBatching(), setting=MicroBatchingSetting(count=2)),))
    with pytest.raises(UsageError, match="the forward pass writes to steps, and each piece of a batch would"):
        _step(cut, steps=1)
    other = MicroBatchingSetting(count=2, once=("nowhere.steps",))
    with pytest.raises(UsageError, match=re.escape("micro-batching names 'nowhere.steps'")):
        with_choices(given, (Choice(technique=MicroBatching(), setting=other),)).start("cpu")


def test_a_plan_is_held_to_what_its_steps_write() -> None:
    given = workload(Counter)
    right = check_promises(given, _plan(given, micro_batching={"count": 4, "once": ["steps"]}))
    assert right.fault is None
    assert "parameters and 1 value that a step writes beside them" in right.note
    wrong = check_promises(given, _plan(given, micro_batching={"count": 4, "summed": ["steps"]}))
    assert wrong.fault is not None
    assert "steps, which a step writes, differs by" in wrong.note


def test_what_a_loss_counts_is_the_same_for_both_halves_of_a_comparison() -> None:
    given = workload(lambda: nn.Sequential(*(layers(16) for _ in range(2))), annealed())
    blocks = {"mode": "whole", "modules": ["0", "1"]}
    found = check_promises(given, _plan(given, activation_checkpointing=blocks))
    assert found.fault is None
    assert "1 value that a step writes beside them are those of the plain program, bit for bit" in found.note
