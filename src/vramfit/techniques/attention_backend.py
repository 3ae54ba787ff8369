"""Which kernels compute attention: fused ones in place of one that writes all weights out."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramfit.errors import UsageError
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
                "Allow it with redraws = true, or set the dropout of attention to 0",
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
    """Lets attention inside a module take one of some backends."""

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
        raise UsageError(
            f"{name!r} is not an nn.MultiheadAttention of the model", "Correct the name in unread"
        )
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


# -- ``nn.MultiheadAttention`` whose weights are asked for by default and thrown away ------------------------------


BEFORE_NEED_WEIGHTS = 4  # query, key, value, key_padding_mask


def unread_weights(model: nn.Module) -> list[str]:
    """Names of the modules of ``nn.MultiheadAttention`` whose caller takes the first of their two results alone.

    Read from the source of the class that holds each: ``self.attention(...)[0]``, or ``out, _ = self.attention(...)``
    where that second name is not read in the function. Where the source is not to be had, or the class uses the module
    in any other way, it is left out. Code outside of that class is not read.
    """
    found = []
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            attends = plain_class(child) is nn.MultiheadAttention and not child._forward_hooks
            if attends and _only_first(plain_class(parent), name):
                found.append(f"{path}.{name}" if path else name)
    return found


def _only_first(kind: type[nn.Module], name: str) -> bool:
    """Whether all uses of ``self.<name>`` in a class and its bases throw the weights away, and there is one."""
    uses = 0
    for base in kind.__mro__:
        if base is nn.Module:
            break
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            return False
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for good in _uses(function, name):
                    if not good:
                        return False
                    uses += 1
    return uses > 0


def _uses(function: ast.FunctionDef, name: str) -> Iterator[bool]:
    """For each use of ``self.<name>`` in a function, whether it throws the weights away."""
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            continue
        parent = parents[node]
        if isinstance(parent, ast.Attribute):
            continue  # its own attributes: self.attention.in_proj_weight
        yield isinstance(parent, ast.Call) and parent.func is node and _unread(parent, parents, read)


def _unread(call: ast.Call, parents: dict[ast.AST, ast.AST], read: set[str]) -> bool:
    """Whether a call asks for weights and throws them away."""
    if len(call.args) > BEFORE_NEED_WEIGHTS or any(isinstance(item, ast.Starred) for item in call.args):
        return False
    if any(keyword.arg in (None, "need_weights") for keyword in call.keywords):
        return False
    outer = parents[call]
    if isinstance(outer, ast.Subscript):
        return isinstance(outer.slice, ast.Constant) and outer.slice.value == 0
    if not isinstance(outer, ast.Assign) or len(outer.targets) != 1:
        return False
    target = outer.targets[0]
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return False
    second = target.elts[1]
    return isinstance(second, ast.Name) and second.id not in read


# -- models of transformers that compute attention step by step ----------------------------------------------------

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def eager_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost ones that write attention weights out, and need not: by name."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(outer) for outer in inside) or not hasattr(module, "set_attn_implementation"):
            continue
        inside.append(f"{path}." if path else "")
        eager = any(config._attn_implementation == "eager" for config in _configs(module))
        if eager and getattr(module, "_supports_sdpa", False) and not _shows_attentions(module):
            yield path, module


def drops_weights(model: nn.Module) -> bool:
    """Whether the configuration of a model that trains says that attention weights are dropped."""
    configs = [getattr(module, "config", None) for module in model.modules() if module.training]
    return any((getattr(config, name, 0.0) or 0.0) > 0 for config in configs for name in _DROPOUTS)


def make_fused(live: AttachedProgram, path: str, module: Any) -> None:
    """Let a model of transformers call ``scaled_dot_product_attention`` until the undo.

    Raises:
        UsageError: it cannot; nothing has been changed then.
    """
    configs = list(_configs(module))
    before = [(config, config._attn_implementation_internal) for config in configs]

    def undo() -> None:
        for config, value in before:
            config._attn_implementation_internal = value

    try:
        module.set_attn_implementation("sdpa")
        problem = "" if module.config._attn_implementation == "sdpa" else "its attention cannot be exchanged"
    except ValueError as error:
        problem = str(error).strip().splitlines()[0]
    if problem:
        undo()
        raise UsageError(
            f"{path or type(module).__name__} does not take fused attention: {problem}",
            "Leave eager at false",
        )
    live.on_undo(undo)


def _shows_attentions(module: Any) -> bool:
    return any(getattr(config, "output_attentions", False) for config in _configs(module))


def _configs(module: nn.Module) -> Iterator[Any]:
    """Configurations of a model and of the models in it, each once."""
    seen: set[int] = set()
    for inner in module.modules():
        config: Any = getattr(inner, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal") and id(config) not in seen:
            seen.add(id(config))
            yield config
