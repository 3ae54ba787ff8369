"""Tensors of a model that hold the same values are stored once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Setting, Technique
from vramfit.torch_internals.layers import NormBase

_LEAST_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingSetting(Setting):
    """Which tensors.

    Attributes:
        shared: names of buffers and frozen parameters, each with the name of the one whose memory it takes; empty for
            all that are found to be equal.
    """

    shared: Mapping[str, str] = field(default_factory=dict)


class ParameterSharing(Technique[SharingSetting]):
    """Equal buffers and equal frozen parameters lie in the same memory.

    Models repeat masks and tables of positions in every layer, as buffers of their own: twelve causal masks of 1024 x
    1024 floats are 48 MiB, of which 44 go. A frozen copy of a frozen network goes as well. It costs nothing. Trained
    parameters are never shared: they would drift apart.

    Found by themselves are tensors from 64 KiB on, equal in every value, of which each has more than one value (what
    begins as zeros will be filled) and which belong to no norm with running statistics. Whether a buffer stays as it is
    cannot be seen from outside: one that is written to is noticed after the step, with an error. What holds for all
    shared memory holds here: load a checkpoint with other values before the plan is applied, not after, and undo it
    before ``save_pretrained``, which refuses tensors that share memory.

    Values are compared where the model is made, on the CPU. On the virtual GPU parameters have no values, there or
    anywhere: equal frozen parameters are shared only where `shared` names them, equal buffers are found. For inference,
    where no parameter changes, plans take tensor-sharing.
    """

    name: ClassVar[str] = "parameter-sharing"
    summary: ClassVar[str] = "equal buffers and frozen parameters are stored once"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = SharingSetting
    follows: ClassVar[str | None] = "fused-norms"

    def options(self, profile: Profile) -> Iterable[SharingSetting]:
        """All, where some tensors are equal, or could be and have no values to tell; for training alone."""
        if profile.trains and _equal(profile.model, unknown=True):
            yield SharingSetting()

    def attach(self, live: AttachedProgram, setting: SharingSetting) -> None:
        """Share memory as soon as the model is where it stays.

        Raises:
            UsageError: nothing is equal, or the named tensors are not.
        """
        shared = dict(setting.shared) or _equal(live.model)
        if not shared:
            raise UsageError(
                "no buffers or frozen parameters of the model are equal", "Leave parameter-sharing out"
            )
        for name, first in setting.shared.items():
            _check(live.model, name, first)
        # Moving a model to its device would give each tensor memory of its own again.
        live.after(AttachStage.OPTIMIZER, lambda: _share(live, shared))


def _share(live: AttachedProgram, shared: Mapping[str, str]) -> None:
    """Give each tensor the memory of its first, and watch that none is written to."""
    model = live.model
    for name, first in shared.items():
        source, target = _tensor(model, first), _tensor(model, name)
        if source.device == target.device:
            target.data = source.data
            live.on_undo(lambda name=name: _part(_tensor(model, name)))  # type: ignore[misc]
    kept = {first: _host_copy(_tensor(model, first)) for first in shared.values()}
    versions = {name: _tensor(model, name)._version for name in (*shared, *shared.values())}

    def watch() -> None:
        for name, version in versions.items():
            tensor, values = _tensor(model, name), kept[shared.get(name, name)]
            if tensor._version == version:  # it may be another tensor by now, whose memory is its own
                continue
            versions[name] = tensor._version
            # Distributed data parallel writes the values of rank 0 into all buffers, which are the same.
            if values is not None and not torch.equal(tensor.cpu(), values):
                raise UsageError(
                    f"{name} was written to, which shares its memory with others by parameter-sharing",
                    "Forbid parameter-sharing, or name what it may share; load checkpoints before the plan is applied",
                )

    live.after_step.append(watch)
    live.on_undo(lambda: live.after_step.remove(watch))


def _host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.detach().cpu().clone() if _known(tensor) else None


def _part(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer by its name."""
    owner, _, own = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        module = None
    found = None if module is None else module._parameters.get(own, module._buffers.get(own))
    if found is None:
        raise UsageError(f"the model has no parameter or buffer {name!r}", "Correct its name")
    return found


def _check(model: nn.Module, name: str, first: str) -> None:
    """Make sure that two named tensors can be shared."""
    one, other = _tensor(model, name), _tensor(model, first)
    for tensor, own in ((one, name), (other, first)):
        if tensor.requires_grad:
            raise UsageError(f"{own} is trained and cannot be shared", "Freeze it, or leave it out")
    if _kind(one) != _kind(other) or (_known(one) and _known(other) and not torch.equal(one, other)):
        raise UsageError(f"{name} and {first} are not equal", "Leave one out")


def _equal(model: nn.Module, *, unknown: bool = False) -> dict[str, str]:
    """Tensors that equal an earlier one, with its name.

    Args:
        unknown: whether tensors without values count as equal to those like them.
    """
    firsts: dict[object, list[tuple[str, torch.Tensor]]] = {}
    found: dict[str, str] = {}
    for name, tensor in _candidates(model):
        known = firsts.setdefault(_kind(tensor), [])
        for first, other in known:
            if other.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                break
            if torch.equal(tensor, other) if _known(tensor) and _known(other) else unknown:
                found[name] = first
                break
        else:
            if not _known(tensor) or bool((tensor != tensor.flatten()[0]).any()):
                known.append((name, tensor))
    return found


def _candidates(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        if isinstance(module, NormBase):
            continue
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor.requires_grad or tensor.layout is not torch.strided:
                continue
            if tensor.numel() * tensor.element_size() >= _LEAST_BYTES and tensor.is_contiguous():
                yield (f"{path}.{own}" if path else own), tensor


def _kind(tensor: torch.Tensor) -> object:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _known(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: those of a virtual GPU and of the meta device have none."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta
