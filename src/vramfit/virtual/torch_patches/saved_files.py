"""Files of virtual checkpoints: of the size that they would have, holes on the disk, with a token that leads back.

NOTE [Tokens]
A checkpoint of a virtual run is written as torch or safetensors would write it, except that the bytes of virtual
tensors are left out: holes of the right length. So it can be measured, renamed and copied, and even loaded without us:
shapes and types are true, values zero. The object itself stays in memory, and a token in the file leads back to it: in
a file of ``torch.save`` the record ``.data/serialization_id``, 40 digits that are a hash of the contents otherwise and
that nothing reads (caffe2/serialize/inline_container.cc, writeSerializationId); in a file of safetensors the last bytes
of a virtual tensor, where zeros would be.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.serialization import (
    PyTorchFileReader,
    rebuild_parameter,
    save_to_zip,
    serialization_settings,
)

_RECORD = ".data/serialization_id"
_DIGITS = 40
_MAGIC = b"vramfit:"
_TOKEN_BYTES = len(_MAGIC) + _DIGITS
_CHUNK = 1 << 20
LARGE = 1 << 30
"""Bytes of virtual tensors that a buffer in memory is filled with; for more of them it gets a short mark instead."""


def new_token() -> str:
    """A token: decimal digits, as in a file's own record."""
    return f"{uuid.uuid4().int:0{_DIGITS}d}"


class _Data:
    """A parameter's data as `torch.nn.Parameter.__reduce_ex__` would find it, without making a tensor for it."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, args = self._parameter._reduce_ex_internal(protocol)
        return rebuild, (*args[:4], False, *args[5:])


def reduced(tensor: FakeTensor, protocol: Any) -> Any:
    """What pickling a tensor of the card gives: the reference to its storage, and how to build it again."""
    if getattr(tensor, "_is_param", False):
        hooks: OrderedDict[int, Any] = OrderedDict()
        return rebuild_parameter, (_Data(tensor), tensor.requires_grad, hooks)
    return tensor._reduce_ex_internal(protocol)


def is_writing() -> bool:
    """Whether this thread writes a file in which virtual tensors are holes."""
    tls = serialization_settings
    return bool(tls.skip_data and tls.materialize_fake_tensors)


class _Zip:
    """The writer of a file, which is given the contents of real storages even where torch would skip them."""

    def __init__(self, writer: Any, storages: list[Any]) -> None:
        self._writer = writer
        self._storages = storages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write_record_metadata(self, name: str, count: int) -> None:
        """The place of a storage."""
        storage = self._storages[int(name.rpartition("/")[2])]
        if storage.device.type == "cpu":
            self._writer.write_record(name, storage, count)
        else:
            self._writer.write_record_metadata(name, count)


class TorchFiles:
    """Writes and recognises files of ``torch.save``.

    Args:
        storages: the storages of an object in the order in which pickling meets them, each once.
    """

    def __init__(
        self, patches: PatchStack, save: Callable[..., None], storages: Callable[[Any], list[Any]]
    ) -> None:
        self._save = save
        self._storages = storages
        self._local = threading.local()
        write: Any = save_to_zip.get()

        def write_with_real(obj: Any, zip_file: Any, *args: Any, **options: Any) -> None:
            met = getattr(self._local, "storages", None)
            write(obj, zip_file if met is None else _Zip(zip_file, met), *args, **options)

        save_to_zip.replace(patches, write_with_real)

    def write(self, obj: Any, file: Any, scratch: str, *args: Any, **options: Any) -> str | None:
        """Write an object with virtual tensors, as ``torch.save`` does.

        Args:
            file: a path, or an object with ``write``.
            scratch: a folder for a file that lasts no longer than this call.
            args, options: of ``torch.save``.

        Returns:
            the token in the file; None where the file is a buffer in memory and the object too large for it.
        """
        with self._skipping(obj):
            if isinstance(file, (str, os.PathLike)):
                self._save(obj, file, *args, **options)
                return _stamp(os.fspath(file))
            if isinstance(file, io.BytesIO) and sum(one.nbytes() for one in self._storages(obj)) > LARGE:
                return None
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                # torch calls the archive in a buffer "archive" (inline_container.cc), in a file by the file's name.
                path = os.path.join(folder, "archive.pt")
                self._save(obj, path, *args, **options)
                token = _stamp(path)
                with open(path, "rb") as source:
                    while chunk := source.read(_CHUNK):
                        file.write(chunk)
        return token

    @contextmanager
    def _skipping(self, obj: Any) -> Iterator[None]:
        skipping: Any = torch.serialization  # the context is untyped
        with skipping.skip_data(materialize_fake_tensors=True):
            self._local.storages = self._storages(obj)
            try:
                yield
            finally:
                self._local.storages = None


def _stamp(path: str) -> str:
    """Put a new token into a file of ``torch.save``."""
    token = new_token()
    with open(path, "r+b") as file:
        reader: Any = PyTorchFileReader(file)  # its stub lacks most of it
        offset = reader.get_record_offset(_RECORD)
        file.seek(offset)
        file.write(token.encode())
    return token


def torch_token(file: Any) -> str | None:
    """The token of a file of ``torch.save``, or what lies in its place; None for anything else.

    The file is a path, or an object to read from, whose position stays.
    """
    if isinstance(file, (str, os.PathLike)):
        try:
            with open(file, "rb") as opened:
                return torch_token(opened)
        except OSError:
            return None
    if not (hasattr(file, "seek") and hasattr(file, "tell") and hasattr(file, "read")):
        return None
    position = file.tell()
    try:
        if file.read(4) != b"PK\x03\x04":
            return None
        file.seek(position)
        return str(PyTorchFileReader(file).serialization_id())
    except RuntimeError:  # a zip file, but not one of torch
        return None
    finally:
        file.seek(position)


# -- safetensors ---------------------------------------------------------------------------------------------------


def safetensors_header(tensors: dict[str, torch.Tensor], metadata: Any) -> tuple[bytes, dict[str, int]]:
    """The header that safetensors writes, with its length before it, and where each tensor's bytes begin after it.

    The library itself gives the order, the names of types and the form, for empty tensors of the same names and types;
    shapes and offsets are then put in (safetensors/src/tensor.rs, prepare).
    """
    import safetensors.torch

    empty = {name: torch.empty(0, dtype=tensor.dtype, device="cpu") for name, tensor in tensors.items()}
    made = safetensors.torch.save(empty, metadata)
    (length,) = struct.unpack_from("<Q", made)
    header: dict[str, Any] = json.loads(made[8 : 8 + length])
    offset, starts = 0, {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        starts[name] = offset
        entry["shape"], entry["data_offsets"] = list(tensor.shape), [offset, end]
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, starts


def write_safetensors(tensors: dict[str, torch.Tensor], file: Any, metadata: Any) -> str | None:
    """Write tensors of which some are virtual, as ``safetensors.torch.save_file`` does.

    Returns:
        the token that is in the file; None where there is no room for one.
    """
    header, starts = safetensors_header(tensors, metadata)
    file.write(header)
    total, token = len(header), None
    for name, start in starts.items():
        tensor = tensors[name]
        count = tensor.numel() * tensor.element_size()
        total += count
        if isinstance(tensor, FakeTensor):
            if token is None and count >= _TOKEN_BYTES:
                token = new_token()
                file.seek(len(header) + start + count - _TOKEN_BYTES)
                file.write(_MAGIC + token.encode())
        else:
            file.seek(len(header) + start)
            file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if file.seek(0, os.SEEK_END) < total:
        file.seek(total - 1)
        file.write(b"\0")  # a buffer in memory cannot be truncated to more than it holds
    return token


def safetensors_token(file: Any) -> str | None:
    """The token in an open file of safetensors, None if it has none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(8)
    if len(head) < 8:
        return None
    (length,) = struct.unpack("<Q", head)
    if length > size - 8:
        return None
    try:
        header = json.loads(file.read(length))
    except ValueError:
        return None
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if end - start >= _TOKEN_BYTES:
            file.seek(8 + length + end - _TOKEN_BYTES)
            found = file.read(_TOKEN_BYTES)
            if found.startswith(_MAGIC):
                return bytes(found[len(_MAGIC) :]).decode("ascii", "replace")
    return None


class OpenedSafetensors:
    """Stands for what ``safetensors.safe_open`` gives, for a file whose tensors are kept in memory."""

    def __init__(self, tensors: Callable[[str], torch.Tensor], names: list[str], header: Any) -> None:
        self._tensors = tensors
        self._names = names
        self._header = header

    def __enter__(self) -> OpenedSafetensors:
        """As the original."""
        return self

    def __exit__(self, *error: object) -> None:
        """As the original."""

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return sorted(self._names)

    def offset_keys(self) -> list[str]:
        """Names in the order of the file."""
        return list(self._names)

    def metadata(self) -> Any:
        """What was given as metadata."""
        return self._header.get("__metadata__")

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self._tensors(name)

    def get_slice(self, name: str) -> _Slice:
        """One tensor, of which a part will be asked for."""
        return _Slice(self._tensors, name, self._header[name])


class _Slice:
    """Stands for what ``safe_open(...).get_slice`` gives."""

    def __init__(self, tensors: Callable[[str], torch.Tensor], name: str, entry: Any) -> None:
        self._tensors = tensors
        self._name = name
        self._entry = entry

    def get_shape(self) -> list[int]:
        """The shape of the whole."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """The type as safetensors calls it."""
        return str(self._entry["dtype"])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensors(self._name)[index]
