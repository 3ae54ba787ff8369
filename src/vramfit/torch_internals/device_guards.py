"""The device guard of ``cuda``: torch's no-op guard in the place of the build's own, and the device that it holds.

Autograd and ``x.cuda()`` look for the guard of a device type in ``c10::impl::device_guard_impl_registry``
(c10/core/impl/DeviceGuardImplInterface.h). A CPU build has none there; that of a CUDA build asks the driver. torch
brings one that only remembers a number for each thread (``FakeGuardImpl``, c10/core/impl/FakeGuardImpl.h, since 2.10),
which ``torch._C._ensureCUDADeviceGuardSet()`` puts there, but only in place of one whose ``deviceCount()`` is 0. So we
register, for a moment, a dummy whose every method returns 0, and let torch replace it.

Until 2.11 that guard belongs to the thread that asked for it: its object goes with the thread, and with the next time
that torch makes one there (c10/core/impl/DeviceGuardImplInterface.cpp, ``tls_fake_device_guard``; pytorch#178950 mends
it). What it remembers is apart from it, so a copy of it that is kept for ever serves all threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vramfit.torch_internals.headers import declared
from vramfit.torch_internals.torch_libraries import Undo, library, pointer_at, put
from vramfit.torch_internals.virtual_tables import WORD, TableNames, table_names

_CUDA = 1  # c10/core/DeviceType.h: DeviceType::CUDA
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_ENCODINGS = (
    "3c104impl13FakeGuardImplILNS_10DeviceTypeE1EE",
    "3c104impl24DeviceGuardImplInterface",
)
_DUMMY_SLOTS = 64


class _Guard(NamedTuple):
    """The guard's object and the methods of it that we call; a ``c10::Device`` is two bytes, type and index."""

    address: int
    set_device: Callable[[int, int], None]
    get_device: Callable[[int], int]


_guard: _Guard | None = None


def install() -> Undo:
    """Put torch's no-op guard in place.

    Raises:
        OSError, ValueError, AttributeError: this torch has no such guard, or not where we look for it.
        EnvironmentUnfitError: nothing says which entries of its table hold its methods.
    """
    global _guard
    registry = (ctypes.c_void_p * (_CUDA + 1)).in_dll(library("c10"), _REGISTRY)
    entry = ctypes.c_void_p.from_buffer(registry, _CUDA * WORD)
    kept = _kept or _copied(entry)
    guard = _methods(ctypes.addressof(kept[0]))
    put_back = put(entry, guard.address)
    _guard = guard

    def undo() -> None:
        global _guard
        _guard = None
        put_back()

    return undo


_kept: list[Any] = []  # the copy of torch's no-op guard, once there is one: C++ keeps pointers to it


def _copied(entry: ctypes.c_void_p) -> list[Any]:
    """Let torch make its no-op guard, and copy it: all that it holds is the pointer to its virtual table."""
    dummy = ctypes.addressof(_dummy()[0])
    put_back = put(entry, dummy)
    try:
        torch._C._ensureCUDADeviceGuardSet()
        if entry.value is None or entry.value == dummy:
            raise ValueError("torch did not replace the dummy device guard")
        _kept.append(ctypes.c_void_p(pointer_at(entry.value)))
    finally:
        put_back()
    return _kept


@functools.cache
def _dummy() -> tuple[Any, ...]:
    """A guard whose every method returns 0, with what it points to: C++ may see it, so it is never collected."""
    zero = ctypes.CFUNCTYPE(ctypes.c_longlong)(lambda: 0)
    slots = (ctypes.c_void_p * _DUMMY_SLOTS)(*([ctypes.cast(zero, ctypes.c_void_p).value] * _DUMMY_SLOTS))
    return (ctypes.c_void_p * 4)(ctypes.addressof(slots)), slots, zero


def _methods(guard: int) -> _Guard:
    table = pointer_at(guard)
    names = guard_names(table)
    set_device = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint16)
    get_device = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)
    return _Guard(
        guard,
        set_device(pointer_at(table + names.slot("uncheckedSetDevice") * WORD)),
        get_device(pointer_at(table + names.slot("getDevice") * WORD)),
    )


@functools.cache
def guard_names(table: int) -> TableNames:
    """The entries of the no-op guard's virtual table, by name."""
    return table_names(
        "DeviceGuardImplInterface",
        table,
        _ENCODINGS,
        declared(("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")),
    )


def set_current_device(index: int) -> None:
    """Tell the guard which device is this thread's current one: C++ asks it where ``x.cuda()`` should go."""
    if _guard is not None:
        _guard.set_device(_guard.address, _CUDA | index << 8)


def current_device() -> int:
    """The number of this thread's current device as the guard knows it; 0 where none is in place."""
    return 0 if _guard is None else _guard.get_device(_guard.address) >> 8
