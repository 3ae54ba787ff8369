"""A plan in a training by Hugging Face's Trainer: ``trainer.add_callback(PlanCallback(plan, trainer))``.

NOTE [A plan in the Trainer]: a Trainer gives its callbacks the model and the optimizer, but no way to its own
``training_step``, so that the callback is told which trainer it is for. The plan is applied when the Trainer asks for
its learning-rate schedule: then the model is placed and the optimizer made, while the schedule and what a checkpoint
holds are still to come, and meet the optimizer of the plan. The Trainer's own loop stays in charge: ``training_step``
runs for each piece of a batch, ``compute_loss`` gives a piece's loss its weight, clipping and the optimizer's step are
the Trainer's.

NOTE [Items in a piece]: some models and loss functions divide a sum over labels by ``num_items_in_batch``, the labels
of all batches of a step; others take it and use the mean over what they were given. With ``w`` the piece's share of the
batch, each piece is told ``w * num_items_in_batch`` and its loss is multiplied with ``w``. For the first kind the two
cancel, and the sum is divided by the items of the step; for the second kind, the means add up to the mean.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec
from vramfit.integrations.auto_fit import AutoPlan
from vramfit.integrations.plan_callbacks import (
    Settings,
    check,
    end_gradients,
    pieces_of,
    plan_from,
    put,
    weighted,
)
from vramfit.planner.plans import Plan
from vramfit.techniques import AttachedProgram

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise UsageError(
        "a plan in the Trainer needs transformers, which is not installed",
        "pip install vramfit[transformers]",
    ) from error


class PlanCallback(TrainerCallback):
    """Applies a plan to the model and the optimizer of a Trainer for the time of ``trainer.train()``.

    Example::

        trainer.add_callback(PlanCallback("plan.toml", trainer))

    The plan is that of the model which the Trainer has. Losses that are logged are those of whole batches. After the
    training the model is as it was, with its new values; an exchanged optimizer has its states in the Trainer's
    checkpoints, and gives its place back. Where the training ends with an exception, call `undo`.

    Args:
        plan: a plan, or the file of one.
        trainer: the Trainer that the callback is added to.

    Raises:
        UsageError: what was given is not a plan; or, when the training starts, the training cannot go with the plan.
    """

    def __init__(self, plan: Plan | str | os.PathLike[str], trainer: Trainer) -> None:
        self.plan = plan_from(plan)
        self._trainer: Any = trainer
        self._training: TrainerTraining | None = None
        self._plain_schedule: Callable[..., Any] = self._trainer.create_scheduler
        put(trainer, "create_scheduler", self._create_scheduler)

    def _create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> Any:
        """Apply the plan, then make the schedule for its optimizer. See NOTE [A plan in the Trainer]."""
        if self in self._trainer.callback_handler.callbacks:
            self.undo()
            _check_trainer(self._trainer, self.plan)
            live = AttachedProgram(self._trainer.model, inner_optimizer(self._trainer.optimizer))
            live.attach(self.plan.choices)
            self._training = TrainerTraining(self._trainer, live)
            optimizer = None  # the trainer's, as it is now
        return self._plain_schedule(num_training_steps, optimizer=optimizer, **kwargs)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are complete and clipped."""
        del args, state, control, kwargs
        if self._training is not None:
            for action in self._training.live.before_step:
                action()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step is taken, and the gradients are gone."""
        del args, state, control, kwargs
        if self._training is not None:
            for action in self._training.live.after_step:
                action()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo the plan."""
        del args, state, control, kwargs
        self.undo()

    def undo(self) -> None:
        """Leave the model and the Trainer as they were, also after a training that failed."""
        training, self._training = self._training, None
        if training is not None:
            training.undo()


class AutoFit(TrainerCallback):
    """Plans for the program when its Trainer starts to train, and trains with the plan: ``callbacks=[AutoFit()]``.

    The program is run again on a virtual card, as ``vramfit plan`` runs it; see docs/fit.md. After the training the
    model is as it was, with its new values.

    Args:
        gpu: the card to plan for; None for the one at hand.
        numerics: how far results may differ.
        seconds: for the search.

    Raises:
        UsageError: when the training starts: there is no card, or the program is no script.
        VramfitError: nothing fits.
    """

    def __init__(
        self, gpu: str | GpuSpec | None = None, numerics: str = "precision", seconds: float = 120.0
    ) -> None:
        self._plan = AutoPlan(gpu, numerics, seconds)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Plan, and attach at the first step."""
        del args, state, control, kwargs
        self._plan.start([] if optimizer is None else [inner_optimizer(optimizer)])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo the plan."""
        del args, state, control, kwargs
        self._plan.end()


class TrainerTraining:
    """One training of a Trainer with what is attached to its model and optimizer. See NOTE [A plan in the Trainer].

    Args:
        trainer: with its optimizer made.
        live: of the trainer's model and its optimizer.
    """

    def __init__(self, trainer: Any, live: AttachedProgram) -> None:
        self._trainer, self.live = trainer, live
        self._accelerator: Any = trainer.accelerator
        self._plain_step: Callable[..., torch.Tensor] = trainer.training_step
        self._plain_loss: Callable[..., Any] = trainer.compute_loss
        self._weight: float | torch.Tensor = 1.0
        changes: list[tuple[Any, str, Any]] = [(trainer, "training_step", self._training_step)]
        if self.live.scaler is not None:
            # Accelerate scales losses, leaves steps out that overflowed, and saves the scale, all by this.
            changes.append((self._accelerator, "scaler", self.live.scaler))
        if self.live.clip is not None:
            changes.append((self._accelerator, "clip_grad_norm_", self._clip))
        self._own = contextlib.ExitStack()
        for owner, name, value in changes:
            self._own.callback(put(owner, name, value))
        self._exchange(self.live.optimizer)

    def _exchange(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Put an optimizer where the Trainer has its own."""
        wrapper = self._trainer.optimizer
        if inner_optimizer(wrapper) is wrapper:
            self._trainer.optimizer = optimizer
        else:
            # As if it were loaded from a pickle: it takes the step of its optimizer anew, to know if that is left out.
            wrapper.__setstate__({"optimizer": optimizer, "scaler": self._accelerator.scaler})

    def _training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        pieces = pieces_of(self.live, inputs)
        del inputs
        total: torch.Tensor | None = None
        while pieces:
            piece = pieces.pop(0)
            self._weight = piece.weight
            self.live.begin_piece(piece)
            items = num_items_in_batch
            if items is not None and piece.weight != 1.0:
                items = items * piece.weight  # see NOTE [Items in a piece]
            back = put(self._trainer, "compute_loss", self._compute_loss)
            try:
                loss = self._plain_step(model, piece.batch, items, *args, **kwargs)
            finally:
                back()
            self.live.end_piece(piece)
            total = loss if total is None else total + loss
            del piece, loss
        self.live.finish_pieces()
        if self._accelerator.sync_gradients:
            end_gradients(self.live)
        assert total is not None
        return total

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = self.live.surrounded(lambda: self._plain_loss(model, inputs, *args, **kwargs))
        if isinstance(found, tuple):
            loss, *rest = found
            return (weighted(loss, self._weight), *rest)
        return weighted(found, self._weight)

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients that are not those of the parameters, by the norm that the Trainer always asks for."""
        del parameters, norm_type
        assert self.live.clip is not None
        return self.live.clip(float(max_norm))

    def undo(self) -> None:
        """Leave the model and the Trainer as they were."""
        self._own.close()
        self.live.undo()
        self._exchange(self.live.optimizer)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper, or itself."""
    return getattr(optimizer, "optimizer", optimizer)


def check_one_device(trainer: Any, what: str) -> None:
    """Make sure that a Trainer uses one device.

    Raises:
        UsageError: it spreads the training, and `what` is for one device.
    """
    args = trainer.args
    spread = str(trainer.accelerator.distributed_type).rpartition(".")[2]
    if spread != "NO" or args.world_size > 1 or args.n_gpu > 1 or trainer.is_model_parallel:
        raise UsageError(
            f"the Trainer spreads the training over several devices, and {what} is for one",
            "Start one process with one visible device, CUDA_VISIBLE_DEVICES=0",
        )


def _check_trainer(trainer: Any, plan: Plan) -> None:
    """Make sure that a plan can be applied to this training."""
    args, accelerator = trainer.args, trainer.accelerator
    others = [found for found in trainer.callback_handler.callbacks if isinstance(found, PlanCallback)]
    if len(others) > 1:
        raise UsageError(
            "the Trainer has two callbacks with a plan", "Remove one: trainer.pop_callback(PlanCallback)"
        )
    check_one_device(trainer, "a plan")
    names = {choice.name for choice in plan.choices}
    model = trainer.model
    checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if checkpoints and "activation-checkpointing" in names:
        raise UsageError(
            "the model checkpoints its own layers (activation_checkpointing=True), and the plan checkpoints blocks",
            "Leave activation_checkpointing out of the TrainingArguments: the plan does it",
        )
    if args.torch_compile and "compile" in names:
        raise UsageError(
            "torch_compile=True and compile of the plan both compile the model",
            "Leave torch_compile=True out: the plan does it",
        )
    if accelerator.mixed_precision != "no" and inner_optimizer(trainer.optimizer) is trainer.optimizer:
        raise UsageError(
            f"transformers {version('transformers')} changes the model's forward pass for "
            f"{accelerator.mixed_precision}=True after its schedule is made, when the plan is applied already",
            "Use transformers 5.23 or later",
        )
    check(plan.choices, _settings(args, accelerator))


def _settings(args: Any, accelerator: Any) -> Settings:
    precision = str(accelerator.mixed_precision)
    written = "" if precision == "no" else f"{precision}=True"
    accumulated, clip = args.gradient_accumulation_steps, args.max_grad_norm
    return Settings(
        precision=written,
        scaling=written if accelerator.scaler is not None else "",
        accumulation=f"gradient_accumulation_steps={accumulated}" if accumulated > 1 else "",
        clipping=f"max_grad_norm={clip}" if clip and clip > 0 else "",
        no_clipping="Set max_grad_norm=0",
    )
