"""Training in bfloat16 as a whole: weights, gradients and activations, with a remedy for updates that would vanish."""

from vramfit.techniques.low_precision_training.bfloat16_training import (
    LowPrecisionTraining,
    LowPrecisionTrainingSetting,
    Master,
)

__all__ = ["LowPrecisionTraining", "LowPrecisionTrainingSetting", "Master"]
