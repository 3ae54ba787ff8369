"""Methods of tensors and storages that torch implements below the dispatcher, for virtual ones."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vramfit.compiled_through import standing_in
from vramfit.patching import PatchStack
from vramfit.torch_internals import dispatch
from vramfit.torch_internals.cuda_device import gpu_context
from vramfit.torch_internals.dispatch import script_builtins
from vramfit.torch_internals.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    device_constructors,
    only_lifts_cpu_tensors,
    set_only_lift_cpu_tensors,
)
from vramfit.torch_internals.tensor_objects import storage_device
from vramfit.virtual.fake_impls.host import LONGEST_LIST, download, may_be_shortened
from vramfit.virtual.meter import VirtualRecord
from vramfit.virtual.op_runner import OpRunner

_DEVICE: Any = storage_device
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Give virtual tensors and storages what programs ask of real ones: host values, addresses, a printed form."""
    # With is_available() true, FakeTensor would create a real CUDA tensor to wake the device up.
    gpu_context.replace(patches, lambda device: None)
    # A mismatch of shapes is the program's error and is raised; torch would also log it, with a traceback.
    patches.set(logging.getLogger(FakeTensorMode.__module__), "disabled", True)
    _keep_lifting(patches)
    _patch_lists(mode, patches)
    _patch_host_values(mode, patches)
    _patch_addresses(mode, patches)
    _patch_sharing(mode, patches)
    _patch_repr(mode, patches)
    _refuse_nested(mode, patches)
    _patch_storage_making(patches)
    _patch_storage_size(mode, patches)
    _patch_storage_place(mode, patches)
    _patch_storage_copies(mode, patches)


def _refuse_nested(mode: OpRunner, patches: PatchStack) -> None:
    """Jagged nested tensors need symbolic sizes, which fake tensors here do not have: say so by name."""

    def get_nested_int(self: FakeTensor, **options: Any) -> Any:
        message = "the virtual GPU has no nested tensors (layout=torch.jagged) yet"
        mode.machine.warn("op-without-rule", message, location=mode.guesses.location())
        raise NotImplementedError(f"vramfit: {message}")

    patches.set(FakeTensor, "get_nested_int", get_nested_int)


def _keep_lifting(patches: PatchStack) -> None:
    """``torch.tensor(data, device="cuda")`` must make a CPU tensor first and copy it where the mode sees it."""
    before = only_lifts_cpu_tensors()
    set_only_lift_cpu_tensors(True)
    patches.call(lambda: set_only_lift_cpu_tensors(before))


def _patch_lists(mode: OpRunner, patches: PatchStack) -> None:
    """``torch.tensor([loss, other_loss])``, ``x[[row, other_row]]``: torch copies the numbers below the dispatcher."""
    original: Callable[..., torch.Tensor] = torch.tensor
    as_original: Callable[..., torch.Tensor] = torch.as_tensor
    # torch makes its table of what follows the default device once, of the functions that it finds then.
    device_constructors()

    def real(data: Any) -> Any:
        set_only_lift_cpu_tensors(True)  # kept per thread, and autograd has threads of its own
        return _on_host(mode, data) if isinstance(data, (list, tuple)) else data

    def tensor(
        data: Any, *args: Any, pin_memory: bool = False, requires_grad: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and _is_traced() and torch.device(device).type == "cuda":
            made = _traced(original, data, *args, **kwargs)
        else:
            made = original(real(data), *args, **kwargs)
        if pin_memory:  # torch would ask the runtime for pages where it copies the data, below the dispatcher
            made = made.pin_memory()
        return made.requires_grad_() if requires_grad else made

    def as_tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return as_original(real(data), *args, **kwargs)

    def new_tensor(self: FakeTensor, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.Tensor.new_tensor(self, real(data), *args, **kwargs)

    def get(self: FakeTensor, index: Any) -> torch.Tensor:
        _keep_within(mode, self, index)
        return torch.Tensor.__getitem__(self, _index(mode, index))

    def put(self: FakeTensor, index: Any, value: Any) -> None:
        _keep_within(mode, self, index)
        torch.Tensor.__setitem__(self, _index(mode, index), value)

    pairs = [(one, standing_in(one, ours)) for one, ours in ((original, tensor), (as_original, as_tensor))]
    patches.rebind(pairs)
    builtins = script_builtins()  # by which torch.jit.script knows what it need not compile
    for before, replaced in pairs:
        patches.item(builtins, id(replaced), builtins[id(before)])
    patches.set(FakeTensor, "new_tensor", new_tensor)
    patches.set(FakeTensor, "__getitem__", get)
    patches.set(FakeTensor, "__setitem__", put)


def _is_traced() -> bool:
    """Whether a compiler writes down on this thread what is called."""
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and tracing.get_proxy_mode() is not None


def _traced(
    make: Callable[..., torch.Tensor], data: Any, *, device: Any, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A constant of a program that is compiled, on the card.

    The tracer works out what follows from constants alone, for real (torch/fx/experimental/proxy_tensor.py,
    ``proxy_call``): a copy of one to the card, where a card is. So it is given none to copy.
    """
    if isinstance(data, bool | int | float | complex):
        return torch.full((), data, dtype=dtype, device=device)
    on_host = make(data, dtype=dtype)
    empty = torch.empty(on_host.shape, dtype=on_host.dtype, device=device)
    filled: torch.Tensor = torch.ops.aten.copy.default(empty, on_host)
    return filled


def _index(mode: OpRunner, index: Any) -> Any:
    """An index, its lists without virtual tensors."""
    if isinstance(index, list):
        return _on_host(mode, index)
    if isinstance(index, tuple) and any(isinstance(item, (list, tuple)) for item in index):
        return tuple(_on_host(mode, item) if isinstance(item, (list, tuple)) else item for item in index)
    return index


def _keep_within(mode: OpRunner, tensor: torch.Tensor, index: Any) -> None:
    """Clamp guessed numbers that pick an element to the dimension that they index.

    torch reads such a number on the host and refuses one out of range. A program that runs on a card has none there, so
    a guess beyond the end (an expert that no token can choose) was too high.
    """
    items = index if isinstance(index, tuple) else (index,)
    if not any(type(item) is FakeTensor for item in items):
        return
    axes = tensor.dim() - sum(map(_indexed, items))
    axis = 0
    for item in items:
        if type(item) is FakeTensor and not item.dim() and item.dtype in _INTEGERS and axis < tensor.dim():
            shadow, value, size = mode.shadows.find(item), mode.shadows.view(item), tensor.shape[axis]
            if size and shadow is not None and shadow.guessed and value is not None:
                value.clamp_(-size, size - 1)
        axis += axes if item is Ellipsis else _indexed(item)


def _indexed(item: Any) -> int:
    """The number of dimensions that one part of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if mask else 1


def _on_host(mode: OpRunner, data: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    """Nested lists with real CPU tensors in place of virtual ones, which keep their types."""
    if not any(isinstance(item, (FakeTensor, list, tuple)) for item in data):
        return data
    return [
        download(mode, item.detach(), {})
        if isinstance(item, FakeTensor)
        else _on_host(mode, item)
        if isinstance(item, (list, tuple))
        else item
        for item in data
    ]


def _patch_host_values(mode: OpRunner, patches: PatchStack) -> None:
    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            raise TypeError(
                f"can't convert {tensor.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if tensor.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        shadow, values = mode.shadows.find(tensor), mode.shadows.view(tensor)
        if shadow is not None and values is not None and not shadow.guessed:
            return values  # what is written to the array is written to the tensor
        return download(mode, tensor, {})

    def numpy(self: FakeTensor, *, force: bool = False) -> Any:
        source = self.detach().cpu() if force else self
        return (on_host(source) if type(source) is FakeTensor else source).numpy()

    def array(self: FakeTensor, dtype: Any = None) -> Any:
        values = on_host(self).numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def tolist(self: FakeTensor) -> Any:
        return as_list(download(mode, self, {}))

    original: Callable[[torch.Tensor], Any] = torch.Tensor.tolist
    iterate: Callable[[torch.Tensor], Iterator[torch.Tensor]] = torch.Tensor.__iter__

    def as_list(self: torch.Tensor) -> Any:
        return original(_shortened(mode, self))

    def each(self: torch.Tensor) -> Iterator[torch.Tensor]:
        return iterate(_shortened(mode, self))

    patches.set(FakeTensor, "numpy", numpy)
    patches.set(FakeTensor, "__array__", array)
    patches.set(FakeTensor, "tolist", tolist)
    patches.set(torch.Tensor, "tolist", as_list)
    patches.set(torch.Tensor, "__iter__", each)


def _shortened(mode: OpRunner, tensor: torch.Tensor) -> torch.Tensor:
    """The first rows of a tensor of an assumed length that becomes a list: nobody waits for millions of guesses."""
    if tensor.dim() == 0 or tensor.shape[0] <= LONGEST_LIST:
        return tensor
    made_up = may_be_shortened(mode, tensor) if type(tensor) is FakeTensor else mode.made_up.find(tensor)
    if not made_up:
        return tensor
    mode.machine.warn(
        "list-shortened",
        f"a list was made of values whose number is assumed: the first {LONGEST_LIST} stand for all",
        location=mode.guesses.location(),
    )
    return tensor[:LONGEST_LIST]


def _patch_addresses(mode: OpRunner, patches: PatchStack) -> None:
    """``data_ptr()`` on the card is the replica's address; on the host it is one that no other tensor has."""

    def data_ptr(self: FakeTensor) -> int:
        record = mode.meter.record_of(self)
        base = record.address if record is not None else self.untyped_storage()._cdata
        return base + int(self.storage_offset()) * self.element_size() if base else 0

    patches.set(FakeTensor, "data_ptr", data_ptr)


def _patch_sharing(mode: OpRunner, patches: PatchStack) -> None:
    """Shared memory: a card's always is, as torch says; DLPack would hand out an address that holds nothing."""

    def share_memory_(self: FakeTensor) -> FakeTensor:
        return self

    def is_shared(self: FakeTensor) -> bool:
        return self.device.type == "cuda"

    def dlpack(self: FakeTensor, **options: Any) -> Any:
        if self.device.type == "cpu":
            return download(mode, self.detach(), {}).__dlpack__(**options)
        raise NotImplementedError(
            "vramfit: a tensor of the virtual GPU cannot be exported with DLPack (to_dlpack, from_dlpack): "
            "its values were never computed"
        )

    original: Callable[[torch.Tensor], Any] = dispatch.to_dlpack

    def to_dlpack(tensor: torch.Tensor) -> Any:
        return dlpack(tensor) if isinstance(tensor, FakeTensor) else original(tensor)

    patches.set(FakeTensor, "share_memory_", share_memory_)
    patches.set(FakeTensor, "is_shared", is_shared)
    patches.set(FakeTensor, "__dlpack__", dlpack)
    patches.rebind([(original, to_dlpack)])


def _patch_repr(mode: OpRunner, patches: PatchStack) -> None:
    def represent(self: FakeTensor, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        if self.fake_mode.in_kernel_invocation:  # torch formats a message of its own: no ops from here
            return f"tensor(..., size={tuple(self.shape)})"
        view = mode.shadows.view(self)
        shadow = mode.shadows.find(self)
        where = f", device='{self.device}'" if self.device.type != "cpu" else ""
        grad = ", requires_grad=True" if self.requires_grad and self.is_leaf else ""
        if view is None or shadow is None or shadow.guessed:
            return f"tensor(..., size={tuple(self.shape)}, dtype={self.dtype}{where}{grad})"
        return f"{repr(view.detach())[:-1]}{where}{grad})"

    def formatted(self: FakeTensor, spec: str) -> str:
        if self.dim() == 0:
            return str(self.item().__format__(spec))
        return object.__format__(self, spec)

    patches.set(FakeTensor, "__repr__", represent)
    patches.set(FakeTensor, "__format__", formatted)


# -- Storages, whose methods do not pass the dispatcher: those of virtual tensors lie on ``meta`` for torch -------


def _record(mode: OpRunner, storage: torch.UntypedStorage) -> VirtualRecord | None:
    # By the storage itself: no tensor can be laid over one whose size is a symbol, as those of compilers are.
    return mode.meter.record_of_storage(storage) if _DEVICE.__get__(storage).type == "meta" else None


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of bytes over a storage where it lies for torch."""
    return torch.empty(0, dtype=torch.uint8, device=_DEVICE.__get__(storage)).set_(storage)


def _patch_storage_making(patches: PatchStack) -> None:
    """``torch.UntypedStorage(n, device="cuda")``, ``torch.cuda.FloatStorage(n)``: those of a new tensor of bytes."""
    original = torch.UntypedStorage.__new__

    def new(cls: type[torch.UntypedStorage], *args: Any, **options: Any) -> Any:
        device = options.get("device")
        if device is None or torch.device(device).type != "cuda":
            return original(cls, *args, **options)
        given = args[0] if args else options.get("size", 0)
        whole = torch.empty(given, dtype=torch.uint8, device=device) if isinstance(given, int) else None
        if whole is None:
            whole = torch.tensor(given, dtype=torch.uint8, device=device)
        return whole.untyped_storage()

    patches.set(torch.UntypedStorage, "__new__", new)


def _patch_storage_size(mode: OpRunner, patches: PatchStack) -> None:
    """``tensor.untyped_storage().resize_(n)``: its values are no longer known, and the block follows."""
    original: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if _DEVICE.__get__(self).type == "meta" and size != self.nbytes():
            mode.shadows.forget(_bytes(self))
        out = original(self, size)
        mode.meter.resized(self, "storage.resize_")
        return out

    patches.set(torch.UntypedStorage, "resize_", resize_)


def _patch_storage_place(mode: OpRunner, patches: PatchStack) -> None:
    """``.device``, and ``.data_ptr()``: on the card the replica's address, on the host one of the storage's own."""
    original: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr

    def device(self: torch.UntypedStorage) -> torch.device:
        record = _record(mode, self)
        return _DEVICE.__get__(self) if record is None else torch.device("cuda", record.device)

    def data_ptr(self: torch.UntypedStorage) -> int:
        if _DEVICE.__get__(self).type != "meta":
            return original(self)
        record = _record(mode, self)
        return self._cdata if record is None else record.address

    patches.set(torch.UntypedStorage, "device", property(device))
    patches.set(torch.UntypedStorage, "data_ptr", data_ptr)


def _patch_storage_copies(mode: OpRunner, patches: PatchStack) -> None:
    """``storage.copy_(other)``, ``.cpu()``, ``.cuda()``, ``.clone()`` and ``.fill_()``: those of a tensor over it."""

    def over(storage: torch.UntypedStorage) -> torch.Tensor:
        record, whole = _record(mode, storage), _bytes(storage)
        if record is None:
            return whole
        return mode.describer.factory.make(whole, torch.device("cuda", record.device))

    def on_card(storage: Any) -> bool:
        return isinstance(storage, torch.UntypedStorage) and _record(mode, storage) is not None

    base = torch.UntypedStorage
    originals: dict[str, Callable[..., Any]] = {
        name: getattr(base, name) for name in ("copy_", "cpu", "cuda", "clone", "fill_")
    }

    def copy_(self: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: bool = False) -> Any:
        if not (on_card(self) or on_card(source)):
            return originals["copy_"](self, source, non_blocking)
        over(self).copy_(over(source), non_blocking=bool(non_blocking))
        return self

    def cpu(self: torch.UntypedStorage) -> Any:
        return over(self).cpu().untyped_storage() if on_card(self) else originals["cpu"](self)

    def cuda(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> Any:
        return over(self).cuda(device, non_blocking=non_blocking).untyped_storage()

    def clone(self: torch.UntypedStorage) -> Any:
        return over(self).clone().untyped_storage() if on_card(self) else originals["clone"](self)

    def fill_(self: torch.UntypedStorage, value: int) -> Any:
        if not on_card(self):
            return originals["fill_"](self, value)
        over(self).fill_(value)
        return self

    for name, method in {"copy_": copy_, "cpu": cpu, "cuda": cuda, "clone": clone, "fill_": fill_}.items():
        patches.set(base, name, method)
