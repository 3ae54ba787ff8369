"""Watching a process's memory, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from vramfit.arguments import call_argument, number_argument, path_argument, whole_argument
from vramfit.watching.card_probe import card_probe
from vramfit.watching.host_memory import check_process
from vramfit.watching.metric_writers import MetricWriter
from vramfit.watching.prometheus_page import PrometheusPage
from vramfit.watching.watch_files import WatchLines, WatchLog
from vramfit.watching.watch_reading import ProgramReading, WatchReading
from vramfit.watching.watcher import ProcessWatcher, WatchSink


def watch(
    pid: int | None = None,
    *,
    every: float = 1.0,
    window: float = 300.0,
    thresholds: Mapping[float, Callable[[WatchReading], object]] | None = None,
    log: str | os.PathLike[str] | None = None,
    jsonl: str | os.PathLike[str] | None = None,
    prometheus: int | None = None,
    writer: Any = None,
) -> ProcessWatcher:
    """Watch the memory of this process, or of another, from a thread, until the block or the process ends.

    >>> import os
    >>> full = []
    >>> with vramfit.watch(every=0.1, thresholds={0.95: full.append}) as watcher:
    ...     weights = torch.zeros(1024, 1024)
    >>> watcher.last.pid == os.getpid(), full
    (True, [])

    ``watcher.last`` is the latest reading: what torch has allocated and reserved on each card and what for (of this
    process), what the driver says of each card, the host's memory, and where each figure is heading.

    Args:
        pid: of the process; None is this one.
        every: seconds between two looks.
        window: seconds of the past that trends are drawn from.
        thresholds: shares from 0 to 1 of the fullest device or the host, and what to call, from the watching thread
            with the reading, when one is passed; again only after it has been left. ``watcher.on_threshold`` adds one.
        log: a file for people: lines, and summaries every five minutes.
        jsonl: a file with a reading a line, as JSON.
        prometheus: a port on this machine at which metrics are served; 0 takes a free one.
        writer: TensorBoard's ``SummaryWriter``, wandb's run, the module ``mlflow``, or a function of a dictionary.

    Raises:
        UsageError: arguments are no such, there is no such process, or prometheus-client is missing.
        WriteError: a file cannot be written.
    """
    every = number_argument("every", every, least=0.01, most=3600.0)
    window = number_argument("window", window, least=1.0, most=86400.0)
    if pid is not None:
        check_process(whole_argument("pid", pid, least=1))
    calls = {
        number_argument("thresholds", share, least=0.0, most=1.0): call_argument("thresholds", callback)
        for share, callback in (thresholds or {}).items()
    }
    sinks: list[WatchSink] = []
    try:
        if writer is not None:
            sinks.append(MetricWriter(writer))
        if log is not None:
            sinks.append(WatchLog(path_argument("log", log)))
        if jsonl is not None:
            sinks.append(WatchLines(path_argument("jsonl", jsonl)))
        if prometheus is not None:
            sinks.append(PrometheusPage(whole_argument("prometheus", prometheus, least=0, most=65535)))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    own: _OwnProgram | None = None
    if pid is None or pid == os.getpid():
        pid = os.getpid()
        sinks.append(own := _OwnProgram())
    cards, _ = card_probe()
    watcher = ProcessWatcher(
        pid,
        programs=own,
        cards=cards,
        every=every,
        window=window,
        sinks=sinks,
    )
    for share, callback in calls.items():
        watcher.on_threshold(share, callback)
    return watcher


class _OwnProgram:
    """What this process holds, asked for at each look."""

    def __init__(self) -> None:
        from vramfit.watching.process_reporter import OwnReadings

        self._readings = OwnReadings()

    def __call__(self) -> tuple[ProgramReading, ...]:
        reading = self._readings.now()
        return () if reading is None else (reading,)

    def take(self, reading: WatchReading) -> None:
        """Nothing: it gives what readings are made of."""

    def close(self) -> None:
        """Hear of no more steps."""
        self._readings.close()
