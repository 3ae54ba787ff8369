"""Finds out about this machine: files of the system here, driver and torch in children that may crash or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vramfit.allocator.versions import REFERENCE_VERSION, alloc_conf_from_env, parse_torch_version
from vramfit.doctor.facts import RELEVANT, Facts, NvidiaDriver, Torch
from vramfit.doctor.host_facts import read_container, read_host
from vramfit.doctor.probe import DriverAnswer, ProbeJob, Question, VirtualAnswer
from vramfit.launch.job import result_of
from vramfit.launch.starting import answer, python_command

Answer = TypeVar("Answer")

DEFAULT_TIMEOUT = 60.0
"""Seconds for each child: importing torch from a cold disk takes long, a hanging driver for ever."""

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def gather(
    *, timeout: float = DEFAULT_TIMEOUT, root: Path = Path("/"), say: Callable[[str], None] | None = None
) -> Facts:
    """Look at this machine; takes a few seconds.

    Args:
        timeout: seconds that each child may take.
        root: where the system's files lie.
        say: called with what is being looked at.
    """
    tell = say or (lambda _: None)
    environ = {name: os.environ[name] for name in RELEVANT if name in os.environ}
    tell("the driver and its cards")
    driver, driver_error = _driver(timeout)
    tell("torch and what it sees")
    torch, torch_error = _torch(timeout)
    virtual_error: str | None = None
    if torch is not None:
        tell("the virtual GPU")
        virtual_error = _virtual(timeout)
    return Facts(
        host=read_host(root),
        container=read_container(root),
        environ=environ,
        driver=driver,
        driver_error=driver_error,
        torch=torch,
        torch_error=torch_error,
        virtual_error=virtual_error,
    )


def _driver(timeout: float) -> tuple[NvidiaDriver | None, str]:
    told, failure = _ask(Question.DRIVER, DriverAnswer, timeout)
    return (None, failure) if told is None else (told.driver, told.error)


def _torch(timeout: float) -> tuple[Torch | None, str]:
    return _ask(Question.TORCH, Torch, timeout)


def _virtual(timeout: float) -> str:
    told, failure = _ask(Question.VIRTUAL, VirtualAnswer, timeout)
    return failure if told is None else told.error


def _ask(question: Question, kind: type[Answer], timeout: float) -> tuple[Answer | None, str]:
    """The answer of a child, or None and how it failed in one line."""
    # Settings that torch refuses would end the child at once: they travel in the job, and are tried there.
    environ = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    settings = alloc_conf_from_env(os.environ, _installed_torch())
    with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
        job = ProbeJob(folder=folder, question=question, settings=settings)
        command = python_command("vramfit.doctor.probe", str(job.write()))
        try:
            done = answer(command, env=environ, stdin=subprocess.DEVNULL, timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, f"did not answer within {timeout:.0f} s"
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            return None, f"could not be asked: cannot start {sys.executable}: {reason}"
        found = result_of(Path(folder), kind)
    return (found, "") if found is not None else (None, _how_it_died(done.returncode, done.stderr))


def _how_it_died(code: int, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = f": {lines[-1][:300]}" if lines else ""
    if code < 0:
        return f"died of signal {signal.Signals(-code).name}{last}"
    return f"ended with exit code {code}{last}"


def _installed_torch() -> tuple[int, int]:
    from importlib import metadata

    try:
        return parse_torch_version(metadata.version("torch"))
    except (metadata.PackageNotFoundError, ValueError):
        return REFERENCE_VERSION
