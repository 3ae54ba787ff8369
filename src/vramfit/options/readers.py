"""How the value that a user gives for an option is read: checked, and turned into the one that is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vramfit.arguments import flag_argument, path_argument, paths_argument, text_argument, whole_argument
from vramfit.errors import UsageError
from vramfit.files.policy import Writes, writes_of
from vramfit.gpus import GpuSpec
from vramfit.gpus.measured_profile import MeasuredProfile
from vramfit.options.cudnn_choice import NONE, wanted_cudnn
from vramfit.options.declaration import Door
from vramfit.options.limits import STEADY, limits_from

AUTO, CPU = "auto", "cpu"
"""Devices of recorded runs: the card of this machine, and its CPU, metered."""

MOST_GPUS = 8
"""Virtual GPUs of one process (c10/core/impl/FakeGuardImpl.h: kFakeGuardImplMaxDevices)."""

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")


def read_card(_door: Door, _name: str, given: Any) -> GpuSpec:
    """A card of the catalogue, of a size or of a file."""
    from vramfit.gpus import find_gpu

    return find_gpu(given)


def read_count(_door: Door, name: str, given: Any) -> int:
    """A number of virtual cards."""
    return whole_argument(name, given, least=1, most=MOST_GPUS)


def read_device(door: Door, name: str, given: Any) -> str:
    """A device that can be recorded."""
    if not isinstance(given, str) or _DEVICE.fullmatch(given) is None:
        first, second, third = (door.given(name, one) for one in ("cuda", "cuda:1", CPU))
        raise UsageError(
            f"{door.given(name, given)} cannot be recorded", f"Write {first}, {second} or {third}"
        )
    return given


def read_size(door: Door, name: str, given: Any) -> int:
    """Bytes."""
    return door.size(name, given)


def read_text(_door: Door, name: str, given: Any) -> str:
    """Text."""
    return text_argument(name, given)


def read_profile(_door: Door, name: str, given: Any) -> str | MeasuredProfile:
    """A profile, or where it is found."""
    return given if isinstance(given, MeasuredProfile) else path_argument(name, given)


def read_cudnn(_door: Door, _name: str, given: Any) -> str:
    """The cuDNN to ask, or ``none``."""
    return wanted_cudnn(given) or NONE


def read_file(door: Door, name: str, given: Any) -> str:
    """The full path of a file that is there."""
    file = Path(path_argument(name, given))
    if not file.is_file():
        raise UsageError(f"there is no file {file}", f"{door.name(name)} names a Python file of stand-ins")
    return str(file.resolve())


def read_steps(_door: Door, _name: str, given: Any) -> int | Literal["steady"]:
    """A number of steps, or ``steady``."""
    limits = limits_from(given, None)
    return STEADY if limits.steps is None else limits.steps


def read_seconds(_door: Door, _name: str, given: Any) -> float:
    """Seconds."""
    seconds = limits_from(None, given).seconds
    assert seconds is not None
    return seconds


def read_writes(_door: Door, _name: str, given: Any) -> Writes:
    """What happens to files that are written."""
    return writes_of(given)


def read_paths(_door: Door, name: str, given: Any) -> tuple[str, ...]:
    """Paths."""
    return paths_argument(name, given)


def read_flag(_door: Door, name: str, given: Any) -> bool:
    """True or False."""
    return flag_argument(name, given)


def read_variables(_door: Door, _name: str, given: Any) -> dict[str, str]:
    """Variables, as a child process can be given them."""
    if not isinstance(given, Mapping):
        raise UsageError(f"environ={given!r} holds no variables", 'Pass a dict, e.g. {"SEED": "1"}')
    for name, value in given.items():
        text = text_argument(f"environ[{name!r}]", value)
        if not isinstance(name, str) or not name or "=" in name or "\0" in name + text:
            raise UsageError(
                f"environ cannot set {name!r} to {text!r}", "Names hold no = and no null character"
            )
    return dict(given)


def read_folder(_door: Door, name: str, given: Any) -> str:
    """A folder that is there."""
    folder = Path(path_argument(name, given))
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "cwd= names the one that the program runs in")
    return str(folder)
