"""Batch norms folded into the convolution or linear layer before them, and activations that then run in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.forward_trace import ForwardTrace, ModuleCall, trace_forward
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.surround import plain_class
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.torch_internals.layers import BatchNorm, ConvNd, ConvTransposeNd
from vramfit.workload import Batch, call_model

FOLDED_MARK = "_vramfit_folded"
"""The attribute of a convolution's result that names the batch norm that it already went through."""

# Their in-place forms compute the same values; without gradients none of them copies its input first.
_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Threshold),
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FORWARDS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchNormFoldingSetting(Setting):
    """What is folded into what; `find_foldable` finds it.

    Attributes:
        norms: names of batch norms, each with the name of the layer that it is folded into.
        activations: names of activations that write over their input.
    """

    norms: Mapping[str, str] = field(default_factory=dict)
    activations: tuple[str, ...] = ()


class BatchNormFolding(Technique[BatchNormFoldingSetting]):
    """A batch norm that follows a convolution becomes part of its weights, and activations write over their input.

    In evaluation a batch norm multiplies each channel by a constant and adds another. So does a convolution, a
    transposed one or a linear layer whose filters were multiplied and whose bias was moved. torch computes the new
    weights (``torch.nn.utils.fusion``), here in float64. What is saved is the norm's result beside the convolution's,
    and a pass over both: at the widest layer, two tensors of three. An activation whose input nobody reads afterwards
    runs in place; that changes no bit.

    What may be folded is found by running the model, not by reading its code: every operation of one pass is noted
    with the memory that it reads. A norm is folded where its input is just what one layer returned, nothing else read
    that memory, nobody holds it after the pass, and both ran together as often as either. The layer's weights must be
    its own: not tied, not parametrised, and without hooks that see the value in between. Norms that compute the
    statistics of their batch (in training mode, or without running ones) stay.

    The pass that was watched stands for all. A model whose layers run otherwise for other inputs has to be watched
    with those, too: a norm that is given another tensor than its layer's result raises an error.

    The weights before stay on the host for the undo, which restores them bit for bit. With lower precision, weights are
    folded before they are cast.
    """

    name: ClassVar[str] = "batch-norm-folding"
    summary: ClassVar[str] = "batch norms become part of the weights before them, activations run in place"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = BatchNormFoldingSetting
    follows: ClassVar[str | None] = "compile"
    quickens: ClassVar[bool] = True

    def options(self, profile: Profile) -> Iterable[BatchNormFoldingSetting]:
        """All that a pass of the model shows; nothing for training."""
        samples = profile.samples
        if profile.trains or samples is None or not any(map(_folds, profile.model.modules())):
            return
        found = samples.once(self.name, lambda: _found_in(samples.traced()))
        if found is not None and found.norms:
            yield found

    def promise(self, setting: BatchNormFoldingSetting) -> Promise:
        """Rounding, unless only activations change."""
        if not setting.norms:
            return Promise(Numerics.BITWISE)
        return Promise(
            Numerics.ROUNDING, "scales of batch norms are multiplied into weights, which are rounded once"
        )

    def describe(self, setting: BatchNormFoldingSetting) -> str:
        """How many of each."""
        words = [f"{len(setting.norms)} norms"] if setting.norms else []
        return ", ".join(words + ([f"{len(setting.activations)} in place"] if setting.activations else []))

    def attach(self, live: AttachedProgram, setting: BatchNormFoldingSetting) -> None:
        """Change the weights, and leave the norms out.

        Raises:
            UsageError: nothing is named, or a named layer cannot be folded into.
        """
        if not (setting.norms or setting.activations):
            raise UsageError(
                "batch-norm-folding names no batch norms",
                "Find them with vramfit.techniques.batch_norm_folding.find_foldable(model, batch)",
            )
        if len(set(setting.norms.values())) < len(setting.norms):
            raise UsageError(
                "batch-norm-folding folds two norms into one layer", "Name one norm for each layer"
            )
        pairs = [_pair(live.model, norm, layer) for norm, layer in setting.norms.items()]
        activations = [_activation(live.model, name) for name in setting.activations]
        originals: list[torch.Tensor] = []
        live.keep_pageable(lambda: originals)
        for name, (norm, layer) in zip(setting.norms, pairs, strict=True):
            _fold(live, norm, layer, originals)
            live.surround(layer, FoldedLayer(name))
            live.surround(norm, FoldedNorm(name))
        for activation in activations:
            live.set(activation, "inplace", True)


class FoldedLayer:
    """Marks what a layer with a folded norm returns."""

    def __init__(self, norm: str) -> None:
        self.norm = norm

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's forward pass."""
        del module
        result = forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            setattr(result, FOLDED_MARK, self.norm)
        return result


class FoldedNorm:
    """Gives its input back: the layer before it has done the norm's work."""

    def __init__(self, norm: str) -> None:
        self.norm = norm

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The input, if it is what the layer returned."""
        del module, forward
        value = args[0] if args else kwargs["input"]
        if not torch.compiler.is_compiling() and getattr(value, FOLDED_MARK, None) != self.norm:
            raise UsageError(
                f"{self.norm} was folded into the layer before it, and is given another tensor than that one's result",
                "Leave it out of batch-norm-folding's norms, or watch a pass with inputs such as these",
            )
        return value


def find_foldable(model: nn.Module, batch: Batch) -> BatchNormFoldingSetting:
    """What can be folded into what, and which activations can run in place, by running the model once.

    Args:
        batch: what the model is called with, where the model is; values do not matter, so the meta device will do.
    """
    return _foldable(model, trace_forward(model, lambda: call_model(model, batch), batch))


def fold_batch_norms(model: nn.Module, batch: Batch) -> AttachedProgram:
    """Fold all that can be folded, in place.

    Args:
        batch: what the model is called with, where the model is.

    Returns:
        the live program, whose ``undo()`` gives the model its own weights back.

    Raises:
        UsageError: nothing can be folded.
    """
    live = AttachedProgram(model, None)
    BatchNormFolding().attach(live, find_foldable(model, batch))
    return live


# -- finding ---------------------------------------------------------------------------------------------------------


def _found_in(traced: Any) -> BatchNormFoldingSetting | None:
    return None if traced is None else _foldable(traced.model, traced.trace)


def _foldable(model: nn.Module, trace: ForwardTrace) -> BatchNormFoldingSetting:
    modules = dict(model.named_modules())
    norms: dict[str, str] = {}
    for path, module in modules.items():
        if _folds(module):
            layer = _feeding(trace, path)
            if layer is not None and _fits(model, modules[layer], module, _shapes(trace, path)):
                norms[path] = layer
    return BatchNormFoldingSetting(
        norms=norms,
        activations=tuple(
            path
            for path, module in modules.items()
            if plain_class(module) in _ACTIVATIONS and not module.inplace and _may_overwrite(trace, path)
        ),
    )


def _folds(module: nn.Module) -> bool:
    """Whether a module is a batch norm that uses its running statistics."""
    return (
        plain_class(module) in _NORMS
        and isinstance(module, BatchNorm)
        and not module.training
        and module.running_mean is not None
        and module.running_var is not None
        and not _hooked(module)
    )


def _feeding(trace: ForwardTrace, norm: str) -> str | None:
    """The layer whose result each call of a norm gets, and nobody else; None where there is none such."""
    layers: set[str] = set()
    numbers = trace.calls_of(norm)
    for number in numbers:
        call = trace.calls[number]
        before = _before(trace, number)
        if before is None or len(call.inputs) != 1:
            return None
        storage = call.inputs[0].storage
        others = [read for read in trace.read_later(storage, before.ended) if not trace.inside(read, number)]
        if others or storage in trace.outlived or storage not in trace.made:
            return None
        layers.add(before.path)
    if len(layers) != 1 or len(trace.calls_of(next(iter(layers)))) != len(numbers):
        return None
    return layers.pop()


def _before(trace: ForwardTrace, number: int) -> ModuleCall | None:
    """The innermost call that returned what a call got, of those that ended before it began."""
    call = trace.calls[number]
    made = [
        earlier
        for earlier in trace.calls[:number]
        if earlier.ended != -1
        and earlier.ended <= call.began
        and [one.storage for one in call.inputs] == list(earlier.outputs)
    ]
    return max(made, key=lambda one: one.began, default=None)


def _fits(model: nn.Module, layer: nn.Module, norm: nn.Module, shapes: list[tuple[int, ...]]) -> bool:
    """Whether a norm that got inputs of these shapes can become part of a layer's weights."""
    kind = plain_class(layer)
    if kind not in _FORWARDS or _hooked(layer) or layer.training:
        return False
    weight = layer._parameters.get("weight")
    if weight is None or "bias" not in layer._parameters or norm.num_features != _channels(layer):
        return False
    if isinstance(layer, ConvTransposeNd) and layer.groups != 1:
        return False  # their filters lie otherwise, which torch's function does not know
    if isinstance(layer, nn.Linear) and any(len(shape) != 2 for shape in shapes):
        return False  # the norm's channels are not the layer's
    owners: dict[int, int] = {}
    for _, one in model.named_parameters(remove_duplicate=False):
        owners[id(one)] = owners.get(id(one), 0) + 1
    return all(owners.get(id(one), 0) == 1 for one in layer._parameters.values() if one is not None)


def _shapes(trace: ForwardTrace, path: str) -> list[tuple[int, ...]]:
    """Of what a module was given."""
    return [trace.calls[number].inputs[0].shape for number in trace.calls_of(path)]


def _channels(layer: nn.Module) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def _hooked(module: nn.Module) -> bool:
    """Whether something sees a module's results, or makes its weights, that folding would change."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or hasattr(module, "parametrizations")


def _may_overwrite(trace: ForwardTrace, activation: str) -> bool:
    """Whether nobody needs the input of an activation any more, in any of its calls."""
    numbers = trace.calls_of(activation)
    for number in numbers:
        call = trace.calls[number]
        if len(call.inputs) != 1 or not call.inputs[0].dense or not call.inputs[0].dtype.is_floating_point:
            return False
        storage = call.inputs[0].storage
        if storage not in trace.made or storage in trace.outlived:
            return False
        if any(not trace.inside(read, number) for read in trace.read_later(storage, call.began)):
            return False
    return bool(numbers)


# -- folding ---------------------------------------------------------------------------------------------------------


def _pair(model: nn.Module, norm_name: str, layer_name: str) -> tuple[BatchNorm, nn.Module]:
    norm, layer = _module(model, norm_name), _module(model, layer_name)
    if not isinstance(norm, BatchNorm) or norm.running_mean is None or norm.training:
        raise UsageError(
            f"{norm_name} is no batch norm with running statistics in evaluation",
            "Call model.eval() before, or leave it out of batch-norm-folding's norms",
        )
    if not isinstance(layer, ConvNd | nn.Linear) or norm.num_features != _channels(layer):
        raise UsageError(
            f"{norm_name} cannot be folded into {layer_name}, a {plain_class(layer).__name__}",
            "Name the convolution or linear layer before it, of as many channels",
        )
    if hasattr(layer, "parametrizations"):
        raise UsageError(
            f"the weights of {layer_name} are parametrised: they are computed anew in each pass",
            "Leave it out of batch-norm-folding's norms, or remove the parametrization",
        )
    return norm, layer


def _activation(model: nn.Module, name: str) -> nn.Module:
    found = _module(model, name)
    if not hasattr(found, "inplace"):
        raise UsageError(
            f"{name}, a {plain_class(found).__name__}, cannot run in place",
            "Leave it out of batch-norm-folding's activations",
        )
    return found


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise UsageError(f"the model has no module {name!r}", "Correct its name") from None


def _fold(live: AttachedProgram, norm: BatchNorm, layer: Any, originals: list[torch.Tensor]) -> None:
    """Move a norm into a layer's weights; those of before go to the host."""
    weight, bias = _fused(norm, layer)
    put_back = [_exchange(layer.weight, weight, originals)]
    if layer.bias is None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
        put_back.append(lambda: setattr(layer, "bias", None))
    else:
        put_back.append(_exchange(layer.bias, bias, originals))
    for action in put_back:
        live.on_undo(action)


def _fused(norm: BatchNorm, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of both together, computed in float64."""
    wide = _doubles(layer.weight, layer.bias, norm.running_mean, norm.running_var)
    scale, shift = _doubles(norm.weight, norm.bias)
    filters, offset, mean, variance = wide
    if scale is None:  # a norm without parameters of its own
        scale, shift = torch.ones_like(mean), torch.zeros_like(mean)
    if isinstance(layer, nn.Linear):
        weight, bias = fuse_linear_bn_weights(filters, offset, mean, variance, norm.eps, scale, shift)
    else:
        transposed = isinstance(layer, ConvTransposeNd)
        weight, bias = fuse_conv_bn_weights(
            filters, offset, mean, variance, norm.eps, scale, shift, transposed
        )
    order = layer.weight
    return weight.detach().to(order.dtype), bias.detach().to(order.dtype)


def _doubles(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if one is None else one.detach().double() for one in tensors]


def _exchange(
    parameter: nn.Parameter, values: torch.Tensor, originals: list[torch.Tensor]
) -> Callable[[], None]:
    """Give a parameter other values; how to put back those of before, which wait on the host."""
    before = parameter.detach().cpu()
    originals.append(before)
    with torch.no_grad():
        parameter.data = values

    def put_back() -> None:
        parameter.data = before.to(parameter.device)

    return put_back
