"""How far values may be off by what is promised of them, as a part of their norm."""

from __future__ import annotations

import torch

from vramfit.techniques.core.technique import Numerics

ROUNDING_ERROR = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Part of a tensor's norm by which another order of sums may change it, by its dtype: of a gradient its parameter's."""

PRECISION_ERROR = 0.1
"""Part of a tensor's norm by which bfloat16 products may change it: 8 bits of mantissa, through some dozen layers."""


def allowed_error(numerics: Numerics, dtype: torch.dtype) -> float | None:
    """Part of a tensor's norm by which it may be off; None where nothing bounds it."""
    return {
        Numerics.BITWISE: 0.0,
        Numerics.ROUNDING: ROUNDING_ERROR.get(dtype, ROUNDING_ERROR[torch.float32]),
        Numerics.PRECISION: PRECISION_ERROR,
        Numerics.APPROXIMATE: None,
    }[numerics]
