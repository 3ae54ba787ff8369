"""Recorder of the metered CPU: its budget, the models that exist already, and the resulting run."""

from __future__ import annotations

import os
import sys
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vramfit.allocator import parse_torch_version
from vramfit.capture import communication_buffers, gathered_parameters
from vramfit.capture.attribution import ProgramPhase
from vramfit.capture.kept_memory import KeptWatch, watch_kept
from vramfit.capture.meter_figures import MeterFigures
from vramfit.capture.observing.program_observer import ProgramObserver, observe_program
from vramfit.capture.step_counter import StepCounter, count_steps
from vramfit.errors import EnvironmentUnfitError, UsageError
from vramfit.gpus import GpuKind, GpuSpec, find_gpu
from vramfit.launch import threads
from vramfit.launch.stopping import StepSink
from vramfit.patching import PatchStack
from vramfit.record.metering import NO_LIMIT, CpuMeter, MeterMode, holders, tensors_of
from vramfit.record.recorder import (
    AllocatorFigures,
    Recorder,
    Subjects,
    error_line,
    release_warnings,
    running,
    watch,
)
from vramfit.torch_internals.autograd_engine import current_graph_task_id
from vramfit.trace import Category, DeviceOutcome, Run, Source, TraceBuilder, TraceDevice
from vramfit.trace.journal import TraceJournal
from vramfit.trace.outcome import platform_text
from vramfit.units import format_bytes
from vramfit.virtual.machine import Machine
from vramfit.virtual.tensor_subclasses import is_wrapper

_UNSETTLED = (Category.OTHER, Category.TEMPORARIES)
"""Categories of tensors that may turn out to be a module's input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuDevice:
    """The device that a metered run reports.

    Attributes:
        total_bytes: its memory: the budget, or that of this machine.
        limit_bytes: requests beyond this are refused.
    """

    name: str
    total_bytes: int
    limit_bytes: int

    @classmethod
    def of(cls, budget: int | None) -> CpuDevice:
        """The CPU with a budget in bytes, or with none."""
        if budget is None:
            return cls(name="CPU", total_bytes=host_bytes(), limit_bytes=NO_LIMIT)
        return cls(
            name=f"CPU with a budget of {format_bytes(budget)}", total_bytes=budget, limit_bytes=budget
        )

    def spec(self) -> GpuSpec:
        """A card that stands for the CPU; only its memory counts."""
        return replace(
            find_gpu("24GiB"),
            name=self.name,
            vendor_name=self.name,
            kind=GpuKind.GENERIC,
            total_bytes=self.limit_bytes,
            context_bytes=0,
        )


def host_bytes() -> int:
    """Memory of this machine in bytes, 0 where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


class CpuRecorder(Recorder):
    """Meters the CPU tensors of this process.

    Args:
        budget: bytes that the program may hold; past them a request raises ``torch.OutOfMemoryError``. None: no limit.
        subjects: the models and optimizers that exist already; without any, all that are alive.
        alloc_conf: allocator settings; None reads the environment.
        journal: a file to write the trace to while it happens, which survives the process; None without.

    Raises:
        ConfigError: a setting cannot be read.
    """

    def __init__(
        self,
        *,
        budget: int | None = None,
        subjects: Subjects | None = None,
        alloc_conf: str | None = None,
        journal: Path | None = None,
    ) -> None:
        self.device = CpuDevice.of(budget)
        self._subjects = subjects or Subjects()
        machine = Machine(
            [self.device.spec()],
            alloc_conf=alloc_conf,
            torch_version=parse_torch_version(torch.__version__),
            visible="0",
            context_bytes=0,
            observes_blocks=False,
        )
        device = TraceDevice(index=0, name=self.device.name, total_bytes=self.device.total_bytes)
        meta: dict[str, str | int | float] = {
            "source": Source.CPU.value,
            "torch_version": torch.__version__,
            "alloc_conf": machine.config.to_string(),
        }
        self._builder = TraceBuilder((device,), meta, None if journal is None else TraceJournal(journal))
        if self._builder.journal is not None:
            self._builder.journal.facts({**meta, "platform": platform_text()}, (device,))
        self.meter = CpuMeter(machine, self._builder)
        self.mode = MeterMode(self.meter)
        self._patches = PatchStack()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._result: Run | None = None
        self._started = 0.0

    # -- the recording -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to meter this process."""
        if _virtual():
            raise EnvironmentUnfitError(
                "a virtual GPU is active in this process", "Track its card (leave device= out)"
            )
        self._started = time.perf_counter()
        self.mode._began = time.perf_counter_ns()
        try:
            with self.meter.meeting():
                self._meet_subjects()
        except torch.OutOfMemoryError as error:
            self._end(error)
            raise
        try:
            watch(self, self._patches)
            self.meter.phases.rounds.follow(self._patches)
            threads.install(self.mode, self._patches)
            self._follow_resizes()
            communication_buffers.install(self.meter, self._patches)
            gathered_parameters.install(self.meter, self._patches)
            self.mode.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._patches.undo()
            raise
        running.append(self)

    def _follow_resizes(self) -> None:
        """See storages that give their memory back and take it again, as FSDP's do, below the dispatcher."""
        meter, original = self.meter, torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            meter.resized(storage)
            return out

        self._patches.set(torch.UntypedStorage, "resize_", resize_)

    def stop(self, error: BaseException | None = None) -> Run:
        """End the recording and undo every patch."""
        running.remove(self)
        self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._patches.undo()
        return self._end(error)

    def _end(self, error: BaseException | None) -> Run:
        self._result = self._outcome(error, ended=True)
        self.meter.machine.on_event = None
        if self._builder.journal is not None:
            self._builder.journal.close()
        return self._result

    def run(self) -> Run:
        """The recording so far."""
        return self._outcome(None) if self._result is None else self._result

    def count_steps(self, stopping: StepSink, patches: PatchStack) -> StepCounter:
        """Count the program's steps."""
        return count_steps(self.meter, stopping, patches)

    def watch_kept(self, patches: PatchStack) -> KeptWatch:
        """Watch for memory that the program holds beyond its use."""
        return watch_kept(self.meter, patches)

    def observe(self, patches: PatchStack) -> ProgramObserver:
        """Observe what the program trains."""
        return observe_program(self.meter.modules, self.meter.phases, patches)

    def mark(self, tag: str) -> None:
        """Put a named point in time into the trace."""
        self.mode.tick()
        self.meter.mark(tag)

    def watched_figures(self) -> MeterFigures:
        """The meter's."""
        return MeterFigures(self.meter, "metered", self.device.total_bytes)

    def figures(self, device: int = 0) -> AllocatorFigures:
        """What the allocator holds now."""
        if device:
            raise UsageError(f"there is no device {device}", "The metered CPU is one device, 0")
        self.meter.collect()
        allocator, peaks = self.meter.machine.devices[0].allocator, self.meter.peaks()
        return AllocatorFigures(
            allocated=allocator.allocated_bytes,
            reserved=allocator.reserved_bytes,
            peak_allocated=peaks.allocated,
            peak_reserved=peaks.reserved,
        )

    def empty_cache(self) -> None:
        """Give back the segments that hold nothing, as ``torch.cuda.empty_cache`` does."""
        with self.meter.lock:
            self.meter.collect()
            self.meter.machine.devices[0].allocator.empty_cache()

    def _meet_subjects(self) -> None:
        """Place what the named models and optimizers hold already, or all that are alive."""
        models, optimizers = self._subjects.models, self._subjects.optimizers
        for name, model in models:
            self.meter.modules.name_tree(model, name)
            self._meet_module(model)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.meter.tag_tensor(parameter, Category.PARAMETERS)
        if not self._subjects:
            for parameter in _alive(nn.Parameter):
                self.meter.tag_tensor(parameter, Category.PARAMETERS)
            optimizers = tuple(_alive(torch.optim.Optimizer))
        self.meter.tag_gradients()
        for optimizer in optimizers:
            self.meter.tag_states(optimizer)

    def _meet_module(self, root: nn.Module) -> None:
        self._seen.add(root)
        for module in root.modules():
            path = self.meter.modules.path_of(module)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
                    self.meter.tag_tensor(tensor, Category.PARAMETERS, path)

    # -- what the program does (Watcher) -------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follow which module runs; a root's parameters and inputs are met here."""
        meter = self.meter
        if not meter.modules.enter(module) or current_graph_task_id() != -1 or self.mode.off:
            return
        self.mode.tick()
        meter.phases.begin(ProgramPhase.FORWARD)
        if module not in self._seen or self._moved(module):
            self._meet_module(module)
        for tensor in (*tensors_of(args), *tensors_of(kwargs)):
            for part in holders(tensor):
                record = meter.adopt(part, "", Category.INPUTS)
                if record.category in _UNSETTLED and tensor.grad_fn is None:
                    meter.settle(record, Category.INPUTS)

    def _moved(self, module: nn.Module) -> bool:
        """Whether a module's parameters lie elsewhere than when they were met (``.to()``, ``.half()``)."""
        first = next(module.parameters(), None)
        if first is None or is_wrapper(first) or first.layout is not torch.strided:
            return False
        record = self.meter.known(first)
        return record is None or record.category != Category.PARAMETERS

    def leave_module(self) -> None:
        """Note that the innermost module returns."""
        if self.meter.modules.leave() and current_graph_task_id() == -1:
            self.meter.phases.on_rest()

    def begin_backward(self) -> None:
        """Note that the backward pass begins."""
        self.mode.tick()
        self.meter.remember_backward()
        self.meter.phases.begin(ProgramPhase.BACKWARD)

    def end_backward(self) -> None:
        """Name the gradients that the backward pass has left."""
        if not self.mode.off:
            self.meter.tag_gradients()
        self.meter.phases.end_backward()

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer's step begins."""
        self.mode.tick()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self.meter._parameters:
                    self.meter.tag_tensor(parameter, Category.PARAMETERS)
        self.meter.tag_gradients()
        self.meter.phases.begin(ProgramPhase.OPTIMIZER)
        self.meter.stepping = True

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the state that the optimizer's step has left."""
        self.meter.stepping = False
        self.meter.tag_states(optimizer)

    def new_parameter(self, tensor: torch.Tensor) -> None:
        """Name a new parameter or buffer."""
        if not torch.nn.parameter.is_lazy(tensor) and not self.mode.off:
            self.meter.tag_tensor(tensor, Category.PARAMETERS)

    # -- results -------------------------------------------------------------------------------------------------

    def _outcome(self, error: BaseException | None, *, ended: bool = False) -> Run:
        meter, device = self.meter, self.device
        meter.collect()
        allocator, peaks = meter.machine.devices[0].allocator, meter.peaks()
        self._builder.meta["alloc_conf"] = meter.machine.config.to_string()
        ended_by_it = meter.oom is not None and isinstance(error, torch.OutOfMemoryError)
        return Run(
            trace=self._builder.finish(
                devices=(
                    TraceDevice(
                        index=0,
                        name=device.name,
                        total_bytes=device.total_bytes,
                        segments=allocator.segments(),
                    ),
                ),
                ended=ended,
            ),
            devices=(
                DeviceOutcome(
                    index=0,
                    gpu=device.name,
                    total_bytes=device.total_bytes,
                    context_bytes=0,
                    stats=allocator.memory_stats_flat(),
                    peak_allocated_bytes=peaks.allocated,
                    peak_reserved_bytes=peaks.reserved,
                    peak_active_bytes=peaks.active,
                ),
            ),
            oom=meter.unhandled_oom() if ended_by_it else meter.oom,
            warnings=release_warnings(),
            ops=meter.ops,
            seconds_simulated=0.0,
            seconds_wall=time.perf_counter() - self._started,
            exit_code=0 if error is None else 1,
            error=error_line(error),
            program=tuple(sys.argv),
            torch_version=torch.__version__,
            platform=platform_text(),
            source=Source.CPU,
        ).with_ending()


def _alive(kind: type) -> list[Any]:
    """All objects of a type that the garbage collector knows, in no particular order."""
    import gc

    # By type: asking an object for its class can run code of its own.
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _virtual() -> bool:
    import sys

    module = sys.modules.get("vramfit.virtual.gpu")
    return module is not None and module._active is not None
