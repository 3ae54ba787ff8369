"""Three plans on a real card, under a budget far below it: they fit, as planned, and beat full checkpointing.

The plans are found on the virtual GPU and run by `benchmarks/plans_on_card.py`. These tests need a card, and are
skipped without one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vramfit.gpus import find_gpu

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plans_on_card.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the plan is looked for first
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card on this machine"),
]


@pytest.mark.parametrize("name", ["bert_large", "unet_3d", "gpt2_xl"])
def test_a_plan_holds_on_the_card(name: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    done = subprocess.run([sys.executable, BENCHMARK, "--only", name, "--json", rows], check=False)
    told = json.loads(rows.read_text(encoding="utf-8"))
    (row,) = told["rows"]
    assert not told["virtual"]
    assert row["fits"], row["note"]
    assert row["measured_bytes"] <= row["budget"]
    assert row["peak_error"] == pytest.approx(0, abs=0.01)
    assert row["full_seconds"] > 0, row["note"]
    assert row["measured_seconds"] < row["full_seconds"]
    assert done.returncode == 0


def test_what_does_not_fit_leaves_the_card_as_it_was() -> None:
    from vramfit.planner.devices.card_backend import CardBackend
    from vramfit.workload import Workload

    workload = Workload(
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))),
        batch=lambda batch_size: torch.ones(batch_size, 4096),
        sizes={"batch_size": 4096},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
    )
    card = CardBackend()
    assert find_gpu(card.name).total_bytes == pytest.approx(card.total_bytes, rel=0.1)
    plain = card.step_cost(workload, dict(workload.sizes))
    assert plain.fits
    assert plain.step_seconds > 0
    small = card.step_cost(
        workload, dict(workload.sizes), card.outside_bytes + plain.peak_allocated_bytes // 2
    )
    assert not small.fits
    assert small.oom
    assert card.left_bytes == torch.cuda.memory_allocated() == 0
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    again = card.step_cost(workload, dict(workload.sizes), plain.total_bytes)
    assert again.fits
    assert again.peak_allocated_bytes == plain.peak_allocated_bytes
