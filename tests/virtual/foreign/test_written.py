"""Which parameters a kernel writes, read from sources like those of Triton kernels."""

from __future__ import annotations

import math as tl  # any module: what counts is that `tl` is one
from collections.abc import Callable
from types import SimpleNamespace

from vramfit.virtual.foreign.triton_runtime import written_parameters


def plain(x_ptr, y_ptr, out_ptr, n, BLOCK):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x + tl.load(y_ptr + offsets), mask=offsets < n)


def through_names(x_ptr, out_ptr, index_ptr, sums_ptr, stride):
    row = tl.load(index_ptr)
    out_ptr += row * stride
    place = out_ptr
    for start in range(4):
        tl.store(place + start, tl.load(x_ptr + start))
    tl.atomic_add(pointer=sums_ptr, val=1)


def helper(destination, value):
    tl.store(destination, value)


kernel_helper = SimpleNamespace(fn=helper)


def with_helper(x_ptr, out_ptr):
    kernel_helper(out_ptr + 1, tl.load(x_ptr))


def descriptor(x_desc, out_desc):
    out_desc.store([0, 0], x_desc.load([0, 0]))


def pointers(kernel: Callable[..., None]) -> set[str]:
    """Parameters that stand for tensors; numbers that are added to a pointer are of no interest."""
    return {name for name in written_parameters(kernel) if name.endswith(("_ptr", "_desc"))}


def test_what_is_stored_through_is_written_and_what_is_loaded_is_not() -> None:
    assert pointers(plain) == {"out_ptr"}
    assert pointers(through_names) == {"out_ptr", "sums_ptr"}
    assert pointers(with_helper) == {"out_ptr"}
    assert pointers(descriptor) == {"out_desc"}


def test_a_kernel_without_source_may_write_everything() -> None:
    namespace: dict[str, object] = {}
    exec("def hidden(a, b): pass", namespace)
    assert written_parameters(namespace["hidden"]) == {"a", "b"}
