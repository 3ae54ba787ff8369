"""Memory by bytes per parameter, as guides give it. Counts no activations: that is what such formulas are.

Training: Hugging Face, Transformers documentation, "GPU memory usage" (model_memory_anatomy): weights 4 bytes, or 6
in mixed precision; gradients 4; Adam's states 8, of an 8-bit Adam 2, of SGD with momentum 4. That is 16 bytes a
parameter for Adam in float32 and 18 in mixed precision. States of other optimizers are counted in the same way. With
weights of 2 bytes everything takes half.

Inference: the weights times 1.2 (EleutherAI, "Transformer Math 101", https://blog.eleuther.ai/transformer-math/).
"""

from __future__ import annotations

from configurations.catalogue import Precision

STATES = {
    "sgd": 0.0,
    "sgd-momentum": 4.0,
    "adam": 8.0,
    "adamw-foreach": 8.0,
    "adamw-fused": 8.0,
    "adamw-loop": 8.0,
    "adamw-8bit": 2.0,
    "adafactor": 4.0,
    "rmsprop": 8.0,
}
"""Bytes of optimizer state per trained parameter in float32. Of Adafactor the documentation of transformers 4 says
slightly more than 4."""

HALF = (Precision.BF16_WEIGHTS, Precision.FP16_WEIGHTS)
MIXED = (Precision.BF16, Precision.FP16)


def predicted_bytes(parameters: int, trained: int, precision: Precision, optimizer: str | None) -> int:
    """Bytes for a model.

    Args:
        parameters: how many it has.
        trained: how many of them are trained.
        precision: number formats.
        optimizer: name in `STATES`, None for inference.
    """
    size = 2 if precision in HALF else 4
    if optimizer is None:
        return round(1.2 * size * parameters)
    weights = 6 if precision in MIXED else size
    return round(weights * parameters + (4 + STATES[optimizer]) * size / 4 * trained)
