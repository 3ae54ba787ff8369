"""Outputs of inference held against the plain program's."""

from __future__ import annotations

import math

import torch
from torch import nn

from vramfit.planner.output_check import FLIPPED, compare_outputs, judge_outputs, outputs_of
from vramfit.techniques import Numerics
from vramfit.techniques.support.promised_errors import PRECISION_ERROR, ROUNDING_ERROR
from vramfit.workload import Workload


def _judged(plain: torch.Tensor, planned: torch.Tensor, numerics: Numerics) -> tuple[bool, float]:
    found = judge_outputs({"": plain}, {"": planned}, numerics)
    return found.passes, found.worst


def test_outputs_are_judged_by_what_is_promised() -> None:
    plain = torch.linspace(-1, 1, 1000)
    rounded = plain * (1 + 0.5 * ROUNDING_ERROR[torch.float32])
    coarse = plain * (1 + 0.5 * PRECISION_ERROR)
    assert _judged(plain, plain.clone(), Numerics.BITWISE) == (True, 0.0)
    assert not _judged(plain, rounded, Numerics.BITWISE)[0]
    assert _judged(plain, rounded, Numerics.ROUNDING)[0]
    assert not _judged(plain, coarse, Numerics.ROUNDING)[0]
    assert _judged(plain, coarse, Numerics.PRECISION)[0]
    assert not _judged(plain, plain * 1.2, Numerics.PRECISION)[0]
    assert _judged(plain, plain * 1.2, Numerics.APPROXIMATE)[0]


def test_a_missing_output_and_other_shapes_never_pass() -> None:
    plain = torch.ones(4)
    assert not judge_outputs({"a": plain}, {}, Numerics.APPROXIMATE).passes
    passes, worst = _judged(plain, torch.ones(5), Numerics.PRECISION)
    assert not passes
    assert math.isinf(worst)
    assert not _judged(plain, torch.full((4,), math.nan), Numerics.PRECISION)[0]


def test_the_same_nan_in_the_same_place_is_equal() -> None:
    plain = torch.tensor([1.0, math.nan])
    assert judge_outputs({"": plain}, {"": plain.clone()}, Numerics.BITWISE).equal == 1
    assert judge_outputs({"": plain}, {"": plain.flip(0)}, Numerics.BITWISE).equal == 0


def test_rounding_may_flip_few_classes() -> None:
    plain = torch.zeros(10_000, dtype=torch.long)
    few, many = plain.clone(), plain.clone()
    few[: int(FLIPPED * 10_000)] = 1
    many[: int(FLIPPED * 10_000) + 1] = 1
    assert _judged(plain, few, Numerics.ROUNDING)[0]
    assert not _judged(plain, many, Numerics.ROUNDING)[0]
    assert not _judged(plain, few, Numerics.BITWISE)[0]


def test_outputs_are_named_by_their_place() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"first": x + 1, "rest": [x, "no tensor"]}

    workload = Workload(
        model=Two, batch=lambda batch_size: torch.ones(batch_size, 2), sizes={"batch_size": 3}
    )
    found = outputs_of(workload, workload.sizes)
    assert list(found) == ["['first']", "['rest'][0]"]
    assert found["['first']"].tolist() == [[2.0, 2.0]] * 3


class Amplified(nn.Module):
    """Divides rounding by rounding: an instance norm of values that are equal but for it."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.norm, self.shift = nn.InstanceNorm1d(1, eps=1e-15), shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.cumsum(-1) / torch.arange(1, x.shape[-1] + 1) + self.shift)  # type: ignore[no-any-return]


def test_rounding_that_a_program_amplifies_itself_is_no_fault_of_a_plan() -> None:
    def workload(shift: float) -> Workload:
        return Workload(
            model=lambda: Amplified(shift),
            batch=lambda batch_size: torch.full((batch_size, 1, 999), 0.3),
            sizes={"batch_size": 1},
        )

    plain, planned = workload(0.0), workload(1e-7)
    sizes = {"batch_size": 1}
    found = judge_outputs(outputs_of(plain, sizes), outputs_of(planned, sizes), Numerics.ROUNDING)
    assert not found.passes
    assert compare_outputs(plain, planned, sizes, Numerics.ROUNDING).passes
    assert not compare_outputs(plain, planned, sizes, Numerics.BITWISE).passes
    wrong = Workload(model=lambda: nn.Linear(999, 999), batch=plain.batch, sizes=plain.sizes)
    assert not compare_outputs(
        wrong, Workload(model=nn.Identity, batch=plain.batch, sizes=sizes), sizes, Numerics.ROUNDING
    ).passes
