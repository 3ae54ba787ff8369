"""The exception tree. Each error names the thing, the reason and the next step.

VramfitError                exit code 1
├── UsageError              exit code 2: what the user gave cannot be used
│   ├── ConfigError         an allocator setting cannot be read
│   ├── UnknownGpuError     no such card in the catalogue
│   ├── TraceFormatError    a file is not a trace or snapshot that we read
│   ├── EnvironmentUnfitError  this interpreter cannot carry the virtual GPU
│   ├── StoreFull           a tier of memory has no room for a tensor
│   └── PeerEnded           a rank waits for another one, which has ended
├── WriteError              exit code 2: a result could not be written
└── OutOfMemory             exit code 3: the allocator could not serve a request
    └── CacheFullError      a key-value cache has no free block
"""

from __future__ import annotations


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


class StoreFull(UsageError):
    """A tensor has no place in a tier of memory: what is there is in use, or the tiers below are full."""


class PeerEnded(UsageError):
    """A rank waits for what another one is to send, and that has ended: why is in the other one's error."""


class WriteError(VramfitError):
    """A result could not be written (no space, no permission); nothing half-written is left."""

    exit_code = 2


class OutOfMemory(VramfitError):
    """The caching allocator could not serve a request (base class; the allocator adds the figures)."""

    exit_code = 3


class CacheFullError(OutOfMemory):
    """A key-value cache has no free block for what it is given; what it holds is as before."""


KINDS: dict[str, type[VramfitError]] = {
    kind.__name__: kind
    for kind in (
        VramfitError,
        UsageError,
        ConfigError,
        UnknownGpuError,
        TraceFormatError,
        EnvironmentUnfitError,
        StoreFull,
        PeerEnded,
        WriteError,
        OutOfMemory,
        CacheFullError,
    )
}
"""The tree by names: what an error can be after it has passed between processes (`vramfit.launch.job.Failure`), for all
of these take a message and a hint alone."""
