"""The exception tree. Each error names the thing, the reason and the next step.

VramfitError                exit code 1
├── UsageError              exit code 2: what the user gave cannot be used
│   ├── ConfigError         an allocator setting cannot be read
│   ├── UnknownGpuError     no such card in the catalogue
│   ├── TraceFormatError    a file is not a trace or snapshot that we read
│   └── EnvironmentUnfitError  this interpreter cannot carry the virtual GPU
├── WriteError              exit code 2: a result could not be written
└── OutOfMemory             exit code 3: the allocator could not serve a request
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class VramfitError(Exception):
    """Base of every error that vramfit raises on purpose.

    >>> try:
    ...     vramfit.run("train.py", gpu="RTX 4900")
    ... except vramfit.VramfitError as error:
    ...     print(error.message)
    ...     print(error.hint)
    no GPU is called 'RTX 4900'
    Did you mean RTX 4090, RTX 4090 D or RTX 4090 Laptop? 'vramfit gpus' lists all

    Args:
        message: what is wrong, and why, in one line.
        hint: what the user can do next, in one line; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}. {hint}")
        self.message = message
        self.hint = hint


class UsageError(VramfitError):
    """What the user gave (an argument, a file, a setting) cannot be used."""

    exit_code = 2


class ConfigError(UsageError):
    """An allocator configuration string cannot be read."""


class UnknownGpuError(UsageError):
    """No card of that name is in the catalogue."""


class TraceFormatError(UsageError):
    """A file is not a trace or snapshot that vramfit reads, or it is damaged."""


class EnvironmentUnfitError(UsageError):
    """This interpreter or this torch cannot carry the virtual GPU."""


class WriteError(VramfitError):
    """A result could not be written (no space, no permission); nothing half-written is left."""

    exit_code = 2


class OutOfMemory(VramfitError):
    """The caching allocator could not serve a request (base class; the allocator adds the figures)."""

    exit_code = 3


_KINDS: dict[str, type[VramfitError]] = {
    kind.__name__: kind
    for kind in (
        VramfitError,
        UsageError,
        ConfigError,
        UnknownGpuError,
        TraceFormatError,
        EnvironmentUnfitError,
        WriteError,
        OutOfMemory,
    )
}
"""What an error can be after it has passed between processes: what stands here takes a message and a hint alone."""


def error_to_plain(error: VramfitError) -> dict[str, Any]:
    """An error as plain values, for another process: ``kind``, ``message``, ``hint`` and the exit ``code``.

    A class that is defined elsewhere goes as the nearest of its bases that stands in the tree above.
    """
    kind = next(base.__name__ for base in type(error).__mro__ if base in _KINDS.values())
    return {"kind": kind, "message": error.message, "hint": error.hint, "code": error.exit_code}


def error_from_plain(told: Mapping[str, Any]) -> VramfitError:
    """The error that another process told of.

    Args:
        told: what `error_to_plain` gave; without ``kind`` it is a `UsageError` or a `VramfitError`, by its ``code``.
    """
    plain = UsageError if told["code"] == UsageError.exit_code else VramfitError
    error = _KINDS.get(told.get("kind", ""), plain)(told["message"], told["hint"])
    if told["code"] != error.exit_code:
        error.exit_code = told["code"]
    return error
