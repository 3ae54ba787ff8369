"""Weights of the true names and shapes, of constant values: a stored tensor takes one number on the disk."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def _hollow(state: dict[str, Any]) -> dict[str, Any]:
    """The same tensors, each a single value that is repeated by strides of 0."""
    import torch

    found = {}
    for name, tensor in state.items():
        value = torch.zeros((), dtype=tensor.dtype)
        if tensor.is_floating_point() and not name.endswith("bias"):
            value.fill_(0.01)
        found[name] = value.expand(tensor.shape)
    return found


def _save(path: Path, content: Any) -> None:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def _state(make: Any) -> dict[str, Any]:
    import torch

    with torch.device("meta"):
        return dict(make().state_dict())


def torchvision_weights(folder: Path, *models: str) -> None:
    """A torch hub folder with weights of torchvision's models, under the names that it looks for."""
    from torchvision.models import get_model, get_model_weights

    for model in models:
        weights = get_model_weights(model)
        state = _hollow(_state(lambda model=model: get_model(model, weights=None)))
        for entry in weights:
            _save(folder / "hub" / "checkpoints" / entry.url.rsplit("/", 1)[-1], state)


def repository_weights(path: Path, module: str, factory: str, *arguments: str) -> None:
    """The ``state_dict`` of a model of the repository: ``module``, a callable in it, and numbers for it."""
    sys.path.insert(0, str(Path.cwd()))
    make = getattr(importlib.import_module(module), factory)
    numbers = [int(argument) for argument in arguments]
    _save(path, _hollow(dict(make(*numbers).state_dict())))


def gpt_fast_weights(folder: Path, name: str = "stories110M") -> None:
    """A checkpoint of gpt-fast and its tokenizer."""
    from stranger_runs.makers.texts import sentencepiece_model

    sys.path.insert(0, str(Path.cwd()))
    model = importlib.import_module("model")
    state = _state(lambda: model.Transformer.from_name(name))
    _save(folder / "model.pth", {"model": _hollow(state)} if "stories" in name else _hollow(state))
    sentencepiece_model(folder / "tokenizer.model", "2000", str(model.ModelArgs.from_name(name).vocab_size))


def whisper_weights(path: Path) -> None:
    """A Whisper checkpoint of the size ``tiny``."""
    sys.path.insert(0, str(Path.cwd()))
    model = importlib.import_module("whisper.model")
    sizes = {
        "n_mels": 80,
        "n_vocab": 51865,
        "n_audio_ctx": 1500,
        "n_audio_state": 384,
        "n_audio_head": 6,
        "n_audio_layer": 4,
        "n_text_ctx": 448,
        "n_text_state": 384,
        "n_text_head": 6,
        "n_text_layer": 4,
    }
    made = model.Whisper(model.ModelDimensions(**sizes))
    _save(path, {"dims": sizes, "model_state_dict": dict(made.state_dict())})


MAKERS = (torchvision_weights, repository_weights, gpt_fast_weights, whisper_weights)
