"""The virtual machine: its GPUs, and what the CUDA runtime keeps per process and per thread.

Nothing here patches torch. `vramfit.virtual.torch_cuda` answers ``torch.cuda`` from it, and the meter places
storages in the allocators of its devices.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from vramfit.allocator import (
    AllocatorConfig,
    AllocatorEventKind,
    CachingAllocator,
    Driver,
    alloc_conf_from_env,
)
from vramfit.allocator.driver import ENDLESS
from vramfit.allocator.versions import ALLOC_CONF_VARIABLES
from vramfit.capture.storages import EventHook, FreedHook
from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec
from vramfit.gpus.measured_profile import Rates
from vramfit.options.assume_choice import Assume, Assumptions, assumption
from vramfit.trace import CardLimit
from vramfit.trace.outcome import AttentionFallback
from vramfit.trace.settings import GIVEN_BY_OPTION
from vramfit.virtual.kernels.measured import MeasuredTable
from vramfit.virtual.op_call import OpCall, WorkspaceAsker
from vramfit.virtual.pinned import PinnedMemory
from vramfit.virtual.simulated_streams import BlockEvents, Clock, Engine, StreamTable

MIB = 1 << 20
DEFAULT_SEED = 67280421310721  # c10/core/GeneratorImpl.h: default_rng_seed_val

_AWAITED_SHARE = 64
"""Memory that is reserved while other streams are waited for is mentioned once it is this part of all that is."""

_GROWS = (AllocatorEventKind.SEGMENT_ALLOC, AllocatorEventKind.SEGMENT_MAP)

_AWAITED = (
    "freed memory waits for other streams that used it (record_stream), so the peak depends on how far the host runs "
    "ahead of the card: taken to be as far as the launch queue allows, the most; a card reserves this or less"
)

_UUID_NAMESPACE = uuid.UUID("8d3c3b1e-6f0e-5a56-9f0e-3a1f5d3a7c11")


@dataclass(slots=True)
class PhiloxState:
    """State of a CUDA random generator: a seed and how far its Philox sequence has been consumed."""

    seed: int = DEFAULT_SEED
    offset: int = 0


class InvalidDevice(IndexError):
    """A device index that the machine does not have; the facade turns it into the card's own error."""


class VirtualDevice:
    """One GPU as the program sees it.

    Attributes:
        index: its number in the program, after ``CUDA_VISIBLE_DEVICES``.
        physical_index: its number in the machine.
        context_bytes: memory of the card that a CUDA context and libraries take, outside torch's allocator.
        uuid: stable for a given card and position.
    """

    def __init__(
        self, machine: Machine, index: int, physical_index: int, spec: GpuSpec, *, context_bytes: int
    ) -> None:
        self._machine = machine
        self.index = index
        self.physical_index = physical_index
        self.spec = spec
        self.context_bytes = context_bytes
        self._libraries: set[str] = set()
        self._awaits = False
        self.rng = PhiloxState()
        self.uuid = device_uuid(spec, physical_index)

    def __repr__(self) -> str:
        return f"VirtualDevice({self.index}, {self.spec.name!r})"

    @cached_property
    def driver(self) -> Driver:
        """The card's memory as ``cudaMalloc`` sees it."""
        driver = Driver(self.spec.total_bytes, outside_bytes=self.context_bytes)
        if self._machine.limit is CardLimit.SERVED:
            driver.ceiling = ENDLESS
        elif self._machine.limit is CardLimit.COLLECTED:
            driver.ceiling = self._machine.begins_at
        return driver

    @cached_property
    def allocator(self) -> CachingAllocator:
        """Its caching allocator; created when it is first used, and only then are the settings read."""
        machine, index = self._machine, self.index

        def on_event(kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
            if kind in _GROWS and not self._awaits:
                self._note_awaited(size)
            if machine.on_event is not None:
                machine.on_event(index, kind, address, size, stream)

        return CachingAllocator(
            self.driver,
            config=machine.settle_config(),
            torch_version=machine.torch_version,
            device=index,
            on_event=on_event if machine.observes_blocks else None,
            on_segment=on_event,
            stream_events=BlockEvents(machine.clock, index),
            on_freed=partial(machine.on_freed, index)
            if machine.observes_blocks and machine.on_freed is not None
            else None,
        )

    def _note_awaited(self, taken: int) -> None:
        """Say that the run depends on how far the host is ahead: much was reserved while as much waited for streams."""
        allocated, active, reserved = self.allocator.figures()
        if min(active - allocated, taken) * _AWAITED_SHARE > reserved:
            self._awaits = True
            self._machine.warn("blocks-await-streams", _AWAITED)

    def use_library(self, name: str) -> None:
        """Let the context grow by what was measured for a CUDA library, when a program first uses that library."""
        if name in self._libraries:
            return
        self._libraries.add(name)
        measured = self._machine.measured
        self.take_outside(0 if measured is None else measured.profile.library_bytes.get(name, 0))

    def take_outside(self, nbytes: int) -> None:
        """Take memory of the card outside torch's allocator for good; whoever takes it sees to it that it is there."""
        self.context_bytes += nbytes
        self.driver.outside_bytes += nbytes

    @property
    def allocator_used(self) -> bool:
        """Whether the allocator exists already."""
        return "allocator" in self.__dict__

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the card, as ``cudaMemGetInfo`` reports them."""
        return self.driver.free_bytes, self.spec.total_bytes


_MOST_FALLBACKS = 200
"""Calls of attention in different places or shapes that are kept."""


@dataclass(slots=True)
class Warned:
    """One warning of the run and how often it was given."""

    code: str
    message: str
    location: str | None
    count: int = 1


@dataclass(slots=True)
class Hooks:
    """What the rest of the virtual GPU wants to hear; every hook is optional.

    Attributes:
        snapshot_provider: gives a snapshot as ``torch.cuda.memory._snapshot()`` returns it.
        collect: returns the blocks of tensors that have died; called before anyone looks at the memory.
        on_set_device: called with the number of the device that becomes this thread's current one.
        device_of_thread: gives the number of the device that this thread begins with.
        on_nvtx: called with ``"push"``, ``"pop"``, ``"mark"``, ``"start"`` or ``"end"`` and the name
            (empty for ``"pop"`` and ``"end"``).
        on_synchronize: called with the device index when the program waits for a device.
        on_record_history: called with the arguments of ``_record_memory_history`` by name.
        on_metadata: called with the text that the history shall carry from now on (``_set_memory_metadata``).
        clear_workspaces: called when the program drops cuBLAS's workspaces.
        malloc: serves ``torch.cuda.caching_allocator_alloc``: (device, bytes, stream id) to address.
            Without it the device's allocator is asked directly.
        free: serves ``torch.cuda.caching_allocator_delete``: (device, address).
        oom_observers: what the program attached to hear of memory running out; see `Machine.notify_oom`.
        on_work: called with each op that a card computes, once its results are known.
    """

    snapshot_provider: Callable[[], dict[str, Any]] | None = None
    collect: Callable[[], None] | None = None
    on_set_device: Callable[[int], None] | None = None
    device_of_thread: Callable[[], int] | None = None
    on_nvtx: Callable[[str, str], None] | None = None
    on_synchronize: Callable[[int], None] | None = None
    on_record_history: Callable[[dict[str, Any]], None] | None = None
    on_metadata: Callable[[str], None] | None = None
    clear_workspaces: Callable[[], None] | None = None
    malloc: Callable[[int, int, int], int] | None = None
    free: Callable[[int, int], None] | None = None
    oom_observers: list[Callable[[int, int, int, int], object]] = field(default_factory=list)
    on_work: Callable[[OpCall], None] | None = None


class _ThreadState(threading.local):
    """What CUDA keeps per thread: the current device, and the current stream of each device.

    Args:
        hooks: say which device a thread begins with. Autograd's threads begin with their own (torch/csrc/autograd/
            engine.cpp: ``set_device``), which decides for hooks of a backward pass that ask for the current one.
    """

    def __init__(self, hooks: Hooks) -> None:
        self.device = 0 if hooks.device_of_thread is None else hooks.device_of_thread()
        self.streams: dict[int, int] = {}


class Machine:
    """The virtual machine that a program runs on.

    Args:
        alloc_conf: allocator settings; None reads ``PYTORCH_ALLOC_CONF`` and ``PYTORCH_CUDA_ALLOC_CONF`` when
            the allocator is first used, as torch does, so that a program may set them at its top.
        torch_version: the release whose allocator is played.
        visible: value of ``CUDA_VISIBLE_DEVICES``; None reads the environment when the program first asks for
            devices, as the driver does.
        context_bytes: memory outside torch per device; None takes it from the card.
        assume: what is taken for sizes that depend on data.
        measured: what was measured on such a card; None without a profile.
        observes_blocks: whether `on_event` hears of blocks too, or of segments alone, which is quicker.

    Attributes:
        on_event: called with (device, kind, address, size, stream) on each event of an allocator.
        on_freed: called with (device, address, size, stream) instead of both events of a block that is free as soon as
            it is given back; who sets it, before an allocator is used, need not hear of blocks handed out.
        hooks: what the rest of the virtual GPU wants to hear.
        init_pid: the process that initialised CUDA, None before.
        cublas_workspace_bytes: what the program set as workspace size, by library (``"cublas"``,
        ``"cublaslt"``).
        conv_benchmark_empties_cache: the search for a convolution's algorithm ends with an emptied cache
            (native/Convolution.cpp, ``conv_benchmark_empty_cache``).
        cudnn_asker: an installed cuDNN that answers for such a card; None without one.
        joined_world: whether the program has made its first process group.
        history: arguments of the last ``_record_memory_history``, None while it is off.
        limit: what becomes of requests for which a card has no room; to be set before a device is used.
        begins_at: with `CardLimit.COLLECTED`, bytes of a card that can be had before garbage is first collected.
    """

    def __init__(
        self,
        specs: Sequence[GpuSpec],
        *,
        alloc_conf: str | AllocatorConfig | None = None,
        torch_version: tuple[int, int] = (2, 13),
        visible: str | None = None,
        context_bytes: int | None = None,
        assume: Assume | Assumptions = Assume.UPPER,
        measured: MeasuredTable | None = None,
        observes_blocks: bool = True,
    ) -> None:
        if not specs:
            raise UsageError("a virtual machine needs at least one GPU")
        self.specs = tuple(specs)
        self.assumptions = assumption(assume)
        self.assume = self.assumptions.sizes
        self.measured = measured
        self.observes_blocks = observes_blocks
        self.torch_version = torch_version
        self.clock = Clock()
        self.on_event: EventHook | None = None
        self.on_freed: FreedHook | None = None
        self.hooks = Hooks()
        self.streams = StreamTable()
        self.pinned = PinnedMemory()
        self.init_pid: int | None = None
        self.cublas_workspace_bytes: dict[str, int] = {}
        self.conv_benchmark_empties_cache = True
        self.cudnn_asker: WorkspaceAsker | None = None
        self.joined_world = False
        self.history: dict[str, Any] | None = None
        self.limit = CardLimit.FAILS
        self.begins_at: int | None = None
        self._captures: set[tuple[int, int]] = set()
        self._alloc_conf = alloc_conf
        self._config: AllocatorConfig | None = None
        self._visible = visible
        self._context_bytes = context_bytes
        self._tls = _ThreadState(self.hooks)
        self._warnings: dict[tuple[str, str | None], Warned] = {}
        self._attention_fallbacks: dict[AttentionFallback, None] = {}
        self._warn_lock = threading.Lock()

    # Devices

    @cached_property
    def devices(self) -> tuple[VirtualDevice, ...]:
        """The devices that the program sees. The first use settles ``CUDA_VISIBLE_DEVICES``."""
        visible = self._visible_text()
        devices = self.devices_now()
        if not devices and visible:
            self.warn(
                "no-visible-device",
                f"CUDA_VISIBLE_DEVICES={visible} names none of the {len(self.specs)} virtual GPUs",
            )
        return devices

    def devices_now(self) -> tuple[VirtualDevice, ...]:
        """What the program would see if it asked now; it may still set ``CUDA_VISIBLE_DEVICES`` before it does."""
        order = visible_devices(self._visible_text(), self.uuids)
        return tuple(
            VirtualDevice(
                self, index, physical, self.specs[physical], context_bytes=self._context_of(physical)
            )
            for index, physical in enumerate(order)
        )

    def _visible_text(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES") if self._visible is None else self._visible

    def _context_of(self, physical: int) -> int:
        if self._context_bytes is not None:
            return self._context_bytes
        known = None if self.measured is None else self.measured.profile.context_bytes
        return self.specs[physical].typical_context_bytes if known is None else known

    @property
    def rates(self) -> Rates | None:
        """Speeds as measured; None without a profile."""
        return None if self.measured is None else self.measured.profile.rates

    @property
    def uuids(self) -> tuple[str, ...]:
        """Identifiers of all devices of the machine, as ``nvidia-smi -L`` prints them (``GPU-...``)."""
        return tuple(f"GPU-{device_uuid(spec, index)}" for index, spec in enumerate(self.specs))

    @property
    def config(self) -> AllocatorConfig:
        """The allocator settings. Those of the environment may change until an allocator is first used.

        Raises:
            ConfigError: a setting cannot be read.
        """
        return self._read_config() if self._config is None else self._config

    def settle_config(self) -> AllocatorConfig:
        """Read the settings for the last time: an allocator is about to be used."""
        self._config = self.config
        return self._config

    def _read_config(self) -> AllocatorConfig:
        conf = self._alloc_conf
        if isinstance(conf, AllocatorConfig):
            return conf
        if conf is None:
            conf = alloc_conf_from_env(os.environ)
        return AllocatorConfig.parse(conf, torch_version=self.torch_version)

    @property
    def conf_from(self) -> str:
        """Where the settings came from: the variable that torch reads, or our option; empty for the defaults."""
        if self._alloc_conf is not None:
            return GIVEN_BY_OPTION if self._alloc_conf else ""
        return next((name for name in ALLOC_CONF_VARIABLES if os.environ.get(name)), "")

    def set_config(self, config: AllocatorConfig) -> None:
        """Change the allocator settings while the program runs, as torch allows."""
        self._config = config
        if "devices" in self.__dict__:
            for device in self.devices:
                if device.allocator_used:
                    device.allocator.config = config

    def device(self, index: int | None = None) -> VirtualDevice:
        """A device by its number; None or a negative number means the current one.

        Raises:
            InvalidDevice: the machine has no such device.
        """
        number = self.current_device if index is None or index < 0 else index
        if number >= len(self.devices):
            raise InvalidDevice(f"device {number} of {len(self.devices)}")
        self.collect()
        return self.devices[number]

    def collect(self) -> None:
        """Return the blocks of all tensors that have died, so that the figures are those of this moment."""
        if self.hooks.collect is not None:
            self.hooks.collect()

    @property
    def current_device(self) -> int:
        """Number of this thread's current device."""
        return self._tls.device

    @current_device.setter
    def current_device(self, index: int) -> None:
        if not 0 <= index < len(self.devices):
            raise InvalidDevice(f"device {index} of {len(self.devices)}")
        self._tls.device = index
        if self.hooks.on_set_device is not None:
            self.hooks.on_set_device(index)

    # Streams

    def current_stream(self, device: int | None = None) -> int:
        """Id of this thread's current stream on a device (the current one by default); 0 is the default."""
        return self._tls.streams.get(self.current_device if device is None else device, 0)

    def set_stream(self, stream: int, device: int | None = None) -> None:
        """Make a stream this thread's current one on a device (which need not be the current device)."""
        self._tls.streams[self.current_device if device is None else device] = stream

    def new_stream(self, device: int | None = None, priority: int = 0) -> int:
        """Id of the next stream of the device's pool; the pool holds 32 per priority, and then repeats."""
        return self.streams.new(self.current_device if device is None else device, priority)

    def begin_capture(self, device: int, stream: int) -> None:
        """Note that a CUDA graph begins to record what is sent to a stream."""
        self._captures.add((device, stream))

    def end_capture(self, device: int, stream: int) -> None:
        """Note that the recording of a stream ends."""
        self._captures.discard((device, stream))

    def is_capturing(self, device: int | None = None) -> bool:
        """Whether this thread's current stream is being recorded into a CUDA graph."""
        number = self.current_device if device is None else device
        return self.captures(number, self.current_stream(number))

    def captures(self, device: int, stream: int) -> bool:
        """Whether a stream is being recorded into a CUDA graph."""
        return (device, stream) in self._captures

    # Time

    @property
    def clock_us(self) -> float:
        """Simulated time at which all work so far is done, in microseconds."""
        return self.clock.now_us

    @clock_us.setter
    def clock_us(self, microseconds: float) -> None:
        self.clock.hold_host(microseconds)

    def advance(
        self, microseconds: float, device: int | None = None, engine: Engine = Engine.COMPUTE
    ) -> None:
        """Give this thread's current stream of a device (by default the current one) something to do."""
        number = self.current_device if device is None else device
        self.clock.work(microseconds, number, self.current_stream(number), engine)

    def wait_for_stream(self, device: int) -> None:
        """Let the host wait for this thread's current stream of a device, as it does to read a value."""
        self.clock.hold_host(self.clock.reached(device, self.current_stream(device)))

    def synchronize(self, device: int | None = None, until: float | None = None) -> None:
        """Wait for all work of a device, or until a time: pending frees of other streams complete."""
        found = self.device(device)
        self.clock.hold_host(self.clock_us if until is None else until)
        if found.allocator_used:
            found.allocator.synchronize()
        if self.hooks.on_synchronize is not None:
            self.hooks.on_synchronize(found.index)

    def notify_oom(self, device: int, requested: int, allocated: int, free: int) -> None:
        """Tell the program's observers that an allocation failed; all figures in bytes."""
        for observer in tuple(self.hooks.oom_observers):
            observer(device, requested, allocated, free)

    # Pinned host memory

    def pin(self, nbytes: int) -> int:
        """Take page-locked host memory; returns a handle for `unpin` (0 for nothing)."""
        config = self.settle_config()
        return self.pinned.allocate(
            nbytes,
            round_limit=config.pinned_max_round_threshold,
            cache_limit=config.pinned_max_cached_size,
        )

    def unpin(self, handle: int) -> None:
        """Give page-locked host memory back to torch's cache."""
        self.pinned.free(handle, cache_limit=self.config.pinned_max_cached_size)

    # Warnings

    def warn(self, code: str, message: str, *, location: str | None = None) -> None:
        """Note something that the reader of the results must know; repetitions (same code and location) are counted."""
        location = location or None
        with self._warn_lock:
            known = self._warnings.get((code, location))
            if known is None:
                self._warnings[code, location] = Warned(code, message, location)
            else:
                known.count += 1

    def note_attention(self, fallback: AttentionFallback) -> None:
        """Note calls of attention that the math kernel serves; each place and shape is kept once, of the first ones."""
        with self._warn_lock:
            if len(self._attention_fallbacks) < _MOST_FALLBACKS:
                self._attention_fallbacks[fallback] = None

    @property
    def attention_fallbacks(self) -> tuple[AttentionFallback, ...]:
        """The calls of attention that the math kernel served, in the order they first came."""
        return tuple(self._attention_fallbacks)

    @property
    def warnings(self) -> tuple[Warned, ...]:
        """The warnings so far, in the order they first came."""
        return tuple(self._warnings.values())


def device_uuid(spec: GpuSpec, physical_index: int) -> uuid.UUID:
    """An identifier for a card, the same whenever the same card is in the same place."""
    return uuid.uuid5(_UUID_NAMESPACE, f"{spec.vendor_name}/{physical_index}")


def visible_devices(text: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Indices of the devices that ``CUDA_VISIBLE_DEVICES`` leaves, in order; None means that it is not set.

    The rules are the CUDA driver's (CUDA C++ Programming Guide, "CUDA Environment Variables"): the list ends before the
    first entry that names no device; an entry given twice leaves none; an identifier (``GPU-...``) may be cut short as
    long as it names one device only. An empty text or ``-1`` leaves none.
    """
    if text is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for entry in text.split(","):
        index = _visible_entry(entry.strip(), uuids)
        if index is None:
            break
        if index in found:
            return ()
        found.append(index)
    return tuple(found)


def _visible_entry(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.startswith("GPU-"):
        matches = [index for index, name in enumerate(uuids) if name.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.match(r"[+-]?\d+", entry)
    if number is None:
        return None
    index = int(number.group())
    return index if 0 <= index < len(uuids) else None
