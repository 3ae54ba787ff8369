"""Rules for ops that FakeTensorMode cannot describe, or that mean more than shapes on a virtual card."""

from vramfit.virtual.rules import (
    attention,
    backward,
    foreach,
    gradients,
    host,
    random,
    recurrent,
    shapes,
    storage,
)
from vramfit.virtual.rules.registry import RULES

__all__ = [
    "RULES",
    "attention",
    "backward",
    "foreach",
    "gradients",
    "host",
    "random",
    "recurrent",
    "shapes",
    "storage",
]
