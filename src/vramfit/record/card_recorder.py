"""Recorder of a real card: torch's own memory history, and what only the live program can tell beside it.

torch records every event of its allocator with the Python stack, in C++ and into a ring that is bounded. This module
adds what that leaves open, at a cost of microseconds per module call and step: the module that runs goes along as the
history's metadata (kept per thread by torch, so that it does not reach autograd's own threads); phases and marks are
noted as numbers of events; parameters, gradients and optimizer states by their addresses when an optimizer steps.

This has run against the virtual GPU in a card's place, which answers the same functions of torch. It has not run on a
real card yet.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from vramfit.capture.attribution import ModuleStack, PhaseTracker, ProgramPhase, StackInterner
from vramfit.capture.observing.program_observer import ProgramObserver, observe_program
from vramfit.capture.step_counter import StepCounter
from vramfit.capture.storages import LifetimePeaks
from vramfit.errors import EnvironmentUnfitError, WriteError
from vramfit.launch.stopping import StepSink
from vramfit.patching import PatchStack
from vramfit.record.metering import tensors_of
from vramfit.record.notes import (
    MODULE_PREFIX,
    CardDemand,
    MarkNote,
    Moment,
    NotedInterval,
    Notes,
    PhaseNote,
    TensorNotes,
    annotate,
    peaks_of_card,
    requests_and_frees,
    traced_device,
)
from vramfit.record.recorder import (
    AllocatorFigures,
    Recorder,
    Subjects,
    error_line,
    release_warnings,
    running,
    watch,
)
from vramfit.torch_internals import cuda_memory
from vramfit.torch_internals.autograd_engine import current_graph_task_id
from vramfit.torch_internals.cuda_device import call_when_initialized
from vramfit.trace import (
    Category,
    DeviceOutcome,
    MemoryTrace,
    OomReport,
    Run,
    RunWarning,
    Source,
    TraceBuilder,
    TraceDevice,
    trace_from_snapshot,
)
from vramfit.trace.frames import user_frame
from vramfit.trace.outcome import platform_text
from vramfit.trace.partial import peaks_of

_CONTEXT = "alloc"  # stacks of allocations; those of frees would double the cost, and nothing reads them
_SAVE_EVERY = 5.0  # seconds
_SAVE_SHARE = 0.01
_STATES_AT = frozenset(1 << n for n in range(16))
"""Steps of an optimizer after which its states are noted: the first step creates them."""


class CardRecorder(Recorder):
    """Records the cards of this process.

    Recording begins when the program first uses CUDA, so that a program may still choose its devices and settings.

    Args:
        device: ``"cuda"`` or ``"cuda:1"``: the one that a budget is for and that figures tell of.
        budget: bytes, None for no limit.
        subjects: the models and optimizers that exist already; others are noted when they are first used.
        max_entries: how many events torch keeps per device: the last ones.
        partial: a file to which the recording is written from time to time (at most a hundredth of the time goes into
            it), for the case that the process is killed; None without.
    """

    def __init__(
        self,
        *,
        device: str = "cuda",
        budget: int | None = None,
        subjects: Subjects | None = None,
        max_entries: int = 1_000_000,
        partial: str | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._budget = budget
        self._subjects = subjects or Subjects()
        self._max_entries = max_entries
        self._partial = None if partial is None else Path(partial)
        self._save_at = 0.0
        self._names = TraceBuilder()
        self._modules = ModuleStack(self._names)
        self._stacks = StackInterner(self._names)
        self._patches = PatchStack()
        self._began: dict[int, int] | None = None
        self._peaks_before: dict[int, LifetimePeaks] = {}
        self._devices: set[int] = set()
        self._held: Moment | None = None
        self._gradients_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._phases: list[PhaseNote] = []
        self._marks: list[MarkNote] = []
        self._tensors: list[TensorNotes] = []
        # Weak, by identity: an object made later at the same address is not mistaken for the first.
        self._paths = WeakIdKeyDictionary()
        self._last: weakref.WeakKeyDictionary[object, dict[Category, TensorNotes]] = (
            weakref.WeakKeyDictionary()
        )
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._phase = PhaseTracker(self._names, self._begin_phase)
        self._oom: OomReport | None = None
        self._metadata_before = ""
        self._fraction: float | None = None
        self._result: Run | None = None
        self._started = 0.0

    # -- the recording -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin as soon as CUDA is initialised, which may be now."""
        global _recording
        if _recording is not None:
            raise EnvironmentUnfitError(
                "this process's cards are being recorded already: torch keeps one history",
                "Record the outer block only, or mark moments in it with vramfit.snapshot",
            )
        self._started = time.perf_counter()
        _recording = self
        try:
            watch(self, self._patches)
            self._phase.rounds.follow(self._patches)
            call_when_initialized(self._begin)
        except BaseException:
            self._patches.undo()
            _recording = None
            raise
        running.append(self)

    def _begin(self) -> None:
        """Let torch record, now that CUDA is initialised."""
        if _recording is not self:
            return  # the block was left before the program used CUDA
        index = self._index()
        if self._budget is not None:
            total = torch.cuda.get_device_properties(index).total_memory
            self._fraction = torch.cuda.get_per_process_memory_fraction(index)
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._budget / total), index)
        cuda_memory.record_history(
            "all", context=_CONTEXT, stacks="python", max_entries=self._max_entries, clear_history=True
        )
        _attach_observer()
        self._began = requests_and_frees(range(torch.cuda.device_count()))
        self._peaks_before = {device: peaks_of_card(device) for device in self._began}
        for name, model in self._subjects.models:
            self._modules.name_tree(model, name)
            self._meet_module(model)
        for optimizer in self._subjects.optimizers:
            self._note_optimizer(optimizer)

    def stop(self, error: BaseException | None = None) -> Run:
        """End the recording of torch and undo every patch."""
        global _recording
        running.remove(self)
        self._patches.undo()
        _recording = None
        try:
            self._result = self._outcome(error)
        finally:
            if self._began is not None:
                cuda_memory.record_history(None)
                if self._fraction is not None:
                    torch.cuda.set_per_process_memory_fraction(self._fraction, self._index())
        return self._result

    def run(self) -> Run:
        """The recording so far."""
        return self._outcome(None) if self._result is None else self._result

    def count_steps(self, stopping: StepSink, patches: PatchStack) -> StepCounter:
        """Count the program's steps."""
        counter = StepCounter(self._modules, self._phase, CardDemand(), stopping)
        counter.install(patches)
        return counter

    def observe(self, patches: PatchStack) -> ProgramObserver:
        """Observe what the program trains."""
        return observe_program(self._modules, self._phase, patches)

    def pinned_bytes(self) -> int:
        """Page-locked bytes that torch holds of the host; 0 where this torch does not report it."""
        told: Any = getattr(torch.cuda, "host_memory_stats", None)
        return 0 if told is None else int(told().get("reserved_bytes.current", 0))

    def mark(self, tag: str) -> None:
        """Put a named point in time into the trace."""
        if self._began is not None:
            self._marks.append(MarkNote(moment=self._moment(), tag=tag))

    def empty_cache(self) -> None:
        """Give back the segments that hold nothing."""
        torch.cuda.empty_cache()

    def figures(self, device: int | None = None) -> AllocatorFigures:
        """What the allocator holds now."""
        if self._began is None:
            return AllocatorFigures(allocated=0, reserved=0, peak_allocated=0, peak_reserved=0)
        index = self._index() if device is None else device
        cuda = torch.cuda
        return AllocatorFigures(
            allocated=cuda.memory_allocated(index),
            reserved=cuda.memory_reserved(index),
            peak_allocated=cuda.max_memory_allocated(index),
            peak_reserved=cuda.max_memory_reserved(index),
        )

    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

    # -- what the program does (Watcher) -------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let torch's history name the module; at a root, the forward phase begins."""
        root = self._modules.enter(module)
        if self._began is None:
            return
        if root:
            self._metadata_before = cuda_memory.metadata()
            if current_graph_task_id() == -1:
                with self._one_moment():
                    self._phase.begin(ProgramPhase.FORWARD)
                    self._meet_root(module, args, kwargs)
        cuda_memory.set_metadata(MODULE_PREFIX + self._modules.current_path())

    def leave_module(self) -> None:
        """Name the enclosing module again."""
        empty = self._modules.leave()
        if self._began is not None:
            text = self._metadata_before if empty else MODULE_PREFIX + self._modules.current_path()
            cuda_memory.set_metadata(text)

    def begin_backward(self) -> None:
        """Note that the backward pass begins."""
        self._phase.begin(ProgramPhase.BACKWARD)

    def end_backward(self) -> None:
        """Note that the backward pass ends; gradients are noted when an optimizer steps, or at the end."""
        self._phase.end_backward()

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients: they exist when an optimizer steps."""
        if self._began is None:
            self._phase.begin(ProgramPhase.OPTIMIZER)
            return
        with self._one_moment():
            if self._steps.get(optimizer, 0) + 1 in _STATES_AT:
                self._note_parameters(optimizer)
            self._note_gradients(optimizer)
            self._phase.begin(ProgramPhase.OPTIMIZER)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer's state; until a module is called, new allocations are data."""
        if self._began is None:
            return
        count = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._devices.update(range(torch.cuda.device_count()))  # whichever the step has used
        with self._one_moment():
            if count in _STATES_AT:
                self._note_states(optimizer)
            if self._phases:
                name = self._phases[-1].name
                self._phases.append(PhaseNote(moment=self._moment(), name=name, stretch=NotedInterval.OTHER))
            self._devices = {device for device, events in self._moment().items() if events}
        if self._partial is not None and time.perf_counter() >= self._save_at:
            self._save(self._partial)

    def new_parameter(self, tensor: torch.Tensor) -> None:
        """Do nothing: parameters are noted when their module is called."""

    def _begin_phase(self, index: int) -> None:
        del index  # of the phase in the table of names, which is not the trace's
        if self._began is None:
            return
        phase = self._phase.phase
        stretch = NotedInterval.BUSY
        if phase is ProgramPhase.FORWARD:
            stretch = NotedInterval.FORWARD if torch.is_grad_enabled() else NotedInterval.INFERENCE
        self._phases.append(PhaseNote(moment=self._moment(), name=self._phase.name, stretch=stretch))

    # -- notes ---------------------------------------------------------------------------------------------------

    def _moment(self) -> Moment:
        """The present moment (NOTE [Moments of a card's history]); asking torch takes tens of microseconds a device."""
        if self._held is not None:
            return self._held
        began = self._began
        assert began is not None
        devices = self._devices | {torch.cuda.current_device()}
        return {device: count - began.get(device, 0) for device, count in requests_and_frees(devices).items()}

    @contextlib.contextmanager
    def _one_moment(self) -> Iterator[None]:
        """Give all notes of the block the same moment: the program does nothing in between."""
        self._held = self._moment()
        try:
            yield
        finally:
            self._held = None

    def _meet_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next(module.parameters(), None)
        where = 0 if first is None else _address(first)
        if self._seen.get(module) != where:  # new, or its parameters have moved
            self._seen[module] = where
            self._meet_module(module)
        inputs = [tensor for tensor in (*tensors_of(args), *tensors_of(kwargs)) if tensor.grad_fn is None]
        self._note(self, Category.INPUTS, inputs, [""] * len(inputs))

    def _meet_module(self, root: nn.Module) -> None:
        tensors, paths = [], []
        for module in root.modules():
            path = self._modules.path_of(module)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
                    tensors.append(tensor)
                    paths.append(path)
                    self._paths[tensor] = path
        self._note(root, Category.PARAMETERS, tensors, paths)

    def _note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._note_parameters(optimizer)
        self._note_gradients(optimizer)
        self._note_states(optimizer)

    def _note_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        paths = [self._paths.get(parameter, "") for parameter in parameters]
        self._note(optimizer, Category.PARAMETERS, parameters, paths)

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients of every step: they may lie at the addresses of the previous step's, which are gone."""
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [parameter.grad for parameter in held]
        where = [g.data_ptr() if g.layout is torch.strided else 0 for g in gradients]
        last = self._last.get(optimizer, {}).get(Category.GRADIENTS)
        if last is not None and self._gradients_at.get(optimizer) == where:
            last.moments.append(self._moment())
            return
        self._gradients_at[optimizer] = where
        paths = [self._paths.get(parameter, "") for parameter in held]
        self._note(optimizer, Category.GRADIENTS, gradients, paths)

    def _note_states(self, optimizer: torch.optim.Optimizer) -> None:
        tensors, paths = [], []
        for parameter, state in optimizer.state.items():
            path = self._paths.get(parameter, "")
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                    paths.append(path)
        self._note(optimizer, Category.OPTIMIZER_STATE, tensors, paths)

    def _note(
        self, owner: object, category: Category, tensors: Iterable[torch.Tensor], paths: Iterable[str]
    ) -> None:
        """Note where tensors lie now; an unchanged note gets one more moment."""
        devices, addresses, modules = [], [], []
        for tensor, path in zip(tensors, paths, strict=True):
            if tensor.is_cuda and tensor.layout is torch.strided:
                devices.append(tensor.get_device())
                addresses.append(_address(tensor))
                modules.append(path)
        if not addresses:
            return
        of_owner = self._last.setdefault(owner, {})
        last = of_owner.get(category)
        if last is None or last.addresses != tuple(addresses):
            last = TensorNotes(
                category=category,
                devices=tuple(devices),
                addresses=tuple(addresses),
                modules=tuple(modules),
            )
            of_owner[category] = last
            self._tensors.append(last)
        last.moments.append(self._moment())

    # -- results -------------------------------------------------------------------------------------------------

    def note_oom(self, device: int, requested: int, free: int) -> None:
        """Note a request that failed after all retries; torch calls this with the figures of the moment."""
        stack = self._stacks.frames(self._stacks.key())
        self._oom = OomReport(
            device=device,
            requested_bytes=requested,
            stack=stack,
            user_line=user_frame(stack),
            op="",
            message="",
            allocated_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
            free_bytes=free,
            total_bytes=torch.cuda.get_device_properties(device).total_memory,
            handled=True,
        )

    def _save(self, file: Path) -> None:
        """Write the recording so far, then wait a hundred times as long as that took."""
        began = time.perf_counter()
        with contextlib.suppress(WriteError):  # a full disk must not end the program
            self._trace()[0].save(file)
        ended = time.perf_counter()
        self._save_at = ended + max(_SAVE_EVERY, (ended - began) / _SAVE_SHARE)

    def _outcome(self, error: BaseException | None) -> Run:
        trace, warnings = self._trace()
        oom = self._oom
        if oom is not None and isinstance(error, torch.OutOfMemoryError):
            oom = replace(oom, handled=False, message=str(error))
        return Run(
            trace=trace,
            devices=tuple(self._device_outcome(trace, device) for device in trace.devices),
            oom=oom,
            warnings=(*release_warnings(), *warnings),
            ops=0,
            seconds_simulated=0.0,
            seconds_wall=time.perf_counter() - self._started,
            exit_code=0 if error is None else 1,
            error=error_line(error),
            program=tuple(sys.argv),
            torch_version=torch.__version__,
            platform=platform_text(),
            source=Source.CARD,
        ).with_ending()

    def _trace(self) -> tuple[MemoryTrace, list[RunWarning]]:
        """The history as a trace, with warnings about its gaps."""
        if self._began is None:
            empty = TraceBuilder(meta={"source": "card", "torch_version": torch.__version__})
            return empty.finish(devices=(traced_device(0, ()),) if torch.cuda.is_available() else ()), []
        if self._result is None:
            self._note_last()
        self._devices = set(self._began)
        total = self._moment()
        snapshot = cuda_memory.snapshot()
        warnings = []
        if not cuda_memory.is_recording():
            warnings.append(_warning("history-stopped", "the program itself ended torch's memory history"))
        read = trace_from_snapshot({**snapshot, "external_annotations": []})  # phases come from the notes
        held = {d: len(events) for d, events in enumerate(snapshot["device_traces"])}
        if any(count >= self._max_entries for count in held.values()):
            warnings.append(
                _warning(
                    "history-full",
                    f"only the last {self._max_entries:,} events are in the trace: earlier ones were dropped",
                )
            )
        notes = Notes(total=total, phases=self._phases, marks=self._marks, tensors=self._tensors)
        trace = annotate(read, snapshot, notes)
        used = {segment["device"] for segment in snapshot["segments"]} | {d for d, n in held.items() if n}
        devices = tuple(
            traced_device(device.index, device.segments)
            for device in trace.devices
            if device.index in used or device.index == self._index()
        )
        meta = {**trace.meta, "source": "card", "torch_version": torch.__version__}
        return replace(trace, devices=devices, meta=meta), warnings

    def _note_last(self) -> None:
        """Note what is alive at the end."""
        for _, model in self._subjects.models:
            self._meet_module(model)
        for optimizer in {*self._steps.keys(), *self._subjects.optimizers}:
            self._note_optimizer(optimizer)

    def _device_outcome(self, trace: MemoryTrace, device: TraceDevice) -> DeviceOutcome:
        index = device.index
        allocated, reserved = peaks_of(trace, index)
        active, stats = allocated, {}
        if self._began is not None:
            stats = dict(torch.cuda.memory_stats(index))
            # torch knows peaks that the ring of events has lost. Each of them may be of before the recording.
            now, before = peaks_of_card(index), self._peaks_before.get(index, LifetimePeaks())
            allocated = max(allocated, now.allocated if now.allocated > before.allocated else 0)
            reserved = max(reserved, now.reserved if now.reserved > before.reserved else 0)
            active = max(allocated, now.active if now.active > before.active else 0)
        return DeviceOutcome(
            index=index,
            gpu=device.name,
            total_bytes=device.total_bytes,
            context_bytes=device.context_bytes,
            stats=stats,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            peak_active_bytes=active,
        )


_recording: CardRecorder | None = None
_observed = False


def _attach_observer() -> None:
    """Observe failed requests. torch cannot remove an observer, so one serves all recordings."""
    global _observed
    if _observed:
        return

    def observe(device: int, requested: int, limit: int, free: int) -> None:
        del limit  # the memory of the card, or the share of it that is allowed
        if _recording is not None:
            _recording.note_oom(device, requested, free)

    cuda_memory.observe_out_of_memory(observe)
    _observed = True


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _warning(code: str, message: str) -> RunWarning:
    return RunWarning(code=code, message=message, location=None, count=1)
