"""How far the peak may be off where ``torch.compile`` was followed, and where it could not be followed.

NOTE [Programs that ran eagerly]
A compiler decides about the results of ops: what is saved for the backward pass, what is never written, when it goes.
It leaves parameters, gradients and optimizer states alone. Of nine models in float32 and in bfloat16, trained compiled
and eagerly on the virtual GPU (studies/compiled_or_eager.py), activations, temporaries and gradients at the peak took
0.51 to 1.01 times as much compiled. The bar reaches further both ways, from a third of activations and temporaries to a
quarter more, since nine models are few and a program that is compiled in part may need more than either.

NOTE [Programs that were compiled]
Where torch's own compiler was followed, the requests of a step are known, but not what a card tries at the first one:
clones of what a kernel changes in place, while launches are timed, which cut free blocks otherwise. So the peak of
allocated bytes hardly moves, and that of reserved bytes does. CUDA graphs keep blocks in pools of their own, which are
followed only roughly. The bars are shares of activations and temporaries, and rest on programs that were recorded on an
H100 and an H200 (benchmarks/README.md). Programs of one half, by a hash of their names, chose them; that of CUDA graphs
was chosen by the one program with them that is recorded, whose recording took blocks beside those of its warm-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vramfit.trace import Category, RunWarning

RAN_EAGERLY = "compile-ran-eagerly"
COMPILED = "compiled-estimate"
COMPILED_GRAPHS = "compiled-graphs"
_DECIDED = (Category.ACTIVATIONS, Category.TEMPORARIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledBar:
    """Bytes by which the peaks of allocated and of reserved memory may be lower, and higher."""

    below: int = 0
    above: int = 0
    reserved_below: int = 0
    reserved_above: int = 0


_SHARES = {
    RAN_EAGERLY: (2 / 3, 1 / 4, 2 / 3, 1 / 4),
    COMPILED: (1 / 32, 1 / 32, 1 / 8, 1 / 8),
    COMPILED_GRAPHS: (1 / 32, 1 / 32, 1 / 8, 1 / 2),
}
"""Shares of what a compiler decides: below and above, of allocated memory and of reserved."""


def compiled_bar(warnings: Iterable[RunWarning], held: Mapping[Category, int]) -> CompiledBar:
    """How far the peaks may be off; not at all where nothing was compiled or should have been.

    Args:
        held: bytes at the peak by category.
    """
    found = [_SHARES[code] for code in {warning.code for warning in warnings} & _SHARES.keys()]
    if not found:
        return CompiledBar()
    decided = sum(held.get(category, 0) for category in _DECIDED)
    below, above, reserved_below, reserved_above = (
        int(decided * max(shares)) for shares in zip(*found, strict=True)
    )
    return CompiledBar(below=below, above=above, reserved_below=reserved_below, reserved_above=reserved_above)
