"""Synthetic batches on the CPU: what a model of each kind takes, labels included."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from transformer_families.inputs import BATCH, bins, images, side, text, tokens, wave
from transformer_families.kinds import Kind
from transformer_families.sensory_batches import INPUTS, MAKERS, complete


def batch_for(model: nn.Module, kind: Kind) -> dict[str, Any]:
    """Inputs and labels of a model, by name."""
    accepted = set(inspect.signature(model.forward).parameters)
    maker = INPUTS.get(model.config.model_type) or _MAKERS.get(kind) or MAKERS[kind]
    made = maker(model.config)
    if "decoder_input_ids" in accepted and kind is Kind.MASKED_LM:
        made["decoder_input_ids"] = made["input_ids"]
    return complete(model, {name: value for name, value in made.items() if name in accepted})


def _classified_text(config: Any) -> dict[str, Any]:
    return text(config) | {"labels": torch.tensor([0, 1])}


def _classified_images(config: Any) -> dict[str, Any]:
    return {"pixel_values": images(config), "labels": torch.tensor([0, 1])}


def _videos(config: Any) -> dict[str, Any]:
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None) or 4
    clip = torch.randn(BATCH, frames, 3, side(config), side(config))
    return {"pixel_values": clip, "pixel_values_videos": clip, "labels": torch.tensor([0, 1])}


def _waves(config: Any) -> dict[str, Any]:
    frames = getattr(config, "max_length", None) or 128
    frames = frames if isinstance(frames, int) and frames > 20 else 128
    return {
        "input_values": wave(),
        "input_features": torch.randn(BATCH, frames, bins(config)),
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
    positions = getattr(config, "max_source_positions", None) or 64
    said = tokens(config)
    return {
        "input_features": torch.randn(BATCH, bins(config), 2 * positions),
        "input_values": wave(),
        "decoder_input_ids": said,
        "labels": said.clone(),
    }


def _segmented(config: Any) -> dict[str, Any]:
    return {
        "pixel_values": images(config),
        "labels": torch.randint(0, 2, (BATCH, side(config), side(config))),
    }


def _depth(config: Any) -> dict[str, Any]:
    return {"pixel_values": images(config)}


def _detected(config: Any) -> dict[str, Any]:
    targets = [
        {
            "class_labels": torch.tensor([0, 1]),
            "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.2]]),
        }
        for _ in range(BATCH)
    ]
    pixels = max(64, side(config))
    return {"pixel_values": torch.randn(BATCH, 3, pixels, pixels), "labels": targets}


_MAKERS = {
    Kind.CAUSAL_LM: text,
    Kind.SEQ_TO_SEQ: text,
    Kind.SPEECH_TO_TEXT: _speech,
    Kind.MASKED_LM: text,
    Kind.IMAGE_CLASSES: _classified_images,
    Kind.VIDEO_CLASSES: _videos,
    Kind.SPEECH_CTC: _ctc,
    Kind.AUDIO_CLASSES: _classified_waves,
    Kind.SEGMENTATION: _segmented,
    Kind.DEPTH: _depth,
    Kind.DETECTION: _detected,
    Kind.SEQUENCE_CLASSES: _classified_text,
}
