"""A plan held against the plain program: promises that are kept, and those that are broken on purpose."""

from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console
from tests.planner.test_plan_objects import _layers, _plan
from tests.techniques.toys import all_toys
from torch import nn

from vramfit.planner.verification import (
    LOSS_SHARE,
    Verification,
    compare,
    judge_gradients,
    judge_losses,
    smaller_sizes,
    too_large,
)
from vramfit.report import print_report
from vramfit.techniques import Numerics
from vramfit.techniques.support.no_dropout import silence_dropout
from vramfit.techniques.support.promised_errors import ROUNDING_ERROR


def test_a_bitwise_plan_is_equal_in_every_gradient_and_loss() -> None:
    workload = all_toys()["language-tied"]
    gradients, losses, notes = compare(
        workload, _plan(activation_checkpointing=_layers()), workload.sizes, steps=4
    )
    assert gradients.passes
    assert gradients.equal == gradients.parameters > 20
    assert losses.passes
    assert losses.plain == losses.planned
    assert len(losses.plain) == 4
    assert notes == ()


def test_a_plan_that_rounds_stays_within_its_bound_and_is_not_equal() -> None:
    workload = all_toys()["language-untied"]
    gradients, losses, _ = compare(workload, _plan(chunked_loss={}), workload.sizes, steps=3)
    assert gradients.passes
    assert gradients.equal < gradients.parameters
    assert 0 < gradients.worst < 1e-4
    assert losses.passes


def test_switches_of_the_process_are_put_back() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    workload = all_toys()["mlp"]
    seen: list[str] = []
    compare(
        workload,
        _plan(tf32={}),
        workload.sizes,
        steps=2,
        progress=lambda _text: seen.append(torch.backends.cuda.matmul.fp32_precision),
    )
    assert seen == [before, before, "tf32", "tf32"]  # the plain program's steps, then the plan's
    assert torch.backends.cuda.matmul.fp32_precision == before != "tf32"


def test_lower_precision_is_judged_by_its_own_bound() -> None:
    workload = all_toys()["language-untied"]
    gradients, losses, _ = compare(
        workload, _plan(mixed_precision={"dtype": "bfloat16"}), workload.sizes, steps=10
    )
    assert gradients.passes
    assert gradients.worst > 1e-4
    assert losses.passes


def test_a_scale_that_is_too_large_at_first_is_lowered_as_in_training() -> None:
    workload = all_toys()["language-untied"]
    plan = _plan(mixed_precision={"dtype": "float16", "initial_scale": 2.0**24})
    gradients, losses, _ = compare(workload, plan, workload.sizes, steps=4)
    assert gradients.passes
    assert 0 < gradients.worst < 0.1
    assert losses.passes
    assert len(losses.planned) == 4


def test_wrong_gradients_fail_each_promise_but_the_last() -> None:
    plain = {"a": torch.ones(4, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    wrong = {"a": plain["a"] * 1.5, "b": plain["b"]}
    for numerics in (Numerics.BITWISE, Numerics.ROUNDING, Numerics.PRECISION):
        found = judge_gradients(plain, wrong, numerics)
        assert not found.passes
        assert found.worst_name == "a"
        assert found.worst == pytest.approx(0.5)
        assert found.equal == 1
    assert judge_gradients(plain, wrong, Numerics.APPROXIMATE).passes


def test_a_missing_gradient_fails() -> None:
    plain = {"a": torch.ones(4, dtype=torch.float64)}
    found = judge_gradients(plain, {}, Numerics.APPROXIMATE)
    assert not found.passes
    assert found.worst == math.inf


def test_a_gradient_that_is_rounding_itself_is_measured_beside_the_largest() -> None:
    plain = {"a": torch.ones(4, dtype=torch.float64), "key.bias": torch.full((4,), 1e-9, dtype=torch.float64)}
    other = {"a": plain["a"], "key.bias": -plain["key.bias"]}
    found = judge_gradients(plain, other, Numerics.ROUNDING)
    assert found.passes
    assert found.tiny
    assert found.worst == pytest.approx(2e-3 * ROUNDING_ERROR[torch.float32])
    assert (found.difference, found.norm, found.largest_norm) == pytest.approx((4e-9, 2e-9, 2.0))
    assert not judge_gradients(plain, other, Numerics.BITWISE).passes
    # What becomes of it is no longer rounding.
    assert not judge_gradients(plain, other | {"key.bias": plain["a"] * 1e-3}, Numerics.ROUNDING).passes


def test_in_lower_precision_only_what_is_rounding_itself_is_measured_beside_the_largest() -> None:
    plain = {
        "a": torch.ones(4, dtype=torch.float64),
        "key.bias": torch.full((4,), 1e-9, dtype=torch.float64),
        "norm.bias": torch.full((4,), 1e-3, dtype=torch.float64),
    }
    noise = judge_gradients(plain, plain | {"key.bias": plain["a"] * 1e-3}, Numerics.PRECISION)
    assert noise.passes
    assert noise.tiny
    # A small gradient is a real one, and a difference below what bfloat16 rounds of the largest still breaks the word.
    real = judge_gradients(plain, plain | {"norm.bias": plain["norm.bias"] * 1.2}, Numerics.PRECISION)
    assert not real.passes
    assert not real.tiny


def test_what_was_compared_is_printed() -> None:
    plain = {"a": torch.ones(4, dtype=torch.float64), "key.bias": torch.full((4,), 1e-9, dtype=torch.float64)}
    tiny = judge_gradients(plain, plain | {"key.bias": plain["key.bias"] * 0.05}, Numerics.ROUNDING)
    own = judge_gradients(plain, plain | {"a": plain["a"] * 1.00005}, Numerics.ROUNDING)
    for gradients, told in (
        (
            tiny,
            "by 1.9e-09 (key.bias, a gradient of 2e-09 that is rounding beside the largest of 2: 9.5e-08 of ",
        ),
        (own, "5e-05 of its norm (a, 0.0001 of 2), 0.0001 promised"),
    ):
        found = Verification(
            simulated=None,
            gradients=gradients,
            losses=None,
            sizes={"batch_size": 2},
            numerics=Numerics.ROUNDING,
        )
        console = Console(width=500, file=io.StringIO())
        print_report(found, console=console)
        printed = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
        assert printed.startswith("✓ gradients")
        assert told in printed


@pytest.mark.parametrize(
    ("dtype", "kept", "broken"),
    [(torch.float64, 1e-11, 1e-9), (torch.float32, 1e-5, 1e-3), (torch.bfloat16, 1e-2, 0.1)],
)
def test_rounding_is_judged_by_the_dtype_of_the_parameter(
    dtype: torch.dtype, kept: float, broken: float
) -> None:
    plain = {"a": torch.ones(4, dtype=torch.float64)}
    for error, passes in ((kept, True), (broken, False)):
        found = judge_gradients(plain, {"a": plain["a"] + error}, Numerics.ROUNDING, {"a": dtype})
        assert found.passes is passes
        assert found.allowed == ROUNDING_ERROR[dtype]


def test_dropout_by_function_is_off_where_micro_batches_would_draw_otherwise() -> None:
    workload = all_toys()["language-tied"]  # its blocks call F.dropout
    gradients, _, notes = compare(workload, _plan(micro_batching={"count": 2}), workload.sizes, steps=2)
    assert gradients.passes
    assert any("dropout was off" in note for note in notes)
    model = nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.2), nn.MultiheadAttention(4, 2, 0.1), nn.Dropout(0.3))
    assert silence_dropout(model)
    assert not silence_dropout(model)
    assert [model[0].dropout, model[1].dropout, model[2].p] == [0.0, 0.0, 0.0]


def test_a_curve_that_falls_less_fails() -> None:
    plain = [4.0 - 0.1 * step for step in range(20)]
    near = [loss + 0.5 * LOSS_SHARE for loss in plain]
    flat = [4.0 - 0.02 * step for step in range(20)]
    assert judge_losses(plain, near, Numerics.PRECISION).passes
    assert not judge_losses(plain, flat, Numerics.APPROXIMATE).passes
    assert not judge_losses(plain, [math.nan] * 20, Numerics.APPROXIMATE).passes
    assert not judge_losses(plain, near, Numerics.BITWISE).passes


def test_what_is_too_large_for_this_machine_is_not_tried() -> None:
    workload = all_toys()["mlp"]
    assert too_large(workload, 1 << 30) == ""
    assert "are free" in too_large(workload, 1 << 10)


def test_the_batch_is_halved_until_it_is_quick_enough() -> None:
    workload = all_toys()["mlp"]
    plan = _plan(activation_checkpointing={"mode": "none"})
    assert smaller_sizes(workload, plan, 1.0, 1e9, 50) == {"batch_size": 4}
    assert smaller_sizes(workload, plan, 1.0, 60, 50) == {"batch_size": 2}
