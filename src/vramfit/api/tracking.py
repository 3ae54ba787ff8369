"""``vramfit.track`` and ``vramfit.snapshot``: recording around any code, and lines of figures from inside it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO, TypeAlias, TypeVar

from vramfit.api.programs import Report
from vramfit.arguments import (
    flag_argument,
    path_argument,
    shown,
    size_argument,
    text_argument,
    whole_argument,
)
from vramfit.errors import UsageError
from vramfit.launch.host_meter import HostMemoryMeter, HostSteps
from vramfit.patching import PatchStack
from vramfit.trace import MemoryTrace, Run
from vramfit.units import format_bytes

if TYPE_CHECKING:
    from vramfit.record.recorder import AllocatorFigures, Models, Optimizers, Recorder

P = ParamSpec("P")
R = TypeVar("R")

Sink: TypeAlias = TextIO | Callable[[str], object] | None

MAX_ENTRIES = 1_000_000
"""Events that a recording of a card keeps: the last ones. One of them takes about 200 bytes, its stack apart."""


class Track:
    """Records the memory of the code in its ``with`` block, or of the function that it decorates.

    >>> model = torch.nn.Linear(1024, 1024)
    >>> with vramfit.Track(model, device="cpu") as track:
    ...     model(torch.ones(256, 1024)).sum().backward()
    >>> track.peak_allocated_bytes, track.trace.modules
    (9446400, ('Linear',))
    >>> track.save("train.vft")

    On a machine with a card it records the card by torch's own memory history. With ``device="cpu"``, or without a
    card, it meters the real CPU tensors through the same allocator, with a budget if one is given. The code computes
    what it would compute without; on leaving, nothing stays patched.

    Args:
        model: the model, or several in a list or dict, that exist already: their tensors are parameters, and they
            name the modules. Without model and optimizer, all parameters and optimizers that are alive are met.
        optimizer: the optimizer, or several.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; None means the card where there is one, else the CPU.
        budget: ``"2GiB"`` or bytes: past it a request raises ``torch.OutOfMemoryError``. On a card it is set by
            ``torch.cuda.set_per_process_memory_fraction`` and put back afterwards.
        alloc_conf: allocator settings of metered CPU, instead of those of the environment.
        max_entries: events kept of a card; earlier ones are lost.
        host_memory: follow the host's memory too, by `tracemalloc`: which lines grow from step to step. It costs time.
        journal: a file to write the trace of metered CPU to while it happens, so that a killed process leaves it;
            ``vramfit explain`` reads it. It is deleted when the recording ends well.

    Raises:
        UsageError: an argument is of another kind than these, or there is no such device.
    """

    def __init__(
        self,
        model: Models = None,
        optimizer: Optimizers = None,
        *,
        device: str | None = None,
        budget: str | float | None = None,
        alloc_conf: str | None = None,
        max_entries: int = MAX_ENTRIES,
        host_memory: bool = False,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        from vramfit.record.recorder import Subjects

        self._subjects = Subjects.of(model, optimizer)
        self._device = _device(device)
        self._budget = None if budget is None else size_argument("budget", budget)
        self._alloc_conf = None if alloc_conf is None else text_argument("alloc_conf", alloc_conf)
        self._max_entries = whole_argument("max_entries", max_entries, least=1)
        self._journal = None if journal is None else Path(path_argument("journal", journal))
        self._host_memory = flag_argument("host_memory", host_memory)
        self._host: HostMemoryMeter | None = None
        self._steps = PatchStack()
        self._recorder: Recorder | None = None
        self._run: Run | None = None
        if alloc_conf is not None:
            from vramfit.allocator import AllocatorConfig

            AllocatorConfig.parse(alloc_conf)

    # -- around code ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Track:
        """Begin to record.

        Raises:
            torch.OutOfMemoryError: what is alive already exceeds the budget; `print` and `report` tell of it.
        """
        import torch

        if self._recorder is not None:
            raise UsageError("this recording runs already", "Make another with vramfit.track()")
        recorder = self._make()
        try:
            recorder.start()
        except torch.OutOfMemoryError:
            self._end(recorder.run())
            raise
        self._recorder, self._run = recorder, None
        if self._host_memory:
            self._host = HostMemoryMeter(recorder.pinned_bytes)
            recorder.count_steps(HostSteps(self._host), self._steps)
            self._host.start()
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End; what the code raised goes on its way."""
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        _active.remove(self)
        host, self._host = self._host, None
        self._steps.undo()
        seen = None if host is None else host.stop()
        self._end(replace(recorder.stop(error), host=seen))

    def _end(self, run: Run) -> None:
        self._run = run
        if self._journal is not None:
            self._journal.unlink(missing_ok=True)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call is a recording of its own, and `run` is that of the last one.

        Raises:
            UsageError: it is a generator or a coroutine function, whose body does not run when it is called.
        """
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise UsageError(
                f"{function.__qualname__} does not run when it is called, but piece by piece",
                "Put `with vramfit.track():` around what it does",
            )

        @functools.wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        recorded.tracked = self  # type: ignore[attr-defined]
        return recorded

    def _make(self) -> Recorder:
        if self._device == "cpu":
            from vramfit.record.cpu_recorder import CpuRecorder

            return CpuRecorder(
                budget=self._budget,
                subjects=self._subjects,
                alloc_conf=self._alloc_conf,
                journal=self._journal,
            )
        from vramfit.record.card_recorder import CardRecorder

        if self._alloc_conf is not None:
            raise UsageError(
                "alloc_conf= is for metered CPU: a card's allocator has its settings already",
                "Set PYTORCH_ALLOC_CONF before the program starts",
            )
        if self._journal is not None:
            raise UsageError(
                "journal= is for metered CPU: a card's history lies in torch until it is asked for",
                "vramfit run saves it from time to time",
            )
        return CardRecorder(
            device=self._device,
            budget=self._budget,
            subjects=self._subjects,
            max_entries=self._max_entries,
        )

    # -- what came out -------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """What happened so far (inside the block) or in all (after it).

        Raises:
            UsageError: nothing was recorded yet.
        """
        if self._recorder is not None:
            return self._recorder.run()
        if self._run is None:
            raise UsageError("nothing was recorded yet", "Run code in `with vramfit.track() as trace:` first")
        return self._run

    @property
    def trace(self) -> MemoryTrace:
        """Every allocation and free."""
        return self.run.trace

    @property
    def report(self) -> Report:
        """The run with its verdict, as ``vramfit run`` reports it."""
        from vramfit.analysis import verdict

        run = self.run
        return Report(run=run, verdict=verdict(run))

    def print(self) -> None:
        """Print the report."""
        self.report.print()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded in the form that the file's ending asks for: ``.vft`` the trace, ``.pickle`` a torch
        snapshot, ``.html`` the page, and the others of `Report.save`.

        Raises:
            UsageError: the ending is that of no form.
            WriteError: it cannot be written.
        """
        self.report.save(path)

    def __repr__(self) -> str:
        if self._recorder is None and self._run is None:
            return f"<Track of {self._device}: nothing recorded yet>"
        figures = self._now()
        peak = (
            f"peak allocated {format_bytes(figures.peak_allocated)}, "
            f"reserved {format_bytes(figures.peak_reserved)}"
        )
        return f"<Track of {self._device}: {peak}{', recording' if self._recorder is not None else ''}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict and the timeline, without scripts."""
        return self.report._repr_html_()

    # -- figures, at any time ------------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Bytes in tensors now, or at the end of the recording."""
        return self._now().allocated

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator holds now, or at the end."""
        return self._now().reserved

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes in tensors at once since the recording began."""
        return self._now().peak_allocated

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes that the allocator held at once since the recording began."""
        return self._now().peak_reserved

    def mark(self, tag: str) -> None:
        """Put a named point in time into the trace.

        Raises:
            UsageError: the recording does not run.
        """
        if self._recorder is None:
            raise UsageError("a mark is set while the recording runs", "Set it inside the `with` block")
        self._recorder.mark(str(tag))

    def _now(self) -> AllocatorFigures:
        from vramfit.record.recorder import AllocatorFigures

        if self._recorder is not None:
            return self._recorder.figures()
        device = self.run.devices[0]
        return AllocatorFigures(
            allocated=device.stats.get("allocated_bytes.all.current", 0),
            reserved=device.stats.get("reserved_bytes.all.current", 0),
            peak_allocated=device.peak_allocated_bytes,
            peak_reserved=device.peak_reserved_bytes,
        )


_active: list[Track] = []
_last_on_card: dict[int, tuple[str, int]] = {}


def running_track() -> Track | None:
    """The innermost recording that runs, None if none does."""
    return _active[-1] if _active and _active[-1]._recorder is not None else None


def track(
    model: Models = None,
    optimizer: Optimizers = None,
    *,
    device: str | None = None,
    budget: str | float | None = None,
    alloc_conf: str | None = None,
    max_entries: int = MAX_ENTRIES,
    host_memory: bool = False,
    journal: str | os.PathLike[str] | None = None,
) -> Track:
    """Record the memory of a block of code or of a function; see `Track`.

    >>> @vramfit.track(device="cpu", budget="1GiB")
    ... def step():
    ...     return torch.ones(1024, 1024).sum()
    >>> step()
    tensor(1048576.)
    """
    return Track(
        model,
        optimizer,
        device=device,
        budget=budget,
        alloc_conf=alloc_conf,
        max_entries=max_entries,
        host_memory=host_memory,
        journal=journal,
    )


def snapshot(
    tag: str = "",
    *,
    gc: bool = False,
    empty_cache: bool = False,
    device: int | None = None,
    file: Sink = None,
) -> str:
    """Print and return a line of figures, and put a mark of that name into the trace that is being recorded.

    >>> with vramfit.track(device="cpu"):
    ...     batch = torch.ones(1024, 1024)
    ...     _ = vramfit.snapshot("loaded")
    [loaded] allocated 4.00 MiB, reserved 20.00 MiB, peak 4.00 MiB

    It tells of the innermost ``vramfit.track``, or of the run that ``vramfit run`` records, else of the card (a real or
    a virtual one); where there is neither, the line says so.

    Args:
        tag: names the moment.
        gc: collect Python's garbage first.
        empty_cache: then give the allocator's idle segments back to the device.
        device: index of the card; None means the current one.
        file: where the line goes: a stream, or a function that takes it (``logger.info``); None prints it.
    """
    if gc:
        import gc as collector

        collector.collect()
    head = f"[{tag}] " if tag else ""
    last: tuple[str, int] | None
    recorders = _running()
    if recorders:
        recorder = recorders[-1]
        if empty_cache:
            recorder.empty_cache()
        now = recorder.figures() if device is None else recorder.figures(device)
        last, recorder.last_told = recorder.last_told, (tag, now.allocated)
    elif (found := _card_figures(device, empty_cache)) is not None:
        index, now = found
        last = _last_on_card.get(index)
        _last_on_card[index] = tag, now.allocated
    else:
        return _say(
            f"{head}nothing to measure: there is no CUDA card here; inside "
            'vramfit.track(device="cpu") the CPU is metered',
            file,
        )
    _mark(tag)
    text = (
        f"{head}allocated {format_bytes(now.allocated)}, reserved {format_bytes(now.reserved)}, "
        f"peak {format_bytes(now.peak_allocated)}"
    )
    if last is not None:
        change = now.allocated - last[1]
        before = f"[{last[0]}]" if last[0] else "the last"
        text += f" ({'+' if change >= 0 else ''}{format_bytes(change)} since {before})"
    return _say(text, file)


def _say(line: str, file: Sink) -> str:
    if file is None:
        print(line, flush=True)
    elif callable(file):
        file(line)
    elif not callable(getattr(file, "write", None)):
        raise UsageError(
            f"file={shown(file)} takes no text", "Give an open file, or a function such as logging.info"
        )
    else:
        print(line, file=file, flush=True)
    return line


def _running() -> list[Recorder]:
    """The recordings of this process: those of tracks, and that of ``vramfit run``."""
    module = sys.modules.get("vramfit.record.recorder")
    return [] if module is None else list(module.running)


def _mark(tag: str) -> None:
    """Mark the moment in all that record: the recordings, and a virtual GPU of this process."""
    for recorder in _running():
        recorder.mark(tag)
    virtual = sys.modules.get("vramfit.virtual.gpu")
    if virtual is not None and virtual._active is not None:
        virtual._active.mark(tag)


def _card_figures(device: int | None, empty_cache: bool) -> tuple[int, AllocatorFigures] | None:
    """Index and figures of a card, None where there is none."""
    import torch

    from vramfit.record.recorder import AllocatorFigures

    if not torch.cuda.is_available():
        return None
    cuda = torch.cuda
    if device is not None and not 0 <= device < cuda.device_count():
        raise UsageError(f"there is no device {device}", f"There are {cuda.device_count()}: 0 is the first")
    index = cuda.current_device() if device is None else device
    if empty_cache:
        cuda.empty_cache()
    return index, AllocatorFigures(
        allocated=cuda.memory_allocated(index),
        reserved=cuda.memory_reserved(index),
        peak_allocated=cuda.max_memory_allocated(index),
        peak_reserved=cuda.max_memory_reserved(index),
    )


def _device(device: Any) -> str:
    """The device's name: ``cpu``, ``cuda`` or ``cuda:N``."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={device!r} is no device", 'Give "cpu", "cuda" or "cuda:1"') from error
    if found.type == "cpu":
        return "cpu"
    if found.type != "cuda":
        raise UsageError(f"{found.type} devices cannot be recorded", 'Give "cpu" or "cuda"')
    if not torch.cuda.is_available():
        raise UsageError(
            "torch finds no CUDA card here",
            'Give device="cpu", or run the program with vramfit run --gpu NAME',
        )
    if found.index is not None and found.index >= torch.cuda.device_count():
        raise UsageError(
            f"there is no device {found}", f"There are {torch.cuda.device_count()}: cuda:0 is the first"
        )
    return str(found)
