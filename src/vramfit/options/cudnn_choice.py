"""Which cuDNN is asked: a path, the one that is found, or none."""

from __future__ import annotations

import os
from pathlib import Path

from vramfit.arguments import path_argument
from vramfit.errors import UsageError

AUTO = "auto"
"""Look where packages of the index, CUDA builds of torch and the system put it."""

NONE = "none"
"""Ask none."""

VARIABLE = "VRAMFIT_CUDNN"
"""Environment variable that names one, or says ``auto``; empty or ``none`` for none."""


def wanted_cudnn(chosen: str | os.PathLike[str] | None) -> str | None:
    """The cuDNN to ask: what was chosen, else the environment's; None for none.

    Raises:
        UsageError: there is nothing at that path.
    """
    named = os.environ.get(VARIABLE, "") if chosen is None else path_argument("cudnn", chosen)
    if named in ("", NONE):
        return None
    if named != AUTO and not Path(named).expanduser().exists():
        raise UsageError(f"there is no cuDNN at {named}", "Name its library, its folder, or auto")
    return named
