"""Activation checkpointing: blocks keep their input, and run again for the backward pass."""

from vramfit.techniques.activation_checkpointing.checkpointing import (
    ActivationCheckpointing,
    Checkpointing,
    Mode,
    setting_for,
)
from vramfit.techniques.activation_checkpointing.specs import PRESETS, keeps, op_specs

__all__ = [
    "PRESETS",
    "ActivationCheckpointing",
    "Checkpointing",
    "Mode",
    "keeps",
    "op_specs",
    "setting_for",
]
