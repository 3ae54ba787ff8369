"""A training by Hugging Face's Trainer that outlives running out of memory, by a callback.

NOTE [A transaction in the Trainer]: the Trainer's loop stays in charge. Its ``training_step``, forward and backward of
one batch, is what begins anew after a shortage, in as many pieces as the ladder says; gradients of earlier batches of
the same update are set aside meanwhile. Clipping, logging and the schedule are the Trainer's. The optimizer's own
``step`` commits slice by slice. Ranks of DistributedDataParallel vote after each batch; gradients stay on their rank
until the last batch of an update, when all that has accumulated is reduced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.integrations.guarded_updates import GuardedUpdate, check_options, insisted, trainer_survivor
from vramfit.integrations.plan_callbacks import put
from vramfit.integrations.transformers import (
    PlanCallback,
    TrainerTraining,
    check_one_device,
    inner_optimizer,
)
from vramfit.runtime.survival.ladder import SurvivalEvent
from vramfit.runtime.survival.survival_settings import UpdatePart
from vramfit.runtime.survival.survivor import Survivor

from transformers import Trainer, TrainerCallback  # isort: skip  # vramfit's module above says where it is missing


class TrainerSurvivalCallback(TrainerCallback):
    """Lets the steps of a Trainer outlive running out of memory, each done exactly once.

    Example::

        trainer.add_callback(TrainerSurvivalCallback(trainer))

    Args:
        trainer: the Trainer that the callback is added to.
        options: how far it may go, as `vramfit.survive` takes it: numerics, reduction, labels, patience,
            vote_seconds, host_margin, reserve, on_event.

    Attributes:
        events: what was done in the latest training.

    Raises:
        UsageError: an option is none; or, when the training starts, it is spread over several devices in another way
            than by DistributedDataParallel, or has a plan.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self._trainer: Any = trainer
        check_options(options)
        self._options = options
        self._training: _SurvivingTraining | None = None
        self.events: list[SurvivalEvent] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer and its schedule are made."""
        del args, state, control, kwargs
        self.undo()
        model = _trained_model(self._trainer)
        if any(isinstance(one, PlanCallback) for one in self._trainer.callback_handler.callbacks):
            raise UsageError(
                "the Trainer has a plan, and surviving takes some of the same techniques",
                "Leave one of the two callbacks out",
            )
        optimizer = inner_optimizer(self._trainer.optimizer)
        survivor = trainer_survivor(model, optimizer, self._options)
        self.events = survivor.events
        self._training = _SurvivingTraining(self._trainer, survivor)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step is taken, and the gradients are gone."""
        del args, state, control, kwargs
        if self._training is not None:
            self._training.survivor.settle()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model and the Trainer as they were."""
        del args, state, control, kwargs
        self.undo()

    def undo(self) -> None:
        """Leave the model and the Trainer as they were, also after a training that failed."""
        training, self._training = self._training, None
        if training is not None:
            training.undo()


class _SurvivingTraining(TrainerTraining):
    """One training. See NOTE [A transaction in the Trainer]."""

    def __init__(self, trainer: Any, survivor: Survivor) -> None:
        self.survivor = survivor
        optimizer = survivor.optimizer
        back = put(optimizer, "step", GuardedUpdate(survivor, optimizer.step))
        super().__init__(trainer, survivor.live)  # Accelerate's wrapper takes the step anew
        self._own.callback(back)
        plain_clip = self._accelerator.clip_grad_norm_
        clip = functools.partial(self._clipped, plain_clip)
        self._own.callback(put(self._accelerator, "clip_grad_norm_", clip))

    def _training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        plain = super()._training_step
        part = UpdatePart.LAST if self._accelerator.sync_gradients else UpdatePart.EARLIER
        return self.survivor.gradients(
            inputs, lambda: plain(model, inputs, num_items_in_batch, *args, **kwargs), part
        )

    def _clipped(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The norm is computed before any gradient is cut, which allocates nothing."""
        return insisted(self.survivor, plain, args, kwargs)

    def undo(self) -> None:
        """Leave the model and the Trainer as they were."""
        super().undo()
        self.survivor.close()


def _trained_model(trainer: Any) -> nn.Module:
    """The model as the training calls it.

    Raises:
        UsageError: it is spread over several devices in another way than by DistributedDataParallel.
    """
    wrapped: nn.Module = trainer.model_wrapped
    alone = not (trainer.args.n_gpu > 1 or trainer.is_model_parallel)
    if isinstance(wrapped, nn.parallel.DistributedDataParallel) and alone:
        return wrapped
    check_one_device(trainer, "surviving in the Trainer, but by DistributedDataParallel,")
    model: nn.Module = trainer.model
    return model
