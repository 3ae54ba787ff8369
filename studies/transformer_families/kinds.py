"""Which class of a family is tried, and what goes into it."""

from __future__ import annotations

from enum import Enum
from functools import cache

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from transformer_families.overrides import CLASSES, FURTHER, LEFT_OUT, SEES


class Kind(Enum):
    """What a model does, by the name of the mapping that lists its classes."""

    SEQ_TO_SEQ = "SEQ_TO_SEQ_CAUSAL_LM"
    SPEECH_TO_TEXT = "SPEECH_SEQ_2_SEQ"
    CAUSAL_LM = "CAUSAL_LM"
    MASKED_LM = "MASKED_LM"
    IMAGE_CLASSES = "IMAGE_CLASSIFICATION"
    VIDEO_CLASSES = "VIDEO_CLASSIFICATION"
    SPEECH_CTC = "CTC"
    AUDIO_CLASSES = "AUDIO_CLASSIFICATION"
    SEGMENTATION = "SEMANTIC_SEGMENTATION"
    DEPTH = "DEPTH_ESTIMATION"
    DETECTION = "OBJECT_DETECTION"
    SEQUENCE_CLASSES = "SEQUENCE_CLASSIFICATION"
    IMAGE_TEXT = "IMAGE_TEXT_TO_TEXT"
    UNIVERSAL_SEGMENTATION = "UNIVERSAL_SEGMENTATION"
    CONTRASTIVE = "ZERO_SHOT_IMAGE_CLASSIFICATION"
    GROUNDED = "ZERO_SHOT_OBJECT_DETECTION"
    MASKS = "MASK_GENERATION"
    FORECAST = "TIME_SERIES_PREDICTION"
    REGRESSION = "TIME_SERIES_REGRESSION"
    SPEECH = "TEXT_TO_WAVEFORM"
    SPECTROGRAM = "TEXT_TO_SPECTROGRAM"
    VISUAL_ANSWERS = "VISUAL_QUESTION_ANSWERING"
    KEYPOINTS = "KEYPOINT_DETECTION"
    MATCHING = "KEYPOINT_MATCHING"
    SUPER_RESOLUTION = "IMAGE_TO_IMAGE"
    TEXT_RECOGNITION = "TEXT_RECOGNITION"
    TABLE_RECOGNITION = "TABLE_RECOGNITION"
    BACKBONE = "BACKBONE"
    OTHER = ""


@cache
def families() -> dict[str, tuple[Kind, str]]:
    """Families to try: model type to its kind and its class, the first kind that it has."""
    found: dict[str, tuple[Kind, str]] = {}
    for kind in Kind:
        mapping = _mapping(kind)
        for model_type, names in mapping.items():
            name = CLASSES.get(model_type) or (names if isinstance(names, str) else names[0])
            if kind is Kind.CAUSAL_LM and model_type in SEES:
                continue
            if model_type in CONFIG_MAPPING_NAMES and model_type not in LEFT_OUT:
                found.setdefault(model_type, (kind, name))
    return found


def _mapping(kind: Kind) -> dict[str, str | tuple[str, ...]]:
    """Model types of a kind and their classes; families of no kind stand in a table of our own."""
    if kind is Kind.OTHER:
        return dict(FURTHER)
    names = (f"MODEL_FOR_{kind.value}_MAPPING_NAMES", f"MODEL_{kind.value}_MAPPING_NAMES")
    return next(getattr(modeling_auto, name) for name in names if hasattr(modeling_auto, name))


def kind_of(class_name: str) -> Kind:
    """The first kind whose mapping lists a class."""
    for kind in Kind:
        for names in _mapping(kind).values():
            if class_name == names or class_name in names:
                return kind
    return Kind.OTHER
