"""Where the command line begins: an interrupt while it is still being imported ends it in a line."""

from __future__ import annotations

import os
import signal
from types import FrameType

_LINE = b"error: interrupted before the program began\n"
_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line of this process; never returns."""
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _end)
    from vramfit.cli import main as run

    try:
        if ours:
            signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:
        _end(signal.SIGINT, None)


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: what was being imported cannot be relied on, and nothing has been begun."""
    del number, frame
    os.write(2, _LINE)
    os._exit(_INTERRUPTED)
