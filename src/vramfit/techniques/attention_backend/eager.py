"""Models of transformers that compute attention step by step, and their change to fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram

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
