"""How a program makes its process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vramfit.virtual.gpu import VirtualGPU


def test_a_mesh_takes_the_card_of_its_rank_and_mpi_is_torchs_error() -> None:
    with VirtualGPU("H100", rank=13, world_size=16, alloc_conf="") as gpu:
        with pytest.raises(RuntimeError, match="doesn't have MPI built in"):
            dist.init_process_group("mpi")
        init_device_mesh("cuda", (16,))  # makes the group too, and nobody has chosen a card
        assert torch.cuda.current_device() == 5
        torch.empty(1 << 20, device="cuda")
    used = [device.index for device in gpu.run.devices if device.peak_allocated_bytes]
    assert used == [5]


def test_a_rank_may_hide_the_other_cards_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with VirtualGPU("H100", rank=3, world_size=4, alloc_conf="") as gpu:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        dist.init_process_group("nccl")
        torch.empty(1 << 20, device="cuda")
        assert torch.cuda.device_count() == 1
    assert gpu.peak_allocated_bytes == 4 << 20
