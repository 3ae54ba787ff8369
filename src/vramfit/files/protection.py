"""Chooses what keeps a run's writes from the real files, and knows which protection stands in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol, Self

from vramfit.errors import EnvironmentUnfitError
from vramfit.files import namespace
from vramfit.files.changes import summarise
from vramfit.files.policy import Backend, FilePolicy, Writes
from vramfit.trace.outcome import FileChanges


class Protection(Protocol):
    """What keeps writes from the real files while it is entered.

    In a child it is entered before torch is imported, and never left: the process ends in it, so that what runs last is
    protected as well. In the user's own process leaving it undoes every patch. With `Writes.KEEP` the backend leaves
    what was set aside in ``policy.folder``, each file under its absolute path; otherwise nothing of it is needed once
    the process has ended, and whoever made the policy removes the folder.
    """

    policy: FilePolicy
    backend: Backend

    def __enter__(self) -> Self:
        """Protect from now on."""

    def __exit__(self, *error: object) -> None:
        """Stop protecting; what was set aside is no longer seen."""

    def changes(self) -> FileChanges:
        """What would have happened to files until now; may be called inside and after."""


class Unprotected:
    """`Writes.REAL`: files are written where the program says."""

    backend = Backend.NONE

    def __init__(self, policy: FilePolicy) -> None:
        self.policy = policy

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def changes(self) -> FileChanges:
        """An empty summary: nobody counted."""
        return summarise(self.policy, Backend.NONE, ())


def protect(policy: FilePolicy, *, in_child: bool) -> Protection:
    """The protection for a policy; it is not entered yet.

    Args:
        in_child: whether this process is ours alone and ends with the program. Only there can a namespace be entered
            and Landlock be switched on, since neither can be left.

    Raises:
        EnvironmentUnfitError: the backend that was asked for is not possible here.
    """
    if policy.writes is Writes.REAL:
        return Unprotected(policy)
    if policy.backend is Backend.PATCHES:
        return _patches(policy, in_child, "")
    reason = namespace.why_not(policy) if in_child else "a process that runs on cannot enter a namespace"
    if reason is None:
        return namespace.Namespace(policy)
    if policy.backend is Backend.NAMESPACE:
        raise EnvironmentUnfitError(
            f"files cannot be protected by a namespace: {reason}", "Leave the choice to vramfit"
        )
    return _patches(policy, in_child, reason)


def _patches(policy: FilePolicy, in_child: bool, reason: str) -> Protection:
    if os.name != "posix":
        raise EnvironmentUnfitError(
            "nothing protects files from a virtual run on this system",
            "Write them for real, with --writes real or writes='real', in a folder that holds nothing of value",
        )
    from vramfit.files.patches.patches_backend import Patches

    return Patches(policy, in_child=in_child, reason=reason)


def recovered(policy: FilePolicy) -> FileChanges | None:
    """What a killed process would have done to files, for its parent; None where nothing shows it."""
    from vramfit.files.patches import patches_backend

    if policy.writes is Writes.REAL:
        return None
    return namespace.recovered(policy) or patches_backend.recovered(policy)


_standing: list[Protection] = []


def current() -> Protection | None:
    """The protection that stands in this process, None without one."""
    return _standing[-1] if _standing else None


def stand(protection: Protection) -> Protection:
    """Enter a protection for the rest of the process, and make it the `current` one."""
    protection.__enter__()
    _standing.append(protection)
    return protection


@contextlib.contextmanager
def standing(protection: Protection) -> Iterator[Protection]:
    """Enter a protection, and make it the `current` one in the block."""
    with protection:
        _standing.append(protection)
        try:
            yield protection
        finally:
            _standing.remove(protection)
