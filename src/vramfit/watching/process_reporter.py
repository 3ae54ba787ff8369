"""In the watched process: a thread that writes what the process holds, a JSON line at a time, for who watches it.

NOTE [A folder, not a socket]: each process of the program appends to a file of its own in the watcher's folder. So a
program with many processes needs no agreement, one that is killed leaves what it wrote, and one whose watcher has
gone notices nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.plain import to_plain
from vramfit.watching.watch_reading import ProgramReading

if TYPE_CHECKING:
    from vramfit.watching.torch_figures import FigureSource

_CATEGORIES_EVERY = 2.0
"""Seconds between two sums by category at least: they walk all parameters."""

_CATEGORIES_SHARE = 0.01
"""The share of the time that sums by category may take: those of large models come less often."""

_NONE = None, None, None

_POLL = 0.2
"""Seconds between two looks whether the program has imported torch."""


class ProcessReporter:
    """Writes readings of this process every so often, from a daemon thread, until the process ends.

    Args:
        folder: of the watcher; the file there is named by the number of this process.
        every: seconds between two readings.
        source: where figures come from; None waits until the program has imported torch, and asks that.

    Attributes:
        busy: seconds that readings took.
        count: readings written.
    """

    def __init__(self, folder: Path, every: float, source: FigureSource | None = None) -> None:
        self._folder, self._every, self._source = folder, every, source
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vramfit-watch", daemon=True)
        self.busy = 0.0
        self.count = 0

    def start(self) -> ProcessReporter:
        """Begin."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End, with a last reading."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        if self._source is None and not self._torch_is_there():
            return
        readings = OwnReadings(self._source)
        file = self._folder / f"{os.getpid()}.jsonl"
        try:
            # A watcher that has gone has removed its folder; the program is not to notice.
            with contextlib.suppress(OSError), open(file, "a", encoding="utf-8") as stream:
                while True:
                    done = self._done.wait(self._every)
                    began = time.perf_counter()
                    if reading := self._looked(readings):
                        stream.write(json.dumps(to_plain(reading)) + "\n")
                        stream.flush()
                        self.count += 1
                    self.busy += time.perf_counter() - began
                    if done or not self._folder.exists():
                        return
        finally:
            readings.close()

    @staticmethod
    def _looked(readings: OwnReadings) -> ProgramReading | None:
        """The process now; None where a look fails, such as after an error that left the card's context dead."""
        try:
            return readings.now()
        except Exception:  # the program is not to notice; its watcher sees that nothing comes
            return None

    def _torch_is_there(self) -> bool:
        """Wait until the program has imported torch; false if it is to end before."""
        while not self._done.wait(_POLL):
            torch = sys.modules.get("torch")
            spec = getattr(torch, "__spec__", None)
            if spec is not None and not getattr(spec, "_initializing", False):
                return True
        return False


class OwnReadings:
    """Readings of this process.

    Args:
        source: where figures come from; None asks torch.
    """

    def __init__(self, source: FigureSource | None = None) -> None:
        from vramfit.watching.torch_figures import StepEnds, TorchFigures

        self._source = source or TorchFigures()
        self._ends = StepEnds(self._source.held)
        if isinstance(self._source, TorchFigures):
            self._source.ends = self._ends
        self._due = 0.0
        self._categories: dict[int, dict[str, int]] = {}

    def now(self) -> ProgramReading | None:
        """The process now; None while it uses no device."""
        now = time.monotonic()
        sum_up = now >= self._due or not self._categories
        steps, after = self._ends.steps, dict(self._ends.after)
        devices = list(self._source.devices(categories=sum_up))
        if not devices:
            return None
        if sum_up:
            took = time.monotonic() - now
            self._due = now + max(_CATEGORIES_EVERY, took / _CATEGORIES_SHARE)
            self._categories = {one.index: one.categories for one in devices if one.categories}
        told = tuple(
            replace(
                one,
                after_step=after.get(one.index, _NONE)[0],
                step_peak=after.get(one.index, _NONE)[1],
                step_split=after.get(one.index, _NONE)[2],
                categories=self._categories.get(one.index, {}),
            )
            for one in devices
        )
        return ProgramReading(time=time.time(), pid=os.getpid(), steps=steps, devices=told)

    def close(self) -> None:
        """Hear of no more steps."""
        self._ends.close()


FOLDER_VARIABLE = "VRAMFIT_WATCH_FOLDER"
EVERY_VARIABLE = "VRAMFIT_WATCH_EVERY"
"""Variables by which a watcher tells the processes of a command where and how often to write."""


def report_as_asked(source: FigureSource | None = None) -> ProcessReporter | None:
    """Start a reporter if this process' environment names a watcher's folder.

    Args:
        source: where figures come from; None asks torch, once the program has imported it.
    """
    folder, every = os.environ.get(FOLDER_VARIABLE), os.environ.get(EVERY_VARIABLE, "1")
    if not folder or not Path(folder).is_dir():
        return None
    if source is None and any(word.startswith("vramfit.") for word in sys.orig_argv):
        return None  # a child of ours, which starts its own where the program begins: until then it wants no thread
    return ProcessReporter(Path(folder), float(every), source).start()
