"""Finds the layer of a model that gives the logits."""

from __future__ import annotations

from torch import nn

from vramfit.techniques.core.surround import plain_class


def find_head(model: nn.Module) -> str | None:
    """The linear layer that gives a language model's logits, by name.

    What ``get_output_embeddings`` of transformers' models says; else the last that has as many outputs as the largest
    embedding has rows; else the last of all linear layers, if none has more outputs and it has more than inputs.
    """
    linear: dict[str, nn.Linear] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and plain_class(module) is nn.Linear
    }
    for module in model.modules():
        told = getattr(module, "get_output_embeddings", None)
        found = told() if callable(told) else None
        for name, known in linear.items():
            if known is found:
                return name
    words = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    of_words = [name for name, module in linear.items() if module.out_features == words]
    if of_words:
        return of_words[-1]
    if not linear:
        return None
    name, last = list(linear.items())[-1]
    widest = max(module.out_features for module in linear.values())
    return name if last.out_features == widest and last.out_features > last.in_features else None
