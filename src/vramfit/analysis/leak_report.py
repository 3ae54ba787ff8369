"""What a search for leaks finds: the verdict, and the stacks that grow, settle, or are freed at one blow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from vramfit.analysis._steps import LEAST_STEPS, Steps
from vramfit.trace import Category, Frame
from vramfit.units import counted, format_bytes

if TYPE_CHECKING:
    from vramfit.record.chains import OwnerChain


class LeakVerdict(Enum):
    """What can be said of a trace."""

    GROWING = "growing"
    """Memory grows from step to step, beyond chance."""
    SUSPECTED = "suspected"
    """It grows, but the steps of the program had to be guessed."""
    NO_STEPS = "no steps"
    """Nothing in the trace repeats: what grew over equal parts of it is listed, but any program builds something."""
    STEADY = "steady"
    """No growth beyond chance."""
    TOO_FEW_STEPS = "too few steps"
    """Not enough steps to tell growth from chance; what grew in each of them is listed all the same."""


class Release(Enum):
    """What would free the memory that grows."""

    HELD = "held"
    """Something reaches it, or nothing is known."""
    COLLECTOR = "garbage collector"
    """Nothing reaches it: dead reference cycles, which only a collection frees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakPlace:
    """What allocates: a stack, and what most of its bytes are.

    Attributes:
        stack: index into the trace's table, -1 where the trace has no stack; then blocks of one size are meant.
        frames: the stack, innermost first.
        line: the user's line.
        library_line: the innermost line outside torch, where that is in another package.
        category: what most of the bytes are used for.
        op: the operator that made most.
        module: dotted path with layer numbers replaced by ``*``.
        tensor: dtype and shape of most.
        kinds: how many different (category, op, module, tensor) there are.
    """

    stack: int
    frames: tuple[Frame, ...]
    line: Frame | None
    library_line: Frame | None
    category: Category
    op: str
    module: str
    tensor: str
    kinds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingStack:
    """A stack whose memory grows from step to step.

    Attributes:
        place: what allocates.
        bytes_per_step: median slope, in bytes of blocks as torch counts them; exact where growth is constant.
        requested_per_step: the same of the bytes that were asked for.
        grown_bytes: growth from the end of the warm-up to the last step.
        blocks: blocks allocated since the warm-up that were alive at the last boundary.
        first_step: number of the step from which on it grows.
        p_value: the chance of such growth where there is none.
        adjusted_p: the same for any of all the stacks that were tested (Holm).
        levels: low-water mark of every step, warm-up included.
        release: what would free it.
        rows: rows of the trace at which those blocks were allocated, oldest first.
        owners: who holds samples of it, where a live process could be asked.
    """

    place: LeakPlace
    bytes_per_step: float
    requested_per_step: float
    grown_bytes: int
    blocks: int
    first_step: int
    p_value: float
    adjusted_p: float
    levels: tuple[int, ...]
    rows: tuple[int, ...]
    release: Release = Release.HELD
    owners: tuple[OwnerChain, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledStack:
    """A stack that grew after the warm-up, and stopped or slowed down: a cache that filled.

    Attributes:
        place: what allocates.
        grown_bytes: by how much.
        last_step: number of the last step in which it grew.
    """

    place: LeakPlace
    grown_bytes: int
    last_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sawtooth:
    """A stack whose blocks of three or more steps are freed at one blow, again and again or once.

    Reference cycles that wait for the garbage collector look so, and lists that are emptied once an epoch.

    Attributes:
        place: what allocates.
        most_bytes: most that it held at a boundary.
        times: how often blocks were freed at one blow.
        steps: most steps that one blow freed the blocks of.
    """

    place: LeakPlace
    most_bytes: int
    times: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeakReport:
    """Whether a device's memory grows from step to step, and what makes it grow.

    Attributes:
        device: index of the device.
        verdict: the answer.
        steps: the steps that were told apart.
        warmup: how many of them were left out at the beginning.
        alpha: chance of calling growth where there is none, for the whole report.
        tested: stacks whose levels changed after the warm-up.
        p_value: of growth of the whole device.
        bytes_per_step: median slope of the whole device after the warm-up.
        levels: low-water mark of the device in every step, warm-up included.
        growing: stacks that grow, fastest first. With too few steps: all that grew in every one of them.
        settled: stacks that grew and stopped, largest first.
        sawteeth: stacks freed at one blow, largest first.
    """

    device: int
    verdict: LeakVerdict
    steps: Steps
    warmup: int
    alpha: float
    tested: int
    p_value: float
    bytes_per_step: float
    levels: tuple[int, ...]
    growing: tuple[GrowingStack, ...]
    settled: tuple[SettledStack, ...]
    sawteeth: tuple[Sawtooth, ...]

    def __repr__(self) -> str:
        grows = f", {format_bytes(round(self.bytes_per_step))} a step" if self.leaks else ""
        return f"<LeakReport of GPU {self.device}: {self.verdict.value}{grows}, {counted(len(self.levels), 'step')}>"

    @property
    def leaks(self) -> bool:
        """Whether memory grows beyond chance, over known steps."""
        return self.verdict is LeakVerdict.GROWING

    @property
    def least_steps(self) -> int:
        """Steps from which on growth can be told from chance."""
        return LEAST_STEPS
