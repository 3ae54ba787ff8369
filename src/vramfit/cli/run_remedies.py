"""When ``vramfit run`` tries remedies on a program, and for how long."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vramfit.cli.printing import showing
from vramfit.errors import UsageError

if TYPE_CHECKING:
    from vramfit.analysis import Verdict
    from vramfit.options.run_options import RunOptions
    from vramfit.trace import Run
    from vramfit.trace.tried_remedies import TriedRemedies

AUTO, NONE = "auto", "none"

REMEDIES_VARIABLE = "VRAMFIT_REMEDIES"
"""Environment variable that says what ``--remedies`` is where it is not given."""


def remedies_choice(text: str | None) -> float | None:
    """Seconds that remedies are tried for, whatever the verdict; 0 for never, None for where it does not fit.

    Args:
        text: of the option; None where it was not given, and a variable of the environment decides.

    Raises:
        UsageError: it is neither ``auto`` nor ``none`` nor a number of seconds.
    """
    named = "--remedies" if text is not None else REMEDIES_VARIABLE
    text = os.environ.get(REMEDIES_VARIABLE) if text is None else text
    if not text or text == AUTO:
        return None
    if text == NONE:
        return 0.0
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{named} {text} is no choice", "Write auto, none, or a number of seconds")
    return seconds


@dataclass(frozen=True, slots=True)
class RemedyTries:
    """Remedies for one program.

    Attributes:
        choice: as `remedies_choice` gives it.
        command: what python was given.
        options: how it was run.
    """

    choice: float | None
    command: list[str]
    options: RunOptions

    def seconds(self, run: Run, verdict: Verdict) -> float:
        """For how long to try: as long as the run took, a minute at least, where it does not fit; 0 for not at all."""
        from vramfit.planner.remedies.tried import LEAST_SECONDS

        if self.options.gpu is None or self.options.gpus > 1:
            return 0.0
        if self.choice is not None:
            return self.choice
        interrupted = run.progress.is_cut and not run.progress.was_asked_for
        return max(LEAST_SECONDS, run.seconds_wall) if verdict.fits is False and not interrupted else 0.0

    def tried(self, seconds: float, run: Run) -> TriedRemedies:
        """Try them; a line of the terminal says what is being tried."""
        from vramfit.planner.remedies.tried import tried_remedies
        from vramfit.trace.tried_remedies import TriedRemedies

        if why_not := _untrained(run):
            return TriedRemedies(why_not=why_not)
        try:
            with showing() as progress:
                progress("trying what makes it fit")
                return tried_remedies(self.command, self.options, seconds, progress)
        except KeyboardInterrupt:
            return TriedRemedies(why_not="it was interrupted")


def _untrained(run: Run) -> str:
    """Why nothing can be tried on a program that ran to its end; empty where it trains, or was not seen to its end."""
    whole = run if not run.ran_out else None if run.again is None else run.again.run
    if whole is None or whole.progress.is_cut or whole.exit_code or whole.observed is None:
        return ""
    if whole.observed.unclear and not whole.observed.infers:
        return whole.observed.unclear[0]
    return "" if whole.observed.models or whole.observed.infers else "the program runs no model on the card"
