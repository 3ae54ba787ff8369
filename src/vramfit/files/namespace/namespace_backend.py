"""The namespace backend as a protection: entered once, never left, and read for what was written."""

from __future__ import annotations

import contextlib
import os
from typing import Self

from vramfit import units
from vramfit.errors import EnvironmentUnfitError
from vramfit.files.changes import summarise
from vramfit.files.namespace import entry
from vramfit.files.namespace.contents import Manifest, changes_in, read_manifest
from vramfit.files.namespace.entry import Inside, NamespaceEntry
from vramfit.files.namespace.mounts import is_under
from vramfit.files.namespace.overlay_storage import remove
from vramfit.files.namespace.renames import copy_upper, install, keep_holes
from vramfit.files.policy import Backend, FilePolicy, Writes
from vramfit.patching import PatchStack
from vramfit.trace.outcome import FileChanges


def why_not(policy: FilePolicy | None = None) -> str | None:
    """Why this process cannot enter a namespace with a policy, None if it can. Tried in a child that ends at once.

    Without a policy, the answer holds for the machine, where temporary files lie.
    """
    with contextlib.ExitStack() as stack:
        found = entry.find_entry(policy or stack.enter_context(entry.any_policy()))
    if policy is not None and isinstance(found, NamespaceEntry):
        _found[policy.folder] = found
    return found if isinstance(found, str) else None


_found: dict[str, NamespaceEntry] = {}
_UNTOLD = "what was written is not known: the program closed all descriptors of its process"


class Namespace:
    """A `vramfit.files.protection.Protection` of overlays in a mount namespace.

    It is never left: to go back, a process would need rights that it gave up.
    """

    backend = Backend.NAMESPACE

    def __init__(self, policy: FilePolicy) -> None:
        self.policy = policy
        self._inside: Inside | None = None
        self._patches = PatchStack()

    def __enter__(self) -> Self:
        """Take this process into the namespace.

        Raises:
            EnvironmentUnfitError: the system refuses; the process must end then.
        """
        if (reason := None if self.policy.folder in _found else why_not(self.policy)) is not None:
            raise EnvironmentUnfitError(f"files cannot be protected by a namespace: {reason}")
        try:
            self._inside = entry.enter(self.policy, _found.pop(self.policy.folder))
        except OSError as error:
            raise EnvironmentUnfitError(
                f"files cannot be protected by a namespace: {error}", "Run it again with another backend"
            ) from error
        install(self._inside.mounts, self._patches)
        keep_holes(self._patches)
        return self

    def __exit__(self, *error: object) -> None:
        """The namespace ends with the process; what was replaced in Python is put back."""
        self._patches.undo()

    def changes(self) -> FileChanges:
        """What the overlays hold."""
        if self._inside is None:
            return summarise(self.policy, self.backend, ())
        inside = self._inside
        if not os.path.isdir(inside.real) or not os.path.isdir(inside.outside):
            return summarise(self.policy, self.backend, (), notes=[_UNTOLD])
        self._bring_out(inside)
        found = changes_in(inside.manifest, outside=inside.real, uppers=inside.uppers)
        return summarise(
            self.policy, self.backend, found, notes=_notes(self.policy, inside.manifest, inside.real)
        )

    def _bring_out(self, inside: Inside) -> None:
        """Put on the disk what lies in memory and must outlive this process: what is kept, and new caches."""
        for overlay in inside.manifest.overlays:
            if not overlay.in_memory:
                continue
            kept = self.policy.writes is Writes.KEEP
            wanted = [path for path in inside.manifest.missing if is_under(path, overlay.point)]
            for path in [overlay.point] if kept else wanted:
                part = os.path.relpath(path, overlay.point)
                source = os.path.join(inside.uppers[overlay.point], part)
                target = os.path.normpath(f"{inside.outside}{overlay.upper}/{part}")
                if os.path.lexists(source):
                    remove(target)
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    copy_upper(source, target)


def recovered(policy: FilePolicy) -> FileChanges | None:
    """What a killed process left in its overlays, for its parent; None if it entered no namespace."""
    manifest = read_manifest(policy.folder)
    if manifest is None:
        return None
    return summarise(policy, Backend.NAMESPACE, changes_in(manifest), notes=_notes(policy, manifest, ""))


def _notes(policy: FilePolicy, manifest: Manifest, outside: str) -> list[str]:
    dropped = manifest.dropped(outside)
    if not dropped:
        return list(manifest.notes)
    told = (
        f"{units.counted(len(dropped), 'file')} would have occupied more than "
        f"{units.format_bytes(policy.cap_bytes)} of this disk: contents were dropped, sizes kept "
        f"({', '.join(dropped[:3])}{', …' if len(dropped) > 3 else ''})"
    )
    return [*manifest.notes, told]
