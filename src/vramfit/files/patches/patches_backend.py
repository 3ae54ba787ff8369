"""The patches backend as a protection: the overlay, the replaced functions, and what they recorded. No torch."""

from __future__ import annotations

import contextlib
import os
from typing import Self

from vramfit.files import real
from vramfit.files.calls import Calls
from vramfit.files.changes import look_through, summarise
from vramfit.files.overlay import LOG, Overlay
from vramfit.files.patches import compiled_libraries, refusals, system
from vramfit.files.policy import Backend, FilePolicy, cache_folder, default_through
from vramfit.patching import PatchStack
from vramfit.trace.outcome import FileChanges

_DEVICES = ("/dev", "/proc")
_OUTPUTS = ("/proc/self/fd/1", "/proc/self/fd/2")
"""Files that the output was sent to may be opened anew, by way of /dev/stdout."""


class Patches:
    """A `vramfit.files.protection.Protection` of replaced functions.

    Python's own writes, and those of the libraries that `compiled_libraries` lists, go to the overlay. What no patch
    leads
    away is refused: by an audit hook where Python announces it, and in a child by Landlock where the kernel has it.
    """

    backend = Backend.PATCHES

    def __init__(self, policy: FilePolicy, *, in_child: bool, reason: str = "") -> None:
        self.policy = policy
        self._in_child = in_child
        self._reason = reason
        self._patches = PatchStack()
        self._overlay: Overlay | None = None
        self._after: FileChanges | None = None

    def __enter__(self) -> Self:
        """Replace the functions."""
        self._overlay = overlay = Overlay(self.policy)
        try:
            guarded = self._in_child and refusals.restrict_writes(_writable(self.policy))
            calls = Calls(overlay)
            system.install(calls, self._patches)
            compiled_libraries.install(calls, self._patches, guarded=guarded)
            refusals.install(overlay, self._patches, guarded=guarded)
        except BaseException:
            self._patches.undo()
            overlay.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Put them back."""
        assert self._overlay is not None
        self._after = self.changes()
        cwd = self._overlay.cwd
        self._patches.undo()
        self._overlay.close()
        self._overlay = None
        if real.is_folder(cwd):  # one that was set aside is gone: the program stays where it was for real
            real.chdir(cwd)

    def changes(self) -> FileChanges:
        """What the overlay holds."""
        overlay = self._overlay
        if overlay is None:
            return self._after or summarise(self.policy, self.backend, (), reason=self._reason)
        return summarise(
            self.policy, self.backend, look_through(overlay), reason=self._reason, notes=overlay.notes
        )


def recovered(policy: FilePolicy) -> FileChanges | None:
    """What the overlay of a killed process holds, by its log; None without one."""
    if not real.exists(os.path.join(policy.folder, LOG)):
        return None
    overlay = Overlay(policy)
    try:
        return summarise(policy, Backend.PATCHES, look_through(overlay))
    finally:
        overlay.close()


def _writable(policy: FilePolicy) -> list[str]:
    """Folders that Landlock lets the process write to: those that are written for real, and ours.

    What does not exist yet cannot be named to the kernel. In the folder of all caches, that folder stands for it.
    Elsewhere a folder that the user named, or of a hub, is made, without a trace on the times above it; other caches
    are left out, so that libraries do without.
    """
    caches = cache_folder(os.environ)
    usual = {os.path.realpath(path) for path in default_through(os.environ)}
    found = [policy.folder, policy.temporary, *_DEVICES, *_OUTPUTS]
    for path in policy.through:
        above = path
        while not real.exists(above):
            above = os.path.dirname(above)
        if above == path or f"{above}/".startswith(f"{caches}/"):
            found.append(above)
        elif path in usual and os.path.basename(path) != "hub":
            continue
        elif os.path.splitext(path)[1]:  # a file
            found.append(above)
        else:
            with contextlib.suppress(OSError):
                before = real.lstat(above)
                real.make_folders(path)
                real.utime(above, ns=(before.st_atime_ns, before.st_mtime_ns))
                found.append(path)
    return found
