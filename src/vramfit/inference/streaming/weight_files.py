"""Weights in files, as other libraries write them: where each tensor's bytes are, and files of our own.

Formats: safetensors (huggingface.co/docs/safetensors, "Format"), and NumPy's ``.npy``, one tensor a file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from vramfit.errors import UsageError
from vramfit.writing import write_file

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header that its own library accepts (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where the bytes of a contiguous tensor are.

    Attributes:
        offset: of the first byte in the file.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def mapped(self) -> torch.Tensor:
        """The tensor over the file's pages: nothing is read before it is looked at, and what is written stays here.

        Raises:
            UsageError: the file cannot be read, or is shorter than it should be.
        """
        try:
            pages = np.memmap(self.path, mode="c", dtype=np.uint8)
            part = torch.from_numpy(pages[self.offset : self.offset + self.nbytes])
            if part.numel() != self.nbytes:
                raise ValueError("the file ends too early")
            if self.offset % self.dtype.itemsize:
                part = part.clone()  # the CPU reads numbers at multiples of their size
            return part.view(self.dtype).view(self.shape)
        except (OSError, ValueError) as error:
            raise unreadable(self.path, error) from error


def unreadable(path: Path, why: object) -> UsageError:
    """The error of a file of weights that cannot be read."""
    return UsageError(
        f"the weights in {path} cannot be read: {why}",
        "Give a .safetensors file, or a folder of these or of .npy files",
    )


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a ``.safetensors`` file, or of a folder of these or of ``NAME.npy`` files, by name.

    Raises:
        UsageError: there is no such file, or it is of another format or damaged.
    """
    if not path.is_dir():
        return _in_safetensors(path)
    found: dict[str, StoredTensor] = {}
    try:
        files = sorted(path.iterdir())
    except OSError as error:
        raise unreadable(path, error.strerror) from error
    for file in files:
        if file.suffix == ".safetensors":
            found |= _in_safetensors(file)
        elif file.suffix == ".npy":
            found[file.stem] = _in_npy(file)
    if not found:
        raise unreadable(path, "it has no .safetensors and no .npy files")
    return found


def _in_safetensors(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _LONGEST_HEADER):
                raise ValueError("it is no safetensors file")
            header = json.loads(stream.read(length))
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            tensor = StoredTensor(
                path=path,
                offset=8 + length + begin,
                shape=tuple(entry["shape"]),
                dtype=_DTYPES[entry["dtype"]],
            )
            if end - begin != tensor.nbytes or 8 + length + end > size:
                raise ValueError(f"{name} is cut off")
            found[name] = tensor
        return found
    except OSError as error:
        raise unreadable(path, error.strerror) from error
    except KeyError as error:
        raise unreadable(path, f"{error} is not known") from error
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        raise unreadable(path, error) from error


def _in_npy(path: Path) -> StoredTensor:
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        if not mapped.flags.c_contiguous or not isinstance(mapped, np.memmap):
            raise ValueError("it is not in C order")
        dtype = torch.from_numpy(np.empty(0, mapped.dtype)).dtype
        return StoredTensor(path=path, offset=int(mapped.offset), shape=tuple(mapped.shape), dtype=dtype)
    except OSError as error:
        raise unreadable(path, error.strerror or error) from error
    except (ValueError, TypeError) as error:
        raise unreadable(path, error) from error


def store(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Write tensors of the CPU to a safetensors file, whole or not at all.

    Raises:
        UsageError: a dtype has no name in the format.
        WriteError: it cannot be written.
    """
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise UsageError(
                f"{name} of dtype {tensor.dtype} cannot be written to a file", "Let it stay in memory"
            )
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # what follows begins at a multiple of every number's size
    write_file(path, lambda stream: _write(stream, text, tensors.values()))
    return _in_safetensors(path)


def _write(stream: BinaryIO, header: bytes, tensors: Iterable[torch.Tensor]) -> None:
    stream.write(struct.pack("<Q", len(header)))
    stream.write(header)
    for tensor in tensors:
        stream.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
