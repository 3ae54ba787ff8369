"""Synthetic batches on the CPU: what a model of each kind takes, labels included."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from transformer_families.kinds import Kind
from transformer_families.sizes import IMAGE, LENGTH

BATCH = 2


def batch_for(model: nn.Module, kind: Kind) -> dict[str, Any]:
    """Inputs and labels of a model, by name."""
    accepted = set(inspect.signature(model.forward).parameters)
    made = _MAKERS[kind](model.config)
    if "decoder_input_ids" in accepted and kind is Kind.MASKED_LM:
        made["decoder_input_ids"] = made["input_ids"]
    return {name: value for name, value in made.items() if name in accepted}


def _vocabulary(config: Any) -> int:
    for part in (
        config,
        *(getattr(config, name, None) for name in ("text_config", "decoder", "decoder_config")),
    ):
        size = getattr(part, "vocab_size", None)
        if isinstance(size, int):
            return size
    return 100


def _tokens(config: Any) -> Tensor:
    return torch.randint(5, _vocabulary(config), (BATCH, LENGTH))


def _text(config: Any) -> dict[str, Any]:
    tokens = _tokens(config)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _classified_text(config: Any) -> dict[str, Any]:
    return _text(config) | {"labels": torch.tensor([0, 1])}


def _side(config: Any) -> int:
    size = getattr(config, "image_size", None) or IMAGE
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _images(config: Any) -> Tensor:
    channels = getattr(config, "num_channels", None) or 3
    return torch.randn(BATCH, channels, _side(config), _side(config))


def _classified_images(config: Any) -> dict[str, Any]:
    return {"pixel_values": _images(config), "labels": torch.tensor([0, 1])}


def _videos(config: Any) -> dict[str, Any]:
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None) or 4
    clip = torch.randn(BATCH, frames, 3, _side(config), _side(config))
    return {"pixel_values": clip, "pixel_values_videos": clip, "labels": torch.tensor([0, 1])}


def _waves(config: Any) -> dict[str, Any]:
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80
    bins = getattr(config, "feature_projection_input_dim", None) or bins
    frames = getattr(config, "max_length", None) or 128
    spectrum = torch.randn(BATCH, frames if isinstance(frames, int) and frames > 20 else 128, bins)
    return {
        "input_values": torch.randn(BATCH, 4000),
        "input_features": spectrum,
        "attention_mask": None,
    }


def _ctc(config: Any) -> dict[str, Any]:
    return _waves(config) | {"labels": torch.randint(5, 20, (BATCH, 3))}


def _classified_waves(config: Any) -> dict[str, Any]:
    made = _waves(config) | {"labels": torch.tensor([0, 1])}
    if getattr(config, "patch_size", None):  # spectrogram transformers take the spectrogram by this name
        made["input_values"] = torch.randn(BATCH, config.max_length, config.num_mel_bins)
    return made


def _speech(config: Any) -> dict[str, Any]:
    bins = getattr(config, "num_mel_bins", None) or 80
    positions = getattr(config, "max_source_positions", None) or 64
    tokens = _tokens(config)
    return {
        "input_features": torch.randn(BATCH, bins, 2 * positions),
        "input_values": torch.randn(BATCH, 4000),
        "decoder_input_ids": tokens,
        "labels": tokens.clone(),
    }


def _segmented(config: Any) -> dict[str, Any]:
    side = _side(config)
    return {"pixel_values": _images(config), "labels": torch.randint(0, 2, (BATCH, side, side))}


def _depth(config: Any) -> dict[str, Any]:
    return {"pixel_values": _images(config)}


def _detected(config: Any) -> dict[str, Any]:
    targets = [
        {
            "class_labels": torch.tensor([0, 1]),
            "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.2]]),
        }
        for _ in range(BATCH)
    ]
    side = max(64, _side(config))
    return {"pixel_values": torch.randn(BATCH, 3, side, side), "labels": targets}


_MAKERS = {
    Kind.CAUSAL_LM: _text,
    Kind.SEQ_TO_SEQ: _text,
    Kind.SPEECH_TO_TEXT: _speech,
    Kind.MASKED_LM: _text,
    Kind.IMAGE_CLASSES: _classified_images,
    Kind.VIDEO_CLASSES: _videos,
    Kind.SPEECH_CTC: _ctc,
    Kind.AUDIO_CLASSES: _classified_waves,
    Kind.SEGMENTATION: _segmented,
    Kind.DEPTH: _depth,
    Kind.DETECTION: _detected,
    Kind.SEQUENCE_CLASSES: _classified_text,
}
