"""One saying, what became of it, and the figures that decide."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from vramfit.units import GIB, MIB

CARD = "A100 80GB"
UNLIMITED = "1TiB"
"""A card for programs that fit no real one, so that one sees how much they take."""


class Answer(Enum):
    """What is to be said of a saying."""

    RIGHT = "Right"
    WRONG = "Wrong"
    DEPENDS = "It depends"
    OPEN = "Not measured here"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer to one saying.

    Attributes:
        answer: right, wrong or when.
        why: the reason in a sentence or two, with the figures that decide.
        columns: headings of the table of figures.
        rows: the figures, as text.
    """

    answer: Answer
    why: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Saying:
    """A saying and the function that checks it.

    Attributes:
        name: for the command line.
        text: the saying as people say it.
        check: the function that runs the programs and judges, as ``module.function`` of this package. It is
            looked up when it is called, for these modules import all that the programs need.
    """

    name: str
    text: str
    check: str

    def find(self) -> Finding:
        """Run the programs and judge."""
        module, _, function = self.check.partition(".")
        check: Callable[[], Finding] = getattr(importlib.import_module(f"folklore.{module}"), function)
        return check()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a program took on the virtual GPU. Bytes.

    Attributes:
        allocated: highest bytes of tensors.
        reserved: highest bytes that torch held from the driver.
        context: the CUDA context, beside them.
        categories: bytes at the peak by category, as `vramfit run --json` names them.
        seconds: estimated on the card.
    """

    allocated: int
    reserved: int
    context: int
    categories: dict[str, int]
    seconds: float

    @property
    def total(self) -> int:
        """What ``nvidia-smi`` shows."""
        return self.reserved + self.context


def measure(
    program: Callable[[], object], *, card: str = CARD, alloc_conf: str = "", cards: int | None = None
) -> Measured:
    """Run a function on a virtual card, as the first rank of so many where a number is given, and say what it took."""
    import vramfit

    rank = None if cards is None else 0
    with vramfit.VirtualGPU(card, alloc_conf=alloc_conf, rank=rank, world_size=cards) as gpu:
        program()
    report = gpu.report
    device = report.run.devices[0]
    facts = report.to_dict()
    return Measured(
        allocated=device.peak_allocated_bytes,
        reserved=device.peak_reserved_bytes,
        context=device.context_bytes,
        categories=facts["categories"],
        seconds=report.run.seconds_simulated,
    )


def gib(amount: float) -> str:
    """Bytes as GiB."""
    return f"{amount / GIB:.2f} GiB"


def mib(amount: float) -> str:
    """Bytes as MiB."""
    return f"{amount / MIB:,.1f} MiB"


def percent(share: float) -> str:
    """A share of 1 in percent."""
    return f"{round(100 * share)} %"
