"""Gradients of cut batches beside the plain program's, for the workloads of the study at a small size."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.virtual.conftest import fit_interpreter

from vramfit.planner.micro_batch_trial import MicroBatchVerdict, try_micro_batching
from vramfit.planner.plan_file import PlanFigures, PlanTarget
from vramfit.planner.plans import plan_of
from vramfit.planner.verification import GradientCheck, compare
from vramfit.techniques import Choice, Numerics, Profile, Setting, find_technique
from vramfit.techniques.gradient_caching import GradientCachingSetting
from vramfit.techniques.micro_batching import (
    BatchNormalisation,
    MicroBatching,
    MicroBatchingSetting,
    batch_norms,
)
from vramfit.workload import Workload

__all__ = ["fit_interpreter"]

STUDIES = Path(__file__).parents[2] / "studies"
sys.path.insert(0, str(STUDIES))
import plan_gradients  # noqa: E402
from gradient_parts import single, two_budgets  # noqa: E402
from gradient_parts.kinds import KINDS  # noqa: E402
from gradient_parts.subjects import SUBJECTS  # noqa: E402

EXAMPLES = 5
CUT = {"mean", "masked mean, ragged", "LSTM", "Whisper", "T5", "Llama with LoRA"}
"""Whose batches are cut under a promise of rounding."""

IN_PIECES = {
    "variance regularisation": ("",),
    "coupled in training": ("0", "1", "3"),
    "DETR": ("model",),
    "CLIP, 1 + 1 layers": ("text_model", "vision_model"),
    "CLIP, 4 + 4 layers": ("text_model", "vision_model"),
}
"""Whose encoders run in pieces, and which these are."""

REFUSED = {
    "GAN": "with a step of its own",
    "mixture of experts, balanced": "do not give its gradients",
}


def _small(name: str) -> Workload:
    for library in ("transformers", "peft"):
        pytest.importorskip(library)
    workload = SUBJECTS[name].make()
    return replace(workload, sizes={"batch_size": EXAMPLES})


def _cutting(workload: Workload) -> MicroBatchVerdict:
    return try_micro_batching(
        workload, Profile(model=workload.model(), optimizer=None, sizes=workload.sizes, trains=True)
    )


def _compared(workload: Workload, technique: str, setting: Setting) -> GradientCheck:
    choice = Choice(technique=find_technique(technique), setting=setting)
    assert choice.promise.numerics is Numerics.ROUNDING
    figures = PlanFigures(peak_allocated_bytes=0, peak_reserved_bytes=0, total_bytes=0)
    plan = plan_of(
        (choice,), PlanTarget(device="CPU", budget_bytes=1, sizes=workload.sizes), figures, figures
    )
    return compare(workload, plan, workload.sizes, steps=1)[0]


@pytest.mark.filterwarnings("ignore:var\\(\\)", "ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_cut_has_the_gradients_of_the_whole(name: str) -> None:
    workload = _small(name)
    found = _cutting(workload)
    if name == "batch norm":
        assert batch_norms(workload.model())
        known = MicroBatchingSetting(batch_norm=BatchNormalisation.PER_PIECE)
        assert MicroBatching().promise(known).numerics is Numerics.APPROXIMATE
    elif name in CUT:
        assert found.setting is not None, found.note
        for count in (2, EXAMPLES):
            check = _compared(workload, "micro-batching", replace(found.setting, count=count))
            assert check.passes, check
    elif name in IN_PIECES:
        assert re.search(
            "micro-batching is left out: pieces of a batch of [0-9]+ do not give its", found.note
        )
        assert found.encoders == IN_PIECES[name]
        for count in (2, EXAMPLES):
            setting = GradientCachingSetting(count=count, modules=found.encoders)
            check = _compared(workload, "gradient-caching", setting)
            assert check.passes, check
            wrong = _compared(workload, "micro-batching", MicroBatchingSetting(count=count))
            assert not wrong.passes
    else:
        assert (found.setting, found.encoders) == (None, ())
        assert REFUSED[name] in found.note


@pytest.mark.filterwarnings("ignore:var\\(\\)")
def test_a_plan_of_the_study_keeps_its_word_and_is_shown() -> None:
    row = plan_gradients.row_of("variance regularisation", "rounding", ["micro-batching", "gradient-caching"])
    assert row.passes
    assert row.techniques == ("gradient-caching",)
    assert row.after < row.before
    assert row.parameters == 18
    assert row.allowed is not None
    assert 0 < row.worst <= row.allowed == 1e-4
    shown = plan_gradients.page([row, replace(row, passes=False)])
    assert "1 of 2 plans keep their word" in shown
    assert (
        "- variance regularisation: micro-batching is left out: pieces of a batch of 4 do not give" in shown
    )


def test_a_batch_that_was_cut_wrongly_is_told() -> None:
    def cut(name: str, **setting: Any) -> bool:
        choice = Choice(technique=MicroBatching(), setting=MicroBatchingSetting(**setting))
        figures = PlanFigures(peak_allocated_bytes=0, peak_reserved_bytes=0, total_bytes=0)
        plan = plan_of((choice,), PlanTarget(device="CPU", budget_bytes=1), figures, figures)
        return plan_gradients._wrongly_cut(SUBJECTS[name], plan)

    assert cut("CLIP, 1 + 1 layers")
    assert not cut("mean")
    assert not cut("batch norm", batch_norm=BatchNormalisation.PER_PIECE)


def _alone(subject: str, technique: str) -> list[single.Trial]:
    pytest.importorskip("transformers")
    return list(single.trials(subject, (technique,), steps=2))


def test_routers_in_float32_keep_the_promise_of_mixed_precision() -> None:
    (found,) = _alone("mixture of experts, balanced", "mixed-precision")
    assert found.setting == "island kinds MixtralTopKRouter"
    assert found.passes, found
    assert found.worst < 0.05


def test_layer_norms_in_bfloat16_are_judged_as_a_card_computes_them() -> None:
    found = _alone("mean", "low-precision-training")
    assert len(found) == 3
    for one in found:
        assert one.passes
        assert 0 < one.worst < 0.02, one


def test_tf32_is_tried_with_rounded_products() -> None:
    (found,) = _alone("mean", "tf32")
    assert found.equal == 0
    assert 2**-14 < found.worst < 2**-8
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"


def test_values_of_tf32_have_10_bits() -> None:
    values = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 0.0, math.inf, -math.inf])
    expected = torch.tensor([1 + 2**-10, 1 + 2**-10, 1.0, -1 - 2**-10, 0.0, math.inf, -math.inf])
    assert torch.equal(single.rounded(values), expected)
    assert single.rounded(values.double()).dtype is torch.float64


def test_each_technique_alone_is_shown_by_its_worst() -> None:
    one = single.Trial(
        technique="tf32",
        setting="",
        subject="mean",
        promise="precision",
        parameters=4,
        equal=1,
        worst=0.01,
        worst_name="a",
        allowed=0.1,
    )
    tried = [one, replace(one, subject="GAN", worst=0.3, worst_name="b", passes=False, losses=0.02)]
    tried.append(
        replace(one, subject="DETR", parameters=0, equal=0, worst=0.0, refused="it cannot. Try another")
    )
    (cells,) = single.alone_cells(tried)
    assert cells == (
        *("tf32", "as it is", "precision", "2 (not DETR: it cannot)", "2 of 8", "3.0e-01 (GAN: b)", "0.1"),
        *("2.0e-02 (GAN)", "GAN (0.3)"),
    )
    assert "| tf32 | as it is | precision |" in plan_gradients.page([], tried)


def test_a_kind_is_held_to_its_promise_at_two_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_budgets, "SAVED", (0.3,))
    (row,) = two_budgets.rows_of("counter in a buffer")
    assert row.passes
    assert row.compared
    assert row.techniques[0] == "micro-batching"
    assert 0 < row.worst <= 1e-4
    assert row.state == 0
    shown = plan_gradients.page(
        [], [], [row, replace(row, kind="other", passes=False, state=0.5, worst_state="count")]
    )
    assert "1 of 2 plans for 2 kinds keep their word; at 0 budgets nothing fits." in shown
    assert "| other ✗ | 30% | micro-batching" in shown
    assert "5.0e-01 (count)" in shown
    assert len(KINDS) == 60


def test_a_broken_promise_is_seen_by_the_studys_own_loop() -> None:
    workload = replace(KINDS["counter in a buffer"](), sizes={"batch_size": 64})
    technique = find_technique("micro-batching")
    choice = Choice(technique=technique, setting=technique.setting_type(count=4, summed=("count",)))
    figures = PlanFigures(peak_allocated_bytes=0, peak_reserved_bytes=0, total_bytes=0)
    plan = plan_of([choice], PlanTarget(device="CPU", budget_bytes=1), figures, figures)
    plain = two_budgets._step(workload, None, dropout=False)
    planned = two_budgets._step(workload, plan, dropout=False)
    assert two_budgets._worst_gradient(plain.gradients, planned.gradients) < 1e-4
    assert two_budgets._worst_state(plain.states, planned.states) == (3.0, "count")
