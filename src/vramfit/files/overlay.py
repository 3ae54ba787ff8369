"""The overlay: what a program sees of the file system while its writes are set aside. No torch.

NOTE [The overlay]
What the program writes lies in the *upper* folder, each file under its absolute path; what it did not touch is read
where it lies, *below*. A folder in which anything was changed is *opened*: it exists in the upper folder too, and a
`Folder` says what shows through it. Only opened folders have to be looked into, so a path elsewhere costs one look into
a dictionary. A file that is renamed is not copied: the folder notes where it really lies (`moved`). A folder that is
renamed keeps showing what lay below its old name (`below`).

Whatever changes in this picture is one line of a log that forked processes share: each applies the lines that others
wrote before it looks. A process that is killed leaves the log behind, so that its parent can still tell what it did.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import stat as modes
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from vramfit.files import real
from vramfit.files.policy import FilePolicy, is_bytecode, is_system
from vramfit.files.sparse_files import DiskAllowance

LOG = ".vramfit-log"
"""In the upper folder: what changed, for forked processes and for the parent."""

_COPY = ".vramfit-copy"
"""In the upper folder: a copy that is being made."""

_MOST_LINKS = 40
"""Symbolic links that one path may go through, as in the kernel (fs/namei.c, MAXSYMLINKS)."""


class Where(Enum):
    """Where the thing lies that a path names."""

    BELOW = "below"
    """Where it was before the run."""
    MOVED = "moved"
    """Where it was before the run, under another name."""
    UPPER = "upper"
    """Set aside."""
    THROUGH = "through"
    """Really there: the path is written for real."""
    NOWHERE = "nowhere"
    """It does not exist."""


@dataclass(slots=True)
class Folder:
    """A folder that exists in the upper folder too.

    Attributes:
        below: the real folder that shows through it; None where none does.
        gone: names that do not show through.
        moved: names of files that lie elsewhere for real.
    """

    below: str | None
    gone: set[str] = field(default_factory=set)
    moved: dict[str, str] = field(default_factory=dict)


class View(NamedTuple):
    """A folder as the program sees it: its path without links, what shows through, and how it was changed."""

    path: str
    below: str | None
    folder: Folder | None
    through: bool


class Place(NamedTuple):
    """What a path names: the folder, the name in it, where the thing lies, its real path, and its state if known."""

    view: View
    name: str
    where: Where
    real: str
    found: os.stat_result | None = None

    @property
    def path(self) -> str:
        """The path without links, as the program would know it."""
        return join(self.view.path, self.name)

    @property
    def is_folder(self) -> bool:
        """Whether a folder was found there."""
        return self.found is not None and modes.S_ISDIR(self.found.st_mode)

    @property
    def is_link(self) -> bool:
        """Whether a symbolic link was found there."""
        return self.found is not None and modes.S_ISLNK(self.found.st_mode)


def join(folder: str, name: str) -> str:
    """A path of a name in a folder; the root ends with its slash already."""
    if not name:
        return folder
    return f"{folder}{name}" if folder.endswith("/") else f"{folder}/{name}"


class Overlay:
    """What a program sees, and what it changed."""

    def __init__(self, policy: FilePolicy) -> None:
        self.policy = policy
        self.upper = policy.folder
        self.folders: dict[str, Folder] = {}
        self.cwd: str = real.getcwd()
        self.notes: list[str] = []
        self._views: dict[str, View] = {}
        # Both forms, so that the folder itself counts and a name that merely begins alike does not.
        paths = (self.upper, *policy.through)
        self._through_whole = frozenset(paths)
        self._through_start = tuple(f"{path.rstrip('/')}/" for path in paths)
        self._parents = frozenset(parent for path in policy.through for parent in _parents(path))
        self._lock = threading.RLock()
        self._inside = 0
        self._seen = 0
        self._offset = 0
        self._log = real.open_fd(
            f"{self.upper}/{LOG}", os.O_RDWR | os.O_CREAT | os.O_APPEND | real.CLOSE_ON_EXEC, 0o600
        )
        # Shared with forked processes: how many lines the log has, whether anybody forked, bytes spent.
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.shared = memoryview(self._page).cast("Q")
        self.disk = DiskAllowance(self.upper, policy.cap_bytes, self.shared[2:3], self.tell)
        self._read_log()
        self.shared[0] = self._seen
        _remember(self)

    def close(self) -> None:
        """Give back what it holds of the system; the upper folder stays."""
        self.disk.spent.release()
        self.shared.release()
        self._page.close()
        real.close(self._log)

    # The shared picture

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """A block in which the picture changes: alone among threads, and among processes once one forked."""
        import fcntl  # here, since Windows has none

        with self._lock:
            outermost = self.shared[1] and not self._inside
            if outermost:
                fcntl.flock(self._log, fcntl.LOCK_EX)
            self._inside += 1
            try:
                self.catch_up()
                yield
            finally:
                self._inside -= 1
                if outermost:
                    fcntl.flock(self._log, fcntl.LOCK_UN)

    def catch_up(self) -> None:
        """Apply what other processes changed."""
        if self.shared[0] != self._seen:
            with self._lock:
                self._read_log()

    def _read_log(self) -> None:
        data = bytearray()
        while chunk := os.pread(self._log, 1 << 16, self._offset + len(data)):
            data += chunk
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._apply(*json.loads(line))
            self._seen += 1

    def _note(self, *change: Any) -> None:
        """Change the picture, here and in every process."""
        line = json.dumps(change).encode() + b"\n"  # names that are no text are escaped as surrogates
        real.write(self._log, line)
        self._apply(*change)
        self._offset += len(line)
        self._seen += 1
        self.shared[0] = self._seen

    def _apply(self, what: str, path: str, *more: Any) -> None:
        if what == "open":
            self.folders[path] = Folder(more[0])
        elif what == "close":
            del self.folders[path]
        elif what == "gone":
            self.folders[path].gone.add(more[0])
        elif what == "moved":
            name, source = more
            if source is None:
                self.folders[path].moved.pop(name, None)
            else:
                self.folders[path].moved[name] = source
        elif what == "rename":
            target = more[0]
            start = f"{path}/"
            for known in [one for one in self.folders if one == path or one.startswith(start)]:
                self.folders[target + known[len(path) :]] = self.folders.pop(known)
            if self.cwd == path or self.cwd.startswith(start):
                self.cwd = target + self.cwd[len(path) :]
        self._views = {}

    # Looking

    def is_through(self, path: str) -> bool:
        """Whether a path without links is written for real."""
        return (
            path.startswith(self._through_start)
            or path in self._through_whole
            or is_system(path)
            or is_bytecode(path)
        )

    def untouched(self) -> bool:
        """Whether nothing was changed, so that every path may be read as it stands."""
        if self.shared[0] != self._seen:
            self.catch_up()
        return not self.folders

    def text(self, path: Any, dir_fd: int | None = None) -> str:
        """A path as absolute text; links are not followed.

        Raises:
            TypeError: what was given is not a path.
            OSError: the descriptor leads to no folder.
        """
        name = os.fsdecode(path)
        if "\0" in name:
            raise ValueError("embedded null byte")
        if name.startswith("/"):
            return name
        if not name:
            raise real.failure(errno.ENOENT, name)
        return join(self.cwd if dir_fd is None else self.of_fd(dir_fd), name)

    def of_fd(self, fd: int) -> str:
        """The path by which a descriptor was opened, as the program sees it.

        Raises:
            OSError: the descriptor has no path.
        """
        found = real.path_of_fd(fd)
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.seen_as(found)

    def seen_as(self, path: str) -> str:
        """The path by which the program knows a real path."""
        if path == self.upper:
            return "/"
        return path[len(self.upper) :] if path.startswith(f"{self.upper}/") else path

    def view(self, path: str) -> View:
        """The folder at an absolute path.

        Raises:
            OSError: there is none.
        """
        if self.shared[0] != self._seen:
            self.catch_up()
        # A thread may be on its way while another one changes the picture: what it finds is kept with the old views.
        views = self._views
        found = views.get(path)
        if found is None:
            found = views[path] = self._walk(path, [0])
        return found

    def _walk(self, path: str, links: list[int]) -> View:
        view = View("/", "/", self.folders.get("/"), False)
        for name in path.split("/"):
            if not name or name == ".":
                continue
            if name == "..":
                view = self.view(os.path.dirname(view.path))
                continue
            view = self._step(view, name, path, links)
        return view

    def _step(self, view: View, name: str, asked: str, links: list[int]) -> View:
        place = self.checked(self.look(view, name))
        if place.found is None:
            raise real.failure(errno.ENOENT, asked)
        if place.is_link:
            links[0] += 1
            if links[0] > _MOST_LINKS:
                raise real.failure(errno.ELOOP, asked)
            return self._walk(self.target(place), links)
        if not place.is_folder:
            raise real.failure(errno.ENOTDIR, asked)
        return self.enter(place)

    def target(self, place: Place) -> str:
        """Where a link leads."""
        target = real.readlink(place.real)
        return target if target.startswith("/") else join(place.view.path, target)

    def checked(self, place: Place) -> Place:
        """The same place with its state looked up; a path that was not touched may name nothing."""
        if place.found is not None or place.where is Where.NOWHERE:
            return place
        try:
            found = real.lstat(place.real)
        except (FileNotFoundError, NotADirectoryError):
            where = Where.THROUGH if place.where is Where.THROUGH else Where.NOWHERE
            return Place(place.view, place.name, where, place.real)
        return Place(place.view, place.name, place.where, place.real, found)

    def enter(self, place: Place) -> View:
        """The folder that a place is."""
        path = place.path
        if place.where is Where.THROUGH:
            return View(path, path, None, True)
        folder = self.folders.get(path)
        if folder is not None:
            return View(path, folder.below, folder, False)
        if place.where is Where.UPPER:  # made by a compiled library in a folder that was set aside
            return View(path, None, None, False)
        return View(path, place.real, None, False)

    def look(self, view: View, name: str) -> Place:
        """The place of a name in a folder, links not followed."""
        if view.through:
            return Place(view, name, Where.THROUGH, join(view.path, name))
        path = join(view.path, name)
        if self.is_through(path):
            return Place(view, name, Where.THROUGH, path)
        folder = view.folder
        if folder is None:
            if view.below is None:
                return self._in_upper(view, name, path)
            return Place(view, name, Where.BELOW, join(view.below, name))
        if name in folder.moved:
            return Place(view, name, Where.MOVED, folder.moved[name])
        found = self._in_upper(view, name, path)
        if found.where is Where.UPPER or name in folder.gone or folder.below is None:
            return found
        return Place(view, name, Where.BELOW, join(folder.below, name))

    def _in_upper(self, view: View, name: str, path: str) -> Place:
        upper = self.upper + path
        try:
            return Place(view, name, Where.UPPER, upper, real.lstat(upper))
        except (FileNotFoundError, NotADirectoryError):
            return Place(view, name, Where.NOWHERE, upper)

    def find(self, path: str, *, follow: bool = True) -> Place:
        """The place that an absolute path names, with its state; that is None where nothing is there.

        Raises:
            OSError: a folder of the path does not exist, or its links go in circles.
        """
        for _ in range(_MOST_LINKS):
            bare = path.rstrip("/")
            folder, _, name = bare.rpartition("/")
            if name in ("", ".", ".."):
                return self.place_of(self.view(bare or "/"))
            place = self.checked(self.look(self.view(folder or "/"), name))
            if place.found is None:
                return place
            if not place.is_link:
                if bare != path and not place.is_folder:
                    raise real.failure(errno.ENOTDIR, path)
                return place
            if is_system(place.path) or not (follow or bare != path):  # a slash at the end follows a link
                return place
            path = self.target(place)
        raise real.failure(errno.ELOOP, path)

    def behind(self, place: Place) -> Place:
        """The place that is changed by way of another: the same, or where a link of the kernel leads past all paths.

        /proc/self/fd/3 is the very file that descriptor 3 was opened on. A real one that was opened for reading must
        not be written to by it; one that is open for writing, as standard output is, may be.

        Raises:
            OSError: the link leads to what no longer exists.
        """
        if not (place.is_link and is_system(place.path)):
            return place
        target = self.target(place)
        try:
            is_free = real.is_open_for_writing(place.real)
            is_free |= not os.path.samestat(real.stat(place.real), real.stat(target))
        except OSError:
            is_free = True
        if is_free:  # it may be written to, or is a pipe or a file without a name
            return place
        found = self.behind(self.find(self.seen_as(target)))
        return place if found.where is Where.THROUGH else found

    def place_of(self, view: View) -> Place:
        """The place of a folder in its parent."""
        parent, _, name = view.path.rpartition("/")
        if name:
            return self.checked(self.look(self.view(parent or "/"), name))
        path = "/" if view.folder is None else self.upper
        where = Where.BELOW if view.folder is None else Where.UPPER
        return Place(view, "", where, path, real.lstat(path))

    def names(self, view: View) -> list[str]:
        """Names in a folder."""
        if view.folder is None:
            return real.listdir(view.below if view.below is not None else self.upper + view.path)
        names = dict.fromkeys(real.listdir(self.upper + view.path))
        names.update(dict.fromkeys(view.folder.moved))
        if view.path == "/":
            names.pop(LOG, None)
            names.pop(_COPY, None)
        if view.folder.below is not None:
            gone = view.folder.gone
            names.update(dict.fromkeys(name for name in real.listdir(view.folder.below) if name not in gone))
        return list(names)

    # Changing

    def open_folder(self, view: View) -> str:
        """Make a folder and those above it exist in the upper folder; returns its real path there."""
        if view.through:
            return view.path
        upper = self.upper + (view.path if view.path != "/" else "")
        if view.path in self.folders:
            return upper
        if view.path == "/":
            self._note("open", "/", "/")
            return upper
        if view.below is None:  # made there by a compiled library
            self._note("open", view.path, None)
            return upper
        parent = self.view(os.path.dirname(view.path))
        above = self.open_folder(parent)
        with unchanged_times(above):
            real.mkdir(upper, 0o700)
        real.copy_metadata(view.below, upper)
        mode = modes.S_IMODE(real.lstat(upper).st_mode)
        if mode & 0o700 != 0o700:
            real.chmod(upper, mode | 0o700)
        self._note("open", view.path, view.below)
        return upper

    def prepare(self, place: Place) -> str:
        """Where a new file of a place is to lie, its folder made; what lies there now is left to the caller."""
        if place.where is Where.THROUGH:
            return place.real
        self.may_change(place.view, place.path)
        return join(self.open_folder(place.view), place.name)

    def may_change(self, view: View, path: str) -> None:
        """Make sure that the program would be allowed to make and remove names in a folder.

        Raises:
            PermissionError: the program would not be allowed to.
        """
        below = view.below
        if below is not None and not real.access(below, os.W_OK | os.X_OK):
            raise real.failure(errno.EACCES, path)

    def copy_up(self, place: Place, *, contents: bool = True) -> str:
        """Make what a place names exist in the upper folder, and return its real path there.

        A file is copied with its bytes, or empty if not `contents`.
        """
        if place.where in (Where.UPPER, Where.THROUGH):
            return place.real
        if place.where is Where.NOWHERE:
            raise real.failure(errno.ENOENT, place.path)
        if not place.name or real.is_folder(place.real):
            return self.open_folder(self.enter(place) if place.name else place.view)
        above = self.open_folder(place.view)
        target = join(above, place.name)
        # Another thread must not find half of a copy: it is made beside, and then given its name.
        copy = join(self.upper, _COPY)
        with unchanged_times(self.upper), unchanged_times(above):
            if modes.S_ISLNK(real.lstat(place.real).st_mode):
                real.symlink(real.readlink(place.real), copy)
            elif contents:
                if not real.copy_contents(place.real, copy, self.disk.room()):
                    self.disk.dropped(place.path)
            else:
                real.close(real.open_fd(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
            real.copy_metadata(place.real, copy)
            real.rename(copy, target)
        if contents:
            self.disk.spend(real.allocated(real.lstat(target)))
        if place.where is Where.MOVED:
            self._note("moved", place.view.path, place.name, None)
        return target

    def hide(self, place: Place) -> None:
        """Let a name no longer show through, and forget where it was moved from."""
        path = place.view.path
        folder = self.folders[path]
        if place.name in folder.moved:
            self._note("moved", path, place.name, None)
        below = folder.below
        if below is not None and place.name not in folder.gone and real.exists(join(below, place.name)):
            self._note("gone", path, place.name)

    def made(self, path: str) -> None:
        """Note that a new folder exists in the upper folder; nothing shows through it."""
        self._note("open", path, None)

    def removed(self, path: str) -> None:
        """Note that a folder no longer exists in the upper folder."""
        if path in self.folders:
            self._note("close", path)

    def renamed(self, path: str, target: str) -> None:
        """Note that a folder of the upper folder has another name."""
        self._note("rename", path, target)

    def moved(self, place: Place, source: str) -> None:
        """Note that a file shows at a place though it really lies elsewhere."""
        self._note("moved", place.view.path, place.name, source)

    def forget_views(self) -> None:
        """Note, for every process, that links or folders changed, so that paths may lead elsewhere."""
        self._note("look", "")

    def touch(self, view: View) -> None:
        """Change a folder's time, since names in it changed."""
        now = time.time_ns()
        upper = self.upper + (view.path if view.path != "/" else "")
        real.utime(upper, ns=(real.lstat(upper).st_atime_ns, now))

    def is_parent_of_through(self, path: str) -> bool:
        """Whether a path that is written for real lies below."""
        return path in self._parents

    # Notes

    def tell(self, note: str) -> None:
        """Add a note to the report, unless one that begins alike is there."""
        if not any(known[:40] == note[:40] for known in self.notes):
            self.notes.append(note)


@contextlib.contextmanager
def unchanged_times(folder: str) -> Iterator[None]:
    """Keep a folder's times in a block that does to the upper folder what the program did not do."""
    before = real.lstat(folder)
    try:
        yield
    finally:
        real.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def _parents(path: str) -> Iterator[str]:
    while (path := os.path.dirname(path)) != "/" and path:
        yield path


_all: weakref.WeakSet[Overlay] = weakref.WeakSet()
_registered: list[bool] = []


def _remember(overlay: Overlay) -> None:
    """Let forked processes that share an overlay wait for each other, from the first fork on."""
    _all.add(overlay)
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
        _registered.append(True)


def _before_fork() -> None:
    for overlay in _all:
        with contextlib.suppress(ValueError):  # it was closed
            overlay.shared[1] = 1


def _after_fork() -> None:
    for overlay in _all:
        overlay._lock, overlay._inside = threading.RLock(), 0
        with contextlib.suppress(OSError):
            # A description of its own: locks of flock belong to descriptions, and forked processes share one.
            path = f"{overlay.upper}/{LOG}"
            number = real.open_fd(path, os.O_RDWR | os.O_APPEND | real.CLOSE_ON_EXEC)
            os.dup2(number, overlay._log, inheritable=False)
            real.close(number)
