"""Parts of synthetic batches: tokens, pictures, clips, sounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_families.sizes import IMAGE, LENGTH, SPECIAL_TOKENS

BATCH = 2
_REAL_VOCABULARY, _REAL_LENGTH = 10_000, 256
"""A model with as many tokens as real ones have reads texts as long as real ones."""


def vocabulary(config: Any) -> int:
    """Tokens that a model, or the part of it that reads, knows."""
    names = ("text_config", "decoder", "decoder_config", "thinker_config")
    for part in (config, *(getattr(config, name, None) for name in names)):
        size = getattr(part, "vocab_size", None)
        if isinstance(size, int):
            return size
    return 100


def tokens(config: Any) -> Tensor:
    """Text of which no token stands for a picture or a sound."""
    size = vocabulary(config)
    length = LENGTH if size < _REAL_VOCABULARY else _REAL_LENGTH
    return torch.randint(5, min(size, SPECIAL_TOKENS), (BATCH, length))


def text(config: Any) -> dict[str, Tensor]:
    """Text with its mask and, as labels, itself."""
    read = tokens(config)
    return {"input_ids": read, "attention_mask": torch.ones_like(read), "labels": read.clone()}


def side(config: Any) -> int:
    """Pixels along one side of a model's pictures."""
    for part in (config, *(getattr(config, name, None) for name in ("vision_config", "backbone_config"))):
        size = getattr(part, "image_size", None)
        if size:
            return int(size[0] if isinstance(size, (list, tuple)) else size)
    return IMAGE


def images(config: Any) -> Tensor:
    """Pictures of random pixels."""
    channels = getattr(config, "num_channels", None) or 3
    return torch.randn(BATCH, channels if isinstance(channels, int) else 3, side(config), side(config))


def wave() -> Tensor:
    """A quarter of a second of noise at 16 kHz."""
    return torch.randn(BATCH, 4000)


def bins(config: Any) -> int:
    """Frequency bands of the spectrograms that a model hears."""
    for part in (config, getattr(config, "encoder_config", None), getattr(config, "audio_config", None)):
        for name in ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel"):
            if isinstance(getattr(part, name, None), int):
                return int(getattr(part, name))
    return 80
