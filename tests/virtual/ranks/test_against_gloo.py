"""Real worlds of gloo processes on CPU tensors, metered, and virtual ranks of the same programs: live bytes are equal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests import warm
from tests.virtual.ranks import gloo_programs

from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own deprecations, in programs as users write them


def measured(world: int, folder: Path) -> list[dict[str, list[int]]]:
    """What each real rank held."""
    command = [sys.executable, str(gloo_programs.__file__), str(world), str(folder)]
    done = warm.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def predicted(rank: int, world: int) -> dict[str, list[int]]:
    """What a virtual rank holds: cuBLAS's workspaces, which a CPU has not, are given back before each look."""

    def live() -> int:
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    with VirtualGPU("H100", rank=rank, world_size=world, alloc_conf=""):
        dist.init_process_group("nccl")
        torch.cuda.set_device(rank)
        return gloo_programs.run_all("cuda", live)


@pytest.mark.parametrize(("world", "ranks"), [(2, (0, 1)), (4, (1, 3))])
def test_each_rank_holds_what_a_real_one_holds(world: int, ranks: tuple[int, ...], tmp_path: Path) -> None:
    real = measured(world, tmp_path)
    for rank in ranks:
        virtual = predicted(rank, world)
        assert virtual.keys() == gloo_programs.PROGRAMS.keys()
        for name, held in virtual.items():
            on_host = gloo_programs.ON_HOST.get(name, 0)
            assert [bytes_held + on_host for bytes_held in held] == real[rank][name], name
