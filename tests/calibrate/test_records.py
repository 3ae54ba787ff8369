"""Steps of an op: as text, in canonical form, and in the form that rules have."""

import pytest

from vramfit.calibrate.records import (
    BlockKind,
    CaseRecord,
    Give,
    OpRecord,
    Take,
    as_measured,
    canonical,
    from_text,
    peak_bytes,
    record_from_plain,
    record_to_plain,
    to_text,
)
from vramfit.gpus.measured_profile import MeasuredOp


def test_text_is_read_back() -> None:
    text = "t512 o1024@0 -1 k8519680 o7@2 o9"
    assert to_text(from_text(text)) == text
    assert from_text("t512 -1") == (Take(BlockKind.TEMPORARY, 512), Give(1))
    with pytest.raises(ValueError, match="x12"):
        from_text("t512 x12")


def test_what_is_given_back_at_the_end_does_not_matter() -> None:
    assert canonical(from_text("t1 t2 -2 -1 o3@0")) == from_text("t1 t2 -1 -2 o3@0")
    assert canonical(from_text("t1 o3@0 -1")) == from_text("t1 o3@0")


def test_peak_counts_rounded_blocks_while_they_are_held() -> None:
    assert peak_bytes(from_text("t1 -1 t513")) == 1024
    assert peak_bytes(from_text("t1 t513")) == 1536
    assert peak_bytes(()) == 0


@pytest.mark.parametrize(
    ("text", "results", "expected"),
    [
        ("o8@0", 1, MeasuredOp()),
        ("t4 o8@0 t5", 1, MeasuredOp(before=(4,), after=(5,))),
        ("t4 -1 t6 o8@0", 1, MeasuredOp(before=(4, -1, 6))),
        ("o8@0 t4 -2 t6", 1, MeasuredOp(after=(4, -1, 6))),
        ("t3 t4", 1, MeasuredOp(after=(3, 4))),  # in place: no result is new
        ("o8@0 t4 -2 o9@1 t5", 3, MeasuredOp(between=((4,), (5,), ()))),
        ("o8@0 t4 -2 o9@2", 3, MeasuredOp(between=((4,), (), ()))),
        ("o8@0 t4 o9@1", 2, MeasuredOp(before=(4,))),  # held while the next result is taken
        ("o8@0 k99", 1, MeasuredOp()),  # a library's workspace is no temporary
    ],
)
def test_steps_become_what_a_rule_would_say(text: str, results: int, expected: MeasuredOp) -> None:
    assert as_measured(canonical(from_text(text)), results) == expected


def test_size_of_a_reserve_is_kept() -> None:
    assert as_measured(from_text("o8@0 o77@3 t5"), 5, reserve_at=3) == MeasuredOp(after=(5,), reserve=77)


def test_record_is_read_back() -> None:
    op = OpRecord(
        op="aten.mm.default",
        signature="float32[2,2]",
        steps=from_text("o16@0"),
        results=2,
        reserve_at=1,
        above=3,
        below=4,
        first=from_text("t1 o16@0"),
    )
    plain_op = OpRecord(op="aten.add.Tensor", signature="", steps=())
    record = CaseRecord(case="matmul/x", ops=(op, plain_op), seconds=0.5, peak_bytes=9)
    assert record_from_plain("matmul/x", record_to_plain(record)) == record
