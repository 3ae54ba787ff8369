"""A file of stand-ins that the user names: ``--kernels FILE``, or ``VRAMFIT_KERNELS``."""

from __future__ import annotations

import os
import runpy
import traceback
from pathlib import Path

from vramfit.errors import UsageError
from vramfit.virtual.foreign.fake_kernels import KERNELS_VARIABLE

_loaded: set[Path] = set()


def load() -> None:
    """Run the file that the environment names, once in a process: it registers stand-ins.

    Raises:
        UsageError: there is no such file, or it fails; the message has the error and its line.
    """
    named = os.environ.get(KERNELS_VARIABLE)
    if not named or Path(named).resolve() in _loaded:
        return
    path = Path(named).resolve()
    if not path.is_file():
        raise UsageError(
            f"there is no file {named}", f"--kernels and {KERNELS_VARIABLE} name a Python file of stand-ins"
        )
    _loaded.add(path)
    try:
        runpy.run_path(str(path))
    except UsageError:
        raise
    except Exception as error:  # the file is the user's: whatever it raises is told as its error
        line = next((f.lineno for f in _frames(error) if Path(f.filename) == path), None)
        at = "" if line is None else f", line {line}"
        raise UsageError(
            f"{named}{at}: {type(error).__name__}: {error}", "Mend the file of stand-ins"
        ) from error


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(reversed(traceback.extract_tb(error.__traceback__)))
