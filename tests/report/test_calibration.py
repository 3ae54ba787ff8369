"""The tables and the JSON of a calibration."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from vramfit.calibrate.calibration_result import Calibration
from vramfit.calibrate.measurement_journal import About, CaseFailure
from vramfit.calibrate.records import CaseRecord, OpRecord, from_text
from vramfit.gpus.measured_profile import Rates
from vramfit.report import print_report, to_json

from .golden_files import check_golden


def _op(name: str, steps: str, **more: Any) -> OpRecord:
    return OpRecord(op=f"aten.{name}.default", signature="float32[8,64]", steps=from_text(steps), **more)


def found() -> Calibration:
    measured = {
        "conv/a": [_op("convolution", "o4096@0 t9000"), _op("cudnn", "o8@0")],
        "sorting/b": [_op("sort", "t512 o2048@0 t700"), _op("topk", "o64@0 t512")],
    }
    predicted = {
        "conv/a": [_op("convolution", "o4096@0 t4000", above=8192), _op("flash", "o8@0")],
        "sorting/b": [_op("sort", "o2048@0 t700 t512"), _op("topk", "o64@0")],
    }
    return Calibration(
        about=About(
            source="card",
            name="NVIDIA H200",
            total_bytes=150_149_398_528,
            capability=(9, 0),
            sm_count=132,
            l2_bytes=60 << 20,
            torch="2.11.0+cu130",
            cuda="13.0",
            cudnn=91900,
            driver="580.1",
        ),
        measured={
            name: CaseRecord(case=name, ops=tuple(ops), seconds=3e-5) for name, ops in measured.items()
        },
        predicted={
            name: CaseRecord(case=name, ops=tuple(ops), seconds=2e-5) for name, ops in predicted.items()
        },
        failures={
            "rnn/c": CaseFailure(case="rnn/c", kind="died", text="the process ended by signal SIGSEGV")
        },
        growths=(
            {"name": "context", "outside": 500 << 20, "kept": 0},
            {"name": "cublas", "outside": 30 << 20, "kept": 32 << 20},
        ),
        expected_growths=(
            {"name": "context", "outside": 402 << 20, "kept": 0},
            {"name": "cublas", "outside": 0, "kept": 32 << 20},
        ),
        rates=Rates(
            flops={"float32": 5.1e13},
            bandwidth=4.1e12,
            launch_seconds=2.3e-6,
            to_card={"pinned": 5.5e10, "pageable": 9e9},
            to_host={"pinned": 5.4e10},
        ),
        left=3,
        journal=Path("h200.measured.jsonl"),
    )


def test_tables_are_as_agreed() -> None:
    console = Console(width=110, record=True, file=io.StringIO())
    print_report(found(), console=console)
    text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    check_golden("calibration.txt", text + "\n")


def test_json_is_as_agreed() -> None:
    document = to_json(found(), "p.json")
    check_golden("calibration.json", json.dumps(document, indent=1) + "\n")


def test_share_is_never_rounded_to_all() -> None:
    ops = [_op("sort", f"o{512 * n}@0") for n in range(1, 2)]
    many = [OpRecord(op="aten.x.default", signature=str(n), steps=()) for n in range(5000)]
    wrong = _op("sort", "o512@0 t1")
    record = CaseRecord(case="a/b", ops=(*many, wrong))
    compared = Calibration(
        about=found().about,
        measured={"a/b": record},
        predicted={"a/b": CaseRecord(case="a/b", ops=(*many, *ops))},
    )
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(compared, console=console)
    assert "5000 of 5001 ops exact in bytes (99.9 %)" in console.export_text()
