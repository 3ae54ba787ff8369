"""Trainings by others' loops that run out of memory in between are those that do not, bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.training import check_same, plan_with
from tests.runtime.faults import Faults
from tests.runtime.rank_programs import ran_on_ranks

import vramfit
from vramfit.errors import UsageError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from tests.integrations import test_lightning_plan as by_lightning  # it needs lightning
from tests.integrations import test_transformers_plan as by_trainer  # it needs transformers

from vramfit.integrations.lightning import PlanCallback as LightningPlan
from vramfit.integrations.surviving_lightning import LightningSurvivalCallback
from vramfit.integrations.surviving_trainer import TrainerSurvivalCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # both advise on data loaders, devices and their own renames

UPDATES: dict[str, Any] = {"optim": "adamw_torch", "gradient_accumulation_steps": 2, "max_steps": 2}


def with_trainer(
    folder: Path, faults: contextlib.AbstractContextManager[Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """A model with dropout after two updates of two batches each, and the callback."""
    model = by_trainer.language_model(0.1)
    trainer = by_trainer.trainer_for(model, folder, **UPDATES)
    callback = TrainerSurvivalCallback(trainer, **options)
    trainer.add_callback(callback)
    with faults or contextlib.nullcontext():
        trainer.train()
    return trainer, callback


def with_lightning(
    faults: contextlib.AbstractContextManager[Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """A module with dropout after an epoch of three batches, and the callback."""
    module, callback = by_lightning.Speaker(0.1), LightningSurvivalCallback(**options)
    with faults or contextlib.nullcontext():
        by_lightning.fit(module, callbacks=[callback], max_epochs=1)
    return module, callback


@pytest.fixture(scope="module")
def plain_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = by_trainer.trainer_for(
        by_trainer.language_model(0.1), tmp_path_factory.mktemp("plain"), **UPDATES
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain_module() -> Any:
    module = by_lightning.Speaker(0.1)
    by_lightning.fit(module, max_epochs=1)
    return module


def logged(module: Any) -> dict[str, float]:
    return {name: float(value) for name, value in module.trainer.callback_metrics.items()}


def test_without_a_shortage_the_trainer_trains_as_without_the_callback(
    tmp_path: Path, plain_trainer: Any
) -> None:
    trainer, callback = with_trainer(tmp_path)
    check_same(trainer.model.state_dict(), plain_trainer.model.state_dict(), exact=True)
    assert by_trainer.losses(trainer) == by_trainer.losses(plain_trainer)
    assert callback.events == [] and "training_step" not in vars(trainer)


# Of 786 allocations of both updates: forward, backward, optimizer's steps.
@pytest.mark.parametrize("at", [40, 350, 480, 700])
def test_the_trainer_trains_on_as_if_memory_had_sufficed(tmp_path: Path, at: int, plain_trainer: Any) -> None:
    faults = Faults(at)
    trainer, _ = with_trainer(tmp_path, faults)
    assert faults.raised == 1
    check_same(trainer.model.state_dict(), plain_trainer.model.state_dict(), exact=True)
    assert by_trainer.losses(trainer) == by_trainer.losses(plain_trainer)


def test_gradients_are_cut_after_a_shortage_while_they_were(
    tmp_path: Path, plain_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate passes the parameters as a generator, which the first attempt uses up."""
    cut, failed = torch.nn.utils.clip_grad_norm_, []

    def once(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(parameters)
        if not failed:
            failed.append(len(given))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. (a test's)")
        return cut(given, *args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", once)
    trainer, callback = with_trainer(tmp_path)
    assert failed and failed[0] > 0
    check_same(trainer.model.state_dict(), plain_trainer.model.state_dict(), exact=True)
    assert [event.kind for event in callback.events] == ["retry"]


def test_a_loop_with_what_accelerate_prepares_goes_on() -> None:
    from accelerate import Accelerator

    def trained(faults: Faults) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
        plain = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
        ready = Accelerator(cpu=True).prepare(model, plain, schedule)
        survivor = vramfit.survive(
            ready[0], ready[1], loss=lambda net, x: net(x).square().mean(), scheduler=ready[2]
        )
        batch = torch.ones(4, 6)
        for _ in range(3):
            with faults:
                survivor.step(batch)
        return [*model.parameters(), torch.tensor(plain.param_groups[0]["lr"])]

    none = Faults()
    expected = trained(none)
    for at in range(0, none.seen, 7):
        assert all(map(torch.equal, trained(Faults(at)), expected)), at


def test_the_trainer_goes_on_in_micro_batches(tmp_path: Path) -> None:
    expected = by_trainer.trainer_for(by_trainer.language_model(), tmp_path, **UPDATES)
    expected.train()
    trainer = by_trainer.trainer_for(by_trainer.language_model(), tmp_path, **UPDATES)
    callback = TrainerSurvivalCallback(trainer, numerics="rounding")
    trainer.add_callback(callback)
    with Faults(40, 41):
        trainer.train()
    assert [event.kind for event in callback.events][:2] == ["retry", "up"]
    check_same(trainer.model.state_dict(), expected.model.state_dict(), exact=False)
    assert by_trainer.losses(trainer) == pytest.approx(by_trainer.losses(expected), rel=1e-4)


@pytest.mark.slow
def test_ranks_of_a_trainer_train_on_as_if_memory_had_sufficed(tmp_path: Path) -> None:
    """Beside DistributedDataParallel's own reduction, with batches that accumulate and buffers that change."""
    last = ran_on_ranks(2, "tests.integrations.trainer_ranks_inside", tmp_path).splitlines()[-1]
    assert last == "3 equal"


def test_without_a_shortage_lightning_trains_as_without_the_callback(plain_module: Any) -> None:
    module, callback = with_lightning()
    check_same(module.state_dict(), plain_module.state_dict(), exact=True)
    assert module.seen == plain_module.seen and logged(module) == logged(plain_module)
    assert callback.events == [] and "optimizer_step" not in vars(module.trainer.strategy)


# Of 339 allocations: forward, backward after values were logged, an optimizer's step, the last batch.
@pytest.mark.parametrize("at", [20, 90, 135, 320])
def test_lightning_trains_and_logs_as_if_memory_had_sufficed(at: int, plain_module: Any) -> None:
    faults = Faults(at)
    module, _ = with_lightning(faults)
    assert faults.raised == 1
    check_same(module.state_dict(), plain_module.state_dict(), exact=True)
    assert module.seen == plain_module.seen and logged(module) == logged(plain_module)


@pytest.fixture(scope="module")
def plain_accumulated() -> Any:
    module = by_lightning.Speaker(0.1)
    by_lightning.fit(module, max_epochs=1, accumulate_grad_batches=2)
    return module


# Of 302 allocations: the first batch, the second, which steps, the step, and the third, left over at the end.
@pytest.mark.parametrize("at", [30, 70, 120, 150, 190, 280])
def test_batches_that_lightning_accumulates_are_guarded_each(at: int, plain_accumulated: Any) -> None:
    module, callback, faults = by_lightning.Speaker(0.1), LightningSurvivalCallback(), Faults(at)
    with faults:
        by_lightning.fit(module, callbacks=[callback], max_epochs=1, accumulate_grad_batches=2)
    assert faults.raised == 1
    check_same(module.state_dict(), plain_accumulated.state_dict(), exact=True)
    assert module.seen == plain_accumulated.seen and logged(module) == logged(plain_accumulated)
    loop = module.trainer.fit_loop.epoch_loop.automatic_optimization
    assert "_make_closure" not in vars(loop)


def test_lightning_accumulates_in_micro_batches() -> None:
    expected, module = by_lightning.Speaker(), by_lightning.Speaker()
    by_lightning.fit(expected, max_epochs=1, accumulate_grad_batches=2)
    callback = LightningSurvivalCallback(numerics="rounding")
    with Faults(60, 61):
        by_lightning.fit(module, callbacks=[callback], max_epochs=1, accumulate_grad_batches=2)
    assert [event.kind for event in callback.events][:2] == ["retry", "up"]
    check_same(module.state_dict(), expected.state_dict(), exact=False)


def test_lightning_goes_on_in_micro_batches() -> None:
    expected = by_lightning.Speaker()
    by_lightning.fit(expected, max_epochs=1)
    module, callback = by_lightning.Speaker(), LightningSurvivalCallback(numerics="rounding")
    with Faults(60, 61):
        by_lightning.fit(module, callbacks=[callback], max_epochs=1)
    assert [event.kind for event in callback.events][:2] == ["retry", "up"]
    check_same(module.state_dict(), expected.state_dict(), exact=False)
    assert logged(module) == pytest.approx(logged(expected), rel=1e-4)


def test_a_trainer_that_spreads_otherwise_is_refused_before_the_training(tmp_path: Path) -> None:
    """As with FSDP, DeepSpeed, or several devices in one process."""
    for spread in ("FSDP", "DEEPSPEED", "NO"):
        trainer = by_trainer.trainer_for(by_trainer.language_model(), tmp_path, **UPDATES)
        trainer.add_callback(TrainerSurvivalCallback(trainer))
        if spread == "NO":
            trainer.args._n_gpu = 2
        else:
            trainer.accelerator.state.distributed_type = f"DistributedType.{spread}"
        try:
            with pytest.raises(UsageError, match="surviving in the Trainer, but by DistributedDataParallel"):
                trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        finally:
            trainer.accelerator.state._reset_state(reset_partial_state=True)
    assert "training_step" not in vars(trainer)


def test_what_does_not_go_together_is_one_line(tmp_path: Path) -> None:
    plan = plan_with(activation_checkpointing={})
    with pytest.raises(UsageError, match="clip_norm is no option of surviving in a trainer"):
        LightningSurvivalCallback(clip_norm=1.0)
    trainer = by_trainer.trainer_for(by_trainer.language_model(), tmp_path, plan, **UPDATES)
    trainer.add_callback(TrainerSurvivalCallback(trainer))
    with pytest.raises(UsageError, match="the Trainer has a plan"):
        trainer.train()
    for callbacks, options, line in (([LightningPlan(plan)], {}, "the fit has a plan"),):
        with pytest.raises(UsageError, match=line):
            by_lightning.fit(
                by_lightning.Speaker(), callbacks=[*callbacks, LightningSurvivalCallback()], **options
            )
    state = torch.get_rng_state()
    LightningSurvivalCallback(numerics="bitwise")
    assert torch.equal(torch.get_rng_state(), state)
