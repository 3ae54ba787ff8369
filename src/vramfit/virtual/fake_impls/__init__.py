"""Rules for ops that FakeTensorMode cannot describe, or that mean more than shapes on a virtual card."""

from vramfit.virtual.fake_impls import (
    apart,
    attention,
    backward,
    bitsandbytes,
    compressed,
    custom,
    described,
    encoder,
    foreach,
    gradients,
    host,
    random,
    recurrent,
    shapes,
    sparse,
    storage,
)
from vramfit.virtual.fake_impls.registry import LATE, RULES

__all__ = [
    "LATE",
    "RULES",
    "apart",
    "attention",
    "backward",
    "bitsandbytes",
    "compressed",
    "custom",
    "described",
    "encoder",
    "foreach",
    "gradients",
    "host",
    "random",
    "recurrent",
    "shapes",
    "sparse",
    "storage",
]
