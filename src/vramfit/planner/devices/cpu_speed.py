"""How long arithmetic takes on a CPU that nobody has measured: a guess, made before anything runs. Imports no torch."""

from __future__ import annotations

CPU_FLOPS = 20e9
"""FLOP/s that a core reaches, at least, in a training step in float32.

Measured on one core of an AMD EPYC with torch 2.13, by the FLOPs of torch.utils.flop_counter: 26 and 33 GFLOP/s for a
transformer of width 64 and a convolutional network of 16 channels, 46 to 91 GFLOP/s for larger ones. It stands below
all of them, and counts one core, since a guess that is too long costs a smaller trial, and one that is too short costs
the user's time.
"""


def cpu_seconds(flops: float) -> float:
    """Seconds that as many floating-point operations take at most, guessed."""
    return flops / CPU_FLOPS
