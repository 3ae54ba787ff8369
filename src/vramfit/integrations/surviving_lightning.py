"""A fit by Lightning that outlives running out of memory, by a callback.

NOTE [A transaction in Lightning]: Lightning's loop stays in charge. What it calls the closure of a step (gradients
cleared, ``training_step``, backward) is what begins anew after a shortage, in as many pieces as the ladder says. Values
that a failed attempt logged are taken back. Clipping, hooks, logging and schedules are Lightning's. The optimizer's own
``step`` commits slice by slice. Of batches that accumulate Lightning calls the closure by itself, without a step: so
each closure is guarded where it is made, and gradients of earlier batches are set aside meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.integrations.guarded_updates import GuardedUpdate, check_options, insisted, trainer_survivor
from vramfit.integrations.lightning import LightningTraining, PlanCallback, check_fit
from vramfit.integrations.plan_callbacks import put
from vramfit.runtime.survival.ladder import SurvivalEvent
from vramfit.runtime.survival.survivor import Survivor

from lightning.pytorch import Callback, LightningModule, Trainer  # isort: skip  # vramfit's module above says where it is missing


class LightningSurvivalCallback(Callback):
    """Lets the steps of a fit outlive running out of memory, each done exactly once.

    Example::

        trainer = Trainer(callbacks=[LightningSurvivalCallback()])

    Metrics with a state of their own (torchmetrics) that ``training_step`` updates count an attempt that failed, too.

    Args:
        options: how far it may go, as `vramfit.survive` takes it: numerics, reduction, labels, patience,
            host_margin, reserve, on_event.

    Attributes:
        events: what was done in the latest fit.

    Raises:
        UsageError: an option is none; or, when the fit starts: the module optimizes manually, the training is spread
            over several devices, or there is a plan.
    """

    def __init__(self, **options: Any) -> None:
        check_options(options)
        self._options = options
        self._training: _SurvivingFit | None = None
        self.events: list[SurvivalEvent] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module is on its device, and the optimizer and its schedules are made."""
        by_hand = "Call survivor.step of vramfit.survive in its training_step instead"
        check_fit(trainer, pl_module, "surviving", by_hand)
        if any(isinstance(one, PlanCallback) for one in trainer.callbacks):  # type: ignore[attr-defined]
            raise UsageError(
                "the fit has a plan, and surviving takes some of the same techniques",
                "Leave one of the two callbacks out",
            )
        survivor = trainer_survivor(pl_module, trainer.optimizers[0], self._options)
        self.events = survivor.events
        self._training = _SurvivingFit(trainer, pl_module, survivor)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch, which says how far it can be cut."""
        del trainer, pl_module, batch_idx
        if self._training is not None:
            self._training.batch = batch


class _SurvivingFit(LightningTraining):
    """One fit. See NOTE [A transaction in Lightning].

    Attributes:
        batch: of the next step.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, survivor: Survivor) -> None:
        super().__init__(trainer, module, survivor.live)
        self.survivor = survivor
        self.batch: Any = None
        self._plain_update = GuardedUpdate(survivor, self._plain_update)
        plugin: Any = trainer.precision_plugin
        self._own.callback(put(plugin, "clip_gradients", functools.partial(self._cut, plugin.clip_gradients)))
        loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        made = functools.partial(self._made, loop._make_closure)
        self._own.callback(put(loop, "_make_closure", made))

    def _made(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The closure of a batch, guarded. See NOTE [A transaction in Lightning]."""
        closure = plain(*args, **kwargs)
        closure.closure = functools.partial(self._guarded, closure.closure)
        return closure

    def _optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        found = super()._optimizer_step(optimizer, closure, *args, **kwargs)
        self.survivor.settle()
        return found

    def _completed(self, closure: Callable[[], Any]) -> Any:
        return closure()  # which completes gradients itself, in each attempt

    def _guarded(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        complete = functools.partial(super()._completed, functools.partial(plain, *args, **kwargs))
        batch, self.batch = self.batch, None
        logged = _Logged(self._trainer)

        (result,) = self.survivor.gradients(batch, lambda: (complete(),), discard=logged.take_back)
        return result

    def _cut(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The norm is computed before any gradient is cut, which allocates nothing."""
        return insisted(self.survivor, plain, args, kwargs)

    def undo(self) -> None:
        """Leave the module and the trainer as they were."""
        super().undo()
        self.survivor.close()


class _Logged:
    """Values that were logged before an attempt: the trainer's results, whose means hold what an attempt added."""

    def __init__(self, trainer: Any) -> None:
        self._results = trainer._results
        self._before = {key: _copied(metric) for key, metric in (self._results or {}).items()}

    def take_back(self) -> None:
        """As before the attempt, but for metrics with a state of their own."""
        for key in list(self._results or {}):
            if key not in self._before:
                del self._results[key]
            elif (known := self._before[key]) is not None:
                vars(self._results[key]).update(_copied_values(known))


def _copied(metric: Any) -> dict[str, Any] | None:
    return _copied_values(vars(metric)) if getattr(metric, "is_tensor", False) else None


def _copied_values(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }
