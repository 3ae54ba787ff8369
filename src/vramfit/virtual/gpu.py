"""The virtual GPU as a context: everything installed on entering, everything undone on leaving."""

from __future__ import annotations

import atexit
import contextlib
import platform
import sys
import tempfile
import time
from bisect import bisect_right
from dataclasses import astuple
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import torch

from vramfit.allocator import parse_torch_version
from vramfit.arguments import (
    path_argument,
    size_argument,
)
from vramfit.cudnn.asker import AskedCudnn, ask_cudnn
from vramfit.cudnn.found_library import dotted, of_torch
from vramfit.errors import EnvironmentUnfitError, UsageError, VramfitError
from vramfit.failure_line import failure_line
from vramfit.files import Protection, Writes, current, make_policy, protect
from vramfit.files.protection import standing
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.gpus.measured_profile import MeasuredProfile, chosen_profile, profile_doubt
from vramfit.options.assume_choice import Assume, assumption
from vramfit.options.clock_choice import program_clock
from vramfit.options.cudnn_choice import wanted_cudnn
from vramfit.options.option_keywords import takes_options
from vramfit.options.run_options import KEYWORDS, NOT_OF_A_BLOCK, BlockKeywords, RunOptions, read_options
from vramfit.patching import PatchStack, together
from vramfit.torch_internals import build_check, build_shim, cuda_hooks, device_guards, names, releases
from vramfit.trace import (
    Category,
    CudnnNote,
    DeviceOutcome,
    EventKind,
    MemoryTrace,
    ProfileNote,
    Run,
    RunWarning,
    TraceBuilder,
    TraceDevice,
    snapshot_from_trace,
)
from vramfit.trace.journal import TraceJournal
from vramfit.trace.outcome import platform_text
from vramfit.trace.settings import CONF_FROM
from vramfit.units import format_bytes
from vramfit.virtual import foreign, program_clocks, ranks, torch_cuda, torch_patches
from vramfit.virtual.data_dependent.assume import may_come_from
from vramfit.virtual.kernels.measured import MeasuredTable
from vramfit.virtual.machine import Machine, VirtualDevice
from vramfit.virtual.meter import Meter
from vramfit.virtual.mode import VirtualMode, exclusive_counts
from vramfit.virtual.ranks.rank_place import PER_NODE, place_of
from vramfit.virtual.workspaces import Workspaces

if TYPE_CHECKING:
    from vramfit.virtual.ranks.communicators import Communicators

_RANKS = names.Feature("ranks of distributed programs")
_FOREIGN = names.Feature("kernels of Triton and of other libraries")


@takes_options(without=NOT_OF_A_BLOCK, own=("gpu",))
class VirtualGPU:
    """Runs the CUDA code inside its ``with`` block on virtual cards, and measures its memory.

    >>> with vramfit.VirtualGPU("RTX 4090") as gpu:
    ...     model = torch.nn.Linear(4096, 4096).cuda()
    ...     model(torch.empty(1024, 4096, device="cuda")).sum().backward()
    >>> gpu.peak_allocated_bytes, gpu.run.oom
    (184828928, None)

    Models must be built inside the block. On leaving, every patch of Python is undone; tensors made inside hold no
    values and should not be used further. Where files are protected in this process already, as in the child of
    ``vramfit run``, that protection holds.

    Args:
        gpu: a card's name, a size (``"24GiB"``), a path to a TOML file, or a `GpuSpec`; or `RunOptions` with all of the
            options below.
        context_bytes: memory of the CUDA context; None takes it from the card.
        journal: a file to write the trace to while it happens, which survives the process; None without.
        rank: which rank of a distributed program the block is, from 0; None for one that is its only process. See
            docs/distributed.md.
        world_size: how many ranks that program has.
        ranks_per_node: ranks, and cards, of one node (at most 8).
        mailbox: a folder through which ranks that run side by side, each in a process of its own, hand one another
            Python objects (stages of a pipeline do); None where this rank runs alone.
        options: those of `RunOptions` for a block.

    Raises:
        UnknownGpuError: no such card.
        UsageError: there is no such rank.
        EnvironmentUnfitError: this interpreter cannot carry the virtual GPU (see `check_interpreter`).
    """

    meter_type: type[Meter] = Meter

    def __init__(
        self,
        gpu: str | PathLike[str] | GpuSpec | RunOptions,
        *,
        context_bytes: int | None = None,
        journal: str | PathLike[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        ranks_per_node: int = PER_NODE,
        mailbox: str | PathLike[str] | None = None,
        **options: Unpack[BlockKeywords],
    ) -> None:
        if isinstance(gpu, RunOptions):
            if options or gpu.gpu is None:
                raise UsageError(
                    "options of a run name the card and all else",
                    "Pass them with a card, and no other option",
                )
            chosen = gpu
        else:
            chosen = read_options(KEYWORDS, {"gpu": find_gpu(gpu), **options}, without=NOT_OF_A_BLOCK)
        self._clock = program_clock(chosen.clock)
        self.place = place_of(rank, world_size, ranks_per_node, mailbox)
        gpus = max(chosen.gpus, self.place.cards)
        self.spec = chosen.card
        if context_bytes is not None:
            context_bytes = size_argument("context_bytes", context_bytes, least=0)
        if journal is not None:
            path_argument("journal", journal)
        self._machine = Machine(
            [self.spec] * gpus,
            alloc_conf=chosen.alloc_conf,
            torch_version=parse_torch_version(torch.__version__),
            context_bytes=context_bytes,
            assume=assumption(chosen.assume),
            measured=_measured(chosen.profile, self.spec),
        )
        measured = self._machine.measured
        if measured is not None and (doubt := profile_doubt(measured.profile, self.spec, torch.__version__)):
            self._machine.warn("profile-differs", doubt)
        self._cudnn = wanted_cudnn(chosen.cudnn)
        self._asked: AskedCudnn | None = None
        self._machine.config  # noqa: B018  # unreadable settings are refused here, not in the middle of the program
        self._builder = TraceBuilder(
            meta={"source": "virtual", "torch_version": torch.__version__},
            journal=None if journal is None else TraceJournal(Path(journal)),
        )
        self._patches = PatchStack()
        self._writes = chosen.writes or Writes.DISCARD
        self._through = [
            *chosen.writes_through,
            *([] if journal is None else [journal]),
            *([] if mailbox is None else [mailbox]),
        ]
        self._folder = contextlib.ExitStack()
        self._files = contextlib.ExitStack()
        self._protection: Protection | None = None
        self._history_start = 0
        self._metadata: list[tuple[int, str]] = []
        self._run: Run | None = None
        self.communicators: Communicators | None = None
        self._started = 0.0
        self.meter = self.meter_type(self._machine, self._builder)
        self.mode = VirtualMode(self._machine, self.meter, Workspaces(self._machine, self.meter))

    def __enter__(self) -> VirtualGPU:
        """Install the virtual GPU in this process; where that fails, nothing of it stays."""
        check_interpreter()
        with contextlib.ExitStack() as undo:
            undo.callback(build_shim.uninstall)
            build_shim.install()
            build_check.self_check()
            if note := _platform_note():
                self._machine.warn("platform-not-run", note)
            if told := releases.untried():
                self._machine.warn(releases.UNTRIED, told)
            self.mode.exclusive_counts = exclusive_counts()
            self._start_asking()
            self._started = time.perf_counter()
            undo.callback(self._put_back)
            self._install()
            self.mode.__enter__()
            undo.callback(self.mode.__exit__, None, None, None)
            self._begin_journal()
            undo.pop_all()
        global _active
        _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Undo every patch, whatever fails meanwhile; the results stay available in `run`."""
        global _active
        _active = None
        with contextlib.ExitStack() as undo:  # the last one first
            if self._builder.journal is not None:
                undo.callback(self._builder.journal.close)
            undo.callback(build_shim.uninstall)
            undo.callback(self._put_back)
            undo.callback(self.mode.__exit__, kind, error, traceback)
            self._tell_doubts()
            self._tell_shapes(error)
            self._tell_ranks(error)
            self._run = self._outcome(error, ended=True)

    def _start_asking(self) -> None:
        """Start the process that asks cuDNN, before files are protected: it writes its cache for real."""
        if self._cudnn is None:
            return
        try:
            self._asked = AskedCudnn(ask_cudnn(self._cudnn, self.spec), self._not_asked)
        except VramfitError as error:
            self._not_asked(error.message)
        self._machine.cudnn_asker = self._asked

    def _not_asked(self, reason: str) -> None:
        self._machine.warn("cudnn-not-asked", f"{reason}: workspaces of cuDNN are estimated by rules instead")

    def _install(self) -> None:
        """Patch torch and the libraries that it meets, and connect the machine's hooks."""
        names.report(lambda text: self._machine.warn("torch-name-missing", text), self._patches)
        with together():
            self._protect()
            torch_cuda.install(self._machine, self._patches)
            torch_patches.install(self.mode, self._patches)
            self.communicators = names.attempt(
                _RANKS, self._patches, partial(ranks.install, self.mode, self.place)
            )
            names.attempt(_FOREIGN, self._patches, partial(foreign.install, self.mode))
            program_clocks.install(self.mode, self._clock, self._patches)
        hooks = self._machine.hooks
        hooks.snapshot_provider = self._snapshot
        hooks.collect = self.meter.collect
        hooks.on_set_device = device_guards.set_current_device
        hooks.device_of_thread = device_guards.current_device
        self._patches.call(lambda: device_guards.set_current_device(0))
        cards = cuda_hooks.describe_cards(
            lambda: [device.spec.compute_capability for device in self._machine.devices]
        )
        self._patches.call(cards)
        hooks.clear_workspaces = self.mode.workspaces.clear
        hooks.on_record_history = self._begin_history
        hooks.on_metadata = self._note_metadata
        hooks.malloc = self._raw_malloc
        hooks.free = lambda device, address: self.meter.free(address, device)

    def _begin_journal(self) -> None:
        """Write the first entry of the journal, if there is one: where the trace comes from."""
        if self._builder.journal is None:
            return
        meta = {
            **self._builder.meta,
            "platform": platform_text(),
            "assume": self._machine.assumptions.text,
            "alloc_conf": self._machine.config.to_string(),
        }
        devices = [
            TraceDevice(
                index=device.index,
                name=device.spec.name,
                total_bytes=device.spec.total_bytes,
                context_bytes=device.context_bytes,
            )
            for device in self._machine.devices_now()
        ]
        self._builder.journal.facts(meta, devices)

    def _protect(self) -> None:
        """Keep the block's writes from the real files, unless a protection stands already."""
        if current() is not None:
            return
        workplace = self._folder.enter_context(
            tempfile.TemporaryDirectory(prefix="vramfit-", ignore_cleanup_errors=True)
        )
        policy = make_policy(self._writes, workplace=workplace, through=self._through)
        self._protection = self._files.enter_context(standing(protect(policy, in_child=False)))
        # A process may end inside the block: the folder of what was set aside is to go after the patches have gone.
        atexit.register(self._put_back)

    def _put_back(self) -> None:
        """Undo the patches of torch and of files, then remove what was set aside."""
        atexit.unregister(self._put_back)
        with contextlib.ExitStack() as undo:  # the last one first
            undo.callback(self._folder.close)
            undo.enter_context(together())
            undo.callback(self._files.close)
            undo.callback(self._patches.undo)

    # -- results -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        cards = self._machine.devices
        name = self.spec.name if len(cards) == 1 else f"{len(cards)} × {self.spec.name}"
        peaks = self.meter.lifetime_peaks(self._own_card)
        peak = f"peak allocated {format_bytes(peaks.allocated)}, reserved {format_bytes(peaks.reserved)}"
        return f"<VirtualGPU {name}: {peak}>"

    @property
    def run(self) -> Run:
        """What happened so far (inside the block) or in all (after it)."""
        return self._run if self._run is not None else self._outcome(None)

    @property
    def trace(self) -> MemoryTrace:
        """The memory trace of the run."""
        return self.run.trace

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes allocated at once since entering on device 0, or on the card of the rank."""
        return self.run.devices[self._own_card].peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes reserved at once since entering on device 0, or on the card of the rank."""
        return self.run.devices[self._own_card].peak_reserved_bytes

    @property
    def _own_card(self) -> int:
        """The number of this rank's card among those that the program sees: it may have hidden the others."""
        cards = self._machine.devices
        return next((card.index for card in cards if card.physical_index == self.place.local_rank), 0)

    def mark(self, tag: str) -> None:
        """Put a named point in time into the trace of every card."""
        self.meter.mark(tag)

    def _raw_malloc(self, device: int, size: int, stream: int) -> int:
        """Allocate for ``torch.cuda.caching_allocator_alloc``."""
        return self.meter.malloc(
            size, device, op="caching_allocator_alloc", category=Category.OTHER, stream=stream
        )[0]

    def _begin_history(self, arguments: dict[str, object]) -> None:
        """Let the program's snapshots begin here: ``torch.cuda.memory._record_memory_history``."""
        self.meter.collect()  # tensors that have died before are no part of them
        if arguments.get("clear_history") or self._machine.history is not None:
            self._history_start = len(self._builder)

    def _note_metadata(self, text: str) -> None:
        """Let events carry a text from now on: ``torch.cuda.memory._set_memory_metadata``."""
        if self._machine.history is not None:
            self.meter.collect()
            self._metadata.append((len(self._builder), text))

    def _outcome(self, error: BaseException | None, *, ended: bool = False) -> Run:
        meter, machine = self.meter, self._machine
        meter.collect()
        self._builder.meta["alloc_conf"] = machine.config.to_string()
        if machine.conf_from:
            self._builder.meta[CONF_FROM] = machine.conf_from
        oom = meter.oom
        # NCCL's error is of another type, with the message that was noted.
        if oom is not None and (isinstance(error, torch.OutOfMemoryError) or str(error) == oom.message):
            oom = meter.unhandled_oom()
        return Run(
            trace=self._builder.finish(devices=self._trace_devices(), ended=ended),
            devices=tuple(self._device_outcome(index) for index in range(len(machine.devices))),
            oom=oom,
            warnings=tuple(
                RunWarning(code=w.code, message=w.message, location=w.location, count=w.count)
                for w in machine.warnings
            ),
            ops=meter.ops,
            seconds_simulated=machine.clock_us / 1e6,
            seconds_wall=time.perf_counter() - self._started,
            exit_code=0 if error is None else 1,
            error=None if error is None else failure_line(error),
            program=tuple(sys.argv),
            torch_version=torch.__version__,
            platform=platform_text(),
            assume=machine.assumptions.text,
            host_pinned_peak_bytes=machine.pinned.peak_reserved_bytes,
            files=None if self._protection is None else self._protection.changes(),
            profile=self._profile_note(),
            cudnn=self._cudnn_note(),
            estimates=tuple(meter.estimates),
            attention_fallbacks=machine.attention_fallbacks,
        ).with_ending()

    def _profile_note(self) -> ProfileNote | None:
        measured = self._machine.measured
        if measured is None:
            return None
        profile = measured.profile
        return ProfileNote(
            file=profile.file or "",
            gpu=profile.gpu_name,
            torch=profile.torch_version,
            date=profile.date,
            source=profile.source,
            used=measured.used,
        )

    def _cudnn_note(self) -> CudnnNote | None:
        asked = self._asked
        if asked is None or not (asked.convolutions or asked.attentions or asked.attention_lacks):
            return None
        return CudnnNote(
            version=dotted(asked.version),
            torch_version=dotted(of_torch(self._machine.torch_version)),
            card=self.spec.name,
            convolutions=asked.convolutions,
            attentions=asked.attentions,
            attention_by_rules=asked.attention_lacks,
        )

    def _context_bytes(self, device: VirtualDevice) -> int:
        """Bytes of the CUDA context; none on a device that the program never touched."""
        machine = self._machine
        used = self.meter.lifetime_peaks(device.index).allocated or device.index == machine.current_device
        return device.context_bytes if machine.init_pid is not None and used else 0

    def _tell_doubts(self) -> None:
        """Warn of what the error bar of a peak comes from."""
        for device in range(len(self._machine.devices)):
            _, above = self.meter.error_bar(device)
            doubted = self.meter.lifetime_peaks(device).doubted
            if above and doubted:
                self._machine.warn(
                    "estimated-size",
                    f"sizes that closed libraries or data decide are estimated ({doubted}): the error bar of GPU "
                    f"{device} says how far its peak may be off",
                )

    def _tell_shapes(self, error: BaseException | None) -> None:
        """Warn that a program may have failed because of assumed sizes, where its error shows one."""
        if error is None or isinstance(error, (torch.OutOfMemoryError, SystemExit, KeyboardInterrupt)):
            return
        lines = [w.location for w in self._machine.warnings if w.code == "shape-from-data" and w.location]
        if lines and may_come_from(error, self.meter.assumed_sizes, lines):
            what = "Let the sizes not depend on data for this run"
            if self._machine.assume is Assume.UPPER:  # parts of a whole do not sum to it; typical ones do
                what = (
                    f"Try --assume {Assume.TYPICAL.value}, or let the sizes not depend on data for this run"
                )
            self._machine.warn(
                "assumed-size-failed",
                f"the program failed after sizes were assumed at {', '.join(lines[:3])}: its error may come from that. "
                f"{what}",
            )

    def _tell_ranks(self, error: BaseException | None) -> None:
        """Warn that a program was to be one rank of several and ended without asking for the others; and of NCCL."""
        if self.place.world_size > 1 and not self._machine.joined_world and error is None:
            self._machine.warn(
                "no-process-group",
                f"the program was run as rank {self.place.rank} of {self.place.world_size} and never called "
                "init_process_group: nothing was divided among ranks",
            )
        if self.communicators is not None:
            self._tell_nccl(self.communicators)

    def _tell_nccl(self, communicators: Communicators) -> None:
        """Warn of what is estimated of NCCL, where the program asked it for anything."""
        nccl = communicators.nccl_memory()
        if nccl is None or not nccl.total.high:
            return
        card, host = (
            f"{likely} ({low} to {high})"
            for low, likely, high in (
                map(format_bytes, astuple(found)) for found in (nccl.total, communicators.nccl_host_memory())
            )
        )
        self._machine.warn(
            "nccl-estimated",
            f"what NCCL takes outside torch's allocators is estimated: {card} of the card, counted with the context, "
            f"and {host} of the host, which is not counted",
        )

    def _trace_devices(self) -> tuple[TraceDevice, ...]:
        return tuple(
            TraceDevice(
                index=device.index,
                name=device.spec.name,
                total_bytes=device.spec.total_bytes,
                context_bytes=self._context_bytes(device),
                segments=device.allocator.segments(),
            )
            for device in self._machine.devices
        )

    def _device_outcome(self, index: int) -> DeviceOutcome:
        device = self._machine.devices[index]
        lifetime = self.meter.lifetime_peaks(index)
        below, above = self.meter.error_bar(index)
        return DeviceOutcome(
            index=index,
            gpu=device.spec.name,
            total_bytes=device.spec.total_bytes,
            context_bytes=self._context_bytes(device),
            stats=device.allocator.memory_stats_flat(),
            peak_allocated_bytes=lifetime.allocated,
            peak_reserved_bytes=lifetime.reserved,
            peak_active_bytes=lifetime.active,
            error_below_bytes=below,
            error_above_bytes=above,
        )

    def _snapshot(self) -> dict[str, Any]:
        """A snapshot in torch's format, with the events that the program asked to record."""
        self.meter.collect()
        self._builder.meta["alloc_conf"] = self._machine.config.to_string()
        trace = self._builder.finish(devices=self._trace_devices())
        snapshot = snapshot_from_trace(trace)
        history = self._machine.history
        if history is None:
            return {**snapshot, "device_traces": [[] for _ in snapshot["device_traces"]]}
        self._write_metadata(trace, snapshot["device_traces"])
        before = (trace.kind[: self._history_start] < EventKind.MARKER).nonzero()[0]
        limit = int(history.get("max_entries") or sys.maxsize)
        traces = [
            events[int((trace.device[before] == device).sum()) :][-limit:]
            for device, events in enumerate(snapshot["device_traces"])
        ]
        return {**snapshot, "device_traces": traces}

    def _write_metadata(self, trace: MemoryTrace, traces: list[list[dict[str, Any]]]) -> None:
        """Put the program's own texts in place of ours, for the events since each was set."""
        if not self._metadata:
            return
        starts = [row for row, _ in self._metadata]
        events = (trace.kind < EventKind.MARKER).nonzero()[0].tolist()
        positions = [0] * len(traces)
        for row, device in zip(events, trace.device[events].tolist(), strict=True):
            entry = traces[device][positions[device]]
            positions[device] += 1
            index = bisect_right(starts, row) - 1
            if index >= 0:
                entry["user_metadata"] = self._metadata[index][1]


_active: VirtualGPU | None = None

_TESTED_PLATFORMS = {("Linux", "x86_64")}


def _platform_note() -> str:
    """A sentence saying that the virtual GPU has not been run on this platform; empty where it is tested."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) in _TESTED_PLATFORMS:
        return ""
    return f"The virtual GPU has not been run on {system} {machine} by its developers; the self-check passed here."


def _measured(profile: MeasuredProfile | str | PathLike[str], spec: GpuSpec) -> MeasuredTable | None:
    """The measured calls of the chosen profile; None without one."""
    found = chosen_profile(profile, spec, torch.__version__)
    return None if found is None else MeasuredTable(found)


def check_interpreter() -> None:
    """Make sure that this interpreter can carry the virtual GPU.

    A CPU backward pass that ran before the shim has started autograd's threads without one for CUDA devices, after
    which every backward pass on ``cuda`` tensors fails: `build_check.self_check` finds that.

    Raises:
        EnvironmentUnfitError: a virtual GPU is active already, torch is too old, or CUDA is in use.
    """
    if _active is not None:
        raise EnvironmentUnfitError("a virtual GPU is active already", "Leave its block first.")
    releases.refuse_older()
    if torch.cuda.is_initialized():
        raise EnvironmentUnfitError(
            "this process uses a real GPU already",
            "Run the code with vramfit.run(...) or `vramfit run`, in a child process.",
        )
