"""Records and a card to compare."""

from __future__ import annotations

from typing import Any

from vramfit.calibrate.measurement_journal import About
from vramfit.calibrate.records import CaseRecord, OpRecord, from_text

ABOUT = About(
    source="card",
    name="NVIDIA H200",
    total_bytes=150 << 30,
    capability=(9, 0),
    sm_count=132,
    l2_bytes=60 << 20,
    torch="2.11.0+cu130",
    cuda="13.0",
    cudnn=91900,
)


def op(steps: str, name: str = "aten.sort.default", signature: str = "float32[8]", **more: Any) -> OpRecord:
    return OpRecord(op=name, signature=signature, steps=from_text(steps), **more)


def record(case: str, *ops: OpRecord, seconds: float | None = None) -> CaseRecord:
    return CaseRecord(case=case, ops=ops, seconds=seconds)
