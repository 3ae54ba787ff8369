"""Pickles of virtual tensors, past ``torch.save``: ``pickle``, joblib, and the queues and pipes of processes.

NOTE [Pickled storages]
torch pickles a tensor as a call that builds it on its storage, and a storage as what the old format of ``torch.save``
writes of it (torch/storage.py, ``__reduce__``). A virtual tensor's storage is written the same way, of zeros: a file
has the size that it would have, and is read without us with true shapes and types. Behind the zeros, where torch reads
no further, stands what this or another process of the run needs to make the virtual storage again: its device, and the
values of a small one.

Two kinds of storages are written as a mark instead, which nothing but a virtual run can read. Where files are written
for real, zeros would look like a good file. And zeros of more than a gibibyte in all would fill the memory of this
machine.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.serialization import (
    load_from_bytes,
    package_registry,
    rebuild_parameter,
    rebuild_parameter_with_state,
    rebuild_tensor,
    rebuild_tensor_of_new_types,
)
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_patches.saved_files import LARGE

MARK = "storage of a virtual run, without values"
_MAGIC = b"vramfit:storage"
_LENGTH = struct.Struct("<Q")
_NO_VALUES = "pickled-short"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Description:
    """What makes a virtual storage again.

    Attributes:
        dtype: of the tensor that was pickled.
        typed: whether torch writes the storage with that type, as it does for all but the newest types.
        nbytes: of the storage.
        device: on which it lies: ``cuda:0`` or ``cpu``.
        values: the bytes of a small storage whose values are followed, else None.
        guessed: whether these are plausible rather than true.
    """

    dtype: torch.dtype
    typed: bool
    nbytes: int
    device: str
    values: bytes | None
    guessed: bool


class PickledStorage:
    """Stands for the storage of a virtual tensor on its way into a pickle and out of it."""

    def __init__(self, description: _Description, write: Callable[[_Description], bytes]) -> None:
        self.description = description
        self._write = write

    def __reduce_ex__(self, protocol: Any) -> Any:
        return load_from_bytes, (self._write(self.description),)


class _Data:
    """A parameter's data as `torch.nn.Parameter.__reduce_ex__` would find it, without making a tensor for it."""

    def __init__(self, reduced: Any) -> None:
        self._reduced = reduced

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._reduced


class VirtualPickles:
    """Pickles virtual tensors, and makes them again.

    Args:
        save: ``torch.save`` itself.
        for_real: whether files are written for real.
    """

    def __init__(
        self, mode: OpRunner, patches: PatchStack, save: Callable[..., None], for_real: Callable[[], bool]
    ) -> None:
        self._mode = mode
        self._save = save
        self._for_real = for_real
        self._zeros_left = LARGE
        self._local = threading.local()
        blank = FakeTensor(mode.fake, torch.empty(0, device="meta"), torch.device("cpu"))
        self._not_state = {*vars(blank), "_is_param", "fake_device", "_backward_hooks"}
        registry: list[Any] = package_registry
        entry = (0, self._tag, lambda storage, location: None)
        registry.insert(0, entry)
        patches.call(lambda: registry.remove(entry))

    # -- writing -------------------------------------------------------------------------------------------------

    def reduced(self, tensor: FakeTensor) -> Any:
        """What pickling a virtual tensor gives: how to build it, on its storage."""
        if not getattr(tensor, "_is_param", False):
            return self._reduced_data(tensor, tensor.requires_grad)
        data, hooks = _Data(self._reduced_data(tensor, False)), OrderedDict[int, Any]()
        state = {name: value for name, value in vars(tensor).items() if name not in self._not_state}
        if state:
            return rebuild_parameter_with_state, (data, tensor.requires_grad, hooks, state)
        return rebuild_parameter, (data, tensor.requires_grad, hooks)

    def _reduced_data(self, tensor: FakeTensor, requires_grad: bool) -> Any:
        skipping: Any = torch.serialization  # the context is untyped
        with skipping.skip_data(materialize_fake_tensors=True):
            rebuild, args = tensor._reduce_ex_internal(2)
        if tensor.layout is not torch.strided:  # made of tensors, which come here themselves
            return rebuild, args
        storage = PickledStorage(self._described(tensor, args[0]), self._written)
        return rebuild, (storage, *args[1:4], requires_grad, *args[5:])

    def _described(self, tensor: FakeTensor, storage: Any) -> _Description:
        shadow = self._mode.shadows.find(tensor)
        return _Description(
            dtype=tensor.dtype,
            typed=isinstance(storage, torch.TypedStorage),
            nbytes=tensor.untyped_storage().nbytes(),
            device=str(tensor.device),
            values=None if shadow is None else bytes(_bytes_of(shadow.real).numpy()),
            guessed=bool(shadow and shadow.guessed),
        )

    def _written(self, what: _Description) -> bytes:
        """The bytes that torch reads a storage from. See NOTE [Pickled storages]."""
        buffer = io.BytesIO()
        if self._for_real() or what.nbytes > self._zeros_left:
            self._tell_mark()
            self._save({MARK: _plain(what)}, buffer, _use_new_zipfile_serialization=False)
            return buffer.getvalue()
        self._zeros_left -= what.nbytes
        zeros: Any = _bytes_of(bytearray(what.nbytes)).untyped_storage()
        if what.typed:
            zeros = torch.TypedStorage(wrap_storage=zeros, dtype=what.dtype, _internal=True)
        with self._tagged(what.device):
            self._save(zeros, buffer, _use_new_zipfile_serialization=False)
        about = pickle.dumps(_plain(what))
        return b"".join((buffer.getvalue(), about, _LENGTH.pack(len(about)), _MAGIC))

    @contextmanager
    def _tagged(self, device: str) -> Iterator[None]:
        """Let this thread's storages be written as those of a device."""
        self._local.device = device
        try:
            yield
        finally:
            self._local.device = None

    def _tag(self, storage: Any) -> str | None:
        del storage
        return getattr(self._local, "device", None)

    def _tell_mark(self) -> None:
        machine, where = self._mode.machine, self._mode.guesses.location()
        machine.warn(
            _NO_VALUES,
            "what was pickled is shorter than it would be, and only this run can read it: its tensors are virtual, and "
            "a mark stands for each",
            location=where,
        )

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, data: memoryview) -> PickledStorage | None:
        """The storage that the bytes of a pickle stand for; None for one that is real."""
        if data[-len(_MAGIC) :] != _MAGIC:
            return None
        end = len(data) - len(_MAGIC) - _LENGTH.size
        (length,) = _LENGTH.unpack_from(data, end)
        return self._storage_of(pickle.loads(data[end - length : end]))

    def marked(self, out: Any) -> PickledStorage | None:
        """The storage that a mark stands for; None for anything else that was loaded."""
        if isinstance(out, dict) and out.keys() == {MARK}:
            return self._storage_of(out[MARK])
        return None

    def _storage_of(self, plain: tuple[Any, ...]) -> PickledStorage:
        dtype, typed, nbytes, device, values, guessed = plain
        what = _Description(
            dtype=getattr(torch, dtype),
            typed=typed,
            nbytes=nbytes,
            device=device,
            values=values,
            guessed=guessed,
        )
        return PickledStorage(what, self._written)

    def patch_building(self, patches: PatchStack) -> None:
        """Let torch build tensors on the storages that are read here, last of all that build them."""
        build, build_new = rebuild_tensor.get(), rebuild_tensor_of_new_types.get()

        def built(storage: Any, offset: int, size: Any, stride: Any) -> Any:
            if isinstance(storage, PickledStorage):
                return self._whole(storage.description).as_strided(size, stride, offset)
            return build(storage, offset, size, stride)

        @functools.wraps(build_new)  # pickles hold it by its name
        def built_new(
            storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, *rest: Any
        ) -> Any:
            if isinstance(storage, PickledStorage):
                tensor = self._whole(storage.description).as_strided(size, stride, offset)
                return tensor.requires_grad_(requires_grad)
            return build_new(storage, offset, size, stride, requires_grad, hooks, *rest)

        rebuild_tensor.replace(patches, built)
        rebuild_tensor_of_new_types.replace(patches, built_new)

    def _whole(self, what: _Description) -> Any:
        """A tensor over the whole of a virtual storage, made new."""
        count = what.nbytes // what.dtype.itemsize
        device = torch.device(what.device)
        if device.type == "cpu":
            meta = torch.empty(count, dtype=what.dtype, device="meta")
            whole: Any = FakeTensor(self._mode.fake, meta, device)
        else:
            whole = torch.empty(count, dtype=what.dtype, device=device)
        if what.values is not None:
            values = _bytes_of(bytearray(what.values)).untyped_storage()
            self._mode.shadows.share(whole, values, guessed=what.guessed)
        return whole


def _plain(what: _Description) -> tuple[Any, ...]:
    """A description of plain values, which any process can read."""
    dtype = str(what.dtype).removeprefix("torch.")
    return dtype, what.typed, what.nbytes, what.device, what.values, what.guessed


def _bytes_of(source: torch.UntypedStorage | bytearray) -> torch.Tensor:
    """A real tensor of bytes over a storage or a buffer."""
    if isinstance(source, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(source)
    if not source:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(source, dtype=torch.uint8)
