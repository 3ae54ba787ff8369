"""Between float32 and bfloat16: without loss, as two halves, or at random, right on average.

NOTE [Two halves]: bfloat16 is the upper half of float32. A float32 weight is kept as its bfloat16 rounding, which the
model computes with, and the 16 bits by which the two differ as integers: 4 bytes together, as float32 alone
(NVIDIA Apex keeps such remainders: apex/contrib/optimizers/distributed_fused_adam.py, ``store_param_remainders``).
The weights may be changed by others in between (clamped, averaged, loaded): the remainder is then off by at most half
a unit of bfloat16, which is what rounding would have lost.
"""

from __future__ import annotations

import torch

REMAINDERS = "float32_remainders"
"""Where they are in an optimizer's ``state_dict``, beside ``state`` and ``param_groups``: by parameter's number."""

_HALF_UNIT = 1 << 15
_UNIT = 1 << 16


def split(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 tensor as bfloat16 (rounded to nearest, ties upwards in size) and int16 remainders.

    Shapes are those of `wide`. NaN stays NaN.
    """
    half = wide.to(torch.bfloat16)
    lost = _upper_bits(half).neg_().add_(wide.view(torch.int32))
    # Ties go to the even neighbour in torch. One that went downwards lost half a unit, which int16 does not hold.
    tie = lost == _HALF_UNIT
    half.view(torch.int16).add_(tie)
    lost.masked_fill_(tie, -_HALF_UNIT)
    return half, lost.to(torch.int16)


def lost_bits(wide: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """The remainders of a float32 tensor that torch rounded to bfloat16: int16.

    A tie that went to the lower neighbour lost half a unit, which int16 does not hold: it gets a unit of float32 less.
    """
    lost = _upper_bits(half).neg_().add_(wide.view(torch.int32))
    return lost.clamp_(max=_HALF_UNIT - 1).to(torch.int16)


def join_(wide: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Give a float32 tensor that came of bfloat16 its remainders back, in place."""
    lost = remainder.to(torch.int32)
    # A weight that somebody set to zero has no remainder below: its bits would wrap around to NaN.
    lost.masked_fill_((wide == 0) & (lost < 0), 0)
    wide.view(torch.int32).add_(lost)
    return wide


def round_at_random(wide: torch.Tensor) -> torch.Tensor:
    """A float32 tensor in bfloat16, each value to one of its two neighbours, to the nearer with more probability.

    The expected value is the value (Zamirai et al., 2020, arXiv:2010.06192, "Revisiting BFloat16 Training"). The random
    numbers are those of the device's default generator.
    """
    bits = torch.empty_like(wide, dtype=torch.int32).random_(0, _UNIT)
    bits.add_(wide.view(torch.int32)).bitwise_and_(-_UNIT)
    half = bits.view(torch.float32).to(torch.bfloat16)
    return half.masked_fill_(wide.isnan(), torch.nan)  # the bits of a NaN may have wrapped around to a number


def _upper_bits(half: torch.Tensor) -> torch.Tensor:
    return half.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
