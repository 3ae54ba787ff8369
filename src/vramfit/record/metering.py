"""The meter of the CPU: the real tensors of a real program, placed as a card's allocator would place them.

NOTE [What is metered]
A dispatch mode runs every op for real and then looks at the storages of its results. What lay in memory before counts
from the moment at which the program first uses it: a module's parameters when it is called, a tensor when an op
outside every module takes it. So a budget bounds what the program works with, not what else the process holds.

Three things differ from a card. What a CPU kernel allocates inside itself is not seen. A request that exceeds the
budget is refused after the op computed its result, which is then dropped. And where a tensor is used twice the engine
sums its gradients out of place under any dispatch mode (torch/csrc/autograd/input_buffer.cpp, accumulate), so that
the first of them lives a moment longer; the values are the same.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from vramfit.allocator import OutOfMemory
from vramfit.capture.attribution import ProgramPhase
from vramfit.capture.ops import OpInfo, OpTable
from vramfit.capture.storages import LifetimePeaks, StorageMeter, StorageRecord, describe
from vramfit.torch_internals.autograd_engine import current_graph_task_id
from vramfit.torch_internals.dispatch import (
    OpOverload,
    TorchDispatchMode,
    TorchDispatchModeKey,
    get_dispatch_mode,
    take_apart,
)
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.trace import Category, EventKind, TraceBuilder
from vramfit.units import format_bytes
from vramfit.virtual.machine import Machine
from vramfit.virtual.tensor_subclasses import is_wrapper

NO_LIMIT = 1 << 46
"""Memory of the device where no budget is given: more than any machine has, so that no request is refused."""

_RESIZING = frozenset({"aten.resize_", "aten.resize_as_", "aten.set_", "aten._resize_output_"})
_ADOPTING_VIEWS = frozenset({"aten.lift_fresh"})
"""Ops that torch calls views, by which a tensor made outside the dispatcher first comes to be seen."""


class CpuMeter(StorageMeter[StorageRecord]):
    """Places the storages of real CPU tensors.

    Every op of the program comes through here, so what the virtual GPU's meter leaves to the allocator's observer is
    written at once: on the CPU there is one stream, and a free completes when it is asked for.
    """

    stepping = False
    """Whether an optimizer's step is running: allocations between steps are not its temporaries."""

    machine: Machine

    def __init__(self, machine: Machine, builder: TraceBuilder) -> None:
        super().__init__(machine, builder)
        self._allocator = machine.devices[0].allocator
        self._described: dict[tuple[torch.dtype, torch.Size], int] = {}
        self._meets = False
        self._refused: tuple[OutOfMemory, StorageRecord, torch.Tensor] | None = None

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Place everything that is alive already, even beyond the budget, so that a report can show the excess.

        Raises:
            torch.OutOfMemoryError: the budget is exceeded; the first tensor without room is the request that failed.
        """
        driver, allocator = self.machine.devices[0].driver, self._allocator
        limit, self._meets = driver.total_bytes, True
        try:
            yield
        finally:
            driver.total_bytes, self._meets = limit, False
        if self._refused is None:
            return
        error, record, tensor = self._refused
        error = OutOfMemory(
            device=0,
            requested_bytes=error.requested_bytes,
            rounded_bytes=error.rounded_bytes,
            segment_bytes=error.segment_bytes,
            total_bytes=limit,
            free_bytes=driver.free_bytes,
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            process_bytes=driver.process_bytes,
        )
        kind = Category(record.category).name.lower().replace("_", " ")
        raised = self._out_of_memory(error, 0, record.nbytes, f"{kind} {describe(tensor)}")
        owner = "" if record.module is None else f" of {record.module}"
        raised.add_note(
            f"What was alive before the recording began exceeds the budget: the {kind} {describe(tensor)}{owner} "
            f"had no room beside {format_bytes(allocator.allocated_bytes)} of others."
        )
        raise raised

    def _refuse(self, error: OutOfMemory, record: StorageRecord, tensor: torch.Tensor) -> None:
        """Remember the first tensor without room, and lift the limit for all others."""
        record.address, record.row = 0, -1
        self._refused = error, record, tensor
        self.machine.devices[0].driver.total_bytes = NO_LIMIT

    def adopt(self, tensor: torch.Tensor, op: str, category: int | None = None) -> StorageRecord:
        """Place the storage of a CPU tensor if it is new, or follow its change of size; gives its record.

        Raises:
            torch.OutOfMemoryError: it does not fit the budget; the message is like a card's.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._dead:
            self.collect()
        record = self._records.get(key)
        if record is None:
            record = StorageRecord(storage, self._dead.append)
            record.key = key
            record.device = 0
            record.nbytes = storage.nbytes()
            record.graph = torch.is_grad_enabled()
            record.used = self.passes
            record.module = None
            record.address = 0  # where it finds no place, its storage may still die before it
            self._place(record, op, category, tensor)
            self._records[key] = record
        elif record.nbytes != storage.nbytes():
            self._resize(record, storage.nbytes(), op, tensor)
        return record

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage whose size was changed from outside the dispatcher (``storage.resize_``)."""
        if self._dead:
            self.collect()
        record = self._records.get(storage._cdata)
        if record is not None and record.nbytes != storage.nbytes():
            self._resize(record, storage.nbytes(), "storage.resize_", None)

    def _resize(self, record: StorageRecord, nbytes: int, op: str, tensor: torch.Tensor | None) -> None:
        old_address, old_nbytes, row = record.address, record.nbytes, record.row
        record.nbytes = nbytes
        self._place(record, op, self._category_again(record, row), tensor)
        if old_address:
            self._give_back(old_address, old_nbytes)

    def _place(
        self, record: StorageRecord, op: str, category: int | None, tensor: torch.Tensor | None
    ) -> None:
        phases, builder, nbytes = self.phases, self.builder, record.nbytes
        record.phase = phases.index
        record.category = kind = self._category_now() if category is None else category
        if not nbytes:
            record.address, record.row = 0, -1
            return
        described = -1 if tensor is None else self._describe(tensor)
        allocator = self._allocator
        with self.lock:
            try:
                record.address = address = allocator.malloc(nbytes)
            except OutOfMemory as error:
                if self._meets and tensor is not None:
                    self._refuse(error, record, tensor)
                    return
                raise self._out_of_memory(error, 0, nbytes, op) from None
            record.row = builder.append(
                EventKind.ALLOC,
                device=0,
                address=address,
                size=nbytes,
                block=allocator.block_size(address),
                time_us=int(self.machine.clock_us),
                category=kind,
                op=builder.op(op) if op else -1,
                stack=self.stacks.current(self._backward_stack),
                module=self.modules.current(),
                phase=phases.index,
                tensor=described,
            )

    def _describe(self, tensor: torch.Tensor) -> int:
        """Index of a tensor's description in the trace's table."""
        if tensor.is_nested:
            return self.builder.tensor(f"{str(tensor.dtype)[6:]}[nested]")  # it has no shape of numbers
        like = tensor.dtype, tensor.shape
        found = self._described.get(like)
        if found is None:
            found = self._described[like] = self.builder.tensor(describe(tensor))
        return found

    def _release(self, record: StorageRecord) -> None:
        if self._records.get(record.key) is record:
            del self._records[record.key]
        if record.address:
            self._demote(record)
            self._give_back(record.address, record.nbytes)

    def _give_back(self, address: int, nbytes: int) -> None:
        append, time_us, phase = self.builder.append, int(self.machine.clock_us), self.phases.index
        with self.lock:
            self._allocator.free(address)
            for kind in (EventKind.FREE_REQUESTED, EventKind.FREE_COMPLETED):
                append(kind, device=0, address=address, size=nbytes, time_us=time_us, phase=phase)

    def lifetime_peaks(self, device: int) -> LifetimePeaks:
        """Highest figures of the one device since the start."""
        del device
        return self.peaks()

    def peaks(self) -> LifetimePeaks:
        """Highest figures since the start."""
        stats = self._allocator.memory_stats_flat()
        return LifetimePeaks(
            allocated=stats["allocated_bytes.all.peak"],
            reserved=stats["reserved_bytes.all.peak"],
            active=stats["active_bytes.all.peak"],
        )

    def known(self, tensor: torch.Tensor) -> StorageRecord | None:
        """The record of a plain strided tensor, None if it has none."""
        if self._dead:
            self.collect()
        return self._records.get(tensor.untyped_storage()._cdata)

    def settle(self, record: StorageRecord, category: Category) -> None:
        """Set the category of a storage."""
        if record.category != category:
            record.category = category
            if record.row >= 0:
                self.builder.set_category(record.row, category)

    def tag_tensor(self, tensor: torch.Tensor, category: Category, module: str | None = None) -> None:
        """Place a tensor if it is new, and set its category and that of the tensors inside a wrapper."""
        for part in holders(tensor):
            record = self.adopt(part, "", category)
            if not self._keeps_category(record, category):
                self.settle(record, category)
            if module is not None and record.module != module:
                record.module = module
                if record.row >= 0:
                    self.builder.set_module(record.row, self.builder.module(module))
        if category is Category.PARAMETERS and tensor.requires_grad and id(tensor) not in self._parameters:
            self._parameters[id(tensor)] = weakref.ref(tensor)

    def tag_gradients(self) -> None:
        """Name the gradients of all parameters alive."""
        for parameter in self.parameters():
            gradient = parameter.grad
            if gradient is not None:
                record = None if is_wrapper(parameter) else self.known(parameter)
                self.tag_tensor(gradient, Category.GRADIENTS, None if record is None else record.module)

    def tag_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the tensors that an optimizer keeps, with the module of the parameter that they belong to."""
        for parameter, state in optimizer.state.items():
            module = None
            if isinstance(parameter, torch.Tensor) and not is_wrapper(parameter):
                record = self.known(parameter)
                module = None if record is None else record.module
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self.tag_tensor(value, Category.OPTIMIZER_STATE, module)

    def _category_now(self) -> int:
        if self.phases.phase is ProgramPhase.OPTIMIZER and not self.stepping:
            return Category.OTHER
        return super()._category_now()

    def _inside(self, tensor: torch.Tensor) -> Iterable[torch.Tensor] | None:
        return None if type(tensor) in _PLAIN else holders(tensor)


_PLAIN = frozenset({torch.Tensor, nn.Parameter})


def holders(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain CPU tensors that hold a tensor's memory: itself, those inside a wrapper, indices and values."""
    if type(tensor) not in _PLAIN and is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            if isinstance(inner := getattr(tensor, name), torch.Tensor):  # DTensor names its mesh too
                yield from holders(inner)
    elif tensor.device.type != "cpu":
        return
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


class Leaves(Enum):
    """What an op leaves behind that did not exist before."""

    NOTHING = "nothing"
    RESULTS = "results"
    PARTS = "parts"
    """Results, of an op that is made of others."""


def _what_it_leaves(info: OpInfo) -> Leaves:
    if info.composite:
        return Leaves.PARTS
    if info.name in _ADOPTING_VIEWS or info.name in _RESIZING:
        return Leaves.RESULTS
    return Leaves.RESULTS if info.fresh and not info.view else Leaves.NOTHING


def _is_of_shapes(types: Any) -> bool:
    """Whether an op only works out shapes, on tensors without memory: DTensor asks so what an op gives as a whole."""
    fake = TorchDispatchModeKey.FAKE
    return FakeTensor in types or get_dispatch_mode(fake) is not None


class MeterMode(TorchDispatchMode):
    """Runs every op for real, and meters its results."""

    supports_higher_order_operators = True

    def __init__(self, meter: CpuMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter = meter
        self.off = False
        """Whether this is a forked child of the recorded process, which is not recorded."""
        self._ops = OpTable({})
        self._leaves: dict[Any, Leaves] = {}
        self._wrapped: dict[frozenset[type], bool] = {}
        self._began = time.perf_counter_ns()
        self._after_backward = False
        _modes.add(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap each call to keep its compiler away."""
        return False

    def tick(self) -> None:
        """Bring the clock of the trace up to date."""
        self.meter.machine.clock_us = (time.perf_counter_ns() - self._began) // 1000

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op and meter its results. See NOTE [What is metered]."""
        kwargs = kwargs or {}
        if self.off or _is_of_shapes(types):
            return func(*args, **kwargs)
        if types and not _PLAIN.issuperset(types) and self._has_wrapper(types):
            return NotImplemented  # the wrapper unpacks itself and calls again
        if not isinstance(func, OpOverload):
            out = func(*args, **kwargs)
            self._adopt_all(out, str(func), None)
            return out
        leaves = self._leaves.get(func)
        if leaves is None:
            leaves = self._leaves[func] = _what_it_leaves(self._ops[func])
        if leaves is Leaves.PARTS and torch.is_inference_mode_enabled():
            # Below autograd's keys composite ops arrive whole; a card's allocator sees what they are made of.
            with self:
                parts = take_apart(func, args, kwargs)
            if parts is not NotImplemented:
                return parts
        meter = self.meter
        self.tick()
        meter.ops += 1
        category = self._before(args, kwargs)
        if meter.follows_use and not self._ops[func].view:
            meter.use(_strided(args))
        out = func(*args, **kwargs)
        if leaves is not Leaves.NOTHING or "out" in kwargs:
            self._adopt_all(out, self._ops[func].overload, category)
        return out

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Follow the phase and note the arguments of an op outside every module; gives the category of its results."""
        meter = self.meter
        if current_graph_task_id() != -1:
            if meter.phases.phase is not ProgramPhase.BACKWARD:
                meter.phases.begin(ProgramPhase.BACKWARD)
            return None
        if meter.modules.running() or meter.stepping or meter.category is not None:
            return None
        return self._look_at(args, kwargs)

    def _look_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Note the arguments of an op outside modules: data, or part of a forward pass (a loss)."""
        meter = self.meter
        found = [meter.adopt(tensor, "") for tensor in _strided(args)]
        if kwargs:
            found += [meter.adopt(tensor, "") for tensor in _strided(tuple(kwargs.values()))]
        if meter.phases.phase is not ProgramPhase.FORWARD:
            return None
        if not any(record.category in (Category.ACTIVATIONS, Category.PARAMETERS) for record in found):
            return Category.OTHER
        for record in found:
            if record.category == Category.OTHER:
                meter.settle(record, Category.INPUTS)
        return None

    def _adopt_all(self, out: Any, op: str, category: int | None) -> None:
        meter = self.meter
        if type(out) is torch.Tensor:
            if out.is_cpu and out.layout is torch.strided:
                meter.adopt(out, op, category)
                return
            for part in holders(out):
                meter.adopt(part, op, category)
        elif isinstance(out, (list, tuple)):
            for item in out:
                self._adopt_all(item, op, category)
        elif isinstance(out, torch.Tensor):
            for part in holders(out):
                meter.adopt(part, op, category)

    def _has_wrapper(self, types: Any) -> bool:
        key = frozenset(types)
        found = self._wrapped.get(key)
        if found is None:
            plain = torch.Tensor.__torch_dispatch__
            found = self._wrapped[key] = any(t.__torch_dispatch__ is not plain for t in key - _PLAIN)
        return found


_modes: weakref.WeakSet[MeterMode] = weakref.WeakSet()


def _leave_forked_children_alone() -> None:
    for mode in _modes:
        mode.off = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_forked_children_alone)


def _strided(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The strided CPU tensors among arguments, lists one level deep."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.device.type == "cpu":
                yield value
        elif type(value) in (list, tuple):
            for item in value:
                if (
                    isinstance(item, torch.Tensor)
                    and item.layout is torch.strided
                    and item.device.type == "cpu"
                ):
                    yield item


def tensors_of(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a module's call."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item, depth - 1)
