"""Model families of different kinds run on the virtual GPU as on the CPU; results are kept and judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests import warm

ROOT = Path(__file__).parents[2]
SAMPLE = ["resnet", "qwen2_vl"]
"""One of numbers and one of several kinds of input; `make studies` runs all."""

COPIED = {"qwen2_vl": 16}
"""Bytes alive at the peak that only a card needs: offsets of positions, which are computed on the host."""


@pytest.fixture(scope="module")
def study() -> ModuleType:
    sys.path.insert(0, str(ROOT / "studies"))
    try:
        import families
        import transformer_families.kinds
        import transformer_families.realistic
    finally:
        sys.path.remove(str(ROOT / "studies"))
    assert transformer_families.kinds.families() and transformer_families.realistic.REALISTIC
    return families


def test_families_train_infer_and_generate(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_uses_framework", lambda asked: True)
    results = tmp_path / "results.jsonl"
    command = ["--only", *SAMPLE, "--results", str(results), "--write", str(tmp_path / "page.md")]
    assert study.main(command) == 0
    assert "2 of 2 families run" in (tmp_path / "page.md").read_text(encoding="utf-8")
    kept = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [entry["virtual"]["family"] for entry in kept] == SAMPLE
    for entry in kept:
        virtual, real = entry["virtual"], entry["cpu"]
        assert virtual["outputs"] == real["outputs"] != []
        assert virtual["live_bytes"] == real["live_bytes"] + COPIED.get(virtual["family"], 0) > 0
        # what stays after a step: parameters and two moments, and no more than a few MiB beside
        assert virtual["peak_bytes"] > 3 * 4 * virtual["parameters"]


def test_results_of_earlier_runs_are_kept(
    study: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) >= 80
    results = tmp_path / "results.jsonl"
    record = {"family": "gpt2", "device": "cuda", "class": "GPT2LMHeadModel", "train": "ok", "infer": "ok"}
    lines = [json.dumps({"virtual": record | {"family": name}, "cpu": None}) for name in names]
    results.write_text("\n".join(lines) + '\n{"virtual": cut', encoding="utf-8")
    assert study.main(["--results", str(results)]) == 0
    assert f"{len(names)} of {len(names)} families run" in capsys.readouterr().out


def _run(**steps: Any) -> dict[str, Any]:
    return {"family": "x", "class": "X", "parameters": 1, "train": "ok", "infer": "ok", **steps}


def test_a_family_is_judged_by_what_happens_on_the_cpu(study: ModuleType) -> None:
    judge, status = study.judge, study.Status
    fine = _run(outputs=["float32[2]"], loss="torch.float32")
    assert judge(fine, fine).status is status.RUNS
    assert judge(_run(train="E: no"), fine).status is status.FAILED
    assert judge(_run(train="E: no"), _run(train="E: no")).status is status.CONFIGURATION
    assert judge(_run(train="E: no"), _run(infer="E: no")).status is status.FAILED
    other = judge(fine | {"outputs": ["float32[3]"]}, fine)
    assert other.status is status.FAILED and "float32[3]" in other.steps["infer"]


def test_sizes_that_depend_on_data_are_told_apart(study: ModuleType) -> None:
    table = study
    real = _run(outputs=["float32[2, 12]"])
    found = _run(outputs=["float32[2, 99]"])
    assert table.judge(found, real).status is table.Status.FAILED
    told = table.judge(found | {"warnings": ["shape-from-data"]}, real)
    assert told.status is table.Status.RUNS and told.assumed
    assert "1 of them with sizes that depend on data" in table.summary([told])
    for other in ("int64[2, 99]", "float32[2, 99, 1]"):
        warned = _run(outputs=[other], warnings=["shape-from-data"])
        assert table.judge(warned, real).status is table.Status.FAILED


def test_the_page_shows_both_peaks_live_bytes_and_what_was_not_tried(study: ModuleType) -> None:
    table = study
    virtual = _run(
        train_bytes=3 << 20, infer_bytes=1 << 20, live_bytes=1001, seconds=0.5, resident_bytes=5 << 20
    )
    entry = table.judge(virtual, _run(live_bytes=1000))
    never = table.judge(_run(build="ImportError: no | pipes"), _run(build="ImportError: no | pipes"))
    trained = table.judge(virtual | {"untrained": "nobody trains it"}, _run(live_bytes=1001))
    page = table.page(
        [entry, never, trained], [table.judge(virtual | {"family": "realistic:big"}, None)], "torch 1"
    )
    assert "| x | X | 1 | ok | ok |  | 3.0 | 1.0 | 1.0010 | 0.5 |" in page
    assert "| x | X | 1 | nobody trains it | ok |  | 3.0 | 1.0 | equal | 0.5 |" in page
    assert "In 1 of 2 families the most bytes" in page
    assert "| big | 1 | ok | ok | 0.00 | 0.00 | 0.5 | 5 |" in page
    assert "ImportError: no \\| pipes | x |" in page
    assert "needs timm" in page


def test_an_unknown_family_is_a_usage_error(study: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        study.main(["--only", "nonesuch"])
    assert stop.value.code == 2
    assert "nonesuch" in capsys.readouterr().err
