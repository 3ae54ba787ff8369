"""Copies between the host and the virtual card, and the moments at which a program looks at a value."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import torch

from vramfit.capture.storages import SHARED_OUT
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.trace import Category
from vramfit.virtual import roofline
from vramfit.virtual.data_dependent.guesses import GUESSED
from vramfit.virtual.describe import COMPRESSED
from vramfit.virtual.fake_impls.registry import rule
from vramfit.virtual.fake_impls.sparse import build_compressed, download_compressed, parts_of
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.simulated_streams import Engine

_TO_COPY = torch.ops.aten._to_copy.default
_COPY_ = torch.ops.aten.copy_.default
_CLONE = torch.ops.aten.clone.default
_UNTOUCHED_BYTES = 1 << 20
LONGEST_LIST = 512
"""Most rows of which a list is made where a size is assumed and the values are made up: loops over it are to end."""
# Windows has no such flags, and needs none: its mappings without a file are private to the process.
_MMAP: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


@rule("aten._to_copy.default", hands_on=True)
def to_copy(mode: OpRunner, call: OpCall) -> Any:
    """``tensor.to(...)``: to the card gives a fake tensor, to the host a real one."""
    source: torch.Tensor = call.args[0]
    device = call.kwargs.get("device") or source.device
    if device.type == "meta":
        return torch.empty_strided(
            source.shape, source.stride(), dtype=call.kwargs.get("dtype") or source.dtype, device="meta"
        )
    if type(source) is not FakeTensor:
        return _upload(mode, source, device, call.kwargs)
    if source.layout is torch.sparse_coo:  # made of copies of its indices and values
        return mode.run(call, real=False)
    if device.type == "cpu" and source.fake_device.type == "cuda":
        return download(mode, source, call.kwargs)
    if device.type == "cuda" and source.fake_device.type == "cpu":
        return _upload_virtual(mode, call, device)
    return mode.run(call, real=False)


def _upload_virtual(mode: OpRunner, call: OpCall, device: torch.device) -> Any:
    """A virtual tensor of the host, such as a model's parameter, crosses the link as a real one does."""
    source: torch.Tensor = call.args[0]
    if source.layout is not torch.strided:
        return mode.run(call, real=False)
    out = mode.describe(call)
    mode.settle(call, out, engine=Engine.UPWARDS)
    waits = not call.kwargs.get("non_blocking")
    pinned = mode.page_locked.holds(source)
    _pass_link(mode, device.index or 0, source.nbytes, Engine.UPWARDS, pinned, waits=waits)
    return out


def _upload(
    mode: OpRunner, source: torch.Tensor, device: torch.device, kwargs: Mapping[str, Any]
) -> torch.Tensor:
    if source.device.type == "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if source.layout is torch.sparse_coo:
        return _upload_sparse(mode, source, device, kwargs)
    if source.layout in COMPRESSED:
        return _upload_compressed(mode, source, device, kwargs)
    if source.layout is not torch.strided:
        message = f"the virtual GPU has no copies of {source.layout} tensors to the card yet"
        mode.machine.warn("op-without-rule", message, location=mode.guesses.location())
        raise NotImplementedError(f"vramfit: {message}")
    fake = mode.wrap(source)
    call = mode.call(_TO_COPY, fake, **{**kwargs, "device": device})
    out = mode.describe(call)
    category = mode.meter.category  # shards on the host that are gathered are no inputs
    mode.settle(
        call,
        out,
        category=category if category in SHARED_OUT else Category.INPUTS,
        engine=Engine.UPWARDS,
    )
    waits = not kwargs.get("non_blocking")
    _pass_link(
        mode, device.index or 0, source.nbytes, Engine.UPWARDS, mode.page_locked.holds(source), waits=waits
    )
    assert isinstance(out, torch.Tensor)
    return out


def _upload_sparse(
    mode: OpRunner, source: torch.Tensor, device: torch.device, kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Indices and values of a sparse COO tensor cross one by one (native/sparse/SparseTensor.cpp, copy_sparse_)."""
    dtype = kwargs.get("dtype")
    indices = _upload(mode, source._indices(), device, {})
    values = _upload(mode, source._values(), device, {} if dtype is None else {"dtype": dtype})
    with mode:
        return torch.sparse_coo_tensor(
            indices, values, source.shape, is_coalesced=source.is_coalesced(), check_invariants=False
        )


def _upload_compressed(
    mode: OpRunner, source: torch.Tensor, device: torch.device, kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """The three parts of a CSR or CSC tensor cross one by one (native/TensorConversions.cpp, ``_to_copy``)."""
    dtype = kwargs.get("dtype")
    *indices, values = parts_of(source)
    parts = [_upload(mode, index, device, {}) for index in indices]
    parts.append(_upload(mode, values, device, {} if dtype is None else {"dtype": dtype}))
    return build_compressed(mode, parts, tuple(source.shape), source.layout)


def download(mode: OpRunner, source: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """A real CPU tensor for a virtual one: the values of its shadow, or made-up ones."""
    if source.layout in COMPRESSED:
        return download_compressed(
            source, kwargs.get("dtype") or source.dtype, lambda p: download(mode, p, {})
        )
    pinned, waits = bool(kwargs.get("pin_memory")), not kwargs.get("non_blocking")
    _pass_link(mode, source.device.index or 0, source.nbytes, Engine.DOWNWARDS, pinned, waits=waits)
    out = _host_values(mode, source, kwargs.get("dtype") or source.dtype)
    if may_be_shortened(mode, source):
        mode.made_up.set(out, True)
    if pinned:
        mode.page_locked.pin(out)
    return out


def may_be_shortened(mode: OpRunner, tensor: torch.Tensor) -> bool:
    """Whether the first of a fake tensor's rows may stand for all: there are many, and how many is assumed.

    Counts with a known sum are all needed.
    """
    if tensor.dim() == 0 or tensor.shape[0] <= LONGEST_LIST:
        return False
    assumed = any(extent.shown == tensor.shape[0] for extent in mode.meter.extents_of(tensor))
    return assumed and mode.meter.expected(tensor).total is None


def _host_values(mode: OpRunner, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    shadow = mode.shadows.find(source)
    if source.dtype is torch.bool and (shadow is None or shadow.guessed):
        mode.shading.masks.settle(source)
    if shadow is not None:
        if shadow.guessed:
            warn_guess(mode)
        view = mode.shadows.view(source)
        assert view is not None
        out = view.to(dtype, copy=True)
    else:
        warn_guess(mode)
        if source.dtype is torch.bool:
            out = mode.shading.masks.values(source).to(dtype)
        elif (fill := mode.shading.fills.find(source)) is not None:
            out = torch.full(source.shape, fill.value, dtype=dtype, device="cpu")
        else:
            out = _zeros(source.numel(), dtype).view(source.shape)
        if not (source.is_contiguous() or source.numel() == 0):
            dense = torch.ops.aten.empty_like.default(
                torch.empty_strided(source.shape, source.stride(), device="meta")
            )
            out = out.view(-1).as_strided(source.shape, dense.stride())
    return out


def _zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that cost nothing while nobody touches them: torch, and malloc with memory used before, write them."""
    nbytes = count * dtype.itemsize
    if nbytes <= _UNTOUCHED_BYTES:
        return torch.zeros(count, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes, **_MMAP), dtype=dtype)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a real tensor that takes no memory for pages of zeros, as what comes from the card has many."""
    if tensor.nbytes <= _UNTOUCHED_BYTES or not tensor.is_contiguous():
        copy: torch.Tensor = _CLONE(tensor)
        return copy
    out = _zeros(tensor.numel(), tensor.dtype)
    step = _UNTOUCHED_BYTES // tensor.element_size()
    for source, target in zip(tensor.detach().view(-1).split(step), out.split(step), strict=True):
        if source.view(torch.uint8).numpy().any():
            target.copy_(source)
    return out.view(tensor.shape)


@rule("aten.copy_.default")
def copy_(mode: OpRunner, call: OpCall) -> Any:
    """``target.copy_(source)`` in each direction."""
    target, source = call.args[0], call.args[1]
    non_blocking = bool(call.args[2] if len(call.args) > 2 else call.kwargs.get("non_blocking"))
    if type(target) is FakeTensor:
        host = source if type(source) is not FakeTensor else None
        if host is not None:
            source = mode.wrap(host)
        if target.fake_device != source.fake_device:
            # FakeTensorMode wants one device; the copy itself is what crosses.
            torch.broadcast_shapes(target.shape, source.shape)
            crosses = target.fake_device.type != source.fake_device.type
            upwards = target.fake_device.type == "cuda"
            engine = (Engine.UPWARDS if upwards else Engine.DOWNWARDS) if crosses else Engine.COMPUTE
            mode.settle(call.with_arguments(target, source), target, engine=engine)
            if crosses:
                card, other = (target, host if host is not None else source) if upwards else (source, target)
                pinned, nbytes = mode.page_locked.holds(other), source.nbytes
                _pass_link(mode, card.device.index or 0, nbytes, engine, pinned, waits=not non_blocking)
            return target
        return mode.run(call.with_arguments(target, source, *call.args[2:]), real=False)
    return _fill_host(mode, call.func, target, source, non_blocking=non_blocking)


def _fill_host(
    mode: OpRunner, func: Any, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool
) -> torch.Tensor:
    """Copy a virtual tensor into a real one.

    A large target keeps what it holds where nobody knows the values: a program that moves its activations to the host
    would otherwise fill the memory of this machine, page by page, with zeros.
    """
    device, pinned, waits = source.device.index or 0, mode.page_locked.holds(target), not non_blocking
    _pass_link(mode, device, source.nbytes, Engine.DOWNWARDS, pinned, waits=waits)
    if mode.shadows.find(source) is None and target.nbytes > _UNTOUCHED_BYTES and target.is_floating_point():
        torch.broadcast_shapes(target.shape, source.shape)
        warn_guess(mode)
        return target
    filled: torch.Tensor = func(target, _host_values(mode, source, target.dtype))
    return filled


@rule("aten._copy_from.default", "aten._copy_from_and_resize.default")
def copy_from(mode: OpRunner, call: OpCall) -> Any:
    """``_copy_from(source, target)``."""
    return copy_(mode, mode.call(_COPY_, call.args[1], call.args[0], **call.kwargs))


@rule("aten._local_scalar_dense.default")
def item(mode: OpRunner, call: OpCall) -> Any:
    """``tensor.item()``: the shadow's value, else a guess with a warning."""
    tensor: torch.Tensor = call.args[0]
    if tensor.device.type == "cuda":
        mode.machine.wait_for_stream(tensor.device.index or 0)
    shadow = mode.shadows.find(tensor)
    view = mode.shadows.view(tensor)
    if view is not None and shadow is not None:
        value = call.func(view)
        return mode.guesses.answer(value) if shadow.guessed else value
    value = mode.shading.number(tensor)
    fill = mode.shading.fills.find(tensor)
    if fill is not None:
        return min(max(mode.guesses.answer(value), fill.low), fill.high)
    return mode.guesses.answer(complex(value) if tensor.dtype.is_complex else value)


@rule("aten.equal.default")
def equal(mode: OpRunner, call: OpCall) -> Any:
    """``torch.equal``: true values where both have shadows, else by shape, with a warning."""
    first, second = call.args
    if first.shape != second.shape:
        return False
    views = [mode.shadows.view(t) if type(t) is FakeTensor else t for t in (first, second)]
    if all(v is not None for v in views):
        return call.func(*views)
    return mode.guesses.answer(True)


@rule("aten.allclose.default")
def allclose(mode: OpRunner, call: OpCall) -> Any:
    """``torch.allclose``: as `equal`, of tensors that broadcast."""
    torch.broadcast_shapes(call.args[0].shape, call.args[1].shape)
    views = [mode.shadows.view(t) if type(t) is FakeTensor else t for t in call.args[:2]]
    if all(v is not None for v in views):
        return call.func(*views, *call.args[2:], **call.kwargs)
    return mode.guesses.answer(True)


@rule("aten.is_pinned.default", on_host=True)
def is_pinned(mode: OpRunner, call: OpCall) -> bool:
    """Whether a CPU tensor lies in pinned memory."""
    tensor: torch.Tensor = call.args[0]
    if tensor.device.type != "cpu":
        return False
    return mode.page_locked.holds(tensor)


@rule("aten._pin_memory.default", "aten.pin_memory.default", on_host=True)
def pin_memory(mode: OpRunner, call: OpCall) -> torch.Tensor:
    """``tensor.pin_memory()``: a copy, counted as pinned host memory."""
    tensor: torch.Tensor = call.args[0]
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    out: torch.Tensor
    if type(tensor) is FakeTensor:
        out = mode.run(mode.call(_CLONE, tensor), real=False)
    else:
        out = _clone(tensor)
    mode.page_locked.pin(out)
    return out


@rule("aten.record_stream.default")
def record_stream(mode: OpRunner, call: OpCall) -> None:
    """``tensor.record_stream(stream)``: its block is not reused before that stream has passed."""
    record = mode.meter.record_of(call.args[0])
    if record is not None and record.address:
        stream = call.args[1]
        mode.machine.devices[record.device].allocator.record_stream(record.address, stream.stream_id)


def warn_guess(mode: OpRunner) -> None:
    """Say once per line that the program looked at a value that nobody computed."""
    mode.machine.warn("guessed-value", GUESSED, location=mode.guesses.location())


def _pass_link(
    mode: OpRunner, device: int, nbytes: int, engine: Engine, pinned: bool, *, waits: bool
) -> None:
    """Let the time pass that a copy over the card's host link takes; the host waits for it where `waits` is set.

    With pageable memory the host waits in any case (CUDA Runtime API, "API synchronization behavior").
    """
    spec, rates = mode.machine.devices[device].spec, mode.machine.rates
    upwards = engine is Engine.UPWARDS
    duration = roofline.link_seconds(nbytes, spec, rates, upwards=upwards, pinned=pinned)
    mode.machine.advance(1e6 * duration, device, engine)
    if waits or not pinned:
        mode.machine.wait_for_stream(device)
