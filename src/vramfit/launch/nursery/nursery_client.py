"""Asks a nursery for children: one is forked where it would be what a new interpreter is, and started cold elsewhere.

NOTE [When a fork is a new interpreter]
The nursery was started with the variables, options, limits and cores of the process that asks, and these are still the
same; it has one thread, no use of a card, and its imports printed nothing (see `nursery_process`). The fork gets the
arguments, folder, input, output and signals that were asked for, and new random numbers. What differs: `ps` shows the
nursery's command line, and times and peak memory of the process (rusage) include what it shares with the nursery.

NOTE [Whose child]
A fork must be the child of the process that asks, which waits for it and sends it signals. So the nursery forks twice,
and the process between ends: orphans go to the nearest ancestor that is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER),
which the asking process is for that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from vramfit.launch import starting
from vramfit.launch.nursery.child_request import (
    ChildRequest,
    difference,
    ignored_signals,
    request_for,
    surroundings,
)

_SET_SUBREAPER, _GET_SUBREAPER = 36, 37
"""PR_SET_CHILD_SUBREAPER and PR_GET_CHILD_SUBREAPER of linux/prctl.h."""

_SECONDS = 120.0
"""For an answer: the first one comes when everything is imported."""

READY = b"ready"
"""What the nursery sends once it can fork; anything else is why it cannot."""

SILENT = "silent"
"""For the process: what its imports print need not be printed by its children."""

_PROCESS = "vramfit.launch.nursery.nursery_process"


class Nursery:
    """A process that has imported modules and forks on request; it is started when a child is first asked for.

    Args:
        modules: what it imports.
        environ: its variables; only children with the same are forked.
        silent: whether the children need not print what the imports print.
    """

    def __init__(
        self, modules: Sequence[str], environ: Mapping[str, str] | None = None, *, silent: bool = False
    ) -> None:
        self.environ = dict(os.environ if environ is None else environ)
        self.options = tuple(starting.own_options())
        self.owner = os.getpid()
        self.forked = 0
        """How many children it has made."""
        self._modules = tuple(modules)
        self._silent = silent
        self._lock = threading.Lock()
        self._process: subprocess.Popen[Any] | None = None
        self._socket: socket.socket | None = None
        self._around: tuple[object, ...] = ()
        self._is_over = sys.platform != "linux"

    def __enter__(self) -> Nursery:
        """Start nothing yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """End it; its children go on."""
        self.close()

    def close(self) -> None:
        """End the process, and fork no more."""
        with self._lock:
            self._end()

    def request(self, arguments: Any, cwd: Any, environ: Mapping[str, str]) -> ChildRequest | None:
        """What a fork would have to become; None where only a new interpreter will do."""
        if isinstance(arguments, str | bytes | os.PathLike) or environ != self.environ:
            return None
        if cwd is not None and (not Path(cwd).is_dir() or _has_relative_path(environ)):
            return None
        found = request_for(arguments, self.options)
        if found is None or not found.safe:  # as the nursery's own interpreter is
            return None
        return replace(found, cwd=os.getcwd() if cwd is None else os.fspath(cwd))

    def child(self, request: ChildRequest, files: Sequence[int]) -> int | None:
        """Fork a child of this process; its number, None where there can be none: start it cold.

        Args:
            request: what it becomes.
            files: its standard input, output and errors.
        """
        with self._lock:
            if self._is_over or os.getpid() != self.owner or not self._is_there():
                return None
            assert self._socket is not None
            request = replace(
                request,
                ignored=ignored_signals(),
                blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            )
            try:
                with _subreaper():
                    socket.send_fds(self._socket, [request.packed()], list(files))
                    answer = self._socket.recv(100)
                self.forked += bool(answer)
                if answer:
                    return int(answer)
            except OSError:  # it is gone, takes too long, or a file is closed
                pass
            self._end()
            return None

    def command(self, number: int) -> list[str]:
        """The command line of the process, for the number of its socket."""
        words = str(number), SILENT if self._silent else "", *self._modules
        return starting.python_command(_PROCESS, *words, options=self.options)

    def connect(self) -> socket.socket:
        """Start the process; the socket on which it takes requests."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                self.command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self.environ,
            )
        return ours

    def _is_there(self) -> bool:
        """Whether it can fork; it is started where it was not."""
        if self._socket is None:
            try:
                self._around = surroundings()
                self._socket = self.connect()
                self._socket.settimeout(_SECONDS)
                fit = self._socket.recv(1000) == READY
            except OSError:
                fit = False
            if not fit:
                self._end()
                return False
        return surroundings() == self._around

    def _end(self) -> None:
        self._is_over = True
        if self._socket is not None:
            self._socket.close()
        if self._process is not None and os.getpid() == self.owner:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None


class WarmPopen(subprocess.Popen[Any]):
    """As ``subprocess.Popen``, but what a fork of a nursery can become is forked.

    Args:
        arguments: the command line.
        nursery: which one is asked.
        options: those of ``subprocess.Popen``.
    """

    def __init__(self, arguments: Any, *, nursery: Nursery | None, **options: Any) -> None:
        self._nursery = nursery
        super().__init__(arguments, **options)

    def asked(
        self, arguments: Any, cwd: Any, environ: Mapping[str, str]
    ) -> tuple[Nursery, ChildRequest] | None:
        """Which nursery is asked for a child, and for what; None where only a new interpreter will do."""
        request = None if self._nursery is None else self._nursery.request(arguments, cwd, environ)
        return None if self._nursery is None or request is None else (self._nursery, request)

    def _execute_child(self, *given: Any) -> None:
        arguments, executable, preexec, _, passed, cwd, env, _, _, shell = given[:10]
        pipes, session = given[10:16], given[-2]
        restored, user, umask, group = given[16], given[17:20], given[20], given[-1]
        plain = executable is None and preexec is None and not passed and not shell and restored
        plain = plain and user == (None, None, None) and umask == -1 and group in (-1, None)
        environ = dict(os.environ if env is None else env)
        asked = self.asked(arguments, cwd, environ) if plain else None
        child = None
        if asked is not None:
            nursery, request = asked
            changed = difference(nursery.environ, environ)
            files = [pipes[0], pipes[3], pipes[5]]
            files = [own if file == -1 else file for own, file in enumerate(files)]
            child = nursery.child(replace(request, environ=changed, session=bool(session)), files)
        if child is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        self.pid = child
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


_OPEN: ContextVar[Nursery | None] = ContextVar("the nursery of children that are started now", default=None)


@contextlib.contextmanager
def nursery_for(
    modules: Sequence[str], environ: Mapping[str, str] | None = None, *, silent: bool = False
) -> Iterator[Nursery]:
    """Let the children that this context starts in the block, or threads with copies of it, be forked where they can.

    Args:
        modules: what they import before they do anything else.
        environ: variables that are added to those of this process, for them all.
        silent: whether they need not print what the imports print.
    """
    with Nursery(modules, {**os.environ, **(environ or {})}, silent=silent) as nursery:
        token = _OPEN.set(nursery)
        try:
            yield nursery
        finally:
            _OPEN.reset(token)


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """As `vramfit.launch.starting.start`; a fork where a nursery is open (`nursery_for`) and a fork will do.

    Raises:
        UsageError: the process cannot be started.
    """
    nursery = _OPEN.get()
    if nursery is None:
        return starting.start(arguments, **options)
    with starting.explained(arguments[0]):
        return WarmPopen(list(arguments), nursery=nursery, **options)


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Be a subreaper in the block; see NOTE [Whose child]."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


def _has_relative_path(environ: Mapping[str, str]) -> bool:
    """Whether an interpreter's search path depends on the folder in which it starts."""
    path = environ.get("PYTHONPATH")
    return path is not None and not all(Path(entry).is_absolute() for entry in path.split(os.pathsep))
