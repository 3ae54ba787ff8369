"""Allocator settings: given to the allocator and the environment, and taken back."""

from __future__ import annotations

import os

import pytest
import torch
from tests.techniques.toys import all_toys, gradients
from torch import nn

from vramfit.errors import ConfigError, UsageError
from vramfit.techniques import AttachedProgram, Numerics, Profile, setting_from_plain, setting_to_plain
from vramfit.techniques.allocator_settings import AllocatorSetting, AllocatorSettings
from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = AllocatorSetting(conf="expandable_segments:True")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def growing() -> Workload:
    """One tensor of 10, 20, 30, 40 and 50 MiB after the other: the room of one does not do for the next."""

    def loss(model: nn.Linear, batch: torch.Tensor) -> torch.Tensor:
        for size in range(10, 60, 10):
            torch.empty(size * MIB, dtype=torch.uint8, device=batch.device)
        return model.weight.sum() * batch.sum()  # a product of matrices would want a workspace

    return Workload(
        model=lambda: nn.Linear(4, 1),
        batch=lambda batch_size: torch.zeros(batch_size, 4),
        sizes={"batch_size": 1},
        loss=loss,
    )


def reserved_in_large_segments(workload: Workload) -> int:
    state = workload.start("cuda")
    workload.run_step(state, workload.sizes)
    stats = torch.cuda.memory_stats()
    return int(stats["reserved_bytes.large_pool.peak"])


def test_expandable_segments_reserve_what_the_largest_needs(gpu: VirtualGPU) -> None:
    # 10 to 50 MiB, a segment each; against pages of 20 MiB for the largest of them
    assert reserved_in_large_segments(growing()) == 150 * MIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert reserved_in_large_segments(AllocatorSettings().apply(growing(), EXPANDABLE)) == 60 * MIB


def test_undo_gives_the_former_settings_back(gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    native = torch._C
    native._accelerator_setAllocatorSettings("max_split_size_mb:64")  # type: ignore[attr-defined]
    monkeypatch.setenv(VARIABLE, "max_split_size_mb:64")
    live = AttachedProgram(nn.Linear(2, 2), None, torch.device("cuda"))
    AllocatorSettings().attach(live, EXPANDABLE)
    assert native._accelerator_getAllocatorSettings() == "expandable_segments:True"  # type: ignore[attr-defined]
    assert os.environ[VARIABLE] == "expandable_segments:True"
    live.undo()
    assert native._accelerator_getAllocatorSettings() == "max_split_size_mb:64"  # type: ignore[attr-defined]
    assert os.environ[VARIABLE] == "max_split_size_mb:64"


def test_another_backend_has_to_be_exported(gpu: VirtualGPU) -> None:
    live = AttachedProgram(nn.Linear(2, 2), None, torch.device("cuda"))
    with pytest.raises(UsageError, match=rf"export {VARIABLE}=backend:cudaMallocAsync$"):
        AllocatorSettings().attach(live, AllocatorSetting(conf="backend:cudaMallocAsync"))
    assert VARIABLE not in os.environ


def test_settings_that_torch_does_not_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="Unrecognized key 'expandable'"):
        AllocatorSettings().attach(
            AttachedProgram(nn.Linear(2, 2), None), AllocatorSetting(conf="expandable:True")
        )


def test_nothing_changes_on_the_cpu() -> None:
    plain = all_toys()["mlp"]
    found, expected = gradients(AllocatorSettings().apply(plain, EXPANDABLE)), gradients(plain)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert VARIABLE not in os.environ


def test_options_are_for_what_lies_idle_on_a_card() -> None:
    def options(reserved: int, allocated: int, device: str = "cuda") -> list[AllocatorSetting]:
        profile = Profile(
            model=nn.Linear(2, 2),
            optimizer=None,
            sizes={},
            trains=True,
            device_type=device,
            peak_reserved_bytes=reserved * MIB,
            peak_allocated_bytes=allocated * MIB,
        )
        return list(AllocatorSettings().options(profile))

    assert options(1000, 900)[0] == EXPANDABLE
    assert options(1000, 985) == [] == options(10_000, 9_900) == options(1000, 900, "cpu")
    assert AllocatorSettings().promise(EXPANDABLE).numerics is Numerics.BITWISE


def test_the_setting_has_to_be_given() -> None:
    technique = AllocatorSettings()
    assert setting_from_plain(technique, setting_to_plain(EXPANDABLE)) == EXPANDABLE
    assert technique.describe(EXPANDABLE) == "conf expandable_segments:True"
    with pytest.raises(UsageError, match="allocator-settings needs the setting 'conf'"):
        setting_from_plain(technique, {})
