"""How far a prediction may be off: a share of the recorded figure, or bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from vramfit.arguments import size_argument
from vramfit.errors import UsageError
from vramfit.units import format_bytes

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """A bound on differences.

    Attributes:
        share: of the recorded figure (0.01 is one percent); None where the bound is in bytes.
        size: bytes; 0 where the bound is a share.
    """

    share: float | None = None
    size: int = 0

    @staticmethod
    def parse(text: str) -> Tolerance:
        """Read ``"1%"``, ``"0.5 %"``, ``"50MiB"`` or a number of bytes.

        Raises:
            UsageError: it is none of these.
        """
        match = _SHARE.fullmatch(text) if isinstance(text, str) else None
        if match and math.isfinite(share := float(match.group(1)) / 100):
            return Tolerance(share=share)
        try:
            return Tolerance(size=size_argument("tolerance", text, least=0))
        except UsageError:
            raise UsageError(
                f"{text!r} is not a tolerance",
                'Write it as a share such as "1%" or "0.5%", or as a size such as "50MiB"',
            ) from None

    def bound(self, recorded: int) -> int:
        """The largest difference in bytes that is allowed from a recorded figure."""
        return self.size if self.share is None else math.floor(self.share * recorded)

    def allows(self, difference: int, recorded: int) -> bool:
        """Whether a difference, more or less, is within the bound."""
        return abs(difference) <= self.bound(recorded)

    def __str__(self) -> str:
        """As it would be written on the command line."""
        return format_bytes(self.size) if self.share is None else f"{100 * self.share:g}%"


DEFAULT_TOLERANCE = Tolerance(share=0.01)
