"""The options of a run: one object that every door makes and that the child process is given.

NOTE [A new option]
A field of `RunOptions` with its words, a line of the docstring, and a key of `RunKeywords` with the type that Python
callers may pass. The command line, the Python interface, notebooks and the child then have it; verbs that cannot use it
leave it out by name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from vramfit.errors import UsageError
from vramfit.files.policy import Writes
from vramfit.gpus import GpuSpec
from vramfit.gpus.measured_profile import OWN_PROFILE, MeasuredProfile
from vramfit.options.assume_choice import Assume, Assumptions, assumption
from vramfit.options.clock_choice import CLOCK_NAMES, ProgramClock, program_clock
from vramfit.options.declaration import (
    ASSUMED,
    ENDING,
    SEVERAL_CARDS,
    CommandLine,
    Door,
    Keywords,
    RunKind,
    declared,
    option,
)
from vramfit.options.limits import STEADY, Limits
from vramfit.options.readers import (
    MOST_GPUS,
    read_card,
    read_count,
    read_cudnn,
    read_device,
    read_file,
    read_flag,
    read_folder,
    read_paths,
    read_profile,
    read_seconds,
    read_size,
    read_steps,
    read_text,
    read_variables,
    read_writes,
)

KERNELS_VARIABLE = "VRAMFIT_KERNELS"
"""Environment variable that names a file of stand-ins for kernels; the child reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a program is run, on virtual cards or for real and recorded. See NOTE [A new option].

    Attributes:
        gpu: the virtual card: its name, a size (``"24GiB"``), a TOML file or a `GpuSpec`; None records the real run.
        gpus: how many of them.
        ranks: how many ranks a distributed program has; None for one that is its only process.
        per_node: ranks of a node; 8, or as many as there are.
        rank: which ranks run: ``"auto"`` (one of each kind), ``"all"``, or their numbers.
        device: what is recorded without ``gpu``: ``"cuda"`` (or None), this machine's card, or ``"cpu"``, its CPU.
        budget: memory that a recorded program may hold, ``"2GiB"`` or bytes.
        alloc_conf: allocator settings, instead of ``PYTORCH_ALLOC_CONF``.
        assume: ``"upper"`` or ``"typical"``: what is taken for sizes that depend on data; ``"typical,imbalance=2"``: a
            rank of experts receives twice its even share of tokens.
        profile: a file that ``vramfit calibrate`` wrote, a `MeasuredProfile`, ``"none"``, or ``"auto"`` for that
            of this card and torch.
        cudnn: an installed cuDNN to be asked what convolutions and attention take: its path, ``"auto"`` or
            ``"none"``; None is what ``VRAMFIT_CUDNN`` says, by default none.
        clock: what Python's clocks follow where the program reads them: ``"real"``, or ``"simulated"``, the card.
        kernels: a Python file of stand-ins for compiled kernels of the program (docs/kernels.md).
        steps: end the program after as many, or ``"steady"``: when three in a row asked for the same memory.
        time: end it after ``"90s"``, ``"10m"``, ``"1h"`` or as many seconds.
        writes: what happens to files that a program writes on a virtual GPU: ``"discard"`` (the default) sets them
            aside and drops them, ``"keep"`` leaves them in a folder beside it, ``"real"`` writes them.
        writes_through: paths that it writes for real even so, such as a folder of downloads.
        need: run a program that runs out on a virtual GPU again without the card's limit, so that `Report.need` says
            what it needs in all.
        host_memory: follow the host's memory too, by `tracemalloc`: `Run.host`. It costs time.
        environ: variables added to this process's.
        cwd: folder to run in.
    """

    gpu: GpuSpec | None = option(  # noqa: RUF009  # a field, as of `dataclasses.field`
        metavar="NAME", help='The card: "RTX 4090", a size such as 24GiB, or a TOML file.', read=read_card
    )
    gpus: int = option(
        1,
        metavar="N",
        help="How many of them.",
        runs=RunKind.VIRTUAL,
        read=read_count,
        kind=int,
        least=1,
        most=MOST_GPUS,
    )
    ranks: int | None = option(
        metavar="N",
        help="Run it as a program of N ranks, one on each card, as torchrun would start it.",
        panel=SEVERAL_CARDS,
        kind=int,
        least=1,
    )
    per_node: int | None = option(
        metavar="N", help="Ranks of a node.", default_words="8", panel=SEVERAL_CARDS, kind=int, least=1
    )
    rank: str | None = option(
        metavar="auto|all|0,7",
        help="Which ranks run: one of each kind, all, or those named.",
        default_words="auto",
        panel=SEVERAL_CARDS,
    )
    device: str | None = option(
        metavar="cuda[:N]|cpu",
        help="Record the real run instead: on this machine's card (the default without --gpu), or on its CPU.",
        runs=RunKind.RECORDED,
        read=read_device,
    )
    budget: int | None = option(
        metavar="SIZE",
        help="Memory that a recorded run may take, such as 2GiB.",
        runs=RunKind.RECORDED,
        read=read_size,
    )
    alloc_conf: str | None = option(
        metavar="CONF",
        help="Allocator settings, instead of PYTORCH_ALLOC_CONF.",
        read=read_text,
    )
    assume: str = option(
        Assume.UPPER.value,
        metavar="upper|typical[,imbalance=K]",
        help="What to take for sizes that depend on data: the most, or what is to be expected; and for experts on "
        "several cards that a rank receives K times its even share of tokens.",
        panel=ASSUMED,
        runs=RunKind.VIRTUAL,
        read=lambda _door, _name, given: assumption(given).text,
        completion=lambda: [one.value for one in Assume],
    )
    profile: str | MeasuredProfile = option(  # noqa: RUF009  # see above
        OWN_PROFILE,
        metavar="FILE|auto|none",
        help="What vramfit calibrate measured; auto is that of this card and this torch, if there is any.",
        panel=ASSUMED,
        runs=RunKind.VIRTUAL,
        read=read_profile,
    )
    cudnn: str | None = option(
        metavar="PATH|auto|none",
        help="Ask an installed cuDNN for its workspaces (docs/cudnn.md); VRAMFIT_CUDNN says it for all commands.",
        panel=ASSUMED,
        runs=RunKind.VIRTUAL,
        read=read_cudnn,
    )
    clock: str = option(
        CLOCK_NAMES[0],
        default_words=CLOCK_NAMES[0],
        metavar="|".join(CLOCK_NAMES),
        help="What Python's clocks follow where the program reads them: this machine, or the virtual card.",
        panel=ASSUMED,
        runs=RunKind.VIRTUAL,
        read=lambda _door, _name, given: program_clock(given).value,
        completion=lambda: list(CLOCK_NAMES),
    )
    kernels: str | None = option(
        metavar="FILE.py",
        help="Stand-ins for compiled kernels of the program (docs/kernels.md).",
        panel=ASSUMED,
        runs=RunKind.VIRTUAL,
        read=read_file,
        kind=Path,
    )
    steps: int | Literal["steady"] | None = option(
        metavar="N|steady",
        help="End the program after N steps, or when three in a row asked for the same memory.",
        panel=ENDING,
        read=read_steps,
    )
    time: float | None = option(
        metavar="T",
        help="End the program after that time: 90s, 10m, 1h.",
        panel=ENDING,
        read=read_seconds,
    )
    writes: Writes | None = option(  # noqa: RUF009  # see above
        metavar="discard|keep|real",
        help="Files that the program writes on a virtual GPU: set aside and dropped, kept in a folder, or written.",
        default_words="discard",
        panel=ENDING,
        runs=RunKind.VIRTUAL,
        read=read_writes,
        kind=Writes,
    )
    writes_through: tuple[str, ...] = option(
        (),
        metavar="PATH",
        help="A file or folder that it writes for real even so, such as one of downloads. Several times for several.",
        panel=ENDING,
        runs=RunKind.VIRTUAL,
        read=read_paths,
        kind=list[Path],
    )
    need: bool = option(
        True,
        help="Do not run a program that ran out again without the card's limit, to see what it needs in all.",
        panel=ENDING,
        read=read_flag,
        kind=bool,
        negated=True,
    )
    host_memory: bool = option(
        False,
        help="Follow the host's memory too, by tracemalloc: which lines grow from step to step.",
        read=read_flag,
        kind=bool,
    )
    environ: Mapping[str, str] | None = option(read=read_variables)
    cwd: str | None = option(read=read_folder)

    @property
    def limits(self) -> Limits:
        """When the program is ended."""
        if self.steps == STEADY:
            return Limits(steady=True, seconds=self.time)
        return Limits(steps=self.steps, seconds=self.time)

    @property
    def card(self) -> GpuSpec:
        """The virtual card, where there is one."""
        assert self.gpu is not None
        return self.gpu


OPTIONS = declared(RunOptions)
"""The options by name, each with its default."""

KEYWORDS = Keywords()
COMMAND_LINE = CommandLine(OPTIONS)

Pathlike = str | os.PathLike[str]


class BlockKeywords(TypedDict, total=False):
    """What Python callers pass for the options of a block of code on virtual cards."""

    gpus: int
    alloc_conf: str | None
    assume: str | Assume | Assumptions
    profile: Pathlike | MeasuredProfile
    cudnn: Pathlike | None
    clock: str | ProgramClock
    writes: str | Writes | None
    writes_through: Sequence[Pathlike]


class WorldKeywords(BlockKeywords, total=False):
    """What Python callers pass for the options of a program on virtual cards."""

    kernels: Pathlike | None
    steps: int | str | None
    time: str | float | None
    need: bool
    host_memory: bool
    environ: Mapping[str, str] | None
    cwd: Pathlike | None


class RunKeywords(WorldKeywords, total=False):
    """What Python callers pass for `RunOptions`."""

    gpu: Pathlike | GpuSpec | None
    device: str | None
    budget: str | float | None


SEVERAL = frozenset({"ranks", "per_node", "rank"})
"""Options of programs of several ranks."""

NOT_OF_A_BLOCK = SEVERAL | frozenset(
    {"device", "budget", "kernels", "steps", "time", "need", "host_memory", "environ", "cwd"}
)
"""Options that only a process of its own can have."""

NOT_OF_A_CELL = NOT_OF_A_BLOCK - {"device", "budget"}
"""Options that a notebook's cell does not have: it runs in the notebook's process."""

NOT_OF_RANKS = SEVERAL | frozenset({"gpus", "device", "budget", "need", "host_memory"})
"""Options that a rank's process does not have: it has one virtual card, and runs once."""

NOT_TOGETHER = SEVERAL | frozenset({"gpus", "device", "budget", "need"})
"""Options that programs side by side do not have: they share one virtual card."""


def read_options(
    door: Door, given: Mapping[str, Any], *, without: Collection[str] = (), card_follows: bool = False
) -> RunOptions:
    """The options of a run from what a user gave for them.

    Args:
        door: how the user spells them.
        given: values by name; those that are the default count as not given.
        without: options that this door does not have.
        card_follows: whether the caller may choose a card where the user named none; it calls `check_runs` then.

    Raises:
        UsageError: a value cannot be read, or two options contradict each other.
        UnknownGpuError: no such card.
        TypeError: there is no such option.
    """
    known = [name for name in OPTIONS if name not in without]
    for name in given:
        if name not in known:
            raise TypeError(f"there is no option {name!r} here: choose from {', '.join(known)}")
    values = {name: value for name, value in given.items() if _is_given(name, value)}
    if not card_follows:
        check_runs(door, values)
    read = {name: OPTIONS[name][0].read(door, name, value) for name, value in values.items()}
    if read.get("writes") is Writes.REAL and read.get("writes_through"):
        raise UsageError(
            f"{door.given('writes', 'real')} writes all files, so {door.name('writes_through')} has no effect",
            f"Leave {door.name('writes_through')} out",
        )
    return RunOptions(**read)


def given_options(options: RunOptions) -> Iterator[str]:
    """The names of options whose values are not the defaults."""
    return (name for name, (_, default) in OPTIONS.items() if getattr(options, name) != default)


def _is_given(name: str, value: Any) -> bool:
    default = OPTIONS[name][1]
    return not (value is default or (type(value) is type(default) and value == default))


def check_runs(door: Door, given: Collection[str]) -> None:
    """Refuse options of a recorded run beside a virtual card, and those of a virtual card without one.

    Args:
        given: the names of the options that are given.

    Raises:
        UsageError: one is for the other kind of run.
    """
    is_virtual = "gpu" in given
    for name in given:
        runs = OPTIONS[name][0].runs
        if is_virtual and runs is RunKind.RECORDED:
            raise UsageError(
                f"{door.name(name)} is for recording a real run, and {door.name('gpu')} for a virtual GPU",
                f"Leave one of them out; a virtual GPU of any size is {door.given('gpu', '20GiB')}",
            )
        if not is_virtual and runs is RunKind.VIRTUAL:
            files = ": a recorded program writes its files as usual" if name.startswith("writes") else ""
            raise UsageError(f"{door.name(name)} is for a virtual GPU{files}", door.choose_card)
