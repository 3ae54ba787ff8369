"""What tells one model, function or array from another, the same in every process: what a journal's run depends on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from vramfit.inference.arrays import has_values

_DEEPEST = 8
"""Of what is inside of what, functions and their closures too."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def described(value: Any) -> str:
    """A text that two values share only where they do the same, as far as can be seen.

    A function counts by its code, its defaults, what it closes over, and the plain values, tensors, modules and
    functions that it takes from its file; an object by its type and its attributes. What code of C does is not seen.
    """
    return _described(value, 0, frozenset())


def _described(value: Any, depth: int, above: frozenset[int]) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth > _DEEPEST or id(value) in above:
        return type(value).__qualname__
    inner = functools.partial(_described, depth=depth + 1, above=above | {id(value)})
    if isinstance(value, nn.Module):
        return f"module {model_fingerprint(value)}"
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype} {block_fingerprint(value)}"
    if isinstance(value, np.ndarray):
        return f"array {value.shape} {value.dtype} {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{inner(key)}: {inner(one)}' for key, one in value.items())}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(inner, value)))}}}"  # whose order is another in each process
    if isinstance(value, list | tuple):
        return f"({', '.join(map(inner, value))})"
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()} {inner(value.co_names)} {inner(value.co_consts)}"
    if isinstance(value, types.FunctionType):
        return _of_function(value, inner)
    if isinstance(value, types.MethodType):
        return f"{inner(value.__func__)} of {inner(value.__self__)}"
    if isinstance(value, functools.partial):
        return f"partial {inner(value.func)} {inner(value.args)} {inner(value.keywords)}"
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, type):
        return name
    if dataclasses.is_dataclass(value):
        return f"{name} {inner({one.name: getattr(value, one.name) for one in dataclasses.fields(value)})}"
    return f"{name} {inner(vars(value))}" if hasattr(value, "__dict__") else name


def _of_function(function: types.FunctionType, inner: Any) -> str:
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            held.append(None)
    taken = {
        name: function.__globals__[name]
        for name in sorted(set(_names(function.__code__)))
        if name in function.__globals__
        and isinstance(function.__globals__[name], (*_PLAIN, torch.Tensor, nn.Module, types.FunctionType))
    }
    parts = (function.__code__, function.__defaults__, function.__kwdefaults__, held, taken)
    return f"{function.__module__}.{function.__qualname__} {' '.join(map(inner, parts))}"


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)


def model_fingerprint(model: Any) -> str:
    """What tells a model from another: its modules and the values of its parameters and buffers, as a checksum.

    A function that is no module counts as `described` has it. Parameters of the virtual GPU have no values and count by
    their shapes.
    """
    digest = hashlib.blake2b(digest_size=16)
    if not isinstance(model, nn.Module):
        digest.update(described(model).encode())
        return digest.hexdigest()
    digest.update(_ADDRESS.sub("", repr(model)).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if has_values(tensor) and tensor.device.type != "meta":
            digest.update(_raw(tensor))
    return digest.hexdigest()


def block_fingerprint(block: torch.Tensor) -> str:
    """A checksum of a tensor's values."""
    if not has_values(block) or block.device.type == "meta":
        return ""
    return hashlib.blake2b(_raw(block), digest_size=16).hexdigest()


def values_fingerprint(array: Any) -> str:
    """A checksum of the values of an array of NumPy or torch in the host's memory, entry by entry of its first axis."""
    digest = hashlib.blake2b(digest_size=16)
    for one in array:
        if isinstance(one, torch.Tensor):
            digest.update(_raw(one))
        else:
            digest.update(np.ascontiguousarray(one).tobytes())
    return digest.hexdigest()


def _raw(tensor: torch.Tensor) -> Any:
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return values.view(torch.uint8).numpy()
