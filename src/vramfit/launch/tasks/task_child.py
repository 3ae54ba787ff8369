"""The process of a task: calls the function and leaves what came of it, for `own_process`."""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import cloudpickle

from vramfit.launch.interrupts import note_interrupts
from vramfit.launch.running import leave_after
from vramfit.launch.tasks.own_process import ANSWER, CALL
from vramfit.launch.tasks.task import Ending, TaskResult, failed


def main(folder: Path) -> int:
    """Make the call; returns the exit code."""
    note_interrupts(folder)
    began = time.monotonic()
    # Where modules are found comes first: the function may be of one of them.
    sys.path[:], key, call = cloudpickle.loads((folder / CALL).read_bytes())
    try:
        function, arguments = cloudpickle.loads(call)
        result = TaskResult(key=key, ending=Ending.DONE, value=function(*arguments))
    except Exception as error:  # whatever a function may raise is its result
        traceback.print_exc()
        result = failed(key, error)
    packed = _packed(replace(result, seconds=time.monotonic() - began))
    beside = folder / f"{ANSWER}.new"
    beside.write_bytes(packed)
    beside.replace(folder / ANSWER)
    return 0


def _packed(result: TaskResult) -> bytes:
    """A result as bytes that can be read again; without what cannot."""
    try:
        packed: bytes = cloudpickle.dumps(result)
        cloudpickle.loads(packed)
    except Exception as error:  # of classes of the function's own, which may raise anything
        if result.error is not None:
            return _packed(replace(result, error=None))
        return _packed(replace(failed(result.key, error), error=None, seconds=result.seconds))
    return packed


if __name__ == "__main__":
    leave_after(lambda: main(Path(sys.argv[1])))
