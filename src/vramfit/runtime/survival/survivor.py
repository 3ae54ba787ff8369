"""Runs the steps of a loop so that each is done exactly once, whatever memory does in between.

NOTE [A step as a transaction]: a step may be called again. So what it moves besides gradients (buffers, attributes,
random states, whatever its function reaches) is noted at the start (`step_watch`) and put back after a shortage, and
the step begins anew, with more done to make it fit (`ladder`). The optimizer's step itself commits as a whole
(`guarded_step`). What follows (the scaler's update, the schedule) is small, and is done once. What cannot be put back
is found out in the first steps; a step that moves such a thing is not called again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.runtime.oom_forms import MemoryShortage
from vramfit.runtime.survival.climber import Climber
from vramfit.runtime.survival.copy_places import FirstOnDevice
from vramfit.runtime.survival.emergency_reserve import EmergencyReserve
from vramfit.runtime.survival.guarded_step import GuardedStep
from vramfit.runtime.survival.ladder import Ladder, Rung, SurvivalEvent
from vramfit.runtime.survival.leftovers import Recovery, memory_now
from vramfit.runtime.survival.pieces_check import PieceWork
from vramfit.runtime.survival.plain_loop import PlainLoop
from vramfit.runtime.survival.rank_votes import unsynchronised, votes_for
from vramfit.runtime.survival.scaled_step import scaled_step
from vramfit.runtime.survival.step_call import LossCall, as_batch, detached, loss_in
from vramfit.runtime.survival.step_refusals import check_collectives, check_optimizer, check_scheduler
from vramfit.runtime.survival.step_state import StepState
from vramfit.runtime.survival.step_watch import StepWatch
from vramfit.runtime.survival.survival_settings import SurvivalSettings, UpdatePart
from vramfit.techniques import AttachedProgram
from vramfit.training_state.container_kinds import MAPPING
from vramfit.training_state.declared import DeclaredState
from vramfit.training_state.reach import reached_from
from vramfit.training_state.state_notes import ContainersNote, TensorsNote
from vramfit.units import format_bytes
from vramfit.workload import to_device
from vramfit.workload.containers import tensors_in

Loss = Callable[..., Any]

T = TypeVar("T")

_log = logging.getLogger("vramfit.survive")


class Survivor:
    """A loop whose steps outlive running out of memory. See NOTE [A step as a transaction].

    Args:
        model: as the loop has it.
        optimizer: steps its parameters; one that Accelerate has prepared steps as the one inside of it.
        loss: of the model and a batch: a scalar, alone or with metrics beside it; None until the survivor is called
            with it.
        scheduler: steps once after each of the optimizer's steps, or None.
        scaler: of mixed precision, or None.
        state: what else a step moves, where that cannot be seen.
        on_event: called with what was done; it is logged too.

    Attributes:
        live: the model and the optimizer with what the ladder attached; its pieces are those of the rung.
        events: what was done so far.
        steps: that were committed.

    Raises:
        UsageError: the optimizer has no step that could be guarded, the schedule wants a metric, the model has
            collectives of its own, or there is no room for the reserve.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None,
        settings: SurvivalSettings,
        *,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        state: Iterable[Any] = (),
        on_event: Callable[[SurvivalEvent], None] | None = None,
    ) -> None:
        optimizer, scaler = _unwrapped(optimizer, scaler)
        check_optimizer(optimizer)
        if scheduler is not None:
            check_scheduler(scheduler)
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self._loss = None if loss is None else LossCall(loss, model, takes_model=True)
        self._scheduler, self._on_event = scheduler, on_event
        self.live = AttachedProgram(model, optimizer)
        self.live.scaler = scaler
        self._plain = PlainLoop(self.live, optimizer, scheduler, settings.clip_norm)
        self._declared = DeclaredState(list(state))
        self._votes = votes_for(model, settings.vote_seconds) if settings.enabled else None
        self._recovery = Recovery(self.live.device)
        self._recovery.on_retry = self._tell_of_retry
        self._reserve: EmergencyReserve | None = None
        if settings.reserve and settings.enabled:
            self._reserve = EmergencyReserve(settings.reserve, self.live.device)
        self._guard = GuardedStep(optimizer, self._recovery, reserve=self._reserve)
        self._climber = Climber(self.live, self._guard, self._recovery, self._votes, settings, self._tell)
        self._watch: StepWatch | None = None
        self._several = False
        self._accumulates = False
        self._had_reserve = True
        self._said_default = False
        self.events: list[SurvivalEvent] = []
        self.steps = 0
        if settings.enabled:
            self._say_what_is_copied()

    # -- the loop --------------------------------------------------------------------------------------------------

    def step(self, *batch: Any, **named: Any) -> Any:
        """One whole step: gradients cleared, forward, backward, the optimizer's step, the schedule. Done, or not begun.

        Args:
            batch, named: what the function that computes the loss takes, on the host or the device, in any containers.

        Returns:
            what that function gave, without its graph: the loss of the batch, and metrics where it gave some.

        Raises:
            torch.OutOfMemoryError: nothing made the step fit (or another form of shortage); all is as before the step.
            BaseException: what the model, the loss or the optimizer raise; all is as before the step, but for an error
                of one of torch's optimizers itself.
        """
        given, self._several = as_batch(batch, named)
        self._check_loss()
        if not self.settings.enabled:
            result = self._plain.step(lambda: self._forward(given))
            self.steps += 1
            return result
        part = UpdatePart.LAST if self._accumulates and self._votes is not None else UpdatePart.WHOLE
        result, state = self._with_gradients(
            given, lambda: self._own_gradients(given), part, adds=self._accumulates
        )
        self._commit(state)
        self._accumulates = False
        self.settle()
        return result

    def accumulate(self, *batch: Any, **named: Any) -> Any:
        """Forward and backward of a batch whose gradients are added to those of the next `step`, which takes them all.

        Args:
            batch, named: as of `step`.

        Returns:
            as of `step`.

        Raises:
            BaseException: as of `step`; gradients that were accumulated before are kept.
        """
        given, self._several = as_batch(batch, named)
        self._check_loss()
        if not self.settings.enabled:
            return self._plain.gradients(lambda: self._forward(given))
        part = UpdatePart.EARLIER if self._votes is not None else UpdatePart.WHOLE
        result, _ = self._with_gradients(
            given, lambda: self._own_gradients(given), part, adds=self._accumulates, finishes=False
        )
        self._accumulates = True
        return result

    # -- parts of a step, for a trainer that has its own loop ---------------------------------------------------------

    def gradients(
        self,
        batch: Any,
        work: Callable[[], T],
        part: UpdatePart = UpdatePart.WHOLE,
        discard: Callable[[], None] | None = None,
    ) -> T:
        """Gradients of a batch, added to those that are there: all of them, or nothing is changed.

        Args:
            batch: says how far it can be cut.
            part: which batch of an update it is, for several ranks.
            work: goes forward and backward, through `live`'s pieces; called again for each attempt. It gives anything
                but None.
            discard: takes back what an attempt that does not count has left with the trainer.

        Returns:
            what the work gave in the attempt that went well.

        Raises:
            torch.OutOfMemoryError: nothing made it fit (or another form of shortage); all is as before.
            BaseException: what the work raises; all is as before.
        """
        if not self.settings.enabled:
            return work()
        return self._with_gradients(batch, work, part, adds=True, discard=discard)[0]

    def update(self) -> None:
        """The optimizer's step alone, with the gradients as they are; it ends, unless the host has no room either."""
        hosted = len(self._guard.hosted)
        self._guard.step()
        self._agree_on_parameters()
        self._tell_of_step(hosted)

    def insist(self, action: Callable[[], T]) -> T:
        """Do what changes nothing where it fails, again where it ran out of memory, e.g. the norm of gradients."""
        return self._recovery.insist(action) if self.settings.enabled else action()

    def settle(self) -> None:
        """Count a step that is done, and leave a rung on trial where it is time."""
        self._climber.after_good_step()
        self.steps += 1

    def __call__(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the function that computes the loss of a batch: it becomes a whole step.

        Args:
            loss: of what a step is called with, with the model that it knows; or of the model and that, where it takes
                one argument more than the step is called with.
        """
        self._loss = LossCall(loss, self.model, takes_model=None)
        self._watch = None

        @functools.wraps(loss)
        def step(*batch: Any, **named: Any) -> Any:
            return self.step(*batch, **named)

        step.survivor = self  # type: ignore[attr-defined]
        return step

    def loop(self, batches: Iterable[Any]) -> Iterator[Any]:
        """What `step` gives for each of some batches."""
        for batch in batches:
            yield self.step(batch)

    def close(self) -> None:
        """Leave the model as it was but for its values, and the optimizer's states where they belong."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
        self._climber.step_off()
        if self._votes is not None:
            self._votes.close()
        if self._guard.hosted:
            self._recovery.release()
            self._climber.bring_back()
            if self._guard.hosted:
                _log.warning(
                    "states of %d parameters stay on the host: there is no room on the device; close() tries again",
                    len(self._guard.hosted),
                )

    def __enter__(self) -> Survivor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._votes is not None:
            self._votes.fail()
        self.close()

    # -- gradients -------------------------------------------------------------------------------------------------

    def _with_gradients(
        self,
        batch: Any,
        work: Callable[[], T],
        part: UpdatePart,
        *,
        adds: bool,
        finishes: bool = True,
        discard: Callable[[], None] | None = None,
    ) -> tuple[T, StepState]:
        """What a pass over a batch gives, its gradients in the parameters; and the state from before.

        Args:
            adds: whether gradients that are there are part of the update.
            finishes: whether the update follows, for which gradients are unscaled and cut.
            discard: takes back what an attempt that does not count has left elsewhere.
        """
        ladder = self._climber.ladder_for(batch)
        watch = self._watch or self._watched()
        self._climber.look_at_host(ladder)
        if self._votes is not None:
            self._votes.begin_step()
            self._votes.synchronise_buffers()
        state = self._recovery.insist(
            lambda: StepState(watch, self.model, self.live.scaler, self.optimizer, adds=adds, discard=discard)
        )
        piece_work = PieceWork(batch=batch, run=work, restore=lambda: self._restored(state))
        try:
            if watch.steps and not ladder.place and self._climber.pieces_are_due:
                self._compare_pieces(piece_work, less=False)
            result = self._attempted(piece_work, state, ladder, part, finishes=finishes)
        except BaseException:
            state.give_back()
            raise
        self._learn(watch, state)
        return result, state

    def _compare_pieces(self, work: PieceWork, *, less: bool) -> None:
        """Compare the batch with its pieces, on all ranks."""
        pieces = self._climber.pieces
        self._climber.step_off()
        pieces.compare(work, less=less)
        count = len(pieces.trusted)
        if self._votes is not None and -self._votes.most(-count)[0] < count:
            pieces.trusted.clear()
            pieces.why_not = "pieces of another rank's batch do not give its gradients"
        elif count and less:
            self._tell(
                "compared",
                self._climber.rung,
                evidence=f"pieces of {pieces.examples} examples give their gradients",
            )

    def _attempted(
        self, work: PieceWork, state: StepState, ladder: Ladder, part: UpdatePart, *, finishes: bool
    ) -> Any:
        """What the work gives, with all gradients of a batch in the parameters."""
        last = part is UpdatePart.LAST and self._votes is not None
        most, climber = self._climber.most, self._climber

        def whole() -> Any:
            with unsynchronised(self.model):
                found = work.run()
            if last and self._votes is not None:  # what the reduction needs is there before the vote
                state.join_gradients()
                self._votes.prepare(self.model)
            return found

        attempts = 0
        while True:
            climber.stand_on(ladder)
            place = ladder.place
            found, why = self._attempt(whole, state)
            (unrepeatable,) = most(int(bool(why)))
            if unrepeatable:
                del found
                climber.refuse_checkpointing(ladder, why or "another rank's model writes what it reads")
                self._restored(state)
                continue
            may = ladder.may_go_down(climber.below(ladder), memory_now(self.live.device))
            failed, stay = most(int(found is None), int(not may))
            if not failed:
                finished = self._tried(lambda: self._finished_gradients(state, part, finishes=finishes))
                (failed,) = most(int(finished is None))
            if not failed and found is not None:
                climber.may_go_down = not stay
                return found
            # Outside of the handler: see NOTE [Order] in leftovers.
            del found
            self._restored(state)
            before = memory_now(self.live.device)
            self._recovery.release()
            attempts += 1
            if attempts > 1 and climber.comes_to_pieces(place):
                shortage = self._recovery.last
                self._compare_pieces(work, less=True)
                self._recovery.last = shortage
            climber.next_rung(ladder, place, attempts, before)

    def _attempt(self, whole: Callable[[], Any], state: StepState) -> tuple[Any, str]:
        """What an attempt gives, None where it ran out; and why blocks cannot run twice, where that shows."""
        try:
            found = self._tried(whole)
        except UsageError as error:
            if not self._climber.recomputes:
                raise
            return None, error.message
        if found is None or not self._climber.recomputes or self._watch is None:
            return found, ""
        return found, self._watch.unrepeatable(state.noted)

    def _restored(self, state: StepState) -> None:
        """Put back what an attempt moved.

        Raises:
            torch.OutOfMemoryError: it moved something that cannot be put back.
        """
        left = [one.what for one in state.restore()]
        known = [] if self._watch is None else self._watch.problems
        what = left[0] if left else known[0] if known else ""
        (refused,) = self._climber.most(int(bool(what)))
        if not refused:
            return
        shortage = self._recovery.last
        message = "another rank ran out of memory" if shortage is None else shortage.message
        what = what or "something on another rank"
        self._tell("refused", self._climber.rung, message, f"the step moves {what}")
        raise torch.OutOfMemoryError(
            f"{message} (the step cannot be called again: it moves {what}, which cannot be put back; "
            "move that outside of the step, or name it in state=[...] of vramfit.survive)"
        )

    def _tried(self, action: Callable[[], T]) -> T | None:
        """What an action gives; None where memory ran out."""
        try:
            return action()
        except BaseException as error:
            if not self._recovery.noted(error):
                raise
            return None

    def _own_gradients(self, batch: Any) -> Any:
        """What the loss gives for this rank's batch, with its gradients in the parameters."""
        live = self.live
        total: torch.Tensor | None = None
        if live.splitter is None:
            result = self._forward(batch)
            live.backward(loss_in(result))
            self._prepare_reduction()
            return detached(result)
        with contextlib.closing(_generator(live.split(batch))) as pieces:
            for piece in pieces:
                result = self._forward(piece)
                del piece
                loss = loss_in(result)
                if loss is not result:
                    raise UsageError(
                        "metrics beside the loss are those of a whole batch", "Return the loss alone"
                    )
                live.backward(loss)
                share = live.weighted(loss).detach()
                total = share if total is None else total + share
                del loss, share, result
        if total is None:
            raise UsageError("the batch is empty", "Pass at least one example")
        self._prepare_reduction()
        return total

    def _prepare_reduction(self) -> None:
        if self._votes is not None:
            self._votes.prepare(self.model)

    def _finished_gradients(self, state: StepState, part: UpdatePart, *, finishes: bool) -> bool:
        """The gradients as the optimizer takes them: of all ranks, with earlier ones, unscaled and cut."""
        if self._votes is not None and part is not UpdatePart.EARLIER:
            self._votes.reduce(self.model)
        if self._votes is None or part is not UpdatePart.LAST:
            state.join_gradients()
        if not finishes:
            return True
        if self.live.scaler is not None:
            self.live.scaler.unscale_(self.optimizer)
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        return True

    def _placed(self, batch: Any) -> Any:
        """A batch on the device; one that is there in part was placed by the loop, and stays as it is."""
        device = self.live.device
        if device.type == "cpu" or any(tensor.device.type != "cpu" for tensor in tensors_in(batch)):
            return batch
        return to_device(batch, device)

    # -- what a step moves -----------------------------------------------------------------------------------------

    def _watched(self) -> StepWatch:
        """Follow what the step reaches; once, when its function is known."""
        roots = [] if self._loss is None else [self._loss.function]
        if self._votes is not None:
            check_collectives(self.model, roots)
        self._watch = StepWatch(self.model, self.optimizer, roots, self._declared, self.live.device)
        return self._watch

    def _learn(self, watch: StepWatch, state: StepState) -> None:
        """See what a step that went well has moved, and say what could not be put back."""
        for what in watch.after_step(state.noted):
            self._tell(
                "cannot-put-back",
                self._climber.rung,
                evidence=f"the step moves {what}: it is not called again after a shortage; move that outside of the "
                "step, or name it in state=[...]",
            )

    def _check_loss(self) -> None:
        if self._loss is None:
            raise UsageError("survive has no loss", "Pass loss=, or decorate the function that computes it")

    def _say_what_is_copied(self) -> None:
        """Say at once what an optimizer that is not torch's costs."""
        if self._guard.copies is not None:
            held = [one for group in self.optimizer.param_groups for one in group["params"]]
            _log.warning(
                "%s is not one of torch's optimizers: before each of its steps all that it holds is copied to the "
                "host, %s and its states; copying_ratio says how much longer steps take",
                type(self.optimizer).__name__,
                format_bytes(sum(one.nbytes for one in held)),
            )

    @property
    def copying_ratio(self) -> float:
        """How many times as long the optimizer's steps took with the copies before them as without; 1 for torch's."""
        return 1.0 if self._guard.copies is None else self._guard.copies.ratio

    def _forward(self, batch: Any) -> Any:
        """What the loss gives for a batch."""
        assert self._loss is not None
        return self._loss(self._placed(batch), several=self._several)

    # -- the commit ------------------------------------------------------------------------------------------------

    def _commit(self, state: StepState) -> None:
        """The optimizer's step, and what follows it once."""
        scaler, hosted = self.live.scaler, len(self._guard.hosted)
        try:
            if scaler is None:
                self._guard.step()
            else:
                scaled_step(scaler, self.optimizer, self._guard, self._recovery)
        except BaseException:
            if self._guard.copies is not None:  # it is as before its step, and so is all else
                state.give_back()
            raise
        self._recovery.insist(lambda: self.optimizer.zero_grad(set_to_none=True))
        self._agree_on_parameters()
        self._tell_of_step(hosted)
        if scaler is not None:
            self._recovery.insist(scaler.update)
        if self._scheduler is not None:
            self._step_schedule()

    def _step_schedule(self) -> None:
        """The schedule's step: as it was before where it runs out, and then once more."""
        reached = reached_from([self._scheduler], without=[self.optimizer.state, self.model])
        for group in self.optimizer.param_groups:
            reached.hold(MAPPING, group)
        containers = ContainersNote(reached)
        rates = [value for group in self.optimizer.param_groups for value in group.values()]
        values = TensorsNote([one for one in rates if isinstance(one, torch.Tensor)], copying=FirstOnDevice())

        def once() -> None:
            try:
                self._scheduler.step()
            except BaseException:
                containers.restore()
                values.restore()
                raise

        self._recovery.insist(once)

    def _agree_on_parameters(self) -> None:
        """Ranks have the same parameters but for what stepped on a host, which rounds otherwise."""
        if self._votes is not None and self._climber.most(len(self._guard.hosted))[0]:
            self._votes.spread_parameters(self.model)

    def _tell_of_step(self, before: int) -> None:
        """Say that states went to the host in this step, or stay in the reserve, if they do.

        Args:
            before: parameters whose states were on the host when it began.
        """
        rung = self._climber.rung
        if self._reserve is not None and self._reserve.held != self._had_reserve:
            self._had_reserve = self._reserve.held
            what = "it is whole again" if self._had_reserve else "what the step made lies in it"
            self._tell("reserve", rung, evidence=what)
        if len(self._guard.hosted) > before and self._recovery.last is not None:
            evidence = f"states of {len(self._guard.hosted)} parameters are on the host"
            self._tell("hosted", rung, self._recovery.last.message, evidence)

    def _tell_of_retry(self, shortage: MemoryShortage) -> None:
        now = memory_now(self.live.device)
        evidence = "" if now is None else f"at the next attempt {now}"
        self._tell("retry", Rung.AGAIN, shortage.message, evidence)

    def _tell(self, kind: str, rung: Rung, cause: str = "", evidence: str = "", pieces: int = 1) -> None:
        if kind == "retry" and not self._said_default:
            self._said_default = True
            if self.settings.numerics_by_default:
                said = 'results stay the same bit for bit (the default); numerics="rounding" allows pieces of the batch'
                evidence = f"{evidence}; {said}" if evidence else said
        event = SurvivalEvent(
            step=self.steps, kind=kind, rung=rung, cause=cause, evidence=evidence, pieces=pieces
        )
        self.events.append(event)
        _log.log(logging.INFO if kind in ("down", "back") else logging.WARNING, "%s", event)
        if self._on_event is not None:
            self._on_event(event)


def _unwrapped(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler | None]:
    """The optimizer that Accelerate has prepared, and the scaler that it made."""
    kind = type(optimizer)
    if kind.__name__ == "AcceleratedOptimizer" and kind.__module__.startswith("accelerate."):
        prepared: Any = optimizer
        return prepared.optimizer, scaler if scaler is not None else prepared.scaler
    return optimizer, scaler


def _generator(pieces: Iterator[Any]) -> Generator[Any, None, None]:
    """Pieces as what can be closed: an attempt that fails leaves the contexts that they were made in."""
    assert isinstance(pieces, Generator)
    return pieces
