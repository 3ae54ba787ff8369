"""What a namespace holds: the manifest in its folder, and what its overlays wrote, replaced and deleted.

The manifest is a JSON file, so that another process can tell. How overlayfs keeps things is in
Documentation/filesystems/overlayfs.rst: a character device 0:0 where something was removed, a folder marked opaque
where one was removed and made again, a redirect where a folder was renamed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vramfit.files.namespace.mounts import is_under
from vramfit.files.namespace.tree import MountedOverlay
from vramfit.trace.outcome import ChangeKind, FileChange

PLACE = ".namespace"
"""In a policy's folder: where the overlays keep what is written; with a suffix: where entering was tried."""
DROPPED = "dropped.txt"
"""In that folder: files whose contents were dropped, since all of them occupied too much."""
_NAME = "namespace.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a namespace leaves in its folder.

    Attributes:
        overlays: those that were mounted.
        missing: paths that are written for real and did not exist: what is written there is moved there at the end.
    """

    folder: str
    overlays: tuple[MountedOverlay, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def write(self, outside: str = "") -> None:
        """Leave it in its folder, before whose path `outside` is put where this process sees the folder elsewhere."""
        named = outside + os.path.join(self.folder, _NAME)
        with open(f"{named}.new", "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file)
        os.replace(f"{named}.new", named)

    def dropped(self, outside: str = "") -> tuple[str, ...]:
        """Files whose contents were dropped, by the paths that the program knows."""
        try:
            named = outside + os.path.join(self.folder, DROPPED)
            with open(named, encoding="utf-8", errors="surrogateescape") as file:
                kept = [line.rstrip("\n") for line in file]
        except FileNotFoundError:
            return ()
        return tuple(
            os.path.join(overlay.point, os.path.relpath(path, overlay.upper))
            for path in dict.fromkeys(kept)
            for overlay in self.overlays
            if path.startswith(overlay.upper + os.sep)
        )


def read_manifest(place: str) -> Manifest | None:
    """What `Manifest.write` left below a policy's folder, None where no namespace was entered."""
    try:
        with open(os.path.join(place, PLACE, _NAME), encoding="utf-8") as file:
            values = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Manifest(
        folder=values["folder"],
        overlays=tuple(MountedOverlay(**overlay) for overlay in values["overlays"]),
        missing=tuple(values["missing"]),
        notes=tuple(values["notes"]),
    )


# -- Overlays against the real folders ---------------------------------------------------------------------------


_MOST_COMPARED = 256 << 20
_MOST_COUNTED = 20_000


def changes_in(
    manifest: Manifest, *, outside: str = "", uppers: Mapping[str, str] | None = None
) -> Iterator[FileChange]:
    """The changes that the overlays of a namespace hold.

    Args:
        manifest: of the namespace.
        outside: what is put before the paths of real files.
        uppers: for overlays in memory, by their points, the folders of what they hold. Others in memory are left out.
    """
    for overlay in manifest.overlays:
        upper = outside + overlay.upper
        if overlay.in_memory:
            upper = (uppers or {}).get(overlay.point, "")
        if upper and os.path.isdir(upper):
            reader = _ContentsReader(
                outside=outside, point=overlay.point, leave=(*manifest.missing, manifest.folder)
            )
            yield from reader.folder(upper + "/.", reader.real(overlay.point), overlay.point)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ContentsReader:
    outside: str
    point: str
    leave: tuple[str, ...]

    def real(self, path: str) -> str:
        """The real file of a path."""
        return self.outside + path

    def folder(self, upper: str, lower: str | None, path: str) -> Iterator[FileChange]:
        """Changes in a folder that an overlay keeps; `lower` is the folder that shows through it."""
        with os.scandir(upper) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
        for entry in inside:
            inner = os.path.join(path, entry.name)
            if not any(is_under(inner, folder) for folder in self.leave):
                yield from self._entry(entry, lower, inner)

    def _entry(self, entry: os.DirEntry[str], lower: str | None, path: str) -> Iterator[FileChange]:
        facts, real = entry.stat(follow_symlinks=False), _facts(self.real(path))
        if is_whiteout(facts):
            if real is not None:
                yield _change(path, ChangeKind.DELETED, _size(self.real(path), real))
        elif not stat.S_ISDIR(facts.st_mode):
            kind = self._kind(entry.path, facts, path, real)
            if kind is not None:
                yield _change(path, kind, facts.st_size if stat.S_ISREG(facts.st_mode) else 0)
        else:
            yield from self._inner(entry, lower, path, facts, real)

    def _inner(
        self,
        entry: os.DirEntry[str],
        lower: str | None,
        path: str,
        facts: os.stat_result,
        real: os.stat_result | None,
    ) -> Iterator[FileChange]:
        shows = self._shows_through(entry.path, entry.name, lower)
        if real is None or not stat.S_ISDIR(real.st_mode):
            yield _change(path, ChangeKind.FOLDER)
        elif real.st_mode != facts.st_mode:
            yield _change(path, ChangeKind.METADATA)
        names = set(os.listdir(entry.path))
        if shows != self.real(path):
            if shows is not None:
                yield from self._moved_here(shows, path, names)
                names.update(os.listdir(shows))
            if real is not None and stat.S_ISDIR(real.st_mode):
                yield from self._gone(path, names)
        yield from self.folder(entry.path, shows, path)

    def _shows_through(self, upper: str, name: str, lower: str | None) -> str | None:
        """The folder whose contents show through one that an overlay keeps."""
        redirect = _mark(upper, "redirect")
        if redirect is not None and redirect.startswith("/"):
            return self.real(os.path.join(self.point, redirect[1:]))
        if lower is None or _mark(upper, "opaque") == "y":
            return None
        shown = os.path.join(lower, redirect or name)
        facts = _facts(shown)
        return shown if facts is not None and stat.S_ISDIR(facts.st_mode) else None

    def _moved_here(self, source: str, path: str, hidden: set[str]) -> Iterator[FileChange]:
        """What a renamed folder brought with it, without what the overlay keeps itself."""
        with os.scandir(source) as entries:
            inside = sorted((entry for entry in entries if entry.name not in hidden), key=lambda e: e.name)
        for entry in inside:
            inner = os.path.join(path, entry.name)
            facts, real = entry.stat(follow_symlinks=False), _facts(self.real(inner))
            if not stat.S_ISDIR(facts.st_mode):
                kind = ChangeKind.WRITTEN if real is None else ChangeKind.REPLACED
                yield _change(inner, kind, facts.st_size)
                continue
            if real is None:
                yield _change(inner, ChangeKind.FOLDER)
            yield from self._moved_here(entry.path, inner, set())

    def _gone(self, path: str, names: set[str]) -> Iterator[FileChange]:
        """What lay in a folder that was removed and made again."""
        for name in sorted(set(os.listdir(self.real(path))) - names):
            inner = os.path.join(path, name)
            real = _facts(self.real(inner))
            if real is not None:
                yield _change(inner, ChangeKind.DELETED, _size(self.real(inner), real))

    def _kind(
        self, upper: str, facts: os.stat_result, path: str, real: os.stat_result | None
    ) -> ChangeKind | None:
        """What happened to a file; None for one that is as before, such as one that was only opened for writing."""
        if real is None:
            return ChangeKind.WRITTEN
        same_kind = stat.S_IFMT(facts.st_mode) == stat.S_IFMT(real.st_mode)
        if not same_kind or facts.st_size != real.st_size:
            return ChangeKind.REPLACED
        same_times = facts.st_mtime_ns == real.st_mtime_ns
        if not same_times and not self._same(upper, path, facts):
            return ChangeKind.REPLACED
        if same_times and facts.st_mode == real.st_mode:
            return None
        return ChangeKind.METADATA

    def _same(self, upper: str, path: str, facts: os.stat_result) -> bool:
        if stat.S_ISLNK(facts.st_mode):
            return os.readlink(upper) == os.readlink(self.real(path))
        if not stat.S_ISREG(facts.st_mode):
            return True
        if facts.st_size > _MOST_COMPARED:
            return False
        try:
            return all(
                itertools.starmap(operator.eq, zip(_pieces(upper), _pieces(self.real(path)), strict=True))
            )
        except (OSError, ValueError):
            return False  # one of them may not be read, or became shorter meanwhile


def _pieces(path: str) -> Iterator[bytes]:
    """A file's contents, read without changing its time of access where that is allowed."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOATIME)
    except PermissionError:
        number = os.open(path, os.O_RDONLY)
    with open(number, "rb") as file:
        while piece := file.read(1 << 20):
            yield piece


def is_whiteout(facts: os.stat_result) -> bool:
    """Whether a file stands for one that was removed."""
    return stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0


def _mark(folder: str, name: str) -> str | None:
    for space in ("trusted", "user"):
        try:
            return os.getxattr(folder, f"{space}.overlay.{name}", follow_symlinks=False).decode(
                "utf-8", "surrogateescape"
            )
        except OSError:
            continue  # not marked, or not ours to see
    return None


def _facts(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _size(path: str, facts: os.stat_result) -> int:
    """Bytes of a file, or of all files in a folder."""
    if not stat.S_ISDIR(facts.st_mode):
        return facts.st_size
    total = counted = 0
    for folder, _, names in os.walk(path):
        for name in names:
            inner = _facts(os.path.join(folder, name))
            total += 0 if inner is None else inner.st_size
        counted += len(names)
        if counted > _MOST_COUNTED:
            break
    return total


def _change(path: str, kind: ChangeKind, size: int = 0) -> FileChange:
    return FileChange(path=path, kind=kind, size_bytes=size)
