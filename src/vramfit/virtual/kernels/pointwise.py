"""Elementwise ops that make a tensor of a number on the card.

aten/src/ATen/native/Pow.cpp, ``pow_Scalar_out``: the base becomes a tensor beside the exponents
(``wrapped_scalar_tensor``), unless it is 1, of which no power is taken.
"""

from __future__ import annotations

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import Rule, table, temporaries
from vramfit.virtual.op_call import Extras, OpCall

_NUMBER = 8
"""Bytes of a whole or real number."""


def _power_of_number(call: OpCall) -> Extras | None:
    """``pow.Scalar(self, exponent)``."""
    base = call.args[0]
    if base == 1:
        return None
    return temporaries(2 * _NUMBER if isinstance(base, complex) else _NUMBER)


RULES: dict[OpOverload, Rule] = table({("pow.Scalar", "pow.Scalar_out"): _power_of_number})
