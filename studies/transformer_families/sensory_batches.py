"""Synthetic batches of families that see, hear, or take something of their own; pictures within text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from transformer_families.inputs import BATCH, bins, images, side, text, tokens, wave
from transformer_families.kinds import Kind
from transformer_families.sizes import LENGTH, SPECIAL_TOKENS

Maker = Callable[[Any], dict[str, Any]]
_HEIGHT, _WIDTH = 2, 2
"""Patches of one picture, before neighbours are merged, in units of the merge size."""


# -- pictures within text ----------------------------------------------------------------------------------------


def complete(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Put as many tokens into the text as the model makes features of the pictures."""
    config = model.config
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    woven = token == SPECIAL_TOKENS and {"pixel_values", "input_ids"} <= set(batch)
    if not woven or "cross_attention_mask" in batch:
        return batch
    features = _features(model, batch)
    read = batch["input_ids"]
    places = torch.full((BATCH, features // BATCH), token)
    begin, end = (torch.full((BATCH, 1), token + step) for step in (2, 3))
    read = torch.cat([begin, places, end, read], 1)
    kinds = torch.zeros_like(read)
    kinds[:, 1 : 1 + features // BATCH] = 1
    known = set(inspect.signature(model.forward).parameters)
    extra = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in known}
    if "token_type_ids" in extra and "mm_token_type_ids" in extra:
        del extra["token_type_ids"]
    return batch | {
        "input_ids": read,
        "attention_mask": torch.ones_like(read),
        "labels": read.clone(),
        **extra,
    }


def _features(model: nn.Module, batch: dict[str, Any]) -> int:
    """Vectors that take the places of tokens, for all pictures of a batch together."""
    ask = getattr(model, "get_image_features", None) or model.model.get_image_features
    known = set(inspect.signature(ask).parameters)
    given = {name: value for name, value in batch.items() if name in known and name != "input_ids"}
    with torch.no_grad():
        found = ask(**given)
    found = getattr(found, "pooler_output", None) if not isinstance(found, (Tensor, list, tuple)) else found
    parts = found if isinstance(found, (list, tuple)) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _pictured_text(config: Any) -> dict[str, Any]:
    read = text(config)
    vision = getattr(config, "vision_config", None)
    pixels = side(config)
    made = read | {
        "pixel_values": images(config),
    }
    if getattr(vision, "model_type", "") == "pixtral":
        made["image_sizes"] = torch.tensor([[pixels, pixels]] * BATCH)
    merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", None)
    if merge:
        made |= _patches(vision, merge)
    return made


def _patches(vision: Any, merge: int) -> dict[str, Any]:
    """Pictures as rows of patches, with the height and width of each in patches."""
    size = getattr(vision, "patch_size", 14)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
    times = getattr(vision, "temporal_patch_size", None) or 1
    height, width = _HEIGHT * merge, _WIDTH * merge
    return {
        "pixel_values": torch.randn(BATCH * height * width, channels * times * size * size),
        "image_grid_thw": torch.tensor([[1, height, width]] * BATCH),
    }


def _tiled_text(config: Any) -> dict[str, Any]:
    """Every picture as a whole and in four tiles."""
    made = _pictured_text(config)
    pixels = side(config)
    made["pixel_values"] = torch.randn(BATCH, 5, 3, pixels, pixels)
    made["image_sizes"] = torch.tensor([[2 * pixels, 2 * pixels]] * BATCH)
    return made


def _one_of_several(config: Any) -> dict[str, Any]:
    """Models that take several pictures per text: one."""
    made = _pictured_text(config)
    return made | {"pixel_values": images(config)[:, None]}


# -- other kinds -------------------------------------------------------------------------------------------------


def _pictures(config: Any) -> dict[str, Any]:
    return {"pixel_values": images(config)}


def _masks(config: Any) -> dict[str, Any]:
    """Two masked regions with their classes, for every picture."""
    pixels = side(config)
    clip = torch.randn(BATCH, getattr(config, "num_frames", None) or 2, 3, pixels, pixels)
    return {
        "pixel_values": images(config),
        "pixel_values_videos": clip,
        "mask_labels": [torch.randint(0, 2, (2, pixels, pixels)).float() for _ in range(BATCH)],
        "class_labels": [torch.tensor([0, 1]) for _ in range(BATCH)],
    }


def _task_masks(config: Any) -> dict[str, Any]:
    return _masks(config) | {
        "task_inputs": torch.randint(5, 100, (BATCH, config.task_seq_len)),
        "text_inputs": torch.randint(5, 100, (BATCH, config.num_queries - 16, config.task_seq_len)),
    }


def _pairs(config: Any) -> dict[str, Any]:
    """Pictures and the texts that belong to them."""
    length = min(16, getattr(getattr(config, "text_config", None), "max_position_embeddings", None) or 16)
    read = torch.randint(5, 100, (BATCH, length))
    read[:, -1] = 4  # the token that ends a text, which some models look for
    return {
        "input_ids": read,
        "attention_mask": torch.ones_like(read),
        "pixel_values": images(config),
        "return_loss": True,
    }


def _film_pairs(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    frames = getattr(vision, "num_frames", None) or 2
    clip = torch.randn(BATCH, frames, 3, side(config), side(config))
    return _pairs(config) | {"pixel_values": clip, "pixel_values_videos": clip}


def _prompted(config: Any) -> dict[str, Any]:
    """A point on every picture of which the mask is wanted."""
    return {
        "pixel_values": images(config),
        "input_points": torch.full((BATCH, 1, 1, 2), 10.0),
        "input_labels": torch.ones(BATCH, 1, 1, dtype=torch.long),
    }


def _question(config: Any) -> dict[str, Any]:
    read = text(config)
    return read | {"pixel_values": images(config), "labels": torch.rand(BATCH, config.num_labels)}


def _spoken(config: Any) -> dict[str, Any]:
    return text(config) | {"labels": None}


def _two_pictures(_: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 2, 3, 64, 64)}


def _series(config: Any) -> dict[str, Any]:
    """A history of several channels, and what follows."""
    channels = config.num_input_channels
    return {
        "past_values": torch.randn(BATCH, config.context_length, channels),
        "target_values": torch.randn(BATCH, config.num_targets),
    }


def _forecast(config: Any) -> dict[str, Any]:
    """A history with the features of its time, and of the time to predict."""
    past = config.context_length + max(config.lags_sequence)
    features = config.num_time_features
    return {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, config.prediction_length),
        "future_time_features": torch.randn(BATCH, config.prediction_length, features),
    }


def _patched_series(config: Any) -> dict[str, Any]:
    past = torch.randn(BATCH, 4 * config.patch_length)
    return {
        "past_values": list(past),
        "freq": [0] * BATCH,
        "future_values": torch.randn(BATCH, config.horizon_length),
    }


def _sound(_: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 1, 4800)}


MAKERS: dict[Kind, Maker] = {
    Kind.IMAGE_TEXT: _pictured_text,
    Kind.UNIVERSAL_SEGMENTATION: _masks,
    Kind.CONTRASTIVE: _pairs,
    Kind.GROUNDED: _pairs,
    Kind.MASKS: _prompted,
    Kind.FORECAST: _patched_series,
    Kind.REGRESSION: _series,
    Kind.SPEECH: _spoken,
    Kind.SPECTROGRAM: _spoken,
    Kind.VISUAL_ANSWERS: _question,
    Kind.KEYPOINTS: _pictures,
    Kind.MATCHING: _two_pictures,
    Kind.SUPER_RESOLUTION: _pictures,
    Kind.TEXT_RECOGNITION: _pictures,
    Kind.TABLE_RECOGNITION: _pictures,
    Kind.BACKBONE: _pictures,
    Kind.OTHER: _pictures,
}
"""For kinds of models."""


# -- single families ---------------------------------------------------------------------------------------------


def _image_tokens(_: Any) -> dict[str, Any]:
    """Pictures as a text of colours."""
    return {"input_ids": torch.randint(0, 300, (BATCH, 64)), "labels": torch.tensor([0, 1])}


def _patch_rows(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    return {
        "pixel_values": torch.randn(BATCH, 16, 3 * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
        "labels": torch.tensor([0, 1]),
    }


def _stacked_frames(config: Any) -> dict[str, Any]:
    return {
        "input_features": torch.randn(BATCH, 64, 4 * bins(config)),
        "attention_mask": torch.ones(BATCH, 64, dtype=torch.long),
        "labels": torch.randint(5, 20, (BATCH, 3)),
    }


def _masked_frames(config: Any) -> dict[str, Any]:
    """A spectrogram, time first, with the mask of its frames."""
    return {
        "input_features": torch.randn(BATCH, 256, bins(config)),
        "attention_mask": torch.ones(BATCH, 256, dtype=torch.long),
        "labels": torch.randint(5, 20, (BATCH, 3)),
    }


def _dictated(config: Any) -> dict[str, Any]:
    """A spectrogram, time first, and what was said."""
    said = tokens(config)
    return _masked_frames(config) | {"decoder_input_ids": said, "labels": said.clone()}


def _waves_to_text(_: Any) -> dict[str, Any]:
    said = torch.randint(5, 300, (BATCH, 8))
    return {"input_values": wave(), "labels": said, "decoder_input_ids": said}


def _melody(config: Any) -> dict[str, Any]:
    said = tokens(config)
    return {"input_features": torch.randn(BATCH, 16, config.d_model), "labels": said}


def _codebooks(config: Any) -> dict[str, Any]:
    read = torch.randint(5, 200, (BATCH, 16))
    sounds = torch.randint(5, 200, (BATCH, 16, config.decoder_config.num_channels))
    return {"input_ids": read, "attention_mask": torch.ones_like(read), "decoder_input_ids": sounds}


def _page(config: Any) -> dict[str, Any]:
    """Words with the boxes around them, on a picture of the page."""
    made = text(config)
    boxes = torch.tensor([1, 2, 30, 40]).expand(BATCH, LENGTH, 4).clone()
    return made | {"bbox": boxes, "pixel_values": images(config), "labels": torch.tensor([0, 1])}


def _page_text(config: Any) -> dict[str, Any]:
    read = text(config)
    boxes = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(BATCH, LENGTH, 4).clone()
    return read | {"bbox": boxes, "pixel_values": images(config)}


def _boxed_tokens(config: Any) -> dict[str, Any]:
    boxes = torch.rand(BATCH, LENGTH, 8)
    return text(config) | {"bbox": boxes, "labels": torch.randint(0, 2, (BATCH, LENGTH))}


def _regions(config: Any) -> dict[str, Any]:
    """Text beside regions of a picture that another model has described."""
    return text(config) | {
        "visual_feats": torch.randn(BATCH, 6, getattr(config, "visual_feat_dim", 8)),
        "visual_pos": torch.rand(BATCH, 6, getattr(config, "visual_pos_dim", 4)),
        "labels": torch.randint(0, config.num_qa_labels, (BATCH,)),
    }


def _visual_embeddings(config: Any) -> dict[str, Any]:
    seen = torch.randn(BATCH, 6, config.visual_embedding_dim)
    read = text(config)
    return {
        "input_ids": read["input_ids"],
        "attention_mask": read["attention_mask"],
        "visual_embeds": seen,
        "visual_attention_mask": torch.ones(BATCH, 6),
        "labels": torch.cat([read["input_ids"], torch.full((BATCH, 6), -100)], 1),
    }


def _answer_span(config: Any) -> dict[str, Any]:
    where = torch.tensor([1, 2])
    made = text(config)
    made["input_ids"][:, 0] = config.question_token_id
    return made | {"start_positions": where, "end_positions": where}


def _states(config: Any) -> dict[str, Any]:
    steps = 8
    return {
        "states": torch.randn(BATCH, steps, config.state_dim),
        "actions": torch.randn(BATCH, steps, config.act_dim),
        "rewards": torch.randn(BATCH, steps, 1),
        "returns_to_go": torch.randn(BATCH, steps, 1),
        "timesteps": torch.arange(steps).expand(BATCH, steps).clone(),
        "attention_mask": torch.ones(BATCH, steps),
    }


def _heard_pairs(config: Any) -> dict[str, Any]:
    audio = config.audio_config
    return _pairs(config) | {
        "input_features": torch.randn(BATCH, 1, audio.spec_size**2 // audio.num_mel_bins, audio.num_mel_bins),
        "is_longer": torch.zeros(BATCH, 1, dtype=torch.bool),
    }


def _crossed_pictures(config: Any) -> dict[str, Any]:
    """Text that looks at a picture through cross-attention."""
    vision = config.vision_config
    return text(config) | {
        "pixel_values": torch.randn(BATCH, 1, vision.max_num_tiles, 3, vision.image_size, vision.image_size),
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, vision.max_num_tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(BATCH, LENGTH, 1, vision.max_num_tiles, dtype=torch.long),
    }


def _attended_pictures(config: Any) -> dict[str, Any]:
    return text(config) | {
        "pixel_values": images(config)[:, None],
        "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
    }


def _marked_pictures(config: Any) -> dict[str, Any]:
    made = text(config)
    where = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    where[:, 1 : 1 + config.latent_query_num] = 1
    return made | {"pixel_values": images(config), "image_embeds_position_mask": where}


def _answers(config: Any) -> dict[str, Any]:
    """Pictures that a text describes."""
    said = torch.randint(5, 300, (BATCH, 8))
    return {"pixel_values": images(config), "labels": said, "decoder_input_ids": said}


def _queried_pictures(config: Any) -> dict[str, Any]:
    """Pictures that a text asks before another text is written about them."""
    made = _pictured_text(config)
    asked = torch.randint(5, 300, (BATCH, 8))
    return made | {"qformer_input_ids": asked, "qformer_attention_mask": torch.ones_like(asked)}


def _films_in_text(config: Any) -> dict[str, Any]:
    made = _queried_pictures(config)
    return made | {"pixel_values": torch.randn(BATCH, 2, 3, side(config), side(config))}


def _line(config: Any) -> dict[str, Any]:
    """A line of a page, as high as the model wants it."""
    high, wide = _LINES.get(config.model_type, (96, 320))
    return {"pixel_values": torch.randn(BATCH, 3, high, wide)}


_LINES = {"pp_ocrv6_small_rec": (64, 320), "pp_ocrv6_tiny_rec": (48, 160)}


def _sized_line(config: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, *config.image_size), "labels": None}


def _clip(config: Any) -> dict[str, Any]:
    return {"pixel_values_videos": torch.randn(BATCH, 2, 3, side(config), side(config))}


def _plain_text(config: Any) -> dict[str, Any]:
    return text(config)


INPUTS: dict[str, Maker] = {
    "dpr": _plain_text,
    "groupvit": _pairs,
    "instructblip": _queried_pictures,
    "instructblipvideo": _films_in_text,
    "mgp-str": _sized_line,
    "pp_ocrv5_mobile_rec": _line,
    "pp_ocrv5_server_rec": _line,
    "pp_ocrv6_small_rec": _line,
    "pp_ocrv6_tiny_rec": _line,
    "videomt": _clip,
    "videoprism": _film_pairs,
    "bros": _boxed_tokens,
    "canary": _dictated,
    "clap": _heard_pairs,
    "cohere_asr": _dictated,
    "dac": _sound,
    "decision_transformer": _states,
    "dia": _codebooks,
    "encodec": _sound,
    "granite_speech5_ctc": _stacked_frames,
    "idefics": _attended_pictures,
    "idefics2": _one_of_several,
    "idefics3": _one_of_several,
    "imagegpt": _image_tokens,
    "autoformer": _forecast,
    "informer": _forecast,
    "kosmos-2": _marked_pictures,
    "lasr_ctc": _masked_frames,
    "layoutlmv3": _page,
    "lilt": _page,
    "llava_next": _tiled_text,
    "llava_next_video": _tiled_text,
    "llava_onevision": _tiled_text,
    "lxmert": _regions,
    "mimi": _sound,
    "mllama": _crossed_pictures,
    "oneformer": _task_masks,
    "parakeet_ctc": _masked_frames,
    "pop2piano": _melody,
    "pp_doclayout_v2": _pictures,
    "pp_doclayout_v3": _pictures,
    "pp_doclayout_v4": _pictures,
    "siglip2": _patch_rows,
    "smolvlm": _one_of_several,
    "speech-encoder-decoder": _waves_to_text,
    "speech_to_text": _dictated,
    "splinter": _answer_span,
    "time_series_transformer": _forecast,
    "udop": _page_text,
    "vision-encoder-decoder": _answers,
    "visual_bert": _visual_embeddings,
    "xclip": _film_pairs,
}
"""For families that take something of their own."""
