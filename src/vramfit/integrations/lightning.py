"""A plan in a training by Lightning: ``Trainer(callbacks=[PlanCallback(plan)])``.

NOTE [A plan in Lightning]: Lightning's own loop stays in charge, with its hooks, clipping, accumulation, logging and
checkpoints. Four methods of its strategy pass through here from the start of the fit to its end. ``training_step`` goes
forward and backward with every piece of a batch but the last, of which it returns the loss: its value is that of the
whole batch, its gradient that of the last piece, so that Lightning's own backward pass completes the gradients.
Lightning clears gradients between the two, which is left out for that batch, and made up for after the optimizer's
step, where they cost no memory in the next forward pass. ``optimizer_step`` runs the closure first, and not inside of
the optimizer's step as Lightning does, whose hooks belong to techniques that need the gradients to be complete.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import os
from collections.abc import Callable, Mapping
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
from vramfit.techniques import AttachedProgram, Piece
from vramfit.techniques.support.optimizer_exchange import catch_up

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise UsageError(
        "a plan in Lightning needs lightning, which is not installed", "pip install vramfit[lightning]"
    ) from error


class PlanCallback(Callback):
    """Applies a plan to the module and the optimizer for the time of a fit.

    Example::

        trainer = Trainer(callbacks=[PlanCallback("plan.toml")])

    The plan is that of the module itself, as `vramfit.lightning_workload` makes the workload. Losses that are returned
    or logged with ``self.log`` are those of the whole batch; other entries that ``training_step`` returns are those of
    the last piece. ``on_before_backward`` and ``on_after_backward`` are called for each piece, as Lightning calls them
    for each batch that it accumulates. Gradients are gone after the optimizer's step.

    Args:
        plan: a plan, or the file of one.

    Raises:
        UsageError: what was given is not a plan; or, when the fit starts, the training cannot go with the plan.
    """

    def __init__(self, plan: Plan | str | os.PathLike[str]) -> None:
        self.plan = plan_from(plan)
        self._training: LightningTraining | None = None
        self._saved: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the plan: the module is on its device, and the optimizer and its schedules are made."""
        _check_training(trainer, pl_module, self.plan)
        live = AttachedProgram(pl_module, trainer.optimizers[0])
        live.attach(self.plan.choices)
        training = LightningTraining(trainer, pl_module, live)
        self._training = training
        scaler: Any = training.live.scaler
        if scaler is not None and "scaler" in self._saved:
            scaler.load_state_dict(self._saved["scaler"])
        self._saved = {}

    def state_dict(self) -> dict[str, Any]:
        """The scale of losses, where the plan scales them."""
        scaler: Any = None if self._training is None else self._training.live.scaler
        return {} if scaler is None else {"scaler": scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the scale of losses for the start of the fit."""
        self._saved = dict(state_dict)


class AutoFit(Callback):
    """Plans for the program when its fit starts, and trains with the plan: ``Trainer(callbacks=[AutoFit()])``.

    The program is run again on a virtual card, as ``vramfit plan`` runs it (docs/fit.md). After the fit the module is
    as it was, with its new values.

    Args:
        gpu: the card to plan for; None for the one at hand.
        numerics: how far results may differ.
        seconds: for the search.

    Raises:
        UsageError: when the fit starts: there is no card, or the program is no script.
        VramfitError: nothing fits.
    """

    def __init__(
        self, gpu: str | GpuSpec | None = None, numerics: str = "precision", seconds: float = 120.0
    ) -> None:
        self._plan = AutoPlan(gpu, numerics, seconds)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan, and attach at the first step."""
        del pl_module
        self._plan.start(trainer.optimizers)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Undo the plan."""
        del trainer, pl_module
        self._plan.end()


class LightningTraining:
    """One fit with what is attached to the module and its optimizer. See NOTE [A plan in Lightning].

    Args:
        trainer: with its optimizers made.
        module: on its device.
        live: of the module and the trainer's optimizer.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, live: AttachedProgram) -> None:
        self._trainer, self._module, self.live = trainer, module, live
        self._strategy: Any = trainer.strategy
        assert self.live.optimizer is not None
        if self.live.optimizer is not trainer.optimizers[0]:
            self._strategy.optimizers = [self.live.optimizer]
        self._plain_step: Callable[..., Any] = self._strategy.training_step
        self._plain_backward: Callable[..., Any] = self._strategy.backward
        self._plain_optimizer_step: Callable[..., Any] = self._strategy.optimizer_step
        self._plain_update: Callable[..., Any] = self.live.optimizer.step
        self._plain_teardown: Callable[..., Any] = self._strategy.teardown
        self._scaling = False
        self._clear_again: Callable[[], None] = _nothing
        self._own = contextlib.ExitStack()
        for owner, name, value in (
            (self._strategy, "training_step", self._training_step),
            (self._strategy, "backward", self._backward),
            (self._strategy, "optimizer_step", self._optimizer_step),
            (self._strategy, "load_optimizer_state_dict", self._load_optimizer),
            (self._strategy, "teardown", self._teardown),
            (self.live.optimizer, "step", self._update),
        ):
            self._own.callback(put(owner, name, value))
        if self.live.clip is not None:
            self._own.callback(put(trainer.precision_plugin, "clip_gradients", self._clip))

    # -- the batch -----------------------------------------------------------------------------------------------

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        live = self.live
        if live.splitter is None:
            return live.surrounded(lambda: self._plain_step(*args, **kwargs))
        batch, *rest = args
        pieces = pieces_of(live, batch)
        if len(pieces) > 1:
            self._clear_again()
            self._clear_again = put(self._module, "optimizer_zero_grad", _keep_gradients)
        logs = _Logs(self._module, pieces)
        before: torch.Tensor | None = None
        while True:
            piece = pieces.pop(0)
            live.begin_piece(piece)
            output, loss = logs.of_piece(piece, functools.partial(self._forward, piece, rest, kwargs))
            live.end_piece(piece)
            if not pieces:
                break
            if loss is not None:
                share = weighted(loss, piece.weight)
                before = share.detach() if before is None else before + share.detach()
                self._go_back(share / self._trainer.accumulate_grad_batches, self._trainer.optimizers[0])
                del share
            del output, loss, piece
        logs.write()
        if loss is None:
            return output
        whole = weighted(loss, piece.weight)
        if before is not None:
            whole = whole + before
        return {**output, "loss": whole} if isinstance(output, Mapping) else whole

    def _forward(self, piece: Piece, rest: list[Any], kwargs: dict[str, Any]) -> Any:
        return self.live.surrounded(lambda: self._plain_step(piece.batch, *rest, **kwargs))

    def _go_back(self, loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.live.scaler is not None:
            loss = self.live.scaler.scale(loss)
        return self._plain_backward(loss, optimizer, *args, **kwargs)

    def _backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._clear_again()
        self._clear_again = _nothing
        found = self._go_back(closure_loss, optimizer, *args, **kwargs)
        self.live.finish_pieces()
        return found

    # -- the step ------------------------------------------------------------------------------------------------

    def _optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        complete = functools.partial(self._completed, closure)
        found = self._plain_optimizer_step(optimizer, complete, *args, **kwargs)
        optimizer.zero_grad(set_to_none=True)
        for action in self.live.after_step:
            action()
        return found

    def _completed(self, closure: Callable[[], Any]) -> Any:
        """What Lightning's closure gives, with the gradients as the optimizer takes them."""
        try:
            result = closure()
        finally:
            self._clear_again()
            self._clear_again = _nothing
        if result is not None:
            end_gradients(self.live)
        return result

    def _update(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """The optimizer's step, after the closure that Lightning gives to it."""
        if self._scaling:
            return self._plain_update(**kwargs)
        result = None if closure is None else closure()
        for action in self.live.before_step:
            action()
        scaler = self.live.scaler
        if scaler is None:
            found = self._plain_update(**kwargs)
            return found if closure is None else result
        if result is not None:  # without a loss there are no gradients that could have overflowed
            assert self.live.optimizer is not None
            self._scaling = True
            try:
                scaler.step(self.live.optimizer)
            finally:
                self._scaling = False
            scaler.update()
        return result

    def _clip(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip gradients that are not those of the parameters."""
        del optimizer
        if clip_val > 0:
            _check_by_norm(gradient_clip_algorithm)
            assert self.live.clip is not None
            self.live.clip(float(clip_val))

    # -- checkpoints and the end -----------------------------------------------------------------------------------

    def _load_optimizer(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states and leave them where the optimizer has them, which may be another place than the device."""
        for optimizer, states in zip(self._strategy.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(states)

    def _teardown(self) -> None:
        self.undo()
        self._plain_teardown()

    def undo(self) -> None:
        """Leave the module and the trainer as they were.

        The optimizer that trained stays the trainer's, with its states, for a checkpoint that is saved after the fit;
        the next fit makes another. States on the host go back to the optimizer that was there before.
        """
        self._clear_again()
        trained = self.live.optimizer
        assert trained is not None
        catch_up(trained)
        states = dict(trained.state)
        self._own.close()
        self.live.undo()
        if self.live.optimizer is not trained:
            if hasattr(trained, "give_back"):  # it has given its states back
                self._strategy.optimizers = [self.live.optimizer]
            else:
                trained.state.update(states)


class _Logs:
    """Combines the values that the pieces of a batch log under one name.

    A mean is taken over the pieces by their weights, and the loss itself adds up as the losses do. Metrics that keep
    their own state, and sums, smallest and largest values over an epoch, are logged piece by piece as they come.
    """

    def __init__(self, module: LightningModule, pieces: list[Piece]) -> None:
        self._module, self._several = module, len(pieces) > 1
        self._total = sum(piece.weight for piece in pieces)
        self._calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._values: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        self._told: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._plain: Callable[..., None] = module.log

    def of_piece(self, piece: Piece, step: Callable[[], Any]) -> tuple[Any, torch.Tensor | None]:
        """Run the step of a piece: what it gives, and its loss."""
        if not self._several:
            output = step()
            return output, _loss_of(output)
        back = put(self._module, "log", self._log)
        try:
            output = step()
        finally:
            back()
        loss = _loss_of(output)
        for name, value, args, options in self._calls:
            share = piece.weight if value is loss else piece.weight / self._total
            value = (value.detach() if isinstance(value, torch.Tensor) else value) * share
            self._values[name] = self._values[name] + value if name in self._values else value
            if options.get("batch_size") is not None:
                self._sizes[name] = self._sizes.get(name, 0) + options["batch_size"]
            self._told[name] = (args, options)
        self._calls.clear()
        return output, loss

    def write(self) -> None:
        """Log the values of the whole batch."""
        for name, (args, options) in self._told.items():
            if name in self._sizes:
                options = {**options, "batch_size": self._sizes[name]}
            self._plain(name, self._values[name], *args, **options)

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        reduction = args[4] if len(args) > 4 else options.get("reduce_fx", "mean")
        is_number = isinstance(value, numbers.Number) or (
            isinstance(value, torch.Tensor) and value.numel() == 1
        )
        if is_number and reduction in ("mean", "avg", torch.mean):
            self._calls.append((name, value, args, options))
        else:
            self._plain(name, value, *args, **options)


def _loss_of(output: Any) -> torch.Tensor | None:
    found: torch.Tensor | None = output.get("loss") if isinstance(output, Mapping) else output
    return found


def _keep_gradients(*_: Any) -> None:
    """Stands for clearing gradients, between the pieces of a batch."""


def _nothing() -> None:
    """Stands for an undo, where there is nothing to undo."""


def check_fit(trainer: Trainer, module: LightningModule, what: str, by_hand: str) -> None:
    """Make sure that Lightning trains a module itself, on one device, with one optimizer.

    Args:
        what: is for that, in words.
        by_hand: what to do where a module optimizes manually.

    Raises:
        UsageError: it does otherwise.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(f"{name} optimizes manually, so {what} cannot make its steps", by_hand)
    strategy = trainer.strategy
    if trainer.world_size > 1 or strategy.model is not module:
        raise UsageError(
            f"{type(strategy).__name__} spreads the training over processes or wraps the module, "
            f"and {what} is for one device",
            "Use Trainer(devices=1) with the default strategy",
        )
    optimizer: Any = trainer.optimizers[0]
    trained = {id(parameter) for parameter in module.parameters()}
    if not any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            f"configure_optimizers of {name} returns no optimizer of its parameters",
            f"Return one: {what} is for training",
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            f"{type(optimizer).__name__} runs the forward and backward pass inside of its step, "
            f"which {what} cannot split",
            "Use an optimizer that steps once with given gradients, such as torch.optim.AdamW",
        )


def _check_training(trainer: Trainer, module: LightningModule, plan: Plan) -> None:
    """Make sure that a plan can be applied to this training."""
    by_hand = "Call plan.apply, plan.split, plan.backward and plan.step in its training_step instead"
    check_fit(trainer, module, "a plan", by_hand)
    name = type(module).__name__
    names = [choice.name for choice in plan.choices]
    if "micro-batching" in names and "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UsageError(
            f"training_step of {name} takes its batches from dataloader_iter itself, so that none can be split",
            "Let it take batch and batch_idx, or forbid micro-batching in the plan",
        )
    check(plan.choices, _settings(trainer, module))
    if "optimizer-offload" in names and trainer.gradient_clip_val:
        _check_by_norm(trainer.gradient_clip_algorithm or "norm")


def _check_by_norm(algorithm: Any) -> None:
    if getattr(algorithm, "value", algorithm) != "norm":
        raise UsageError(
            f'gradient_clip_algorithm="{getattr(algorithm, "value", algorithm)}" clips gradients on the device, and '
            "optimizer-offload of the plan has them on the host",
            'Clip by "norm", or forbid optimizer-offload in the plan',
        )


def _settings(trainer: Trainer, module: LightningModule) -> Settings:
    precision, scaler = str(trainer.precision), getattr(trainer.precision_plugin, "scaler", None)
    accumulated, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    written = f'precision="{precision}"'
    clipping = f"gradient_clip_val={clip}" if clip else ""
    if type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping:
        clipping = f"configure_gradient_clipping of {type(module).__name__}"
    return Settings(
        precision="" if precision == "32-true" else written,
        scaling=written if scaler is not None else "",
        accumulation=f"accumulate_grad_batches={accumulated}" if accumulated > 1 else "",
        clipping=clipping,
        no_clipping="Leave it out",
    )
