"""The card's prices, with the virtual GPU in the card's place: the same torch.cuda, the same figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.planner.test_plan_objects import _plan
from tests.techniques.toys import all_toys
from torch import nn

from vramfit.errors import UsageError, VramfitError
from vramfit.gpus import find_gpu
from vramfit.planner.activation_ilp.decisions import places
from vramfit.planner.devices.card_backend import CardBackend, card_of_this_process, fraction_of
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.techniques.optimizer_offload import OptimizerOffloadSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

MIB = 1 << 20
CARD = find_gpu("RTX 4090")
CONTEXT = CARD.typical_context_bytes


@pytest.fixture
def card() -> Iterator[CardBackend]:
    with VirtualGPU(CARD, alloc_conf="", context_bytes=CONTEXT):
        yield CardBackend()


def wide() -> Workload:
    """Layers whose activations are far larger than their parameters."""
    return Workload(
        model=lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)) for _ in range(8))
        ),
        batch=lambda batch_size: torch.ones(batch_size, 256),
        sizes={"batch_size": 8192},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
    )


def virtual(workload: Workload, budget: int | None = None):
    return VirtualBackend(CARD, alloc_conf="").step_cost(workload, dict(workload.sizes), budget)


@pytest.mark.parametrize("name", ["mlp", "language-tied", "batch-norm"])
@pytest.mark.usefixtures("fit_interpreter")
def test_peaks_are_those_that_were_predicted(name: str) -> None:
    workload = all_toys()[name]
    predicted = virtual(workload)
    with VirtualGPU(CARD, alloc_conf="", context_bytes=CONTEXT):
        card = CardBackend()
        measured = card.step_cost(workload, dict(workload.sizes))
        again = card.step_cost(workload, dict(workload.sizes))
    assert measured.fits
    assert measured.step_seconds > 0
    for found in (measured, again):
        assert found.peak_allocated_bytes == predicted.peak_allocated_bytes
        assert found.peak_reserved_bytes == predicted.peak_reserved_bytes
        assert found.total_bytes == predicted.total_bytes
    assert card.left_bytes == 0


def test_a_plan_takes_on_the_card_what_it_says_and_undoes_what_it_changed(card: CardBackend) -> None:
    workload = wide()
    plan = _plan(activation_checkpointing={"modules": [str(number) for number in range(4)]}, tf32={})
    plain = card.step_cost(workload, dict(workload.sizes))
    planned = card.step_cost(plan.apply(workload), dict(workload.sizes))
    assert planned.peak_allocated_bytes < plain.peak_allocated_bytes - 32 * MIB
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0


@pytest.mark.usefixtures("fit_interpreter")
def test_pinned_memory_is_counted_and_given_back() -> None:
    workload = _plan(activation_offload={"modules": ["0", "1", "2"], "window": 64 * MIB}).apply(wide())
    predicted = virtual(workload)
    with VirtualGPU(CARD, alloc_conf="", context_bytes=CONTEXT):
        card = CardBackend()
        measured = card.step_cost(workload, dict(workload.sizes))
        after = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    assert predicted.host_bytes > 64 * MIB
    assert measured.host_bytes == predicted.host_bytes
    assert measured.peak_allocated_bytes == predicted.peak_allocated_bytes
    assert after == 0


@pytest.mark.usefixtures("fit_interpreter")
def test_states_and_masters_on_the_host_are_counted_beside_pinned_memory() -> None:
    workload = _plan(low_precision_training={}, optimizer_offload={}).apply(wide())
    predicted = virtual(workload)
    with VirtualGPU(CARD, alloc_conf="", context_bytes=CONTEXT):
        measured = CardBackend().step_cost(workload, dict(workload.sizes))
    moved = [p for p in wide().model().parameters() if p.numel() >= OptimizerOffloadSetting().minimal_size]
    # Pinned in blocks of powers of two: the parameter and the gradient in bfloat16. Beside them the master and the two
    # averages in float32, and a counter.
    pinned = sum(2 * (1 << (2 * p.numel() - 1).bit_length()) for p in moved)
    assert predicted.host_bytes == pinned + sum(12 * p.numel() + 4 for p in moved)
    assert measured.host_bytes == predicted.host_bytes


def test_what_does_not_fit_leaves_nothing_behind(card: CardBackend) -> None:
    workload = wide()
    plain = card.step_cost(workload, dict(workload.sizes))
    need = plain.total_bytes
    for budget in (
        CONTEXT + plain.peak_allocated_bytes - 2 * MIB,
        CONTEXT + 40 * MIB,
        CONTEXT + 2 * MIB,
        CONTEXT - MIB,
    ):
        price = card.step_cost(workload, dict(workload.sizes), budget)
        assert not price.fits
        assert price.oom
        assert price.step_seconds == 0.0
        assert price.total_bytes <= max(budget, CONTEXT)
        assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
        assert torch.cuda.get_per_process_memory_fraction() == 1.0
    assert card.left_bytes == 0
    within = card.step_cost(workload, dict(workload.sizes), need)
    assert within.fits
    assert within.total_bytes == need
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    began = threading.Event()
    ended = threading.Event()

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        SlowBackward.began.set()
        time.sleep(0.5)
        SlowBackward.ended.set()
        return gradient


def test_the_card_is_clear_when_its_backward_thread_is_done(card: CardBackend) -> None:
    """What that thread still holds when an error has reached the caller cannot be had at will: a pass can."""
    workload = wide()
    x = torch.empty(0, device="cuda", requires_grad=True)
    backward = threading.Thread(target=SlowBackward.apply(x).backward, args=(torch.empty(0, device="cuda"),))
    backward.start()
    assert SlowBackward.began.wait(10)
    price = card.step_cost(workload, dict(workload.sizes), CONTEXT - MIB)  # clears the card, and runs nothing
    assert SlowBackward.ended.is_set()
    backward.join()
    assert price.oom


def test_a_budget_binds_as_a_card_of_that_size_does() -> None:
    workload = wide()
    least = CONTEXT + virtual(workload).peak_allocated_bytes
    budgets = [least + MIB * more for more in (-2, 2, 64)]
    predicted = [virtual(workload, budget) for budget in budgets]
    with VirtualGPU(CARD, alloc_conf="", context_bytes=CONTEXT):
        card = CardBackend()
        measured = [card.step_cost(workload, dict(workload.sizes), budget) for budget in budgets]
    assert {price.fits for price in predicted} == {True, False}
    for ours, theirs in zip(measured, predicted, strict=True):
        assert ours.fits == theirs.fits
        assert ours.peak_allocated_bytes == theirs.peak_allocated_bytes


def test_a_plan_that_sets_the_allocator_stays_within_the_budget(card: CardBackend) -> None:
    workload = _plan(allocator_settings={"conf": "max_split_size_mb:128"}).apply(wide())
    room = CONTEXT + card.step_cost(workload, dict(workload.sizes)).peak_allocated_bytes
    assert not card.step_cost(workload, dict(workload.sizes), room - 2 * MIB).fits
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_libraries_that_grow_during_the_run_count(card: CardBackend) -> None:
    from vramfit.virtual.torch_cuda.base import installed_machine

    device = installed_machine().devices[0]
    plain = card.step_cost(wide(), dict(wide().sizes))
    growth = plain.peak_reserved_bytes - plain.peak_allocated_bytes + 2 * MIB
    grown: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if not grown:
            grown.append(growth)
            device.context_bytes += growth
            device.driver.outside_bytes += growth
        return model(batch).square().mean()

    workload = replace(wide(), loss=loss)
    price = card.step_cost(workload, dict(workload.sizes), plain.total_bytes)
    assert not price.fits
    assert price.oom
    assert card.outside_bytes == CONTEXT + growth
    assert card.step_cost(workload, dict(workload.sizes), plain.total_bytes + growth).fits


def test_a_failure_of_the_workload_is_its_own_and_clears_the_card(card: CardBackend) -> None:
    workload = replace(wide(), loss=lambda model, batch: model(batch))
    with pytest.raises(UsageError, match="the loss is no scalar"):
        card.step_cost(workload, dict(workload.sizes), 1 << 33)
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    card.step_cost(wide(), {"batch_size": 8})
    assert torch.cuda.memory_allocated() == 0


def test_tensors_that_outlive_their_run_are_told(card: CardBackend) -> None:
    kept: list[torch.Tensor] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        kept[:] = [torch.ones(MIB, device=batch.device)]
        return model(batch).square().mean()

    card.step_cost(replace(wide(), loss=loss), {"batch_size": 8})
    assert card.left_bytes == 4 * MIB


def test_a_batch_that_moves_itself_is_made_anew_for_each_step(card: CardBackend) -> None:
    class Moving:
        def __init__(self, values: torch.Tensor) -> None:
            self.values = values

        def to(self, device: torch.device) -> Moving:
            self.values = self.values.to(device)
            return self

    workload = replace(
        wide(),
        batch=lambda batch_size: Moving(torch.ones(batch_size, 256)),
        loss=lambda model, batch: model(batch.values).square().mean(),
    )
    assert card.step_cost(workload, {"batch_size": 8}).fits
    assert card.left_bytes == 0


def test_a_step_is_looked_at_on_the_card(card: CardBackend) -> None:
    workload = all_toys()["language-tied"]
    profile, step_profile = card.profile_step(workload, dict(workload.sizes), places)
    assert [block.path for block in step_profile.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert profile.outside_bytes == CONTEXT
    assert profile.peak_allocated_bytes > profile.setup_bytes > 0
    assert sum(block.kept_bytes for block in profile.blocks) > 0


def test_what_others_hold_is_no_part_of_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    with VirtualGPU(CARD, alloc_conf="", context_bytes=CONTEXT):
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
        monkeypatch.setattr(
            "vramfit.planner.devices.card_backend._used_before", lambda: {uuid: 100 * MIB, "another": 1 << 40}
        )
        assert card_of_this_process().outside_bytes == CONTEXT - 100 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_it_says_so() -> None:
    with pytest.raises(VramfitError, match="torch finds no CUDA card here"):
        card_of_this_process()


@pytest.mark.parametrize("total", [CARD.total_bytes, 25_757_220_864, 150_121_545_728, 10_000_000_019])
@pytest.mark.parametrize("room", [0, 1, 2 * MIB, 20 * MIB, 3_001_024_512, 7_340_032_001, 9_999_999_999])
def test_a_fraction_leaves_the_room_to_the_byte(total: int, room: int) -> None:
    fraction = fraction_of(room, total)
    assert 0 <= fraction <= 1
    assert room <= int(fraction * total) <= room + 1


def test_there_is_no_more_room_than_the_card_has() -> None:
    assert fraction_of(1 << 40, CARD.total_bytes) == 1.0
    assert fraction_of(-5, CARD.total_bytes) == 0.0
