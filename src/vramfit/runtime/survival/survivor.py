"""Runs the steps of a loop so that each is done exactly once, whatever memory does in between.

NOTE [A step as a transaction]: up to the optimizer's step everything that a step changes is gradients, buffers, random
states and a scaler's bookkeeping. These are noted at the start and put back after a shortage, so that the step begins
anew, with more done to make it fit (`vramfit.runtime.survival.ladder`). The optimizer's step itself commits slice by
slice (`guarded_step`), and ends. What follows (the scaler's update, the schedule) is small, and is done once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.runtime.oom_forms import MemoryShortage, ShortOf
from vramfit.runtime.survival.emergency_reserve import EmergencyReserve
from vramfit.runtime.survival.guarded_step import GuardedStep
from vramfit.runtime.survival.host_watch import HostWatch
from vramfit.runtime.survival.ladder import Ladder, Rung, RungLevel, SurvivalEvent
from vramfit.runtime.survival.leftovers import MemoryNow, Recovery, memory_now, requested_bytes
from vramfit.runtime.survival.rank_votes import unsynchronised, votes_for
from vramfit.runtime.survival.scaled_step import scaled_step
from vramfit.runtime.survival.step_state import StepState
from vramfit.runtime.survival.survival_settings import SurvivalSettings, UpdatePart
from vramfit.techniques import AttachedProgram, Choice, Numerics, find_technique
from vramfit.techniques.activation_checkpointing import Checkpointing, Mode
from vramfit.techniques.activation_offload import ActivationOffloadSetting
from vramfit.techniques.micro_batching import (
    BatchNormalisation,
    MicroBatchingSetting,
    batch_norms,
    find_cut,
)
from vramfit.workload import to_device
from vramfit.workload.containers import tensors_in

Loss = Callable[[nn.Module, Any], torch.Tensor]

T = TypeVar("T")

_ANOTHER_RANK = MemoryShortage(of=ShortOf.DEVICE, message="another rank ran out of memory")

_LAST_TRIES = 6
"""Attempts that a step has beside one for each rung before it is given up: a neighbour's peak passes."""

_log = logging.getLogger("vramfit.survive")


class Survivor:
    """A loop whose steps outlive running out of memory. See NOTE [A step as a transaction].

    Args:
        model: as the loop has it.
        optimizer: steps its parameters.
        loss: of the model and a batch, a scalar; None until the survivor is called with it.
        scheduler: steps once after each of the optimizer's steps, or None.
        scaler: of mixed precision, or None.
        on_event: called with what was done; it is logged too.

    Attributes:
        live: the model and the optimizer with what the ladder attached; its pieces are those of the rung.
        events: what was done so far.
        steps: that were committed.

    Raises:
        UsageError: the optimizer has no step that could be guarded, or there is no room for the reserve.
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
        on_event: Callable[[SurvivalEvent], None] | None = None,
    ) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self._loss, self._scheduler, self._on_event = loss, scheduler, on_event
        self.live = AttachedProgram(model, optimizer)
        self.live.scaler = scaler
        self._votes = votes_for(model, settings.vote_seconds)
        self._recovery = Recovery(self.live.device)
        self._reserve = EmergencyReserve(settings.reserve, self.live.device) if settings.reserve else None
        self._guard = GuardedStep(optimizer, self._recovery, reserve=self._reserve)
        self._ladder: Ladder | None = None
        self._standing = 0
        self._unattachable: set[int] = set()
        self._checkpoints = True
        self.events: list[SurvivalEvent] = []
        self.steps = 0
        self._may_go_down = False
        self._had_reserve = True
        self._host = HostWatch(settings.host_margin)

    # -- the loop --------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> torch.Tensor:
        """One whole step: forward, backward, the optimizer's step, the schedule. It is done, or nothing is changed.

        Args:
            batch: on the host or the device, in any containers.

        Returns:
            the loss of the batch, without its graph.

        Raises:
            torch.OutOfMemoryError: nothing made the step fit (or another form of shortage); all is as before the step.
            BaseException: what the model, the loss or the optimizer raise; all is as before the step, but for an error
                of the optimizer itself.
        """
        if self._loss is None:
            raise UsageError("survive has no loss", "Give loss=, or decorate the function that computes it")
        loss: torch.Tensor = self.gradients(batch, lambda: self._own_gradients(batch))
        self._commit()
        self.settle()
        return loss

    # -- parts of a step, for a trainer that has its own loop ---------------------------------------------------------

    def gradients(self, batch: Any, work: Callable[[], T], part: UpdatePart = UpdatePart.WHOLE) -> T:
        """Gradients of a batch, added to those that are there: all of them, or nothing is changed.

        Args:
            batch: says how far it can be cut.
            part: which batch of an update it is, for several ranks.
            work: goes forward and backward, through `live`'s pieces; called again for each attempt. It gives anything
                but None.

        Returns:
            what the work gave in the attempt that went well.

        Raises:
            torch.OutOfMemoryError: nothing made it fit (or another form of shortage); all is as before.
            BaseException: what the work raises; all is as before.
        """
        ladder = self._ladder_for(batch)
        self._look_at_host(ladder)
        live, scaler = self.live, self.live.scaler
        if self._votes is not None:
            self._votes.synchronise_buffers()
        state = self._recovery.insist(lambda: StepState(self.model, scaler, live.device))
        try:
            return self._attempted(work, state, ladder, part)
        except BaseException:
            state.give_back()
            raise

    def update(self) -> None:
        """The optimizer's step alone, with the gradients as they are; it ends, unless the host has no room either."""
        hosted = len(self._guard.hosted)
        self._guard.step()
        self._agree_on_parameters()
        self._tell_of_step(hosted)

    def insist(self, action: Callable[[], T]) -> T:
        """Do what changes nothing where it fails, again where it ran out of memory; such as the norm of gradients."""
        return self._recovery.insist(action)

    def settle(self) -> None:
        """Count a step that is done, and leave a rung on trial where it is time."""
        if self._ladder is not None:
            self._ladder.after_good_step()
            if self._may_go_down and not self._host.pressed:
                self._go_down(self._ladder)
        self.steps += 1

    def __call__(self, loss: Callable[..., torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        """Decorate the function that computes the loss of a batch: it becomes a whole step.

        Args:
            loss: of a batch, with the model that it knows; of the model and a batch where it takes two arguments.
        """
        takes = [
            one
            for one in inspect.signature(loss).parameters.values()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
        ]
        self._loss = loss if len(takes) == 2 else lambda _model, batch: loss(batch)

        @functools.wraps(loss)
        def step(batch: Any) -> torch.Tensor:
            return self.step(batch)

        step.survivor = self  # type: ignore[attr-defined]
        return step

    def loop(self, batches: Iterable[Any]) -> Iterator[torch.Tensor]:
        """The losses of batches, one step each."""
        for batch in batches:
            yield self.step(batch)

    def close(self) -> None:
        """Leave the model as it was but for its values, and the optimizer's states where they belong."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
        self.live.undo()
        self._standing = 0
        if self._votes is not None:
            self._votes.close()
        if self._guard.hosted:
            self._recovery.release()
            self._bring_back()
            if self._guard.hosted:
                _log.warning(
                    "states of %d parameters stay on the host: there is no room on the device; close() tries again",
                    len(self._guard.hosted),
                )

    def __enter__(self) -> Survivor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- gradients -------------------------------------------------------------------------------------------------

    def _attempted(self, work: Callable[[], T], state: StepState, ladder: Ladder, part: UpdatePart) -> T:
        """What the work gives, with all gradients of a batch in the parameters."""
        last = part is UpdatePart.LAST and self._votes is not None

        def whole() -> T:
            with unsynchronised(self.model):
                found = work()
            if last and self._votes is not None:  # what the reduction needs is there before the vote
                state.join_gradients()
                self._votes.prepare(self.model)
            return found

        attempts = 0
        while True:
            self._stand_on(ladder)
            place = ladder.place
            found = self._tried(whole)
            may = ladder.may_go_down(memory_now(self.live.device))
            failed, stay = self._most(int(found is None), int(not may))
            if not failed:
                finished = self._tried(lambda: self._finished_gradients(state, part))
                (failed,) = self._most(int(finished is None))
            if not failed and found is not None:
                self._may_go_down = not stay
                return found
            # Outside of the handler: see NOTE [Order] in leftovers.
            del found
            state.restore()
            before = memory_now(self.live.device)
            self._recovery.release()
            attempts += 1
            self._next_rung(ladder, place, attempts, before)

    def _tried(self, action: Callable[[], T]) -> T | None:
        """What an action gives; None where memory ran out."""
        try:
            return action()
        except BaseException as error:
            if not self._recovery.noted(error):
                raise
            return None

    def _own_gradients(self, batch: Any) -> torch.Tensor:
        """The loss of this rank's batch, with its gradients in the parameters."""
        live, total = self.live, None
        assert self._loss is not None
        with contextlib.closing(_generator(live.split(batch))) as pieces:
            for piece in pieces:
                loss = self._loss(self.model, self._placed(piece))
                del piece
                live.backward(loss)
                share = live.weighted(loss).detach()
                total = share if total is None else total + share
                del loss, share
        if total is None:
            raise UsageError("the batch is empty", "Give at least one example")
        if self._votes is not None:
            self._votes.prepare(self.model)
        return total

    def _finished_gradients(self, state: StepState, part: UpdatePart) -> bool:
        """The gradients as the optimizer takes them: of all ranks, with earlier ones, unscaled and cut."""
        if self._votes is not None and part is not UpdatePart.EARLIER:
            self._votes.reduce(self.model)
        if self._votes is None or part is not UpdatePart.LAST:
            state.join_gradients()
        if self.live.scaler is not None:
            self.live.scaler.unscale_(self.optimizer)
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        return True

    def _most(self, *values: int) -> tuple[int, ...]:
        """The largest of what each rank says, for each value; of one process its own."""
        return values if self._votes is None else self._votes.most(*values)

    def _placed(self, batch: Any) -> Any:
        """A batch on the device; one that is there in part was placed by the loop, and stays as it is."""
        device = self.live.device
        if device.type == "cpu" or any(tensor.device.type != "cpu" for tensor in tensors_in(batch)):
            return batch
        return to_device(batch, device)

    # -- the ladder ------------------------------------------------------------------------------------------------

    def _ladder_for(self, batch: Any) -> Ladder:
        if self._ladder is None:
            self._ladder = Ladder(tuple(self._levels(batch)), patience=self.settings.patience)
        return self._ladder

    def _levels(self, batch: Any) -> Iterator[RungLevel]:
        """From the plain step up, as far as results may differ."""
        yield RungLevel(rung=Rung.PLAIN)
        pieces, most = 1, 1
        allowed = Numerics.APPROXIMATE if batch_norms(self.model) else Numerics.ROUNDING
        if not self.settings.numerics < allowed:
            with contextlib.suppress(UsageError):
                most = find_cut(batch).size
        (most,) = self._most(most)
        while pieces < most:
            pieces = min(2 * pieces, most)
            yield RungLevel(rung=Rung.MICRO_BATCHES, pieces=pieces)
        yield RungLevel(rung=Rung.CHECKPOINTING, pieces=pieces, checkpointing=True)
        yield RungLevel(rung=Rung.OFFLOAD, pieces=pieces, checkpointing=True, offload=True)
        on_card, rounds = self.live.device.type != "cpu", not self.settings.numerics < Numerics.ROUNDING
        if on_card and rounds and self._guard.by_parameter:  # the host's kernels round otherwise
            yield RungLevel(rung=Rung.STATES, pieces=pieces, checkpointing=True, offload=True, states=True)

    def _stand_on(self, ladder: Ladder) -> None:
        """Attach what the level says, or the next one that can be attached.

        Raises:
            UsageError: the plain level's own, which attaches nothing.
        """
        if self._standing == ladder.place:
            return
        self.live.undo()
        self.live.splitter = None
        self._standing = 0
        while ladder.place:
            try:
                self.live.attach(self._choices(ladder.level))
            except UsageError as error:
                _log.info("%s is left out: %s", ladder.level.rung.value, error)
                self._unattachable.add(ladder.place)
                if ladder.level.rung is Rung.CHECKPOINTING:
                    self._checkpoints = False
                ladder.climb(self._attachable_near(ladder))
                continue
            self._standing = ladder.place
            break
        if ladder.level.states:
            self._guard.leave()

    def _attachable_near(self, ladder: Ladder) -> int:
        """The next level above that may be attached, or the highest below."""
        places = [one for one in range(len(ladder.levels)) if one not in self._unattachable]
        above = [one for one in places if one > ladder.place]
        return above[0] if above else max(one for one in places if one < ladder.place)

    def _choices(self, level: RungLevel) -> list[Choice]:
        chosen = []
        if level.pieces > 1:
            norm = BatchNormalisation.PER_PIECE if batch_norms(self.model) else BatchNormalisation.NONE
            setting = MicroBatchingSetting(
                count=level.pieces,
                reduction=self.settings.reduction,
                labels=self.settings.labels,
                batch_norm=norm,
            )
            chosen.append(Choice(technique=find_technique("micro-batching"), setting=setting))
        if level.checkpointing and self._checkpoints:
            recomputed = find_technique("activation-checkpointing")
            chosen.append(Choice(technique=recomputed, setting=Checkpointing(mode=Mode.WHOLE)))
        if level.offload:
            offload = find_technique("activation-offload")
            chosen.append(Choice(technique=offload, setting=ActivationOffloadSetting(window=0)))
        return chosen

    def _next_rung(self, ladder: Ladder, place: int, attempts: int, before: MemoryNow | None) -> None:
        """Decide what the next attempt does.

        Raises:
            torch.OutOfMemoryError: there is nothing left to do.
        """
        shortage = self._recovery.last or _ANOTHER_RANK
        self._recovery.last = None
        asked = requested_bytes(shortage.message)
        ladder.shortage(place, 0 if before is None or not asked else before.allocated + asked)
        now = memory_now(self.live.device)
        evidence = "" if now is None else f"at the next attempt {now}"
        if attempts == 1:
            self._tell("retry", Rung.AGAIN, shortage.message, evidence)
            return
        if attempts == 2 and self._most(int(self._defragmented(asked, now)))[0]:
            self._tell("retry", Rung.DEFRAGMENT, shortage.message, evidence)
            return
        above = next(
            (one for one in range(place + 1, len(ladder.levels)) if one not in self._unattachable), None
        )
        if above is None and attempts < place + _LAST_TRIES:
            self._tell("retry", Rung.AGAIN, shortage.message, evidence)
            return
        if above is None:
            self._tell("given-up", ladder.level.rung, shortage.message, evidence)
            raise torch.OutOfMemoryError(
                f"{shortage.message} (nothing that vramfit.survive may do makes it fit)"
            )
        ladder.climb(above)
        self._tell("up", ladder.level.rung, shortage.message, evidence, ladder.level.pieces)

    def _defragmented(self, asked: int, now: MemoryNow | None) -> bool:
        """Whether the optimizer's states went to the host and back: only where as much as was asked for is free.

        States that there is no room for any more stay on the host, where their parameters step then. Tensors are
        exchanged, so it is done for optimizers that are known only.
        """
        if now is None or not asked or now.within_reach < asked or not self._guard.by_parameter:
            return False
        states = [
            (parameter, name)
            for parameter, known in self.optimizer.state.items()
            for name, value in known.items()
            if isinstance(value, torch.Tensor) and value.device == self.live.device and value.dim()
        ]
        moved: list[tuple[Any, str]] = []

        def leave() -> bool:
            for parameter, name in states:
                self.optimizer.state[parameter][name] = self.optimizer.state[parameter][name].cpu()
                moved.append((parameter, name))
            return True

        def come_back(parameter: nn.Parameter, name: str) -> bool:
            known = self.optimizer.state[parameter]
            known[name] = self._recovery.insist(lambda: known[name].to(self.live.device))
            return True

        self._tried(leave)  # as far as the host has room
        self._recovery.release()
        for parameter, name in moved:
            if not self._tried(functools.partial(come_back, parameter, name)):
                self._guard.hosted.add(parameter)
        return bool(moved)

    def _go_down(self, ladder: Ladder) -> None:
        """Leave a rung on trial."""
        states = ladder.level.states
        ladder.go_down()
        while ladder.place in self._unattachable:
            ladder.climb(ladder.place - 1)
        self._tell("down", ladder.level.rung, pieces=ladder.level.pieces)
        if self._guard.hosted and (states or ladder.place == 0):
            self._bring_back()

    def _bring_back(self) -> None:
        count = len(self._guard.hosted)
        try:
            self._guard.bring_back()
        except BaseException as error:
            if not self._recovery.noted(error):
                raise
        else:
            self._tell("back", Rung.PLAIN, evidence=f"states of {count} parameters")

    # -- the host --------------------------------------------------------------------------------------------------

    def _look_at_host(self, ladder: Ladder) -> None:
        """Before a step: make room on the host where its limit is near, before the kernel ends the process.

        What waits there is brought back to a card that has room: activations that are offloaded stay out of the next
        steps, and states of the optimizer return. On the CPU itself, the step is done in more pieces. What else
        fills the host is not ours: that is said once, and the step is done.
        """
        pressure = self._host.near()
        if pressure is None:
            return
        if self._host.relieve():
            return
        rung, cause = ladder.level.rung, str(pressure)
        device = memory_now(self.live.device)
        if (
            ladder.level.offload
            and self._votes is None
            and device is not None
            and ladder.has_room_below(device)
        ):
            states = ladder.level.states
            ladder.climb(ladder.place - 1)
            if states:
                self._bring_back()
            what = "states of the optimizer are back" if states else "activations stay"
            self._tell(
                "host-pressure", ladder.level.rung, cause, f"{what} on the device", ladder.level.pieces
            )
            return
        # On the rung of states a step fits only without them on the device.
        if self._guard.hosted and self.live.device.type != "cpu" and not ladder.level.states:
            self._bring_back()
            if not self._guard.hosted:
                self._tell("host-pressure", rung, cause, "states of the optimizer are back on the device")
                return
        if self.live.device.type == "cpu" and self._votes is None:
            above = ladder.place + 1
            while above in self._unattachable:
                above += 1
            if above < len(ladder.levels) and ladder.levels[above].rung is Rung.MICRO_BATCHES:
                ladder.shortage(ladder.place, 0)
                ladder.climb(above)
                self._tell("host-pressure", ladder.level.rung, cause, "", ladder.level.pieces)
                return
        if self._host.first_time():
            self._tell(
                "host-pressure", rung, cause, "nothing that vramfit.survive may do takes less of the host"
            )

    # -- the commit ------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """The optimizer's step, and what follows it once."""
        scaler, hosted = self.live.scaler, len(self._guard.hosted)
        if scaler is None:
            self._guard.step()
        else:
            scaled_step(scaler, self.optimizer, self._guard, self._recovery)
        self._recovery.insist(lambda: self.optimizer.zero_grad(set_to_none=True))
        self._agree_on_parameters()
        self._tell_of_step(hosted)
        if scaler is not None:
            self._recovery.insist(scaler.update)
        if self._scheduler is not None:
            self._recovery.insist(self._scheduler.step)

    def _agree_on_parameters(self) -> None:
        """Ranks have the same parameters but for what stepped on a host, which rounds otherwise."""
        if self._votes is not None and self._most(len(self._guard.hosted))[0]:
            self._votes.spread_parameters(self.model)

    def _tell_of_step(self, before: int) -> None:
        """Say that states went to the host in this step, or stay in the reserve, if they do.

        Args:
            before: parameters whose states were on the host when it began.
        """
        if self._reserve is not None and self._reserve.held != self._had_reserve:
            self._had_reserve = self._reserve.held
            rung = Rung.PLAIN if self._ladder is None else self._ladder.level.rung
            what = "it is whole again" if self._had_reserve else "what the step made lies in it"
            self._tell("reserve", rung, evidence=what)
        if len(self._guard.hosted) > before and self._recovery.last is not None:
            rung = Rung.PLAIN if self._ladder is None else self._ladder.level.rung
            evidence = f"states of {len(self._guard.hosted)} parameters are on the host"
            self._tell("hosted", rung, self._recovery.last.message, evidence)

    def _tell(self, kind: str, rung: Rung, cause: str = "", evidence: str = "", pieces: int = 1) -> None:
        event = SurvivalEvent(
            step=self.steps, kind=kind, rung=rung, cause=cause, evidence=evidence, pieces=pieces
        )
        self.events.append(event)
        _log.log(logging.INFO if kind in ("down", "back") else logging.WARNING, "%s", event)
        if self._on_event is not None:
            self._on_event(event)


def _generator(pieces: Iterator[Any]) -> Generator[Any, None, None]:
    """Pieces as what can be closed: an attempt that fails leaves the contexts that they were made in."""
    assert isinstance(pieces, Generator)
    return pieces
