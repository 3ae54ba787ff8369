"""At the watcher: reads what the processes of a command wrote into its folder, and puts the reporter into them.

NOTE [How it gets into the command]: any Python imports ``sitecustomize`` when it starts (the module `site`). A folder
with one of ours is put in front of ``PYTHONPATH``; it starts the reporter and then runs the one that it hides. Another
interpreter, into which vramfit is not installed, finds that it cannot be imported, and starts as usual.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vramfit.plain import from_plain
from vramfit.watching.process_reporter import EVERY_VARIABLE, FOLDER_VARIABLE
from vramfit.watching.watch_reading import ProgramReading

_LARGE = 1 << 20
"""Bytes of a process' file above which it begins anew: a watch of days would fill the folder for temporary files."""

_STARTED_BY_SITE = '''"""Runs the sitecustomize that this one hides, then starts vramfit's reporter."""
import importlib.machinery
import importlib.util
import os
import sys
_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [one for one in sys.path if os.path.abspath(one or os.curdir) != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
if _spec is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
try:
    from vramfit.watching.process_reporter import report_as_asked
except ImportError:
    pass
else:
    report_as_asked()
'''


def watched_environment(folder: Path, every: float, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the Python processes of a command write into a folder.

    Args:
        folder: an empty one; what starts the reporter is written there.
        every: seconds between two readings.
        environ: the environment without it.
    """
    started = folder / "site"
    started.mkdir(exist_ok=True)
    (started / "sitecustomize.py").write_text(_STARTED_BY_SITE, encoding="utf-8")
    before = environ.get("PYTHONPATH", "")
    return {
        **environ,
        FOLDER_VARIABLE: str(folder),
        EVERY_VARIABLE: str(every),
        "PYTHONPATH": os.pathsep.join([str(started), before] if before else [str(started)]),
    }


class ReportedFiles:
    """The readings that processes have written into a folder since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._last: dict[int, ProgramReading] = {}

    def latest(self) -> tuple[ProgramReading, ...]:
        """The last reading of each process that is alive, by their numbers."""
        for file in sorted(self._folder.glob("*.jsonl")):
            for line in self._new_lines(file):
                try:
                    reading = from_plain(json.loads(line), ProgramReading)
                except (ValueError, msgspec.ValidationError):  # cut off where the process was killed
                    continue
                self._last[reading.pid] = reading
        return tuple(self._last[pid] for pid in sorted(self._last) if _alive(pid))

    def last(self) -> tuple[ProgramReading, ...]:
        """The last reading of each process, those that have ended too."""
        self.latest()
        return tuple(self._last[pid] for pid in sorted(self._last))

    def _new_lines(self, file: Path) -> list[bytes]:
        with open(file, "rb+") as stream:
            stream.seek(self._offsets.get(file, 0))
            text = stream.read()
            whole = text.rfind(b"\n") + 1
            self._offsets[file] = self._offsets.get(file, 0) + whole
            if self._offsets[file] > _LARGE and whole == len(text):
                # All of it is read. The process appends, so that its next line is the first; one that comes just now
                # is lost, and another one follows it.
                stream.truncate(0)
                self._offsets[file] = 0
        return text[:whole].splitlines()


def _alive(pid: int) -> bool:
    if not sys.platform.startswith("linux"):
        return True
    return Path(f"/proc/{pid}").exists()
