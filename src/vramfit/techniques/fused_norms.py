"""Hand-written norms exchanged for torch's own kernels, which keep less for the backward pass."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.surround import plain_class, surroundings_of
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique

_PROBE_WIDTH = 8
_LARGEST_EPS = 1e-2
_BIASES = frozenset({"bias", "beta", "b"})


class NormForm(Enum):
    """What a norm over the last dimension computes.

    Attributes:
        RMS: the input over its root mean square, times the weight.
        RMS_FROM_ONE: the same, times one plus the weight.
        LAYER: the input less its mean over its standard deviation, times the weight, plus the bias.
    """

    RMS = "rms"
    RMS_FROM_ONE = "rms from one"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedNormSetting(Setting):
    """Which norms.

    Attributes:
        modules: their names in the model; empty for all that are recognised.
    """

    modules: tuple[str, ...] = ()


class FusedNorms(Technique[FusedNormSetting]):
    """Norms written out in tensor operations are computed by one kernel, with the module's own weight.

    Written out, an RMS norm keeps its input in float32, and the normalised input for the weight's gradient: 8 bytes an
    element in float32, 6 in bfloat16. ``F.rms_norm`` keeps the input as it came and one number a row: 4 bytes an
    element less in either case. It is faster as well: one kernel instead of six. It pays for every such norm on a card;
    on the CPU torch writes ``F.rms_norm`` out itself (aten/src/ATen/native/layer_norm.cpp), which saves nothing.

    A norm is recognised by its structure (one weight, perhaps a bias, one small number, no submodules) and by what it
    computes for probes of several scales in float32 and bfloat16, never by its name: LlamaRMSNorm and its many copies,
    T5LayerNorm, Gemma's with one plus the weight, layer norms written by hand. Calls with further arguments, or with an
    input of another dtype than the weight, run as they did; Gemma's also where the weight is no float32, since one plus
    the weight would be rounded.
    """

    name: ClassVar[str] = "fused-norms"
    summary: ClassVar[str] = "hand-written norms are computed by torch's fused kernels"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = FusedNormSetting
    follows: ClassVar[str | None] = "parameter-offload"
    quickens: ClassVar[bool] = True

    def options(self, profile: Profile) -> Iterable[FusedNormSetting]:
        """All of them, where a model that trains on a card has any."""
        if profile.device_type == "cuda" and profile.trains and _recognised(profile.model):
            yield FusedNormSetting()

    def promise(self, setting: FusedNormSetting) -> Promise:  # noqa: ARG002  # the same for all
        """Rounding alone."""
        return Promise(Numerics.ROUNDING, "norms round once, at the end, and sum in another order")

    def attach(self, live: AttachedProgram, setting: FusedNormSetting) -> None:
        """Surround the norms.

        Raises:
            UsageError: the model has none, or a named module is none.
        """
        found = _recognised(live.model)
        for name in setting.modules:
            if name not in found:
                raise UsageError(
                    f"the module {name!r} is not a hand-written norm that fused-norms recognises",
                    f"Give some of {', '.join(list(found)[:4])}" if found else "Leave fused-norms out",
                )
        if not found:
            raise UsageError("the model has no hand-written norms", "Leave fused-norms out")
        for name in setting.modules or found:
            live.surround(live.model.get_submodule(name), found[name])


class FusedNorm:
    """Computes a norm by torch's kernel."""

    def __init__(self, form: NormForm, weight: str, bias: str, eps: str) -> None:
        self.form = form
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The norm of the one argument."""
        weight: torch.Tensor = getattr(module, self.weight)
        x = args[0] if len(args) == 1 and not kwargs else None
        if (
            not isinstance(x, torch.Tensor)
            or x.dtype != weight.dtype
            or x.shape[-1:] != weight.shape
            or (self.form is NormForm.RMS_FROM_ONE and weight.dtype != torch.float32)
            or surroundings_of(module)[0] is not self
        ):
            return forward(*args, **kwargs)
        bias = getattr(module, self.bias) if self.bias else None
        if not torch.is_autocast_enabled(x.device.type):
            return self.compute(x, weight, bias, getattr(module, self.eps))
        with torch.autocast(x.device.type, enabled=False):  # it would make the result float32
            return self.compute(x, weight, bias, getattr(module, self.eps))

    def compute(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """The norm over the last dimension, in the dtype of `x`."""
        width = list(weight.shape)
        if self.form is NormForm.LAYER:
            return F.layer_norm(x, width, weight, bias, eps)
        return F.rms_norm(x, width, 1.0 + weight if self.form is NormForm.RMS_FROM_ONE else weight, eps)


def _recognised(model: nn.Module) -> dict[str, FusedNorm]:
    """Hand-written norms by their names in the model."""
    found = {}
    for name, module in model.named_modules():
        norm = _recognise(module)
        if norm is not None:
            found[name] = norm
    return found


def _recognise(module: nn.Module) -> FusedNorm | None:
    kind = plain_class(module)
    own = dict(module._parameters)
    if kind.__module__.startswith("torch.") or surroundings_of(module) or "forward" in vars(module):
        return None
    if module._modules or module._buffers or not 1 <= len(own) <= 2:
        return None
    shapes = {tuple(parameter.shape) if parameter is not None else () for parameter in own.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
        return None
    small = [
        name for name, value in vars(module).items() if type(value) is float and 0 < value <= _LARGEST_EPS
    ]
    biases = [name for name in own if name in _BIASES] if len(own) == 2 else []
    if len(small) != 1 or len(biases) != len(own) - 1 or not _takes_one(kind):
        return None
    weight = next(name for name in own if name not in biases)
    forms = [NormForm.LAYER] if biases else [NormForm.RMS, NormForm.RMS_FROM_ONE]
    for form in forms:
        norm = FusedNorm(form, weight, biases[0] if biases else "", small[0])
        if _computes(module, norm, shape[0]):
            return norm
    return None


def _takes_one(kind: type[nn.Module]) -> bool:
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    needed = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    return len(needed) == 1 and needed[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _computes(module: nn.Module, norm: FusedNorm, width: int) -> bool:
    """Whether a small copy of the module gives what `norm` does, for probes around eps and far from it."""
    eps: float = getattr(module, norm.eps)
    draw = torch.Generator().manual_seed(0)
    scales = torch.tensor([eps**0.5, 1.0, 100.0]).view(3, 1, 1)
    probe = scales * (torch.randn(3, 2, _PROBE_WIDTH, generator=draw) + 0.5)
    weight, bias = torch.randn(2, _PROBE_WIDTH, generator=draw).unbind()
    for dtype in (torch.float32, torch.bfloat16):
        if dtype is not torch.float32 and norm.form is NormForm.RMS_FROM_ONE:
            continue  # it is not used there
        given = {norm.weight: weight.to(dtype)} | ({norm.bias: bias.to(dtype)} if norm.bias else {})
        x = probe.to(dtype)
        with torch.no_grad():
            try:
                result = plain_class(module).forward(_narrow(module, given, width), x)
            except Exception:  # whatever it is, it is no norm of one tensor
                return False
            expected = norm.compute(x, given[norm.weight], given.get(norm.bias), eps)
        if not isinstance(result, torch.Tensor) or result.dtype != dtype or result.shape != x.shape:
            return False
        exact = dtype is torch.float32
        if not torch.allclose(result, expected, rtol=1e-5 if exact else 2**-6, atol=1e-5 if exact else 2**-6):
            return False
    return True


def _narrow(module: nn.Module, given: dict[str, torch.Tensor], width: int) -> nn.Module:
    """A copy with these weights, and with its width made theirs wherever it is noted."""
    small = copy.copy(module)
    small.__dict__ = {name: _narrowed(value, width) for name, value in vars(module).items()}
    small.__dict__["_parameters"] = dict(given)
    return small


def _narrowed(value: Any, width: int) -> Any:
    if type(value) is int and value == width:
        return _PROBE_WIDTH
    if isinstance(value, list | tuple) and list(value) == [width]:
        return type(value)([_PROBE_WIDTH])
    return value
