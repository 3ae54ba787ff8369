"""For inference: equal tensors are stored once, and what a forward pass never reads stays on the host."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.forward_trace import ForwardTrace, trace_forward
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Setting, Technique
from vramfit.techniques.support.casting import device_type_of
from vramfit.techniques.support.inference_only import refuse_training
from vramfit.workload import Batch, call_model

_LEAST_BYTES = 4096
"""Smaller tensors are left alone: they are thousands, and the allocator gives each 512 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSharingSetting(Setting):
    """Which tensors; `find_shareable` finds them.

    Attributes:
        shared: names of parameters and buffers, each with the name of the equal one that takes its place.
        unused: names of modules that no forward pass runs, whose tensors stay on the host.
    """

    shared: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


class TensorSharing(Technique[TensorSharingSetting]):
    """Duplicates take the memory of one, and modules that never run take none of the card.

    Without training nothing lets equal parameters drift apart, so that all of them can be one object: a copy of a
    network beside it, an embedding and a head that a checkpoint stores twice, masks and tables of each layer. They are
    found by their bytes (a hash first, then every byte), where each has more than one value: what is all zeros or ones
    in a fresh model has other values in a trained one.

    Unused is what a pass of the model shows to be so: modules that were not called and whose tensors no operation read.
    These are auxiliary heads in evaluation, decoders of a model that only encodes, layers beyond the chosen one. They
    are kept on the host. If one is called all the same, its tensors are brought to the device of its inputs, and stay
    there; reading one of its weights without calling it gives torch's error about two devices.

    Nothing that is computed changes, by a single bit. Where a shared buffer or parameter is written to, the next pass
    ends with an error. Load checkpoints before the plan is applied, and undo it before ``save_pretrained``; a
    ``state_dict`` has all names as before.

    The border to parameter-sharing: that one is for training, where only buffers and frozen parameters can be shared,
    as views of one memory that stay parameters of their own. This one is for inference alone.
    """

    name: ClassVar[str] = "tensor-sharing"
    summary: ClassVar[str] = "for inference: duplicates are stored once, unused modules stay on the host"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = TensorSharingSetting
    follows: ClassVar[str | None] = "batch-norm-folding"
    excludes: ClassVar[dict[str, str]] = {
        "parameter-sharing": "that shares a part of the same tensors, for training",
    }

    def options(self, profile: Profile) -> Iterable[TensorSharingSetting]:
        """What samples show; nothing for training."""
        samples = profile.samples
        if profile.trains or samples is None:
            return
        model = profile.model
        setting = samples.once(
            self.name,
            lambda: TensorSharingSetting(
                shared=_equal(samples.valued()),
                unused=_unused_in(samples.traced()),
            ),
        )
        if setting.shared or any(_bytes(model, path) >= _LEAST_BYTES for path in setting.unused):
            yield setting

    def describe(self, setting: TensorSharingSetting) -> str:
        """How many of each."""
        words = [f"{len(setting.shared)} duplicates"] if setting.shared else []
        return ", ".join(words + ([f"{len(setting.unused)} modules unused"] if setting.unused else []))

    def attach(self, live: AttachedProgram, setting: TensorSharingSetting) -> None:
        """Share tensors, and take the unused away from what is moved to the device.

        Raises:
            UsageError: nothing is named, named tensors differ, or the program trains.
        """
        if not (setting.shared or setting.unused):
            raise UsageError(
                "tensor-sharing names no tensors",
                "Find them with vramfit.techniques.tensor_sharing.find_shareable(model, batch)",
            )
        refuse_training(live, self.name)
        pairs = [
            (_slot(live.model, name), _slot(live.model, first)) for name, first in setting.shared.items()
        ]
        for (name, first), (slot, kept) in zip(setting.shared.items(), pairs, strict=True):
            _check_equal(name, slot.tensor, first, kept.tensor)
        modules = [(path, _module(live.model, path)) for path in setting.unused]
        for slot, kept in pairs:
            _tie(live, slot, kept)
        if pairs:
            names = tuple(dict.fromkeys(setting.shared.values()))
            live.after(AttachStage.OPTIMIZER, lambda: _settle(live, pairs, names))
        if modules:
            _keep_on_host(live, modules)


class Recalled:
    """Surrounds a module that was taken for unused: if it is called, its tensors come to where its inputs are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass, with the tensors where they are needed."""
        wanted = torch.device(device_type_of(_EMPTY, (args, kwargs)))
        device = self.device if self.device.type == wanted.type else wanted
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device.type != device.type:
                tensor.data = tensor.data.to(device)
        return forward(*args, **kwargs)


_EMPTY = nn.Module()


class Unwritten:
    """Surrounds a model whose tensors are shared: an error where one of them was written to."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.seen: dict[str, tuple[int, int]] = dict.fromkeys(names, (0, 0))

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass, and a look at the tensors after it."""
        result = forward(*args, **kwargs)
        for name, (tensor, version) in self.seen.items():
            now = _seen(_slot(module, name).tensor)
            self.seen[name] = now
            # Another tensor is that of a copy of the model, or was put there in place of the shared one.
            if now[0] == tensor and now[1] != version:
                raise UsageError(
                    f"{name} was written to, which takes the place of equal ones by tensor-sharing",
                    "Leave it out of tensor-sharing's shared, and load checkpoints before the plan is applied",
                )
        return result


def find_shareable(model: nn.Module, batch: Batch) -> TensorSharingSetting:
    """Equal tensors of a model, and its modules that a pass with a batch does not run.

    Args:
        model: with its values, on the CPU.
        batch: what it is called with.
    """
    trace = trace_forward(model, lambda: call_model(model, batch), batch)
    return TensorSharingSetting(shared=_equal(model), unused=_unused(model, trace))


# -- equal tensors ----------------------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """Where a module keeps a tensor."""

    table: dict[str, torch.Tensor | None]
    own: str

    @property
    def tensor(self) -> torch.Tensor:
        found = self.table[self.own]
        assert found is not None
        return found

    @property
    def is_buffer(self) -> bool:
        return not isinstance(self.tensor, nn.Parameter)


def _equal(model: nn.Module | None) -> dict[str, str]:
    """Tensors that equal an earlier one in every byte, with its name."""
    if model is None:
        return {}
    firsts: dict[object, tuple[str, torch.Tensor]] = {}
    found: dict[str, str] = {}
    for name, tensor in _candidates(model):
        key = (type(tensor), tensor.shape, tensor.dtype, tensor.stride(), _digest(tensor))
        first, known = firsts.setdefault(key, (name, tensor))
        if known is not tensor and known.data_ptr() != tensor.data_ptr() and _same(known, tensor):
            found[name] = first
    return found


def _candidates(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_meta or not tensor.is_contiguous() or tensor.nbytes < _LEAST_BYTES:
            continue
        if bool((tensor != tensor.flatten()[0]).any()):
            yield name, tensor


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(_bytes_of(tensor).numpy().data, digest_size=16).digest()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory on the CPU, as bytes: zeros of both signs differ, and a NaN equals itself."""
    return tensor.detach().cpu().flatten().view(torch.uint8)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _known(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: those of a virtual GPU and of the meta device have none."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta


def _check_equal(name: str, one: torch.Tensor, first: str, other: torch.Tensor) -> None:
    alike = (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    both = isinstance(one, nn.Parameter) == isinstance(other, nn.Parameter)
    if not alike or not both or (_known(one) and _known(other) and not _same(one, other)):
        raise UsageError(
            f"{name} and {first} are not equal", "Leave one out of tensor-sharing's shared, or find them anew"
        )


def _tie(live: AttachedProgram, slot: _Slot, kept: _Slot) -> None:
    """Let a module find the other tensor in the place of its own, whose memory goes."""
    own, other = slot.tensor, kept.tensor
    own.data = own.data.new_empty(0)
    slot.table[slot.own] = other

    def part() -> None:
        now = kept.tensor
        own.data = now.detach().clone()
        slot.table[slot.own] = own

    live.on_undo(part)


def _settle(live: AttachedProgram, pairs: list[tuple[_Slot, _Slot]], names: tuple[str, ...]) -> None:
    """Share again what moving the model parted, as it does with buffers, and watch."""
    for slot, kept in pairs:
        if slot.is_buffer and slot.tensor.dtype is kept.tensor.dtype:
            slot.table[slot.own] = kept.tensor
    watch = Unwritten(names)
    watch.seen = {name: _seen(_slot(live.model, name).tensor) for name in names}
    live.surround(live.model, watch)


def _seen(tensor: torch.Tensor) -> tuple[int, int]:
    """Which tensor it is, and how often it was written to; tensors of inference mode do not count that."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


# -- unused modules ---------------------------------------------------------------------------------------------------


def _unused_in(traced: Any) -> tuple[str, ...]:
    return () if traced is None else _unused(traced.model, traced.trace)


def _unused(model: nn.Module, trace: ForwardTrace) -> tuple[str, ...]:
    """The outermost modules with tensors that a pass neither called nor read."""
    called = {call.path for call in trace.calls}
    read = {storage.cdata for storage in trace.reads}
    found: list[str] = []
    for path, module in model.named_modules():
        if not path or any(path.startswith(f"{outer}.") for outer in found):
            continue
        inside = [f"{path}.{name}" if name else path for name, _ in module.named_modules()]
        own = any(True for _ in _own_tensors(model, module))
        every = (*module.parameters(), *module.buffers())
        untouched = not any(tensor.untyped_storage()._cdata in read for tensor in every)
        if own and untouched and not called.intersection(inside):
            found.append(path)
    return tuple(found)


def _own_tensors(model: nn.Module, module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of a module that no module outside of it has too."""
    parts = {id(part) for part in module.modules()}
    outside = {
        id(tensor)
        for other in model.modules()
        if id(other) not in parts
        for tensor in (*other._parameters.values(), *other._buffers.values())
        if tensor is not None
    }
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in outside:
            yield tensor


def _keep_on_host(live: AttachedProgram, modules: list[tuple[str, nn.Module]]) -> None:
    """Let the tensors of modules stay on the CPU while the model is moved, and bring them if they are called."""
    tensors = {id(one): one for _, module in modules for one in _own_tensors(live.model, module)}
    slots: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (table, own, tensor)
        for _, module in modules
        for part in module.modules()
        for table in _tables(part)
        for own, tensor in table.items()
        if tensor is not None and id(tensor) in tensors
    ]
    live.keep_pageable(tensors.values)
    live.on_undo(lambda: _bring(tensors.values(), live.device if live.placed else torch.device("cpu")))

    def hide() -> None:
        for tensor in tensors.values():
            tensor.data = tensor.data.cpu()
        if not live.placed:
            for table, own, _ in slots:
                table[own] = None

    def show() -> None:
        for table, own, tensor in slots:
            table[own] = tensor

    live.on_undo(show)
    for part in {id(part): part for _, module in modules for part in module.modules()}.values():
        if any(True for _ in part.parameters()) or any(True for _ in part.buffers()):
            live.surround(part, Recalled(live.device))
    # Last of what happens before the model is moved: what casts weights sees these as well.
    live.after(AttachStage.PLACEMENT, hide)
    live.after(AttachStage.OPTIMIZER, show)


def _bring(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.to(device)


def _slot(model: nn.Module, name: str) -> _Slot:
    """Where a parameter or buffer of that name is."""
    owner, _, own = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        module = None
    for table in () if module is None else _tables(module):
        if table.get(own) is not None:
            return _Slot(table, own)
    raise UsageError(f"the model has no parameter or buffer {name!r}", "Correct its name")


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps its parameters and its buffers."""
    parameters: dict[str, Any] = module._parameters
    buffers: dict[str, Any] = module._buffers
    return parameters, buffers


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UsageError(f"the model has no module {path!r}", "Correct its name") from None


def _bytes(model: nn.Module, path: str) -> int:
    module = _module(model, path)
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
