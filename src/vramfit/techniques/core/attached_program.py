"""A program under treatment: its model and optimizer with the techniques attached, and the loop that they ask for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.piece_state import PieceState
from vramfit.techniques.core.surround import Around, release, surround
from vramfit.workload import Batch, check_loss

Optimizer = torch.optim.Optimizer


class AttachStage(IntEnum):
    """When a technique is attached: each finds what the earlier ones made.

    Attributes:
        MODEL: the model is where it was made; its tensors may change dtype or be shared.
        PLACEMENT: in place of moving the model to the device as a whole.
        OPTIMIZER: the model is placed and the optimizer made, in a workload without state yet; it may be exchanged.
        LOSS: what computes the loss may be exchanged.
        FORWARD: forward passes of modules are surrounded, the inner ones first.
        CONTEXT: the forward pass of the whole model is surrounded.
        STEP: batches are split, losses scaled, steps taken otherwise.
    """

    MODEL = 0
    PLACEMENT = 1
    OPTIMIZER = 2
    LOSS = 3
    FORWARD = 4
    CONTEXT = 5
    STEP = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One micro-batch.

    Attributes:
        batch: its examples, in the containers of the whole batch.
        weight: what its loss is multiplied with, so that the gradients add up to those of the whole batch.
        last: whether the step follows.
        first: whether the batch begins with it.
        share: of the batch's examples that it holds.
    """

    batch: Batch
    weight: float | torch.Tensor
    last: bool
    first: bool = True
    share: float = 1.0


class Attachable(Protocol):
    """What is attached: a technique with its setting."""

    @property
    def stage(self) -> AttachStage:
        """When it is attached."""
        ...

    def attach_to(self, live: AttachedProgram) -> None:
        """Change the program in place, every change with its undo."""
        ...


class AttachedProgram:
    """A model and an optimizer that techniques are attached to, in place.

    Args:
        model: the model, on the CPU or on its device.
        optimizer: the optimizer, or a function that makes one of parameters, or None.
        device: where the model goes; None leaves it where it is.

    Attributes:
        model: the same object as long as the program is attached.
        optimizer: what steps; a technique may have exchanged it.
        device: where the model's work is done.
        placed: whether a technique has placed the model, or it had its place before.
        splitter: cuts a batch into pieces; None leaves it whole.
        piece_state: keeps what each piece of a batch writes beside gradients; None where batches stay whole.
        scaler: scales losses; None leaves them.
        steps_in_backward: whether the optimizer steps in the backward pass, so that gradients never are together.
        clip: cuts all gradients to a norm, where they are not those of the model's parameters; None leaves it to torch.
        frees_input: whether a batch may go as soon as the forward pass is over.
        host_inputs: whether a batch without a loss stays on the CPU, as what surrounds the model brings to the device
            what it needs; otherwise the whole batch is moved there before the model is called.
        loss_surroundings: what surrounds the computation of the loss in a workload, and the forward pass where it has
            no loss, the innermost first; each is given a function without arguments that computes it.
        preparing: each is given a workload's batch on the host, without training, and returns what goes to the device.
        gathering: called when the gradients of a step are complete, before they are unscaled or cut: what keeps some
            elsewhere brings them to the parameters.
        before_step: called before the optimizer steps, after gradients are unscaled.
        after_step: called after the optimizer stepped and the gradients went.
        pageable: each gives the tensors that a technique keeps on the host without pinning them, beside a card.
        own_loop: whether the loop knows nothing of techniques: it goes backward and steps by itself, and may
            cut, scale or exchange gradients in between. See `Technique.loop_change`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer | None] | None,
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.optimizer: Optimizer | None = optimizer if isinstance(optimizer, Optimizer) else None
        self._make_optimizer = None if isinstance(optimizer, Optimizer) else optimizer
        self.placed = device is None
        self.device = device if device is not None else _device_of(model)
        self.splitter: Callable[[Batch], Sequence[Piece]] | None = None
        self.piece_state: PieceState | None = None
        self.scaler: torch.amp.GradScaler | None = None
        self.steps_in_backward = False
        self.clip: Callable[[float], Any] | None = None
        self.frees_input = False
        self.host_inputs = False
        self.loss_surroundings: list[Callable[[Callable[[], Any]], Any]] = []
        self.preparing: list[Callable[[Batch], Batch]] = []
        self.gathering: list[Callable[[], None]] = []
        self.before_step: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []
        self.pageable: list[Callable[[], Iterable[torch.Tensor]]] = []
        self.own_loop = False
        self._undo = contextlib.ExitStack()
        self._attaching: AttachStage | None = None
        self._later: list[tuple[AttachStage, Callable[[], None]]] = []
        self._weight: float | torch.Tensor = 1.0
        self._weighted = False
        """Whether a loss got its weight since the last step."""
        self._unweighted = False
        """Whether a piece of the last batch that was cut was worked on without its weight."""

    # -- attaching -----------------------------------------------------------------------------------------------

    def attach(self, choices: Iterable[Attachable]) -> None:
        """Attach techniques, each at its stage; place the model and make the optimizer in between.

        Raises:
            UsageError: one cannot be applied; what the others changed is undone.
        """
        given = tuple(choices)
        try:
            for stage in AttachStage:
                self._attaching = stage
                if stage is AttachStage.OPTIMIZER:
                    self._place()
                for choice in given:
                    if choice.stage is stage:
                        choice.attach_to(self)
                for due, action in self._later:
                    if due is stage:
                        action()
            self._watch_steps()
        except BaseException:
            self.undo()
            raise
        finally:
            self._attaching = None
            self._later.clear()

    def _place(self) -> None:
        if not self.placed:
            self.model.to(self.device)
            self.placed = True
        if self._make_optimizer is not None and self.optimizer is None:
            self.optimizer = self._make_optimizer(self.model.parameters())

    def _watch_steps(self) -> None:
        """Refuse steps of the optimizer itself with gradients that lack the weights of their pieces."""
        # A wrapper, e.g. Accelerate's, is an optimizer without hooks of its own, around the one that steps.
        steps = getattr(self.optimizer, "optimizer", self.optimizer)
        if self.splitter is None or not isinstance(steps, Optimizer):
            return
        watched = weakref.ref(self)  # the optimizer must not hold the program that holds it

        def check(*_args: Any) -> None:
            live = watched()
            if live is not None and live._unweighted:
                live._check_weighted()

        self.on_undo(steps.register_step_pre_hook(check).remove)

    def surround(self, module: nn.Module, around: Around) -> None:
        """Put `around` around a module's forward pass until the undo."""
        surround(module, around)
        self.on_undo(lambda: release(module, around))

    def set(self, obj: object, name: str, value: Any) -> None:
        """Bind ``obj.name`` to `value` until the undo."""
        before = getattr(obj, name)
        setattr(obj, name, value)
        self.on_undo(lambda: setattr(obj, name, before))

    def after(self, stage: AttachStage, action: Callable[[], None]) -> None:
        """Call `action` when all techniques of a stage are attached; at once if that stage is over.

        One that is attached early, to the model on the CPU, can so act on the optimizer that comes of later ones.
        """
        if self._attaching is None or self._attaching > stage:
            action()
        else:
            self._later.append((stage, action))

    @property
    def pageable_bytes(self) -> int:
        """Bytes that techniques keep on the host without pinning them."""
        return sum(
            tensor.nbytes for kept in self.pageable for tensor in kept() if tensor.device.type == "cpu"
        )

    def keep_pageable(self, kept: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Count the tensors that `kept` gives, as far as they are on the host, until the undo."""
        self.pageable.append(kept)
        self.on_undo(lambda: self.pageable.remove(kept))

    def on_undo(self, action: Callable[[], None]) -> None:
        """Call `action` when everything is undone, the latest first, also where one before it fails."""
        self._undo.callback(action)

    def undo(self) -> None:
        """Leave the model as it was before, its values as they are now.

        The optimizer that was exchanged is back in `optimizer`, with its own state.
        """
        self._undo.close()

    # -- the loop ------------------------------------------------------------------------------------------------

    def split(self, batch: Batch) -> Iterator[Batch]:
        """The micro-batches of a batch: go forward and backward with each before the next.

        Gradients of distributed data parallel models are exchanged with the last one alone.
        """
        whole = (Piece(batch=batch, weight=1.0, last=True),)
        waiting = list(whole if self.splitter is None else self.splitter(batch))[::-1]
        del batch, whole
        self._unweighted = False
        try:
            while waiting:
                piece = waiting.pop()
                # Nothing here holds a piece while it is worked on: the loop may let it go after the forward pass.
                held, self._weight, last = [piece.batch], piece.weight, piece.last
                piece = replace(piece, batch=None)
                self.begin_piece(piece)
                with contextlib.ExitStack() as stack:
                    if not last and (no_sync := getattr(self.model, "no_sync", None)) is not None:
                        stack.enter_context(no_sync())
                    before, self._weighted = self._weighted, False
                    yield held.pop()
                    if not self._weighted and not _is_one(self._weight):
                        self._unweighted = True
                    self._weighted = self._weighted or before
                self.end_piece(piece)
            self.finish_pieces()
        finally:
            self._weight = 1.0

    def begin_piece(self, piece: Piece) -> None:
        """A piece goes forward next: it finds the state that the batch began with."""
        if self.piece_state is not None and not (piece.first and piece.last):
            self.piece_state.begin(first=piece.first)

    def end_piece(self, piece: Piece) -> None:
        """A piece has gone forward: note what it wrote.

        Raises:
            UsageError: it wrote what the plan does not name.
        """
        if self.piece_state is not None and not (piece.first and piece.last):
            self.piece_state.end(piece.share, first=piece.first, last=piece.last)

    def finish_pieces(self) -> None:
        """All pieces of a batch have gone backward: leave what the whole batch would have written."""
        if self.piece_state is not None:
            self.piece_state.finish()

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """A micro-batch's loss as its share of the whole batch's.

        Raises:
            UsageError: the loss is not a scalar.
        """
        check_loss(loss)
        self._weighted = True
        if _is_one(self._weight):
            return loss
        return loss * self._weight

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro-batch's loss, with the weight and the scale that belong to it.

        Raises:
            UsageError: the loss is not a scalar.
        """
        loss = self.weighted(loss)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def step(self, *, clip_norm: float | None = None) -> torch.Tensor | None:
        """The optimizer's step, and the end of the gradients.

        Args:
            clip_norm: the norm that all gradients together are cut to before; None does not cut.

        Returns:
            the norm of all gradients together before they were cut; None where they were not: to compute it takes time.

        Raises:
            UsageError: gradients are to be clipped, but the optimizer steps during the backward pass; or they came by
                ``loss.backward()``, without their weight.
        """
        self._check_weighted()
        for action in self.gathering:
            action()
        norm: torch.Tensor | None = None
        if clip_norm is not None:
            if self.steps_in_backward:
                raise UsageError(
                    "gradients cannot be clipped together when the optimizer steps in the backward pass",
                    "Leave clip_norm out, or forbid step-in-backward in the plan",
                )
            if self.scaler is not None and self.optimizer is not None:
                self.scaler.unscale_(self.optimizer)
            if self.clip is not None:
                norm = self.clip(clip_norm)
            else:
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        for action in self.before_step:
            action()
        if self.optimizer is None:
            self.model.zero_grad(set_to_none=True)
        else:
            # Also after steps in the backward pass: it steps what had no part in them, and ends the step for schedules.
            self._take_step(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
        for action in self.after_step:
            action()
        return norm

    def _check_weighted(self) -> None:
        """Make sure that gradients have the weights and the scale that belong to them."""
        wanted = self.splitter is not None or self.scaler is not None
        missed = wanted and (self._unweighted or not self._weighted)
        self._weighted = self._unweighted = False
        if missed and any(parameter.grad is not None for parameter in self.model.parameters()):
            raise UsageError(
                "gradients came by loss.backward(), without the share of their micro-batch or the scale of the plan",
                "Call plan.backward(loss) in its place, and in that of accelerator.backward(loss), for each "
                "micro-batch of plan.split(batch)",
            )

    def _take_step(self, optimizer: Optimizer) -> None:
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self.scaler.update()

    def train_step(
        self,
        loss: Callable[[nn.Module, Batch], torch.Tensor],
        batch: Batch,
        to_device: Callable[[Batch], Batch],
    ) -> torch.Tensor:
        """A whole step of a workload; the loss of the whole batch, without its graph.

        Args:
            loss: the loss of a batch on the device.
            batch: on the CPU, or where it was made.
            to_device: moves a batch to the device.
        """
        pieces = self.split(batch)
        del batch
        total: torch.Tensor | None = None
        for piece in pieces:
            held = [to_device(piece)]
            del piece
            value = self._loss(loss, held)
            self.backward(value)
            share = self.weighted(value).detach()
            del value, held
            total = share if total is None else total + share
            del share
        self.step()
        if total is None:
            raise UsageError("the batch is empty", "Let batch make at least one example")
        return total

    def _loss(self, loss: Callable[[nn.Module, Batch], torch.Tensor], held: list[Batch]) -> torch.Tensor:
        def compute() -> torch.Tensor:
            return loss(self.model, held.pop() if self.frees_input else held[0])

        found: torch.Tensor = self.surrounded(compute)
        return found

    def prepared(self, batch: Batch) -> Batch:
        """A workload's batch as it goes to the device."""
        for change in self.preparing:
            batch = change(batch)
        return batch

    def surrounded(self, compute: Callable[[], Any]) -> Any:
        """What `compute` gives inside the surroundings of the loss."""
        for around in self.loss_surroundings:
            compute = _bind(around, compute)
        return compute()


def _is_one(weight: float | torch.Tensor) -> bool:
    return isinstance(weight, float) and weight == 1.0


def _bind(around: Callable[[Callable[[], Any]], Any], call: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: around(call)


def _device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
