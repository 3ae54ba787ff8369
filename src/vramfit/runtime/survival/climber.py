"""Moves a loop on its ladder: which rungs there are, what is attached on each, and which is next after a shortage."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.runtime.oom_forms import MemoryShortage, ShortOf
from vramfit.runtime.survival.guarded_step import GuardedStep
from vramfit.runtime.survival.host_watch import HostWatch
from vramfit.runtime.survival.ladder import Ladder, Rung, RungLevel
from vramfit.runtime.survival.leftovers import MemoryNow, Recovery, memory_now, requested_bytes
from vramfit.runtime.survival.pieces_check import PiecesCheck, counts_of, pieces_choice
from vramfit.runtime.survival.rank_votes import RankVotes
from vramfit.runtime.survival.survival_settings import SurvivalSettings
from vramfit.techniques import AttachedProgram, Choice, Numerics, find_technique
from vramfit.techniques.activation_checkpointing import Checkpointing, Mode
from vramfit.techniques.activation_offload import ActivationOffloadSetting
from vramfit.techniques.micro_batching import batch_norms, find_cut

_ANOTHER_RANK = MemoryShortage(of=ShortOf.DEVICE, message="another rank ran out of memory")

_LAST_TRIES = 6
"""Attempts that a step has beside one for each rung before it is given up: a neighbour's peak passes."""

_RECOMPUTED = Choice(
    technique=find_technique("activation-checkpointing"), setting=Checkpointing(mode=Mode.WHOLE)
)

_OFFLOADED = Choice(
    technique=find_technique("activation-offload"), setting=ActivationOffloadSetting(window=0)
)

_log = logging.getLogger("vramfit.survive")

Tell = Callable[..., None]


class Climber:
    """Where a loop stands on its ladder.

    Args:
        live: what rungs are attached to.
        guard: of the optimizer, whose states may go to the host.
        votes: of the ranks, or None.
        tell: says what was done: kind, rung, cause, evidence, pieces.

    Attributes:
        pieces: which pieces of a batch are trusted.
        ladder: made with the first batch.
        may_go_down: whether a rung may be left after the step that is being done.
    """

    def __init__(
        self,
        live: AttachedProgram,
        guard: GuardedStep,
        recovery: Recovery,
        votes: RankVotes | None,
        settings: SurvivalSettings,
        tell: Tell,
    ) -> None:
        self._live, self._guard, self._recovery, self._votes = live, guard, recovery, votes
        self._settings, self._tell = settings, tell
        self._host = HostWatch(settings.host_margin)
        self._standing = 0
        self._unattachable: set[int] = set()
        self._checkpoints = True
        self._examples = 1
        self.pieces = PiecesCheck(live, settings, recovery)
        self.ladder: Ladder | None = None
        self.may_go_down = False

    @property
    def rung(self) -> Rung:
        """The rung of the next attempt."""
        return Rung.PLAIN if self.ladder is None else self.ladder.level.rung

    def ladder_for(self, batch: Any) -> Ladder:
        """The ladder, made for the first batch of a loop; off its pieces for a batch larger than those compared."""
        if self.may_take_pieces:
            self._examples = 1
            with contextlib.suppress(UsageError):
                self._examples = find_cut(batch).size
        if self.ladder is None:
            self.ladder = Ladder(tuple(self._levels(batch)), patience=self._settings.patience)
        if self.ladder.level.pieces > 1 and not self._is_open(self.ladder.place):
            self.ladder.climb(self.below(self.ladder))
        return self.ladder

    @property
    def may_take_pieces(self) -> bool:
        """Whether pieces of a batch were asked for, and the model may have them."""
        allowed = Numerics.APPROXIMATE if batch_norms(self._live.model) else Numerics.ROUNDING
        return not self._settings.numerics < allowed

    @property
    def pieces_are_due(self) -> bool:
        """Whether a batch is to be compared with its pieces, so that they are trusted when they are needed."""
        return self.may_take_pieces and self.pieces.due()

    def comes_to_pieces(self, place: int) -> bool:
        """Whether pieces are all that is left to try above a level, and may be compared with a part of the batch."""
        assert self.ladder is not None
        if self._settings.numerics < Numerics.APPROXIMATE:
            return False
        levels = self.ladder.levels[place + 1 :]
        others = any(
            level.pieces == 1 and place + 1 + number not in self._unattachable
            for number, level in enumerate(levels)
        )
        return bool(levels) and not others and not self.pieces.examples and self.pieces_are_due

    def most(self, *values: int) -> tuple[int, ...]:
        """The largest of what each rank says, for each value; of one process its own."""
        return values if self._votes is None else self._votes.most(*values)

    def _levels(self, batch: Any) -> Iterator[RungLevel]:
        """From the plain step up: first what gives the same bits, then as far as results may differ."""
        yield RungLevel(rung=Rung.PLAIN)
        yield RungLevel(rung=Rung.CHECKPOINTING, checkpointing=True)
        yield RungLevel(rung=Rung.OFFLOAD, checkpointing=True, offload=True)
        pieces, most = 1, 1
        if self.may_take_pieces:
            with contextlib.suppress(UsageError):
                most = find_cut(batch).size
        (most,) = self.most(most)
        for pieces in counts_of(most):
            yield RungLevel(rung=Rung.MICRO_BATCHES, pieces=pieces, checkpointing=True, offload=True)
        on_card, rounds = self._live.device.type != "cpu", not self._settings.numerics < Numerics.ROUNDING
        if on_card and rounds and self._guard.by_parameter:  # the host's kernels round otherwise
            yield RungLevel(rung=Rung.STATES, pieces=pieces, checkpointing=True, offload=True, states=True)

    def _is_open(self, place: int) -> bool:
        """Whether a level can be stood on: it was not refused, and its pieces are trusted."""
        assert self.ladder is not None
        level = self.ladder.levels[place]
        return place not in self._unattachable and (level.states or self._may_cut(level))

    def _may_cut(self, level: RungLevel) -> bool:
        """Whether the pieces of a level are trusted, for as many examples as were compared."""
        if level.pieces == 1:
            return True
        proved = self._examples <= self.pieces.examples or not self._settings.numerics < Numerics.APPROXIMATE
        return proved and level.pieces in self.pieces.trusted

    def stand_on(self, ladder: Ladder) -> None:
        """Attach what the level says, or the next one that can be attached.

        Raises:
            UsageError: the plain level's own, which attaches nothing.
        """
        if self._standing == ladder.place:
            return
        self.step_off()
        while ladder.place:
            try:
                self._attach(ladder.level)
            except UsageError as error:
                self.refuse(ladder, error.message)
                continue
            self._standing = ladder.place
            break
        if ladder.level.states:
            self._guard.leave()

    def step_off(self) -> None:
        """Leave the model as it is without any rung."""
        self._live.undo()
        self._live.splitter = None
        self._standing = 0

    def refuse(self, ladder: Ladder, why: str) -> None:
        """Leave a level out from now on, and stand on the nearest that is not."""
        _log.info("%s is left out: %s", ladder.level.rung.value, why)
        self._unattachable.add(ladder.place)
        if ladder.level.rung is Rung.CHECKPOINTING:
            self._checkpoints = False
        ladder.climb(self._nearest(ladder))

    def refuse_checkpointing(self, ladder: Ladder, why: str) -> None:
        """Blocks cannot run twice: the same rung without them, or another."""
        _log.info("checkpointing is left out: %s", why)
        self._checkpoints = False
        self._unattachable |= {
            place for place, level in enumerate(ladder.levels) if level.rung is Rung.CHECKPOINTING
        }
        self.step_off()
        if ladder.place in self._unattachable:
            ladder.climb(self._nearest(ladder))

    @property
    def recomputes(self) -> bool:
        """Whether blocks run twice where the loop stands."""
        return (
            bool(self._standing)
            and self._checkpoints
            and self.ladder is not None
            and self.ladder.level.checkpointing
        )

    def _nearest(self, ladder: Ladder) -> int:
        """The next level above that may be attached, or the highest below."""
        places = [one for one in range(len(ladder.levels)) if self._is_open(one)]
        above = [one for one in places if one > ladder.place]
        return above[0] if above else max(one for one in places if one < ladder.place)

    def below(self, ladder: Ladder) -> int:
        """The next level below that can be stood on; on the lowest that one."""
        return max((one for one in range(ladder.place) if self._is_open(one)), default=0)

    def _choices(self, level: RungLevel) -> list[Choice]:
        chosen = []
        if level.pieces > 1 and self._may_cut(level):
            chosen.append(pieces_choice(self._live.model, self._settings, level.pieces))
        if level.checkpointing and self._checkpoints:
            chosen.append(_RECOMPUTED)
        if level.offload:
            chosen.append(_OFFLOADED)
        return chosen

    def _attach(self, level: RungLevel) -> None:
        """Attach what a level says, without blocks that run twice where the model has none.

        Raises:
            UsageError: the rest cannot be attached.
        """
        choices = self._choices(level)
        try:
            self._live.attach(choices)
        except UsageError:
            rest = [one for one in choices if one is not _RECOMPUTED]
            if len(rest) in (0, len(choices)):
                raise
            self._live.undo()
            self._live.attach(rest)
            self._checkpoints = False

    def next_rung(self, ladder: Ladder, place: int, attempts: int, before: MemoryNow | None) -> None:
        """Decide what the next attempt does.

        Raises:
            torch.OutOfMemoryError: there is nothing left to do.
        """
        shortage = self._recovery.last or _ANOTHER_RANK
        self._recovery.last = None
        asked = requested_bytes(shortage.message)
        ladder.shortage(place, 0 if before is None or not asked else before.allocated + asked)
        now = memory_now(self._live.device)
        evidence = "" if now is None else f"at the next attempt {now}"
        if attempts == 1:
            self._tell("retry", Rung.AGAIN, shortage.message, evidence)
            return
        if attempts == 2 and self.most(int(self._defragmented(asked, now)))[0]:
            self._tell("retry", Rung.DEFRAGMENT, shortage.message, evidence)
            return
        above = next((one for one in range(place + 1, len(ladder.levels)) if self._is_open(one)), None)
        if above is None and attempts < place + _LAST_TRIES:
            self._tell("retry", Rung.AGAIN, shortage.message, evidence)
            return
        if above is None:
            self._tell("given-up", ladder.level.rung, shortage.message, evidence)
            raise torch.OutOfMemoryError(f"{shortage.message} ({self._why_nothing_is_left()})")
        ladder.climb(above)
        self._tell("up", ladder.level.rung, shortage.message, evidence, ladder.level.pieces)

    def _why_nothing_is_left(self) -> str:
        if self.may_take_pieces:
            if self.pieces.trusted and self._examples <= self.pieces.examples:
                return "nothing that vramfit.survive may do makes it fit"
            return f"nothing that vramfit.survive may do makes it fit; {self.pieces.why_not}"
        allowed = "approximate" if batch_norms(self._live.model) else "rounding"
        return (
            "nothing that vramfit.survive may do makes it fit; "
            f'numerics="{allowed}" allows pieces of the batch, where they give its gradients'
        )

    def _defragmented(self, asked: int, now: MemoryNow | None) -> bool:
        """Whether the optimizer's states went to the host and back: only where as much as was asked for is free.

        States that there is no room for any more stay on the host, where their parameters step then. Tensors are
        exchanged, so it is done for optimizers that are known only.
        """
        if now is None or not asked or now.within_reach < asked or not self._guard.by_parameter:
            return False
        optimizer, device = self._guard.optimizer, self._live.device
        states = [
            (parameter, name)
            for parameter, known in optimizer.state.items()
            for name, value in known.items()
            if isinstance(value, torch.Tensor) and value.device == device and value.dim()
        ]
        moved: list[tuple[Any, str]] = []

        def leave() -> bool:
            for parameter, name in states:
                optimizer.state[parameter][name] = optimizer.state[parameter][name].cpu()
                moved.append((parameter, name))
            return True

        def come_back(parameter: nn.Parameter, name: str) -> bool:
            known = optimizer.state[parameter]
            known[name] = self._recovery.insist(lambda: known[name].to(device))
            return True

        self.tried(leave)  # as far as the host has room
        self._recovery.release()
        for parameter, name in moved:
            if not self.tried(functools.partial(come_back, parameter, name)):
                self._guard.hosted.add(parameter)
        return bool(moved)

    def tried(self, action: Callable[[], bool]) -> bool:
        """Whether an action went well; False where memory ran out."""
        try:
            return action()
        except BaseException as error:
            if not self._recovery.noted(error):
                raise
            return False

    def after_good_step(self) -> None:
        """Count a step that is done, and leave a rung on trial where it is time."""
        if self.ladder is not None:
            self.ladder.after_good_step()
            if self.may_go_down and not self._host.pressed:
                self._go_down(self.ladder)

    def _go_down(self, ladder: Ladder) -> None:
        """Leave a rung on trial."""
        states = ladder.level.states
        ladder.go_down(self.below(ladder))
        self._tell("down", ladder.level.rung, pieces=ladder.level.pieces)
        if self._guard.hosted and (states or ladder.place == 0):
            self.bring_back()

    def bring_back(self) -> None:
        """Bring states of the optimizer back to the device, where there is room."""
        count = len(self._guard.hosted)
        try:
            self._guard.bring_back()
        except BaseException as error:
            if not self._recovery.noted(error):
                raise
        else:
            self._tell("back", Rung.PLAIN, evidence=f"states of {count} parameters")

    def look_at_host(self, ladder: Ladder) -> None:
        """Before a step: make room on the host where its limit is near, before the kernel ends the process.

        What waits there is brought back to a card that has room: activations that are offloaded stay out of the next
        steps, and states of the optimizer return. On the CPU itself, the step is done in more pieces. What else
        fills the host is not ours: that is said once, and the step is done.
        """
        pressure = self._host.near()
        if pressure is None or self._host.relieve():
            return
        rung, cause = ladder.level.rung, str(pressure)
        device, below = memory_now(self._live.device), self.below(ladder)
        if (
            ladder.level.offload
            and self._votes is None
            and device is not None
            and ladder.has_room(below, device)
        ):
            states = ladder.level.states
            ladder.climb(below)
            if states:
                self.bring_back()
            what = "states of the optimizer are back" if states else "activations stay"
            self._tell(
                "host-pressure", ladder.level.rung, cause, f"{what} on the device", ladder.level.pieces
            )
            return
        # On the rung of states a step fits only without them on the device.
        if self._guard.hosted and self._live.device.type != "cpu" and not ladder.level.states:
            self.bring_back()
            if not self._guard.hosted:
                self._tell("host-pressure", rung, cause, "states of the optimizer are back on the device")
                return
        if self._live.device.type == "cpu" and self._votes is None and self._more_pieces(ladder, cause):
            return
        if self._host.first_time():
            self._tell(
                "host-pressure", rung, cause, "nothing that vramfit.survive may do takes less of the host"
            )

    def _more_pieces(self, ladder: Ladder, cause: str) -> bool:
        """Whether the step is done in more pieces from now on."""
        above = [
            place
            for place in range(ladder.place + 1, len(ladder.levels))
            if ladder.levels[place].rung is Rung.MICRO_BATCHES and self._is_open(place)
        ]
        if not above:
            return False
        ladder.shortage(ladder.place, 0)
        ladder.climb(above[0])
        self._tell("host-pressure", ladder.level.rung, cause, "", ladder.level.pieces)
        return True
