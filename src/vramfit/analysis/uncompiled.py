"""How far the peak may be off where ``torch.compile`` could not be followed and the program ran eagerly.

NOTE [Programs that ran eagerly]
A compiler decides about the results of ops: what is saved for the backward pass, what is never written, when it goes.
It leaves parameters, gradients and optimizer states alone. Of nine models in float32 and in bfloat16, trained compiled
and eagerly on the virtual GPU (studies/compiled_or_eager.py), activations, temporaries and gradients at the peak took
0.51 to 1.01 times as much compiled. The bar reaches further both ways, from a third of activations and temporaries to a
quarter more, since nine models are few and a program that is compiled in part may need more than either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vramfit.trace import Category, RunWarning

RAN_EAGERLY = "compile-ran-eagerly"
_DECIDED = (Category.ACTIVATIONS, Category.TEMPORARIES)
_LESS = 2 / 3
_MORE = 1 / 4


def uncompiled_bar(warnings: Iterable[RunWarning], held: Mapping[Category, int]) -> tuple[int, int]:
    """Bytes by which the peak may be lower, and higher; none where nothing ran eagerly that should be compiled.

    Args:
        held: bytes at the peak by category.
    """
    if not any(warning.code == RAN_EAGERLY for warning in warnings):
        return 0, 0
    decided = sum(held.get(category, 0) for category in _DECIDED)
    return int(decided * _LESS), int(decided * _MORE)
