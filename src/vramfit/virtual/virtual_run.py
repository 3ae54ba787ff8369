"""How a program is run on virtual GPUs, and the job of the child interpreter that runs it. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vramfit.files import Backend, FilePolicy, Writes, make_policy
from vramfit.files.namespace import attended
from vramfit.files.protection import recovered
from vramfit.gpus.measured_profile import (
    NO_PROFILE,
    OWN_PROFILE,
    MeasuredProfile,
    check_card,
    load_profile,
)
from vramfit.launch.program_job import ChildSettings, ProgramJob
from vramfit.launch.runner import run_job
from vramfit.options.cudnn_choice import NONE, wanted_cudnn
from vramfit.options.run_options import KERNELS_VARIABLE, RunOptions
from vramfit.trace import CardLimit, Run
from vramfit.virtual.ranks.rank_place import RankPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualSettings(ChildSettings):
    """What a verb sets for a child with virtual cards, beside the user's options.

    Attributes:
        ours: paths that a program of vramfit's own writes for real, where it leaves its results.
        backend: what keeps the program's writes from the real files.
        place: which rank of a distributed program it is; None for one that is its only process. The script finds the
            variables that torchrun sets.
        limit: what becomes of requests for which the card has no room.
        begins_at: with `CardLimit.COLLECTED`, bytes of the card that can be had before garbage is first collected.
        aside: the program gets an empty input, what it prints is dropped, and it reaches no other machine.
    """

    ours: Iterable[str | os.PathLike[str]] = ()
    backend: Backend | str = Backend.AUTO
    place: RankPlace | None = None
    limit: CardLimit = CardLimit.FAILS
    begins_at: int | None = None
    aside: bool = False


PLAIN = VirtualSettings()
"""Nothing beside the user's options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualJob(ProgramJob):
    """A program to run on virtual GPUs.

    Attributes:
        files: what happens to what it writes.
        place: which rank of a distributed program it is, None for its only process.
        limit: what becomes of requests for which the card has no room.
        begins_at: with `CardLimit.COLLECTED`, bytes of the card that can be had before garbage is first collected.
        offline: the program reaches no other machine.
    """

    files: FilePolicy
    place: RankPlace | None = None
    limit: CardLimit = CardLimit.FAILS
    begins_at: int | None = None
    offline: bool = False


def run_in_child(command: Sequence[str], options: RunOptions, settings: VirtualSettings = PLAIN) -> Run:
    """Run ``[script, *args]`` or ``["-m", module, *args]`` as python would, on virtual GPUs.

    The program's input and output are this process's own. Its exit code is in the result.

    Args:
        command: what python would be given.
        options: the cards, and how the program is run on them.
        settings: what the verb adds.

    Raises:
        EnvironmentUnfitError: this torch cannot carry the virtual GPU.
        UsageError: the profile cannot be read, or is of another card.
        VramfitError: the child died before it could tell its results; the message says how.
    """
    options = _settled(options)
    with tempfile.TemporaryDirectory(prefix="vramfit-", ignore_cleanup_errors=True) as folder:
        journal = None if settings.journal is None else os.path.abspath(settings.journal)
        if journal is not None:
            with contextlib.suppress(OSError):  # the child says what is wrong with it
                # A namespace lets through what is there: it is read when the child was killed.
                Path(journal).touch()
        policy = make_policy(
            options.writes or Writes.DISCARD,
            workplace=folder,
            through=options.writes_through,
            ours=[*settings.ours, *([] if journal is None else [journal]), *_mailbox(settings.place)],
            beside=options.cwd,
            backend=settings.backend,
        )
        job = VirtualJob(
            folder=folder,
            command=list(command),
            options=options,
            journal=journal,
            ends_line=settings.ends_line,
            hooks=tuple(settings.hooks),
            place=settings.place,
            limit=settings.limit,
            begins_at=settings.begins_at,
            offline=settings.aside,
            files=policy,
        )
        with attended(policy):
            run = run_job(
                "vramfit.virtual.virtual_child",
                job,
                environ=_stand_ins(options),
                aside=settings.aside,
            )
            return run if run.files is not None else replace(run, files=recovered(policy))


def _settled(options: RunOptions) -> RunOptions:
    """The options with the profile's full path and the cuDNN that is asked; a wrong one is refused here."""
    profile = options.profile
    if isinstance(profile, MeasuredProfile):
        check_card(profile, options.card)
    elif profile not in (NO_PROFILE, OWN_PROFILE):
        check_card(load_profile(Path(profile)), options.card)
        profile = os.path.abspath(profile)
    return replace(options, profile=profile, cudnn=wanted_cudnn(options.cudnn) or NONE)


def _stand_ins(options: RunOptions) -> dict[str, str]:
    """The variable by which the child finds stand-ins for kernels."""
    return {} if options.kernels is None else {KERNELS_VARIABLE: options.kernels}


def _mailbox(place: RankPlace | None) -> list[str]:
    """Where ranks that run side by side leave objects for one another, if they do."""
    return [] if place is None or place.mailbox is None else [place.mailbox]
