"""The outcome of a run, virtual or real: its trace, devices, end, progress, files and host memory."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any

from vramfit.masking import mask_arguments, mask_text
from vramfit.trace.applied_plan import AppliedPlan
from vramfit.trace.estimates import Estimate
from vramfit.trace.model import Frame, MemoryTrace
from vramfit.trace.observed_program import ObservedProgram
from vramfit.trace.tried_remedies import TriedRemedies
from vramfit.units import format_bytes

# -- How far a program came: what ended it, its steps, and for how many its memory was steady ----------------


class End(Enum):
    """What ended a run."""

    PROGRAM = "end"
    """The program itself, well or not."""
    STEPS = "steps"
    """It had made the requested number of steps, or its memory was steady."""
    TIME = "time"
    """The time that it was given was over."""
    INTERRUPTED = "interrupted"
    """SIGINT, as Ctrl-C sends it, which it did not handle itself."""
    TERMINATED = "terminated"
    """SIGTERM, which it did not handle itself."""


class Unit(Enum):
    """What counts as a step."""

    OPTIMIZER = "optimizer_step"
    """A round in which each optimizer in use has stepped."""
    FORWARD = "forward_pass"
    """A call of the largest module, where there is no optimizer."""


STEADY = 3
"""Steps in a row that must ask for the same memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a program came.

    Attributes:
        end: what ended the run.
        steps: whole steps that were seen.
        unit: what they are; None where there were none.
        steady: how many of them, up to the last, asked for the same memory in the same order, the peak staying as it
            was; 0 without steps.
        module: the class of the module whose calls were counted, empty for other steps.
    """

    end: End = End.PROGRAM
    steps: int = 0
    unit: Unit | None = None
    steady: int = 0
    module: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether the run was ended from outside, so that what came later is unknown."""
        return self.end is not End.PROGRAM

    @property
    def was_asked_for(self) -> bool:
        """Whether the user had set that end beforehand."""
        return self.end in (End.STEPS, End.TIME)

    @property
    def is_steady(self) -> bool:
        """Whether enough steps asked for the same memory."""
        return self.steady >= STEADY


UNTOLD = Progress()
"""The progress of a run that ended by itself and whose steps were not counted."""


# -- Host memory of the program's Python objects, step by step, and the lines where it grew ------------------


_WARM_UP = 1
"""Measurements that are left out: caches fill in the first steps."""

_LOOKS = 4
"""Fewest further measurements from which growth is concluded."""

_NOTABLE = 16 << 10
"""Bytes for each step below which growth is not reported: lists of numbers grow in any program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSite:
    """A line that allocated host memory.

    Attributes:
        file, line: where; the program's own line where one was among the callers.
        bytes: what it held at each measurement.
    """

    file: str
    line: int
    bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Host memory at some steps of a run, as `tracemalloc` saw it: what Python allocated, numpy's arrays among it.

    Memory that libraries take by themselves is not seen: real CPU tensors of torch are not in it, and tensors of a
    virtual GPU have none.

    Attributes:
        steps: numbers of the steps after which it was measured, evenly apart.
        bytes: in all at each measurement, without vramfit's own.
        pinned: page-locked bytes that torch held at each measurement.
        sites: the lines that held the most or grew the most.
    """

    steps: tuple[int, ...] = ()
    bytes: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    sites: tuple[HostSite, ...] = ()

    def per_step(self, values: tuple[int, ...]) -> int:
        """Bytes that are added at each step; 0 where the values do not rise every time, or hardly.

        Args:
            values: one for each measurement.
        """
        later, steps = values[_WARM_UP:], self.steps[_WARM_UP:]
        if len(later) < _LOOKS or any(one >= after for one, after in pairwise(later)):
            return 0
        rate = (later[-1] - later[0]) // (steps[-1] - steps[0])
        return rate if rate >= _NOTABLE else 0

    @property
    def grows_by(self) -> int:
        """Bytes that Python's objects grow by at each step; 0 where nothing leaks."""
        return self.per_step(self.bytes)

    @property
    def pinned_grows_by(self) -> int:
        """Bytes that page-locked memory grows by at each step; 0 where it does not."""
        return self.per_step(self.pinned)

    @property
    def growing(self) -> tuple[HostSite, ...]:
        """The lines that grow, the fastest first."""
        found = [site for site in self.sites if self.per_step(site.bytes)]
        return tuple(sorted(found, key=lambda site: (-self.per_step(site.bytes), site.file, site.line)))


# -- What a virtual run would have done to files ---------------------------------------------------------------


class ChangeKind(Enum):
    """What would have happened to a path."""

    WRITTEN = "written"
    """A file that did not exist."""
    REPLACED = "replaced"
    """A file that existed has other contents, or another file's."""
    DELETED = "deleted"
    """A file or a folder is gone, moved away included."""
    FOLDER = "folder"
    """A folder that did not exist."""
    METADATA = "metadata"
    """Times, mode or owner alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChange:
    """One path that would have changed.

    Attributes:
        path: absolute, as the program knows it.
        kind: what would have happened.
        size_bytes: of the file as the program left it; of what was there before where it is deleted.
    """

    path: str
    kind: ChangeKind
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChanges:
    """What a virtual run would have done to files.

    Attributes:
        backend: what kept it from the real files: ``namespace``, ``patches``, or ``none`` where they were written.
        writes: the mode that was chosen: ``discard``, ``keep`` or ``real``.
        entries: sorted by path. A folder that is deleted stands for all in it.
        reason: why it was not the better backend; empty where it was.
        kept_at: the folder that holds what was set aside, None if it was dropped.
        notes: limits that were met: contents that were dropped, processes that nothing protected from.
        omitted: entries that were left out, beyond the most that are listed.
    """

    backend: str
    writes: str
    entries: tuple[FileChange, ...] = ()
    reason: str = ""
    kept_at: str | None = None
    notes: tuple[str, ...] = ()
    omitted: int = 0

    def of(self, kind: ChangeKind) -> tuple[FileChange, ...]:
        """Entries of one kind."""
        return tuple(entry for entry in self.entries if entry.kind is kind)


GARBAGE_COLLECTED, GARBAGE_BYTES = "garbage_collected", "garbage_bytes"
"""Keys of a trace's ``meta``: how often garbage was collected where memory ran short (`CardLimit.COLLECTED`), and the
most bytes that one of these collections freed. Absent where that never happened."""

PIPELINE_STAGES, EXPERT_RANKS, PROCESS_GROUPS = "pipeline_stages", "expert_ranks", "process_groups"
"""Keys of a trace's ``meta``: the stages of a pipeline that a rank has, ``0,7/8``; the ranks with which it exchanges
tokens for experts, ``0,1,2,3``; the groups of the whole world that the program makes, as `MadeGroups` writes them."""

RAN_OUT = "ran_out"
"""Key of a trace's meta: 1 where the run ended by running out of memory, 0 where it did not; absent where unknown."""


class CardLimit(Enum):
    """What becomes of a request for which a virtual card has no room; the program is told the same figures of it."""

    FAILS = "fails"
    """It fails, as on the card."""
    SERVED = "served"
    """It is served all the same: the card's memory has no limit."""
    COLLECTED = "collected"
    """Garbage is collected (``gc.collect()``) and the request tried once more; then the limit is lifted a little."""


class Source(Enum):
    """The kind of device of a run."""

    VIRTUAL = "virtual"
    """A virtual GPU."""
    CARD = "card"
    """A real card, recorded."""
    CPU = "cpu"
    """Real tensors on the CPU, metered as if they lay on a card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWarning:
    """Something that differs from a real card or could not be recorded; one warning for each place.

    Attributes:
        code: short name of the kind of warning.
        message: what was done instead, for people.
        location: ``file:line`` of the program, None if it has none.
        count: how many times it happened.
    """

    code: str
    message: str
    location: str | None
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StillToCome:
    """What a program that ran out would have requested next, whatever its batch: bytes on that device.

    Attributes:
        training: gradients are computed: a backward pass or a step was at work, or gradients are enabled and an
            optimizer holds parameters of the device.
        building: a model was being built or moved to the device, so that how large it becomes is not known in full.
        stepping: an optimizer was at its step, and not in a closure that it calls.
        parameters_bytes: of the model that was being moved, not yet there.
        gradients_bytes: of trained parameters that have no gradient yet, those aside that no optimizer has, and those
            whose gradients a hook may use up one by one.
        states_bytes: that the optimizers would have made, where they are torch's own.
        optimizers: their names.
    """

    training: bool = False
    building: bool = False
    stepping: bool = False
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    states_bytes: int = 0
    optimizers: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The sum of the known requests."""
        return self.parameters_bytes + self.gradients_bytes + self.states_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadMemory:
    """What only reference cycles held when a request failed: the program cannot reach it, ``gc.collect()`` frees it.

    Attributes:
        categories: bytes of blocks on that device by the name of their `Category` in lower case; a lower bound.
        graphs_bytes: where a result of a forward pass is dead, the most that its graph may hold too: what only C++
            holds, of living graphs as well. 0 where no such result is dead.
    """

    categories: dict[str, int] = field(default_factory=dict)
    graphs_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return sum(self.categories.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class OomReport:
    """The request that did not fit. Sizes are in bytes.

    Attributes:
        device: index of the device that ran out.
        requested_bytes: what was asked for.
        stack: all frames, innermost first, the program's and the libraries'.
        user_line: the innermost frame of the program's own files, None if there is none.
        op: operator that asked.
        message: the text of the error as the program saw it.
        allocated_bytes, reserved_bytes: state of the allocator after it had released what it could.
        free_bytes: left on the device.
        total_bytes: memory of the device.
        handled: whether the program caught the error.
        to_come: what the program would have requested next; None where that is unknown, as in a recording.
        dead: what only reference cycles held; None where nobody looked, as in a recording.
    """

    device: int
    requested_bytes: int
    stack: tuple[Frame, ...]
    user_line: Frame | None
    op: str
    message: str
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int
    handled: bool
    to_come: StillToCome | None = None
    dead: DeadMemory | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOutcome:
    """One device at the end of a run. Sizes are in bytes.

    Attributes:
        index: device index as the program sees it.
        gpu: name of the card.
        total_bytes: memory of the card as CUDA reports it.
        context_bytes: taken by the CUDA context, outside the allocator.
        stats: ``torch.cuda.memory_stats()`` at exit, with the peaks of the whole run.
        peak_allocated_bytes, peak_reserved_bytes, peak_active_bytes: over the whole run, whatever it reset.
        error_below_bytes: by how much the peak of allocated bytes may be lower, since sizes were estimated.
        error_above_bytes: by how much it may be higher.
    """

    index: int
    gpu: str
    total_bytes: int
    context_bytes: int
    stats: dict[str, int]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_active_bytes: int
    error_below_bytes: int = 0
    error_above_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileNote:
    """The profile of measurements that a run used.

    Attributes:
        file: where it lies, empty for one that was given as a value.
        gpu: the card it was measured on.
        torch: the version of torch it was measured with.
        date: when, ISO form.
        source: ``card``, or ``virtual`` when the virtual GPU took the card's place.
        used: how many calls of the run it answered.
    """

    file: str
    gpu: str
    torch: str
    date: str
    source: str
    used: int


def platform_text() -> str:
    """Operating system and architecture of this machine, as `Run.platform` has them."""
    return f"{platform.system()} {platform.machine()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CudnnNote:
    """The cuDNN that a run asked what convolutions and attention take.

    Attributes:
        version: of the library that answered, ``9.10.2``.
        torch_version: of the one that this torch's default wheel comes with.
        card: the card that it was asked about.
        convolutions: how many different ones it was asked about.
        attentions: the same for passes of attention.
        attention_by_rules: why cuDNN's attention, or some of it, was left to the rules; empty where it was not.
    """

    version: str
    torch_version: str
    card: str
    convolutions: int
    attentions: int = 0
    attention_by_rules: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRefusal:
    """Why a kernel did not serve a call: ``flash``, ``takes no mask``."""

    kernel: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFallback:
    """Calls of ``scaled_dot_product_attention`` that the math kernel served, which writes its scores to memory.

    Attributes:
        location: ``file:line`` of the program, None if it has none.
        dtype: of the queries.
        scores: shape of the scores, (..., heads, queries, keys).
        scores_dtype: what they are computed in.
        refused: why each fused kernel did not serve them.
    """

    location: str | None
    dtype: str
    scores: tuple[int, ...]
    scores_dtype: str
    refused: tuple[KernelRefusal, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A finished run of a program.

    What looks like a password, a token or a key in ``error``, ``program`` and ``warnings`` is masked
    (`vramfit.masking`): runs are written into files that are shared.

    Attributes:
        trace: every allocation and free.
        devices: one entry for each device the program could see.
        oom: the last request that did not fit, None if all did.
        warnings: what was done otherwise than on a card.
        ops: operators that ran on a device.
        seconds_simulated: time the program would take on the card.
        seconds_wall: time the run took here.
        exit_code: the program's.
        error: the program's uncaught exception as one line, None if there was none.
        program: the command line of the program.
        torch_version: version of torch it ran with.
        platform: operating system and architecture.
        assume: what was taken for sizes that depend on data, ``upper`` or ``typical``.
        host_pinned_peak_bytes: most page-locked host memory that torch held at once, its cache included.
        profile: the measurements that were used, None without any.
        cudnn: the installed cuDNN that was asked, None where none was.
        source: the kind of device.
        progress: how far the program came, and what ended it.
        files: what it would have done to files; None where that was not observed, as in a recording.
        estimates: the requests whose sizes were estimated, in the order in which they were noted.
        host: the host's memory, step by step; None where it was not measured.
        again: what came of running it again without the card's limit; None where nobody tried.
        attention_fallbacks: calls of attention that the math kernel served, each place and shape once.
        observed: what the program trains; None where nobody looked.
        plan: the plan that it was run with; None without one.
        remedies: what was tried on it since it does not fit; None where nothing was.
        left: what hooks of the child left, by their names; see `vramfit.launch.child_hooks`.
    """

    trace: MemoryTrace
    devices: tuple[DeviceOutcome, ...]
    oom: OomReport | None
    warnings: tuple[RunWarning, ...]
    ops: int
    seconds_simulated: float
    seconds_wall: float
    exit_code: int
    error: str | None
    program: tuple[str, ...]
    torch_version: str
    platform: str
    assume: str = "upper"
    host_pinned_peak_bytes: int = 0
    profile: ProfileNote | None = None
    cudnn: CudnnNote | None = None
    source: Source = Source.VIRTUAL
    progress: Progress = UNTOLD
    files: FileChanges | None = None
    estimates: tuple[Estimate, ...] = ()
    host: HostMemory | None = None
    again: SecondRun | None = None
    attention_fallbacks: tuple[AttentionFallback, ...] = ()
    observed: ObservedProgram | None = None
    plan: AppliedPlan | None = None
    remedies: TriedRemedies | None = None
    left: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Mask secrets, which must not reach a file."""
        warnings = tuple(replace(told, message=mask_text(told.message)) for told in self.warnings)
        object.__setattr__(self, "error", None if self.error is None else mask_text(self.error))
        object.__setattr__(self, "program", mask_arguments(self.program))
        object.__setattr__(self, "warnings", warnings)

    def __repr__(self) -> str:
        peaks = "".join(
            f", {device.gpu}: peak allocated {format_bytes(device.peak_allocated_bytes)}, "
            f"reserved {format_bytes(device.peak_reserved_bytes)}"
            for device in self.devices
        )
        return f"<Run of {' '.join(self.program)!r}: exit code {self.exit_code}{peaks}>"

    @property
    def ran_out(self) -> bool:
        """Whether it ended by running out of memory.

        A program that caught the error and finished well did not, nor one that was ended from outside later.
        """
        failed = self.exit_code != 0 and not self.progress.is_cut
        return self.oom is not None and (not self.oom.handled or failed)

    def with_ending(self) -> Run:
        """This run with its ending in the trace's meta: the events do not show whether the program caught the error."""
        meta = {**self.trace.meta, RAN_OUT: int(self.ran_out)}
        return replace(self, trace=replace(self.trace, meta=meta))


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondRun:
    """What came of running a program again that ran out, on the same cards without their limit.

    Attributes:
        run: what it did; None where it was not run, or left nothing.
        limit: what became of requests for which the card had no room.
        why_not: why there is no run, in words that complete "it was not run again"; empty where there is one.
    """

    run: Run | None
    limit: CardLimit = CardLimit.SERVED
    why_not: str = ""
