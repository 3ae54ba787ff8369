"""`vramfit.run_ranks`: scripts and functions, and what cannot be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import vramfit
from vramfit.errors import UsageError


def take(mebibytes: int, *, more: int = 0) -> None:
    """What a rank does in the tests below."""
    import torch
    from torch import distributed

    distributed.init_process_group("nccl")
    rank = distributed.get_rank()
    torch.cuda.set_device(rank)
    kept = torch.empty((mebibytes + 2 * rank + more) << 20, dtype=torch.uint8, device="cuda")
    distributed.all_reduce(kept)


def test_a_function_runs_in_every_chosen_rank() -> None:
    lines: list[str] = []
    found = vramfit.run_ranks(take, 20, gpu="RTX 4090", world_size=4, ranks=[1, 2], progress=lines.append)
    assert found.fits and found.worst == 2
    assert {rank: one.peak_allocated_bytes >> 20 for rank, one in found.reports.items()} == {1: 22, 2: 24}
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (24 << 20, 24 << 20)
    assert sorted(lines) == ["rank 1 of 4", "rank 2 of 4"]
    assert json.loads(found.to_json()) == json.loads(json.dumps(found.to_dict()))
    assert str(found).startswith("✓ fits 4 cards RTX 4090: rank 2 is the worst")
    assert repr(found).startswith("<WorldReport: fits 4 cards RTX 4090: rank 2 is the worst")
    assert "nothing is known of 2 other ranks" in str(found)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": 12}, "cannot be divided among nodes of 8"),
        ({"world_size": 4, "ranks": 4}, "rank 4 is beyond a world of 4 ranks"),
        ({"world_size": 4, "per_node": 3}, "4 ranks cannot be divided among nodes of 3"),
    ],
)
def test_worlds_that_cannot_be(named: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        vramfit.run_ranks(take, 1, gpu="RTX 4090", **named)


def test_programs_that_cannot_be_found(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no script .*nowhere\.py"):
        vramfit.run_ranks(tmp_path / "nowhere.py", gpu="RTX 4090", world_size=2)
    with pytest.raises(UsageError, match="cannot be found from another process"):
        vramfit.run_ranks(lambda: None, gpu="RTX 4090", world_size=2)
    with pytest.raises(UsageError, match="arguments of take cannot be pickled"):
        vramfit.run_ranks(take, lambda: None, gpu="RTX 4090", world_size=2)
