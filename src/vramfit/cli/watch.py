"""``vramfit watch``: the memory of a running process, or of a command, as it is now and where it is heading."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.cli import options
from vramfit.cli.printing import check_outputs, interrupted
from vramfit.cli.program import check_source, program_command
from vramfit.errors import UsageError

if TYPE_CHECKING:
    from vramfit.watching.watcher import WatchSink

_TARGETS = "Write vramfit watch 1234, or vramfit watch -- python train.py"


def watch_command(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="(PID | -- COMMAND)",
            help="The number of a running process, or a command to start; all after it is its own.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run the command, a Python script, on a virtual GPU.",
            autocompletion=options.gpu_names,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu", help="Run it on the CPU, its tensors counted as a card would count them."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that --device cpu may take, such as 2GiB.")
    ] = None,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between two looks.", min=0.05, max=3600)
    ] = 1.0,
    window: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Of the past that trends are drawn from.", min=5, max=86400),
    ] = 300.0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines instead of a live panel, as where there is no terminal.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A log for people: lines, and summaries every 5 minutes."),
    ] = None,
    jsonl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A reading a line, as JSON (docs/json.md).")
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve metrics for Prometheus; this machine alone without HOST."
        ),
    ] = None,
) -> None:
    """Watch the memory of a running process or of a command: what it holds, its neighbours, and when it runs out.

    Of a Python command it knows what torch has allocated and reserved and what for; of any process what the driver
    and the system say: its and its neighbours' bytes on the card, temperature, power, host memory.

    The exit code is the command's own; 0 for a process that is watched, whether it ends or Ctrl-C ends the watch.
    Ctrl-C leaves a watched process alone.
    """
    words = target or []
    pid = pid_of(words)
    _check(pid, (("--gpu", gpu), ("--device", device), ("--budget", budget)))
    check_outputs((("--log", log), ("--jsonl", jsonl)))
    look = _Look(every=every, window=window, plain=plain)
    with contextlib.ExitStack() as opened:
        sinks = _sinks(log, jsonl, prometheus)
        for sink in sinks:
            opened.callback(sink.close)
        if pid is not None:
            opened.pop_all()
            _watch_process(pid, look, sinks)
            return
        run = _command(words, gpu, device, budget)
        opened.pop_all()
    try:
        code = _watch_command(run, look, sinks)
    except KeyboardInterrupt:
        raise interrupted() from None
    raise typer.Exit(code)


Started = Callable[[int], object]
Running = Callable[[Path, float, Started], int]
"""Runs a command, given the folder that it reports into, how often, and whom to tell its number; its exit code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """How it is looked at.

    Attributes:
        every, window: seconds.
        plain: lines in place of a panel.
    """

    every: float
    window: float
    plain: bool


def pid_of(words: list[str]) -> int | None:
    """The process that is to be watched; None for a command.

    Raises:
        UsageError: neither is named, or both are.
    """
    if not words:
        raise UsageError("neither a process nor a command is named", _TARGETS)
    if not words[0].isdecimal():
        return None
    if len(words) > 1:
        raise UsageError(f"both a process, {words[0]}, and a command are named", "Name one of them")
    return int(words[0])


def _check(pid: int | None, for_commands: tuple[tuple[str, str | None], ...]) -> None:
    if pid is None:
        return
    from vramfit.watching.host_memory import check_process

    for option, given in for_commands:
        if given is not None:
            raise UsageError(f"{option} is for a command, and process {pid} runs already", _TARGETS)
    check_process(pid)
    if pid == os.getpid():
        raise UsageError(f"{pid} is vramfit itself", _TARGETS)


def _sinks(log: Path | None, jsonl: Path | None, prometheus: str | None) -> list[WatchSink]:
    """Those that the options name; where one cannot be had, none stays open."""
    from vramfit.watching.watch_files import WatchLines, WatchLog

    with contextlib.ExitStack() as opened:
        sinks: list[WatchSink] = []
        for path, kind in ((log, WatchLog), (jsonl, WatchLines)):
            if path is not None:
                sinks.append(sink := kind(path))
                opened.callback(sink.close)
        if prometheus is not None:
            from vramfit.watching.prometheus_page import HOST, PrometheusPage

            host, _, port = prometheus.rpartition(":")
            if not port.isdecimal():
                raise UsageError(f"--prometheus {prometheus} names no port", "Write --prometheus 9400")
            sinks.append(page := PrometheusPage(int(port), host or HOST))
            typer.echo(f"metrics at http://{host or HOST}:{page.port}/metrics", err=True)
        opened.pop_all()
        return sinks


def _command(words: list[str], gpu: str | None, device: str | None, budget: str | None) -> Running:
    """How the command is run.

    Raises:
        UsageError: it cannot be, as asked.
    """
    from vramfit.watching.reported_files import watched_environment

    if gpu is None and device is None and budget is None:
        from vramfit.launch.watched_command import run_watched, whole_command

        command = whole_command(words)
        return lambda folder, every, started: run_watched(
            command, watched_environment(folder, every, os.environ), started=started
        )
    if device not in (None, "cpu"):
        raise UsageError(
            f"--device {device} is not watched so",
            "Leave it out: a command that uses a card is watched as it is",
        )
    return _script(words, gpu, budget)


def _script(words: list[str], gpu: str | None, budget: str | None) -> Running:
    """How a Python script is run on a virtual GPU or the metered CPU."""
    from vramfit.cli.where import run_program
    from vramfit.options.run_options import COMMAND_LINE, read_options
    from vramfit.virtual.virtual_run import VirtualSettings
    from vramfit.watching.process_reporter import EVERY_VARIABLE, FOLDER_VARIABLE

    if Path(words[0]).name.startswith("python"):
        words = words[1:]
    module = words[1] if words[:1] == ["-m"] and len(words) > 1 else None
    command = program_command(module, words[2:] if module else words)
    place = {"device": "cpu"} if gpu is None else {"gpu": gpu}
    options = read_options(COMMAND_LINE, place | ({} if budget is None else {"budget": budget}))
    check_source(command)

    def run(folder: Path, every: float, started: Started) -> int:
        environ = {FOLDER_VARIABLE: str(folder), EVERY_VARIABLE: str(every)}
        with _first_reporter(folder, started):
            found = run_program(command, replace(options, environ=environ), VirtualSettings(ours=[folder]))
        return found.exit_code if found.exit_code >= 0 else 128 - found.exit_code

    return run


@contextlib.contextmanager
def _first_reporter(folder: Path, started: Started) -> Iterator[None]:
    """Tell the number of the first process that reports."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.1):
            for file in folder.glob("*.jsonl"):
                started(int(file.stem))
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch_process(pid: int, look: _Look, sinks: list[WatchSink]) -> None:
    """Watch a process that runs already, until it ends or somebody has seen enough."""
    from vramfit.watching.card_probe import card_probe
    from vramfit.watching.watcher import ProcessWatcher

    cards, reason = card_probe()
    with shown(look, (reason,) if reason else ()) as shower:
        watcher = ProcessWatcher(
            pid, cards=cards, every=look.every, window=look.window, sinks=[*sinks, shower]
        )
        try:
            watcher.watch()
        except KeyboardInterrupt:
            typer.echo(f"the watch has ended; process {pid} goes on", err=True)
            return
    typer.echo(f"process {pid} has ended", err=True)


def _watch_command(run: Running, look: _Look, sinks: list[WatchSink]) -> int:
    """Run a command, watched from a thread; its exit code."""
    from vramfit.watching.card_probe import card_probe
    from vramfit.watching.reported_files import ReportedFiles
    from vramfit.watching.watcher import ProcessWatcher

    cards, reason = card_probe()
    watchers: list[ProcessWatcher] = []
    with tempfile.TemporaryDirectory(prefix="vramfit-watch-") as name:
        folder = Path(name)
        files = ReportedFiles(folder)
        with shown(look, (reason,) if reason else ()) as shower:

            def started(pid: int) -> None:
                watcher = ProcessWatcher(
                    pid,
                    programs=files.latest,
                    cards=cards,
                    every=look.every,
                    window=look.window,
                    sinks=[*sinks, shower],
                )
                watchers.append(watcher.start())

            try:
                code = run(folder, look.every, started)
            finally:
                for watcher in watchers:
                    watcher.stop()
                if not watchers:
                    for sink in [*sinks, shower]:
                        sink.close()
    if not watchers:
        typer.echo("the command ended before it had used a device", err=True)
    return code


@contextlib.contextmanager
def shown(look: _Look, notes: tuple[str, ...]) -> Iterator[WatchSink]:
    """What shows readings on standard error: a panel on a terminal, lines elsewhere.

    Under a panel, what the program prints passes through a pipe and stands above it.
    """
    from vramfit.console import SafeConsole
    from vramfit.report.watch import LivePanel, PlainLines

    console = SafeConsole(stderr=True, highlight=False)
    if look.plain or not console.is_terminal:
        for note in notes:
            typer.echo(note, err=True)
        yield PlainLines(console)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as restored:
        terminal = restored.enter_context(os.fdopen(os.dup(2), "w", encoding="utf-8"))
        panel = LivePanel(SafeConsole(file=terminal, highlight=False), notes)
        restored.enter_context(_passed_above(panel.print_above))
        yield panel


@contextlib.contextmanager
def _passed_above(show: Callable[[str], None]) -> Iterator[None]:
    """Turn what is written to standard output and standard error, children's too, into lines that are shown."""
    kept = os.dup(1), os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)

    def pass_on() -> None:
        with os.fdopen(reading, "r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                show(line.rstrip("\n"))

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in enumerate(kept, start=1):
            os.dup2(before, number)
            os.close(before)
        thread.join(timeout=2)  # a child of the command may keep the pipe open
