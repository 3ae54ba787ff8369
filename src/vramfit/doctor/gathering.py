"""Finds out about this machine: files of the system here, driver and torch in children that may crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vramfit.allocator.versions import REFERENCE_VERSION, alloc_conf_from_env, parse_torch_version
from vramfit.doctor.facts import RELEVANT, Facts, NvidiaDriver, Torch, driver_from_plain, torch_from_plain
from vramfit.doctor.host_facts import read_container, read_host
from vramfit.doctor.probe import MARK
from vramfit.launch.starting import answer

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
        told, failure = _probe("virtual", timeout)
        virtual_error = failure or str(told)
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
    told, failure = _probe("driver", timeout)
    if failure:
        return None, failure
    return (driver_from_plain(told["driver"]) if told["driver"] else None), told["error"]


def _torch(timeout: float) -> tuple[Torch | None, str]:
    told, failure = _probe("torch", timeout)
    return (None, failure) if failure else (torch_from_plain(told), "")


def _probe(question: str, timeout: float) -> tuple[Any, str]:
    """The answer of a child, or how it failed in one line."""
    # Settings that torch refuses would end the child at once; they are handed over under another name and tried there.
    environ = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    environ["VRAMFIT_DOCTOR_SETTINGS"] = alloc_conf_from_env(os.environ, _installed_torch())
    command = [sys.executable, "-P", "-m", "vramfit.doctor.probe", question]
    try:
        done = answer(command, env=environ, stdin=subprocess.DEVNULL, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, f"did not answer within {timeout:.0f} s"
    except OSError as error:
        return (
            None,
            f"could not be asked: cannot start {sys.executable}: {(error.strerror or str(error)).lower()}",
        )
    parts = done.stdout.split(MARK)
    if len(parts) == 3:
        return json.loads(parts[1]), ""
    return None, _how_it_died(done.returncode, done.stderr)


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
