"""The examples of several cards: each as its own launcher would start it, held to bytes that are counted by hand.

Blocks are rounded to 512 bytes and no further: expandable segments split them to what they hold.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from parallel_cases import COMMANDS, WORLD, cases
from tests import warm

EXAMPLES = Path(__file__).parents[2] / "examples" / "parallel"
TABLE = 32000 * 256
"""Numbers of the embedding, and of the head."""
LAYER = 4 * 256 * 256 + 3 * 256 * 688
"""Of the matrices of a layer: attention and feed-forward."""
NORMS = 2 * 2 + 1
PARAMETERS = 2 * TABLE + 2 * LAYER + NORMS * 256
ROTARY = 2 * 512
"""Two small buffers of the rotary embedding."""
SHARDS = 4 * (PARAMETERS - NORMS * 256) // WORLD + NORMS * 512
"""An eighth of the float32 parameters, where a shard of a norm takes a block of 512 bytes for its 128."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The report of the last of eight ranks of each script, all run in one interpreter."""
    folder = tmp_path_factory.mktemp("parallel")
    given = folder / "all.cases"
    given.write_text(json.dumps(cases(str(EXAMPLES))), encoding="utf-8")
    runs = Path(__file__).with_name("framework_runs.py")
    command = [sys.executable, str(runs), str(given), str(folder)]
    done = warm.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {name: json.loads((folder / f"{name}.json").read_text()) for name in COMMANDS}
    for name, one in reports.items():
        assert one["traceback"] is None, f"{name}\n{one['traceback']}"
    return reports


def parts(report: dict[str, Any], *names: str) -> list[int]:
    """Bytes of categories at the peak."""
    return [report["categories"][name] for name in names]


@pytest.mark.slow
def test_ddp_keeps_everything_on_each_card_and_its_buckets_besides(found: dict[str, dict[str, Any]]) -> None:
    kinds = ("parameters", "gradients", "optimizer_state", "communication_buffers", "other")
    tokens = 128 * 8
    # DDP's buckets are as large as the gradients; `other` is what was drawn.
    assert parts(found["ddp_llama"], *kinds) == [
        4 * PARAMETERS + ROTARY,
        4 * PARAMETERS,
        8 * PARAMETERS,
        4 * PARAMETERS,
        tokens,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2_llama", "context_parallel_llama"])
def test_fsdp2_keeps_an_eighth_on_each(found: dict[str, dict[str, Any]], name: str) -> None:
    """At these peaks no layer is gathered. Whoever shares out a sequence too keeps the same shards."""
    assert parts(found[name], "parameters", "optimizer_state") == [SHARDS + ROTARY, 2 * SHARDS]


@pytest.mark.slow
def test_two_dimensions_share_out_matrices_over_all_cards_and_norms_over_rows(
    found: dict[str, dict[str, Any]],
) -> None:
    # A norm is whole in each group of four and halved by FSDP2: 512 bytes, as many as a block of SHARDS. Of what the
    # root gathers in bfloat16, tensor parallelism leaves this card a quarter.
    gathered = 2 * 2 * TABLE // 4 + 512
    held = parts(found["tp_fsdp_llama"], "parameters", "unsharded_parameters", "optimizer_state")
    assert held == [SHARDS + ROTARY, gathered, 2 * SHARDS]


@pytest.mark.slow
def test_a_pretraining_shares_out_its_weights_by_tensor_parallelism_and_fsdp2(
    found: dict[str, dict[str, Any]],
) -> None:
    matrices, norms = 2 * 4096 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 512), 2 * 4 + 1
    shards = 4 * matrices // WORLD + norms * 512
    held = parts(found["llama3_pretrain"], "parameters", "optimizer_state")
    assert held == [shards, 2 * shards]


@pytest.mark.slow
def test_frameworks_shard_by_fsdp2(found: dict[str, dict[str, Any]]) -> None:
    # The head with the last norm is a group of its own, gathered at the peak, which is in the loss. Accelerate puts the
    # rotary buffers back itself: they are no parameters' then (accelerate/utils/fsdp_utils.py: fsdp2_prepare_model).
    gathered = 2 * TABLE + 512
    for name in ("accelerate_llama", "trainer_llama"):
        assert parts(found[name], "parameters", "unsharded_parameters") == [SHARDS, gathered], name
    assert parts(found["accelerate_llama"], "optimizer_state") == [2 * SHARDS]
    # Trainer's AdamW is the fused one, which counts the steps of each parameter on the card.
    tensors = 2 * 9 + 3
    assert parts(found["trainer_llama"], "optimizer_state") == [2 * SHARDS + tensors * 512]
    assert "2 steps done" not in found["trainer_llama"]["output"]  # the first rank's to say


@pytest.mark.slow
def test_each_stage_of_a_pipeline_has_its_layers(tmp_path: Path) -> None:
    given = "--size tiny --seq-len 128 --steps 2 --micro-batches 4"
    torchrun = (
        "--",
        "torchrun",
        "--nproc-per-node",
        "2",
        str(EXAMPLES / "pipeline_llama.py"),
        *given.split(),
    )
    options = ("--gpu", "H100", "--alloc-conf", "expandable_segments:True", "--json", "report.json")
    line = [sys.executable, "-m", "vramfit", "run", *options, *torchrun]
    done = warm.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["launcher"], report["world_size"], report["worst"]["rank"]) == ("torchrun", 2, 1)
    first, last = report["ranks"]
    for rank, norms in ((first, 2), (last, 3)):
        own = TABLE + LAYER + norms * 256
        kinds = ("parameters", "gradients", "optimizer_state")
        assert parts(rank, *kinds) == [2 * own + ROTARY, 2 * own, 4 * own]
    # 1F1B: while the first stage still has a second micro-batch, the last has one, and its logits.
    assert last["peak"]["allocated_bytes"] > first["peak"]["allocated_bytes"]
