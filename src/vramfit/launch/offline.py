"""Keeps this process from other machines: a program that is run a second time must not send anything twice."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from typing import Any

OFFLINE: Mapping[str, str] = {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "offline",
}
"""Variables by which libraries read what they have downloaded before, and ask nobody."""

_OWN = frozenset({"", "localhost", "ip6-localhost", "0.0.0.0", "::", "::1"})
_CONNECTS = frozenset({"socket.connect", "socket.sendto"})
_ASKS = frozenset({"socket.getaddrinfo", "socket.gethostbyname"})


def refuse_connections() -> None:
    """Refuse connections to other machines for the rest of this process.

    This sees what Python's ``socket`` opens; compiled libraries with sockets of their own are not stopped. An audit
    hook stays for good, so this is for a child process.
    """
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _CONNECTS:
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # a path is a socket of this machine
    elif event in _ASKS:
        host = arguments[0]
    else:
        return
    if host is not None and not is_own(host):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))


def is_own(host: object) -> bool:
    """Whether a host is this machine."""
    name = host.decode("utf-8", "replace") if isinstance(host, bytes) else str(host)
    return name in _OWN or name.startswith("127.") or name == os.uname().nodename
