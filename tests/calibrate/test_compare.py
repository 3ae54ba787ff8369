"""Measured ops beside predicted ones: verdicts, pairing, tallies, and the profile that comes of them."""

from __future__ import annotations

from typing import Any

import pytest

from vramfit.calibrate.calibration_result import Calibration, OpVerdict, compare_case, disagreements
from vramfit.calibrate.measurement_journal import CaseFailure
from vramfit.calibrate.records import CaseRecord, OpRecord, from_text
from vramfit.gpus.measured_profile import MeasuredCall, MeasuredOp

from .support import ABOUT, op, record


def verdict(measured: OpRecord, predicted: OpRecord) -> OpVerdict:
    (found,) = compare_case(record("a/b", measured), record("a/b", predicted))
    return found.verdict


@pytest.mark.parametrize(
    ("measured", "predicted", "expected"),
    [
        (op("o32@0 t64"), op("o32@0 t64"), OpVerdict.EXACT),
        (op("t64 o32@0"), op("o32@0 t64"), OpVerdict.SAME_BYTES),
        (op("o32@0 t64 -2 t600"), op("o32@0 t64 t600"), OpVerdict.DIFFERENT),  # the peak is another
        (op("o32@0 t640"), op("o32@0 t64"), OpVerdict.DIFFERENT),
        (op("o32@0 t640"), op("o32@0 t64", above=512), OpVerdict.WITHIN_BAR),
        (op("o32@0 t2000"), op("o32@0 t64", above=512), OpVerdict.DIFFERENT),
        (op("o32@0"), op("o32@0 t64", below=512), OpVerdict.WITHIN_BAR),
        (op("o32@0", first=from_text("t9 o32@0")), op("o32@0"), OpVerdict.DIFFERENT),
        (op("o32@0", first=from_text("t9 o32@0")), op("o32@0", first=from_text("t9 o32@0")), OpVerdict.EXACT),
    ],
)
def test_verdicts(measured: OpRecord, predicted: OpRecord, expected: OpVerdict) -> None:
    assert verdict(measured, predicted) is expected


def test_op_that_one_side_lacks_stands_alone() -> None:
    flash, cudnn = op("o8@0", "aten.flash.default"), op("o8@0 t9", "aten.cudnn.default")
    same = op("o4@0")
    found = compare_case(record("a/b", same, cudnn, same), record("a/b", same, flash, same))
    assert [comparison.verdict for comparison in found] == [
        OpVerdict.EXACT,
        OpVerdict.ONLY_MEASURED,
        OpVerdict.ONLY_PREDICTED,
        OpVerdict.EXACT,
    ]
    assert [comparison.op for comparison in found[1:3]] == ["aten.cudnn.default", "aten.flash.default"]
    assert found[1].difference == 1024


def calibration(measured: list[CaseRecord], predicted: list[CaseRecord], **more: Any) -> Calibration:
    return Calibration(
        about=ABOUT,
        measured={found.case: found for found in measured},
        predicted={found.case: found for found in predicted},
        **more,
    )


def test_call_that_occurs_twice_counts_once_with_its_worst() -> None:
    good, bad = op("o32@0"), op("o32@0 t512")
    found = calibration(
        [record("sorting/a", good), record("sorting/b", bad)],
        [record("sorting/a", good), record("sorting/b", good)],
    )
    assert found.total.calls == 1
    assert found.total.exact == 0
    assert (found.total.with_temporaries, found.total.temporaries_exact) == (1, 0)
    assert [comparison.case for comparison in found.disagreements] == ["sorting/b"]


def test_families_are_counted_apart_and_together() -> None:
    sort, mm = op("o32@0 t5"), op("o64@0", "aten.mm.default", "float32[4,4]")
    found = calibration(
        [record("sorting/a", sort, seconds=2e-3), record("matmul/b", mm, seconds=1e-3)],
        [record("sorting/a", sort, seconds=1e-3), record("matmul/b", mm, seconds=1e-3)],
        failures={"matmul/c": CaseFailure(case="matmul/c", kind="memory", text="no")},
    )
    by_name = {tally.name: tally for tally in found.families}
    assert by_name["sorting"].time_ratio == 2.0
    assert by_name["matmul"].failed == 1
    assert found.total.calls == found.total.exact == 2
    assert found.total.share == 1.0
    assert found.total.time_ratio == 1.5


def test_largest_differences_come_first() -> None:
    predicted = op("o32@0")
    small, large = op("o32@0 t512", signature="s"), op("o32@0 t5120", signature="l")
    comparisons = [
        *compare_case(record("a/s", small), record("a/s", op("o32@0", signature="s"))),
        *compare_case(record("a/l", large), record("a/l", op("o32@0", signature="l"))),
        *compare_case(record("a/x", predicted), record("a/x", predicted)),
    ]
    assert [found.signature for found in disagreements(comparisons)] == ["l", "s"]


def test_profile_holds_what_rules_cannot_tell() -> None:
    exact, wrong = op("o32@0 t5"), op("o32@0 t6", signature="float32[9]")
    unsure = op("o32@0 t7", "aten.convolution.default", first=from_text("o32@0 t70"))
    found = calibration(
        [record("a/b", exact, wrong, unsure)],
        [
            record(
                "a/b",
                exact,
                op("o32@0 t5", signature="float32[9]"),
                op("o32@0 t7", "aten.convolution.default", above=9, first=from_text("o32@0 t70")),
            )
        ],
        growths=(
            {"name": "context", "outside": 500, "kept": 0},
            {"name": "kernels", "outside": 20, "kept": 0},
            {"name": "cublas", "outside": 30, "kept": 33},
            {"name": "cudnn", "outside": 0, "kept": 0},
        ),
    )
    profile = found.profile("2026-01-02")
    assert profile.ops == {
        "aten.sort.default": {"float32[9]": MeasuredCall(usual=MeasuredOp(after=(6,)))},
        "aten.convolution.default": {
            "float32[8]": MeasuredCall(usual=MeasuredOp(after=(7,)), first=MeasuredOp(after=(70,)))
        },
    }
    assert profile.context_bytes == 520
    assert profile.library_bytes == {"cublas": 30}
    assert profile.workspace_bytes == {"cublas": 33}
    assert (profile.gpu_name, profile.torch_version, profile.date) == (
        "NVIDIA H200",
        "2.11.0+cu130",
        "2026-01-02",
    )
