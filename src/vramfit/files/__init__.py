"""The layer between a virtual run and the file system: what a program writes is set aside, what existed stays.

A virtual run computes nothing, so what it saves is worthless, and would replace what is not. `FilePolicy` says what
happens to its writes, `protect` chooses the backend that keeps the policy. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vramfit.files.policy import Backend as Backend
from vramfit.files.policy import FilePolicy as FilePolicy
from vramfit.files.policy import Writes as Writes
from vramfit.files.policy import make_policy as make_policy

if TYPE_CHECKING:
    from vramfit.files.protection import Protection as Protection
    from vramfit.files.protection import current as current
    from vramfit.files.protection import protect as protect

_LATE = frozenset({"Protection", "current", "protect"})


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The command line asks for policies alone, and is to start quickly: the backends need the trace, and so numpy.
    from vramfit.files import protection

    return getattr(protection, name)
