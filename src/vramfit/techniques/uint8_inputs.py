"""Images stay bytes until they are on the device, and are normalised there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.forward_trace import NO_CALL, ForwardTrace, trace_forward
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Setting, Technique
from vramfit.techniques.support.casting import map_tensors
from vramfit.techniques.support.inference_only import refuse_training
from vramfit.workload import Batch, call_model
from vramfit.workload.containers import tensors_in

_LEAST_DIMS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Uint8InputsSetting(Setting):
    """How bytes become what the model was trained on: ``(bytes / divisor - mean) / std``, in float32.

    Attributes:
        mean: of each channel, or one for all; empty where nothing is subtracted.
        std: of each channel, or one for all; empty where nothing is divided by it.
        divisor: 255 as in torchvision's ``ToTensor``; 1 leaves values from 0 to 255.
        modules: names of the layers that read the images, which then normalise them for themselves; empty for the
            model as a whole.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    divisor: float = 255.0
    modules: tuple[str, ...] = ()


class Uint8Inputs(Technique[Uint8InputsSetting]):
    """The model takes bytes, and normalises them on its device.

    Images are bytes on disk. Normalised on the host they are four times as large before they cross the link, where
    they wait on the device for their turn, and while the model runs: callers hold the batch to the end. As bytes they
    take a quarter of that. Where the layers that read the images are known (`find_readers`), each normalises for
    itself, so that the float32 form lives for one layer alone; around the whole model it lives as long as the bytes do,
    since whoever calls a module holds its arguments, and then only what waits is smaller.

    The values are the same bits as on the host: the same operations in the same order in float32, each rounded as IEEE
    754 says. Divisors lie in tensors on the device, since torch multiplies by the reciprocal of a plain number on a
    card (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu).

    In a workload the batch is what its function makes, normalised already: it is turned back into bytes on the host,
    and an error says so where that does not give the same bits again, for then it was not made of bytes with these
    constants. A loop of your own gives the model bytes; inputs in float32 go through as they are.

    Only you know the constants, so that a plan considers it where ``--allow`` names it, with those of ``ToTensor``
    alone, and as far as images are taken from bytes; edit them in the plan's file.
    """

    name: ClassVar[str] = "uint8-inputs"
    summary: ClassVar[str] = "images stay bytes until they are on the device and are normalised there"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = Uint8InputsSetting
    follows: ClassVar[str | None] = "tensor-sharing"
    on_request: ClassVar[bool] = True

    def options(self, profile: Profile) -> Iterable[Uint8InputsSetting]:
        """Divided by 255 and no more, in the layers that read the images; nothing for training."""
        samples = profile.samples
        if profile.trains or samples is None:
            return
        traced = samples.traced()
        modules = () if traced is None else _readers(traced.trace)
        yield Uint8InputsSetting(modules=modules)

    def attach(self, live: AttachedProgram, setting: Uint8InputsSetting) -> None:
        """Surround the layers that read images, or the model, and turn a workload's batches into bytes.

        Raises:
            UsageError: a constant makes no sense, a module is not there, or the program trains.
        """
        _check(setting)
        refuse_training(live, self.name)
        for module in _modules(live.model, setting.modules):
            live.surround(module, NormalisedInput(setting))
        live.preparing.append(lambda batch: to_bytes(batch, setting))
        added = live.preparing[-1]
        live.on_undo(lambda: live.preparing.remove(added))


class NormalisedInput:
    """Gives a module its bytes in float32, normalised, or in the type of its weights."""

    def __init__(self, setting: Uint8InputsSetting) -> None:
        self.setting = setting

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass."""
        dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)

        def change(tensor: torch.Tensor) -> torch.Tensor:
            return normalised(tensor, self.setting).to(dtype) if _is_image(tensor) else tensor

        args, kwargs = map_tensors((args, kwargs), change)
        return forward(*args, **kwargs)


def normalised(images: torch.Tensor, setting: Uint8InputsSetting) -> torch.Tensor:
    """``(images / divisor - mean) / std`` in float32, in one new tensor on their device.

    Args:
        images: uint8, of shape (channels, height, width) or (batch, channels, ...).

    Raises:
        UsageError: they have another number of channels than the constants.
    """
    found = images.to(torch.float32)
    if setting.divisor != 1.0:
        found.div_(torch.full((), setting.divisor, device=found.device))
    if setting.mean:
        found.sub_(_constants(setting.mean, found, "mean"))
    if setting.std:
        found.div_(_constants(setting.std, found, "std"))
    return found


def to_bytes(batch: Batch, setting: Uint8InputsSetting) -> Batch:
    """A batch with its normalised images as the bytes that they were made of; everything else as it is.

    Raises:
        UsageError: no images are of bytes with these constants.
    """
    if hasattr(batch, "to") and not isinstance(batch, torch.Tensor | dict | list | tuple):
        raise UsageError(
            f"the batch is a {type(batch).__name__}, in which images are not seen",
            "Let batch return tensors in a tuple or a dict, or leave uint8-inputs out",
        )
    changed: list[torch.Tensor] = []

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if _is_image(tensor):
            changed.append(tensor)
        if tensor.dtype is not torch.float32 or tensor.dim() < _LEAST_DIMS:
            return tensor
        made = _quantised(tensor, setting)
        if not torch.equal(normalised(made, setting), tensor):
            return tensor
        changed.append(made)
        return made

    found = map_tensors(batch, change)
    if not changed:
        raise UsageError(
            "the batch has no images that are made of bytes by (bytes / divisor - mean) / std in float32",
            "Give uint8-inputs the mean, std and divisor that batch uses, or leave it out",
        )
    return found


def _quantised(images: torch.Tensor, setting: Uint8InputsSetting) -> torch.Tensor:
    """The bytes that come closest to images."""
    wide = images
    if setting.std:
        wide = wide * _constants(setting.std, images, "std")
    if setting.mean:
        wide = wide + _constants(setting.mean, images, "mean")
    return (wide * setting.divisor).round().clamp(0, 255).to(torch.uint8)


def find_readers(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """The layers that alone read what a model is called with, by running it once; empty where the model itself does.

    Args:
        batch: normalised images, where the model is; the meta device will do.
    """
    return _readers(trace_forward(model, lambda: call_model(model, batch), batch))


def normalised_on_device(
    model: nn.Module,
    *,
    mean: Iterable[float] = (),
    std: Iterable[float] = (),
    divisor: float = 255.0,
    sample: Batch | None = None,
) -> AttachedProgram:
    """Let a model take bytes, in place, and normalise them where it is: ``(bytes / divisor - mean) / std``.

    Args:
        mean, std: for each channel, or one for all.
        sample: normalised images to find the layers that read them by; None surrounds the model as a whole.

    Returns:
        the live program; its ``undo()`` leaves the model as it was.

    Raises:
        UsageError: a constant makes no sense.
    """
    if any(tensor.dtype is torch.uint8 for tensor in tensors_in(sample)):
        raise UsageError(
            "the sample is of bytes", "Give the images as the model gets them without this: normalised"
        )
    modules = () if sample is None else find_readers(model, sample)
    live = AttachedProgram(model, None)
    setting = Uint8InputsSetting(mean=tuple(mean), std=tuple(std), divisor=divisor, modules=modules)
    Uint8Inputs().attach(live, setting)
    return live


def _readers(trace: ForwardTrace) -> tuple[str, ...]:
    """The innermost modules that were given all images that were read, and read them alone."""
    found: dict[str, None] = {}
    for image in trace.calls[0].inputs if trace.calls else ():
        if not image.dtype.is_floating_point or len(image.shape) < _LEAST_DIMS:
            continue
        for read in trace.reads.get(image.storage, ()):
            call = trace.calls[read.call] if read.call != NO_CALL else trace.calls[0]
            if not call.path or all(one.storage != image.storage for one in call.inputs):
                return ()
            found[call.path] = None
    # A layer that is called again, with something else, might get bytes there that are no images.
    return tuple(found) if all(len(trace.calls_of(path)) == 1 for path in found) else ()


def _modules(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    if not names:
        return [model]
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise UsageError(f"the model has no module {name!r}", "Correct its name in uint8-inputs' modules")
    return [known[name] for name in names]


def _check(setting: Uint8InputsSetting) -> None:
    for name, values in (
        ("mean", setting.mean),
        ("std", setting.std),
        ("divisor", (setting.divisor,)),
    ):
        if not all(math.isfinite(value) for value in values):
            raise UsageError(f"{name} of uint8-inputs is not finite", "Give numbers")
        if name != "mean" and 0.0 in values:
            raise UsageError(f"{name} of uint8-inputs is 0, which nothing is divided by", "Give another")


def _constants(values: tuple[float, ...], images: torch.Tensor, name: str) -> torch.Tensor:
    """Constants of the channels on the images' device, in a shape that goes with theirs."""
    axis = 0 if images.dim() == _LEAST_DIMS else 1
    if len(values) not in (1, images.shape[axis]):
        raise UsageError(
            f"{name} of uint8-inputs has {len(values)} values, and the images have {images.shape[axis]} channels",
            "Give one for each channel, or one for all",
        )
    shape = [-1] + [1] * (images.dim() - axis - 1)
    return torch.tensor(values, dtype=torch.float32).to(images.device).view(shape)


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.uint8 and tensor.dim() >= _LEAST_DIMS
