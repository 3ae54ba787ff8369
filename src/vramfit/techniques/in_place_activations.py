"""Activations that overwrite their input, where nobody else needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.surround import plain_class, surroundings_of
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.torch_internals.layers import (
    global_backward_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)

# Their backward passes read the input, or statistics of it, and never the output (tools/autograd/derivatives.yaml).
_PRODUCERS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm),
)
_FORWARDS = {kind.forward for kind in _PRODUCERS}
# They hand on their input, or a copy that they do not keep.
_PASSING: tuple[type[nn.Module], ...] = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# In place, these keep their result for the backward pass, which the next layer keeps anyway.
_EXACT: tuple[type[nn.Module], ...] = (nn.ReLU, nn.LeakyReLU)
_SMOOTH: tuple[type[nn.Module], ...] = (nn.ELU, nn.CELU, nn.SELU)


@dataclass(frozen=True, kw_only=True, slots=True)
class InPlaceSetting(Setting):
    """Which activations.

    Attributes:
        smooth: ELU, CELU and SELU too, whose gradients are then computed from the output.
    """

    smooth: bool = False


class InPlaceActivations(Technique[InPlaceSetting]):
    """Activations write their result over their input, inside chains of layers where nobody else can hold it.

    LeakyReLU, ELU, CELU and SELU keep their input for the backward pass, and the next layer keeps their output. In
    place, torch computes the gradient from the output, so that one tensor of the two is left: the memory of these
    activations goes down by half. ReLU keeps its output in any case; in place it saves the second tensor while it
    runs, and nothing afterwards.

    An activation runs in place in the forward pass of an ``nn.Sequential`` when the layer before it is a linear layer,
    a convolution or a norm, whose backward pass does not read its own output. Called in another way (layer by layer,
    to tap a value in between), or with hooks that see that value, it runs as it did. So nothing has to be tried out.

    It costs no time. Where the input is a view (a linear layer on three dimensions, an instance norm), the backward
    pass copies the gradient once more; ReLU leaves these alone.

    Not here: SiLU, Hardswish, Mish and ReLU6, for which torch copies the input before it overwrites it, since their
    gradients are computed from it (derivatives.yaml). Dropout: on a card ``dropout_`` keeps noise in the dtype of its
    input instead of a mask of one byte, and draws it otherwise (aten/src/ATen/native/Dropout.cpp).
    """

    name: ClassVar[str] = "in-place-activations"
    summary: ClassVar[str] = "activations overwrite their input inside chains of layers"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = InPlaceSetting
    follows: ClassVar[str | None] = "tf32"

    def options(self, profile: Profile) -> Iterable[InPlaceSetting]:
        """The exact ones, then the smooth ones too: of those that a step in training keeps twice."""
        kinds = {
            plain_class(profile.model.get_submodule(chain)._modules[name])  # type: ignore[arg-type]
            for chain, name in _plan(profile.model, smooth=True)
        }
        if kinds - set(_SMOOTH) - ({nn.ReLU} if profile.trains else set()):
            yield InPlaceSetting()
        if kinds & set(_SMOOTH):
            yield InPlaceSetting(smooth=True)

    def promise(self, setting: InPlaceSetting) -> Promise:
        """Exact without the smooth ones."""
        if not setting.smooth:
            return Promise(Numerics.BITWISE)
        return Promise(Numerics.ROUNDING, "gradients of ELU, CELU and SELU are computed from their outputs")

    def attach(self, live: AttachedProgram, setting: InPlaceSetting) -> None:
        """Surround the chains that hold such activations.

        Raises:
            UsageError: there is no such one.
        """
        found = _plan(live.model, smooth=setting.smooth)
        if not found:
            raise UsageError(
                "no activation can run in place: none follows a convolution, linear layer or norm in an nn.Sequential",
                "Leave in-place-activations out",
            )
        chains: dict[str, list[str]] = {}
        for chain, activation in found:
            chains.setdefault(chain, []).append(activation)
        for chain, activations in chains.items():
            live.surround(live.model.get_submodule(chain), InPlaceChain(tuple(activations)))


class InPlaceChain:
    """Runs a chain of layers, some of its activations in place."""

    def __init__(self, activations: tuple[str, ...]) -> None:
        self.activations = frozenset(activations)

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The chain's forward pass."""
        unusual = kwargs or len(args) != 1 or surroundings_of(module)[0] is not self
        if unusual or torch.compiler.is_compiling():  # the compiler reuses memory by itself
            return forward(*args, **kwargs)
        value = args[0]
        handled: list[nn.Module] = []  # the layers that had this value, or the memory that it is in
        for name, layer in module._modules.items():
            assert layer is not None
            if plain_class(layer) not in _PASSING and name not in self.activations:
                handled.clear()
            handled.append(layer)
            if name in self.activations and _unseen(value, handled):
                layer.inplace = True  # type: ignore[assignment]
                try:
                    value = layer(value)
                finally:
                    layer.inplace = False  # type: ignore[assignment]
            else:
                value = layer(value)
        return value


def _unseen(value: Any, handled: list[nn.Module]) -> bool:
    """Whether only the last of these layers sees the value that the others made."""
    activation = handled[-1]
    if not isinstance(value, torch.Tensor) or surroundings_of(activation):
        return False
    if value._is_view() and plain_class(activation) is nn.ReLU:
        return False
    if global_forward_hooks or global_forward_pre_hooks or global_backward_hooks:
        return False
    return not any(
        inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks or inner._backward_pre_hooks
        for layer in handled
        for inner in layer.modules()
    )


def _plan(model: nn.Module, *, smooth: bool) -> list[tuple[str, str]]:
    """Chains by their path, each with the name of an activation in it that can run in place."""
    kinds = _EXACT + _SMOOTH if smooth else _EXACT
    found = []
    for path, module in model.named_modules():
        if _is_chain(module):
            found += [(path, name) for name in _in_chain(module, kinds)]
    return found


def _in_chain(chain: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[str]:
    own = False
    for name, layer in chain._modules.items():
        if layer is None:
            return
        if own and plain_class(layer) in kinds and not layer.inplace and _rises(layer):
            yield name
        own = _output_is_free(layer, own)


def _output_is_free(layer: nn.Module, own: bool) -> bool:
    """Whether a layer's output can be overwritten, where `own` says so of its input."""
    if plain_class(layer) in _PASSING:
        return own
    if _is_chain(layer):
        own = False
        for inner in layer._modules.values():
            own = inner is not None and _output_is_free(inner, own)
        return own
    return plain_class(layer).forward in _FORWARDS


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and plain_class(module).forward is nn.Sequential.forward


def _rises(activation: nn.Module) -> bool:
    """Whether the gradient can be told from the output: torch refuses it for falling functions."""
    slope = getattr(activation, "negative_slope", getattr(activation, "alpha", 1.0))
    return bool(slope >= 0)
