"""Methods of storages, which do not pass the dispatcher: those of virtual tensors lie on ``meta`` for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner

if TYPE_CHECKING:
    from vramfit.virtual.meter import VirtualRecord

_DEVICE: Any = torch._C.StorageBase.device  # type: ignore[attr-defined]


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Let storages on the card say where they are, change their size, and be copied."""
    _patch_resize(mode, patches)
    _patch_device(mode, patches)
    _patch_addresses(mode, patches)
    _patch_copies(mode, patches)


def _record(mode: OpRunner, storage: torch.UntypedStorage) -> VirtualRecord | None:
    if _DEVICE.__get__(storage).type != "meta":
        return None
    return mode.meter.record_of(_bytes(storage))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of bytes over a storage where it lies for torch."""
    return torch.empty(0, dtype=torch.uint8, device=_DEVICE.__get__(storage)).set_(storage)


def _patch_resize(mode: OpRunner, patches: PatchStack) -> None:
    """``tensor.untyped_storage().resize_(n)``: what was there is not known any more, and the block follows."""
    original: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if _DEVICE.__get__(self).type == "meta" and size != self.nbytes():
            mode.shadows.forget(_bytes(self))
        out = original(self, size)
        mode.meter.resized(self, "storage.resize_")
        return out

    patches.set(torch.UntypedStorage, "resize_", resize_)


def _patch_device(mode: OpRunner, patches: PatchStack) -> None:
    """``tensor.untyped_storage().device``, and what follows from it."""

    def device(self: torch.UntypedStorage) -> torch.device:
        record = _record(mode, self)
        return _DEVICE.__get__(self) if record is None else torch.device("cuda", record.device)

    patches.set(torch.UntypedStorage, "device", property(device))


def _patch_addresses(mode: OpRunner, patches: PatchStack) -> None:
    """``data_ptr()`` on the card is the replica's address; on the host it is one that no other storage has."""
    original: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr

    def data_ptr(self: torch.UntypedStorage) -> int:
        if _DEVICE.__get__(self).type != "meta":
            return original(self)
        record = _record(mode, self)
        return self._cdata if record is None else record.address

    patches.set(torch.UntypedStorage, "data_ptr", data_ptr)


def _patch_copies(mode: OpRunner, patches: PatchStack) -> None:
    """``storage.copy_(other)``, ``.cpu()``, ``.cuda()``, ``.clone()`` and ``.fill_()``: those of a tensor over it."""

    def over(storage: torch.UntypedStorage) -> torch.Tensor:
        record = _record(mode, storage)
        whole = _bytes(storage)
        return (
            whole
            if record is None
            else mode.describer.factory.make(whole, torch.device("cuda", record.device))
        )

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
