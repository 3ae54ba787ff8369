"""The choice of what computes attention, attached to a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramfit.errors import UsageError
from vramfit.techniques.attention_backend.eager import drops_weights, eager_models, make_fused
from vramfit.techniques.attention_backend.unread import BEFORE_NEED_WEIGHTS, unread_weights
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.surround import plain_class
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique

# What a forward pass names that attends: torch's functions, and the table of transformers.
_CALLS = frozenset(
    {"scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS"}
)


class SdpaName(Enum):
    """Backends of ``scaled_dot_product_attention``, as `torch.nn.attention.SDPBackend` has them."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


_BACKENDS = {
    SdpaName.FLASH: SDPBackend.FLASH_ATTENTION,
    SdpaName.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    SdpaName.CUDNN: SDPBackend.CUDNN_ATTENTION,
    SdpaName.MATH: SDPBackend.MATH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSetting(Setting):
    """What changes.

    Attributes:
        eager: whether models of transformers whose attention is ``eager`` change to ``sdpa``.
        unread: names of ``nn.MultiheadAttention`` whose weights nobody reads, so that they need not be written out.
        backends: which to take, in this order, and ``math`` where none of them can; empty leaves it to torch.
        redraws: whether other attention weights may be dropped than before, where attention has dropout.
    """

    eager: bool = False
    unread: tuple[str, ...] = ()
    backends: tuple[SdpaName, ...] = ()
    redraws: bool = False


class AttentionBackend(Technique[AttentionSetting]):
    """Attention runs in fused kernels, which never write the weights of all pairs out.

    Written out, each layer keeps batch x heads x length x length weights for the backward pass, twice or more: at
    length 2048, 16 heads and batch 4 that is 1 GiB a copy in float32. Fused kernels keep the output and one number a
    row, and compute the weights anew (Dao et al., FlashAttention, 2022). They are faster too.

    Three things stand in their way, and each has its setting. Models of transformers that were loaded with
    ``attn_implementation="eager"``. ``nn.MultiheadAttention``, which writes weights out for its second result unless
    it is called with ``need_weights=False``; where the caller throws them away, as its source shows, they are left
    out in training and the second result is None. And backends that are switched off, or that torch does not prefer.
    Where ``scaled_dot_product_attention`` takes a fused backend anyway, nothing is gained.

    Fused kernels draw dropout in their own way. Where attention has dropout, other weights are dropped than before: not
    wrong, but not the same either, so that it has to be allowed by `redraws`.
    """

    name: ClassVar[str] = "attention-backend"
    summary: ClassVar[str] = "attention in fused kernels, which keep no weights"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = AttentionSetting
    follows: ClassVar[str | None] = "channels-last"
    quickens: ClassVar[bool] = True

    def options(self, profile: Profile) -> Iterable[AttentionSetting]:
        """All that stands in the way of fused kernels, at once."""
        model = profile.model
        eager = any(True for _ in eager_models(model))
        unread = tuple(unread_weights(model)) if profile.trains else ()
        attends = any(True for _ in _attending(model))
        barred = attends and profile.device_type == "cuda" and not _some_fused_is_allowed()
        if eager or unread or barred:
            backends = (SdpaName.FLASH, SdpaName.EFFICIENT, SdpaName.CUDNN) if barred else ()
            yield AttentionSetting(eager=eager, unread=unread, backends=backends, redraws=_drops(model))

    def promise(self, setting: AttentionSetting) -> Promise:
        """Rounding, unless dropout is drawn otherwise."""
        if setting.redraws:
            return Promise(
                Numerics.APPROXIMATE, "attention drops other weights than before, with the same probability"
            )
        return Promise(Numerics.ROUNDING, "attention sums in another order")

    def attach(self, live: AttachedProgram, setting: AttentionSetting) -> None:
        """Change what the setting names.

        Raises:
            UsageError: nothing is named, or it cannot change, or dropout would be drawn otherwise unasked.
        """
        model = live.model
        eager = list(eager_models(model)) if setting.eager else []
        if setting.eager and not eager:
            raise UsageError("the model has no eager attention that could be fused", "Leave eager at false")
        heads = [_multihead(model, name) for name in setting.unread]
        if not (eager or heads or setting.backends):
            raise UsageError("attention-backend has nothing to change", "Set eager, unread or backends")
        if not setting.redraws and _drops(model):
            raise UsageError(
                "attention has dropout, and another backend drops other weights",
                "Allow it by redraws = true, or set the dropout of attention to 0",
            )
        for path, module in eager:
            make_fused(live, path, module)
        for module in heads:
            live.surround(module, WithoutWeights())
        if setting.backends:
            # The attending modules too: one that is recomputed in the backward pass runs without the whole model.
            for module in {id(m): m for m in (model, *_attending(model))}.values():
                live.surround(module, ChosenBackend(setting.backends))


class ChosenBackend:
    """Lets attention inside a module take one of some backends.

    Args:
        backends: those to take, the best first.
    """

    def __init__(self, backends: tuple[SdpaName, ...]) -> None:
        self.backends = tuple(dict.fromkeys((*backends, SdpaName.MATH)))

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass."""
        del module
        with sdpa_kernel([_BACKENDS[name] for name in self.backends], set_priority=True):
            return forward(*args, **kwargs)


class WithoutWeights:
    """Leaves the weights out that a training ``nn.MultiheadAttention`` would give as its second result."""

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass; in evaluation, and where a hook looks, the weights are there."""
        named = len(args) <= BEFORE_NEED_WEIGHTS
        if named and module.training and torch.is_grad_enabled() and not module._forward_hooks:
            kwargs = kwargs | {"need_weights": False}
        return forward(*args, **kwargs)


def _multihead(model: nn.Module, name: str) -> nn.Module:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if module is None or not isinstance(module, nn.MultiheadAttention):
        raise UsageError(f"{name!r} is no nn.MultiheadAttention of the model", "Correct the name in unread")
    return module


def _attending(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose own code calls attention."""
    known: dict[type, bool] = {}
    for module in model.modules():
        kind = plain_class(module)
        if kind not in known:
            known[kind] = _calls_attention(kind)
        processor = getattr(module, "processor", None)  # as diffusers has them
        if known[kind] or (processor is not None and _calls_attention(type(processor))):
            yield module


def _calls_attention(kind: type) -> bool:
    for base in kind.__mro__:
        if base in (nn.Module, object):
            break
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and not _CALLS.isdisjoint(code.co_names):
                return True
    return False


def _drops(model: nn.Module) -> bool:
    """Whether attention that trains drops weights, as far as can be seen."""
    if drops_weights(model):
        return True
    for module in _attending(model):
        if not module.training:
            continue
        own = (value for name, value in vars(module).items() if "drop" in name and isinstance(value, float))
        inner = (child.p for child in module.children() if isinstance(child, nn.Dropout))
        if any(value > 0 for value in (*own, *inner)):
            return True
    return False


def _some_fused_is_allowed() -> bool:
    switches: Any = torch.backends.cuda
    enabled = (switches.flash_sdp_enabled, switches.mem_efficient_sdp_enabled, switches.cudnn_sdp_enabled)
    return any(switch() for switch in enabled)
