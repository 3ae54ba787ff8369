"""The process that forks: ``python -P -m vramfit.launch.nursery.nursery_process SOCKET "" MODULE ...``.

It imports the modules, says whether a fork of it is as good as a new interpreter, and then forks for each request until
its parent has ended or closed the socket. It computes nothing: what has used a card or has threads cannot be forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vramfit.launch.nursery.becoming import become
from vramfit.launch.nursery.child_request import ChildRequest
from vramfit.launch.nursery.nursery_client import READY, SILENT

_LOOK = 1.0
"""Seconds between two looks whether the parent is still there: another child of it may hold the socket open."""

_MOST = 1 << 20
"""Bytes of a request."""


def main(number: str, prints: str, *modules: str) -> None:
    """Import modules and fork on request; `prints` is `SILENT` or empty."""
    parent = os.getppid()
    orders = socket.socket(fileno=int(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the children
    said = os.memfd_create("said")
    for stream in (1, 2):
        os.dup2(said, stream)
    unfit = imported(modules) or why_not()
    sys.stdout.flush()
    sys.stderr.flush()
    if not unfit and prints != SILENT and os.fstat(said).st_size:
        unfit = "the imports print something, which each child has to print"
    os.close(said)
    orders.send(unfit.encode()[:900] or READY)
    if not unfit:
        serve(orders, parent)


def imported(modules: Sequence[str]) -> str:
    """Import modules; why that cannot be done, empty if it can."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported: {error}"
    gc.collect()
    return ""


def why_not() -> str:
    """Why a fork of this process is not as good as a new interpreter; empty if it is."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports use the card"
    if any(file.startswith("/dev/nvidia") for file in _files()):
        return "the imports open the card's driver"
    # Libraries that keep threads for later, such as OpenBLAS, end them before a fork.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    return "" if threads == 1 else f"the imports leave {threads} threads"


def _files() -> list[str]:
    """What this process has open."""
    found = list(Path("/proc/self/fd").iterdir())
    return [str(file.readlink()) for file in found if file.is_symlink()]  # without the one that listed them


def serve(orders: socket.socket, parent: int) -> None:
    """Fork for each request, until the parent has ended or closed its side."""
    while os.getppid() == parent:
        orders.settimeout(_LOOK)
        try:
            text, files, _, _ = socket.recv_fds(orders, _MOST, 3)
        except TimeoutError:
            continue
        if not text:
            return
        orders.settimeout(None)
        told, number = os.pipe()
        between = os.fork()
        if between == 0:
            _fork_and_end(number, ChildRequest.unpacked(text), files, [told, orders.fileno()])
        os.waitpid(between, 0)
        orders.send(os.read(told, 100))
        for file in (told, number, *files):
            os.close(file)


def _fork_and_end(number: int, request: ChildRequest, files: Sequence[int], ours: Sequence[int]) -> NoReturn:
    """Fork once more and end; the fork goes on when it has its parent."""
    here = os.getpid()
    child = os.fork()
    if child:
        os.write(number, str(child).encode())
        os._exit(0)
    # Told by nothing else: the files of a process are closed before its children move.
    while os.getppid() == here:
        time.sleep(0.0005)
    for file in (number, *ours):
        with contextlib.suppress(OSError):
            os.close(file)
    become(request, files)


if __name__ == "__main__":
    main(*sys.argv[1:])
