"""The examples of several cards: each as its own launcher would start it, held to bytes that are counted by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import warm

ROOT = Path(__file__).parents[2]
TINY = ("--size", "tiny", "--batch-size", "1", "--seq-len", "128", "--steps", "2")
PARAMETERS = 2 * 32000 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 688 + 2 * 256) + 256
"""Of the tiny model: embedding and head; attention, feed-forward and norms of two layers; the last norm."""


def report(folder: Path, name: str) -> dict[str, Any]:
    """The last of eight ranks."""
    script = ROOT / "examples" / "parallel" / name
    torchrun = ("torchrun", "--nproc-per-node", "8", script, *TINY)
    line = ("-m", "vramfit", "run", "--gpu", "H100", "--rank", "7", "--json", "report.json", "--", *torchrun)
    done = warm.run(
        [sys.executable, *map(str, line)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.mark.slow
def test_ddp_keeps_everything_on_each_card_and_its_buckets_besides(tmp_path: Path) -> None:
    found = report(tmp_path, "ddp_llama.py")
    (rank,) = found["ranks"]
    assert (found["world_size"], found["launcher"], rank["rank"], rank["device"]) == (8, "torchrun", 7, 7)
    parts = rank["categories"]
    tokens = 128 * 8
    assert parts["other"] == 2 * PARAMETERS + tokens  # buckets, as large as the bfloat16 gradients
    rotary = 2 * 512  # two small buffers of the rotary embedding
    assert parts["parameters"] == parts["gradients"] + rotary >= 2 * PARAMETERS
    assert parts["optimizer_state"] >= 4 * PARAMETERS


@pytest.mark.slow
def test_fsdp2_keeps_an_eighth_on_each(tmp_path: Path) -> None:
    found = report(tmp_path, "fsdp2_llama.py")
    (rank,) = found["ranks"]
    # Five norms whose shards of 128 bytes take blocks of 512, and two buffers of the rotary embedding.
    assert rank["categories"]["parameters"] == 4 * PARAMETERS // 8 + 5 * (512 - 128) + 2 * 512
    assert rank["categories"]["optimizer_state"] >= 8 * PARAMETERS // 8
