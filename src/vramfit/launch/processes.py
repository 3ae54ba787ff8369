"""Processes that the program starts: nobody measures them, and the report must say so."""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vramfit.patching import PatchStack

CODE = "other-processes"
MESSAGE = "the program started other Python processes: what they allocate on a card is not counted"


def install(tell: Callable[[], object], patches: PatchStack) -> None:
    """Call `tell` where the program starts a Python process of its own; a DataLoader's workers do not use the card."""
    start, popen = multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__

    def counted_start(self: multiprocessing.process.BaseProcess) -> None:
        target = getattr(self, "_target", None)
        if not getattr(target, "__module__", "").startswith("torch.utils.data"):
            tell()
        start(self)

    def counted_popen(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if _is_python(args):
            tell()
        popen(self, args, *rest, **options)

    patches.set(multiprocessing.process.BaseProcess, "start", counted_start)
    patches.set(subprocess.Popen, "__init__", counted_popen)


def _is_python(args: Any) -> bool:
    """Whether a command line starts Python or one of torch's launchers."""
    first = (
        args.split()[:1]
        if isinstance(args, str)
        else list(args)[:1]
        if isinstance(args, (list, tuple))
        else [args]
    )
    name = Path(os.fsdecode(first[0])).name if first else ""
    return name.startswith(("python", "torchrun", "accelerate", "deepspeed"))
