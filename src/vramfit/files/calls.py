"""The system's file calls on an overlay: the functions of ``os`` with their signatures and errors. No torch.

Each takes what its original takes: text, bytes, path objects, descriptors, ``dir_fd``. As long as nothing was changed,
a call that only looks goes to the original as it stands.
"""

from __future__ import annotations

import errno
import functools
import os
import stat as modes
from collections.abc import Callable
from typing import Any, TypeVar, cast

from vramfit.files import real
from vramfit.files.dir_entries import DirEntries, DirEntry, is_bytes, like
from vramfit.files.overlay import Overlay, Place, View, Where, join
from vramfit.files.policy import is_system

_Call = TypeVar("_Call", bound=Callable[..., Any])

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGING = WRITING & ~os.O_CREAT
_TMPFILE = getattr(os, "O_TMPFILE", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


def naming_path(call: _Call) -> _Call:
    """Let a call's errors name the path that the program gave, not where it really lies."""

    @functools.wraps(call)
    def inner(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, path, *args, **kwargs)
        except OSError as error:
            error.filename = None if isinstance(path, int) else path
            raise

    return cast(_Call, inner)


class Calls:
    """File calls on an overlay."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay

    # Looking

    def place(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Place:
        """The place that a path of the program names."""
        return self.overlay.find(self.overlay.text(path, dir_fd), follow=follow)

    def reading(self, path: Any, *, follow: bool = True) -> str:
        """The real path of what is to be read, for compiled readers, which take nothing else.

        Raises:
            OSError: nothing exists at the path.
        """
        return self.existing(self.place(path, follow=follow), path).real

    def existing(self, place: Place, path: Any) -> Place:
        """The same place.

        Raises:
            FileNotFoundError: nothing is there.
        """
        if place.found is None:
            raise real.failure(errno.ENOENT, path)
        return place

    @naming_path
    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        """See `os.stat`."""
        if isinstance(path, int) or self.overlay.untouched():
            return real.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        place = self.place(path, dir_fd, follow=follow_symlinks)
        if place.found is None:
            raise real.failure(errno.ENOENT, path)
        if follow_symlinks and place.is_link:  # one of /proc, which leads where no path does
            return real.stat(place.real)
        return place.found

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        """See `os.lstat`."""
        return self.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    @naming_path
    def access(
        self,
        path: Any,
        mode: int,
        *,
        dir_fd: int | None = None,
        effective_ids: bool = False,
        follow_symlinks: bool = True,
    ) -> bool:
        """See `os.access`."""
        options = {"effective_ids": effective_ids, "follow_symlinks": follow_symlinks}
        if isinstance(path, int) or self.overlay.untouched():
            return real.access(path, mode, dir_fd=dir_fd, **options)
        try:
            place = self.place(path, dir_fd, follow=follow_symlinks)
        except OSError:
            return False
        if place.found is None:
            return False
        where = place.real
        if place.where is Where.UPPER and place.is_folder:
            where = self.overlay.view(place.path).below or where  # its mode was widened for ourselves
        return real.access(where, mode, **options)

    @naming_path
    def readlink(self, path: Any, *, dir_fd: int | None = None) -> Any:
        """See `os.readlink`."""
        if self.overlay.untouched():
            return real.readlink(path, dir_fd=dir_fd)
        place = self.existing(self.place(path, dir_fd, follow=False), path)
        return like(path, real.readlink(place.real))

    def _folder(self, path: Any) -> View:
        overlay = self.overlay
        name = overlay.of_fd(path) if isinstance(path, int) else overlay.text(path)
        place = self.existing(overlay.find(name), path)
        if not place.is_folder:
            raise real.failure(errno.ENOTDIR, path)
        return overlay.enter(place) if place.name else place.view

    def _plain(self, view: View) -> bool:
        """Whether a folder may be read as it stands, under its own name."""
        return view.through or (view.folder is None and view.below == view.path)

    def listdir(self, path: Any = None) -> Any:
        """See `os.listdir`."""
        if self.overlay.untouched():
            return real.listdir(path)
        return self._listdir("." if path is None else path)

    @naming_path
    def _listdir(self, path: Any) -> Any:
        view = self._folder(path)
        if self._plain(view):
            if not real.access(view.path, os.R_OK):
                raise real.failure(errno.EACCES, path)
            names = real.listdir(view.path)
        else:
            names = self.overlay.names(view)
        return [os.fsencode(name) for name in names] if is_bytes(path) else names

    def scandir(self, path: Any = None) -> Any:
        """See `os.scandir`."""
        if self.overlay.untouched():
            return real.scandir(path)
        return self._scandir("." if path is None else path)

    @naming_path
    def _scandir(self, path: Any) -> Any:
        view = self._folder(path)

        def entry(name: str | bytes) -> DirEntry:
            text = os.fsdecode(name)
            return DirEntry(self.stat, join(view.path, text), path, text)

        named = isinstance(path, int) or self.overlay.text(path).rstrip("/") == view.path
        if named and self._plain(view):
            found = real.scandir(path)
            # Only a link may lead to what was changed.
            made = (entry(one.name) if one.is_symlink() else one for one in found)
            return DirEntries(made, found.close)
        names = real.listdir(view.path) if view.through else self.overlay.names(view)
        return DirEntries(entry(name) for name in names)

    def _call_read(self, call: Any, path: Any, *args: Any, **options: Any) -> Any:
        follow = options.get("follow_symlinks", True)
        return call(self.reading(path, follow=follow), *args, **options)

    # The current folder

    def getcwd(self) -> str:
        """See `os.getcwd`."""
        return self.overlay.cwd

    def getcwdb(self) -> bytes:
        """See `os.getcwdb`."""
        return os.fsencode(self.overlay.cwd)

    @naming_path
    def chdir(self, path: Any) -> None:
        """See `os.chdir`."""
        view = self._folder(path)
        if view.below is not None:
            real.chdir(view.below)
        elif view.through:
            real.chdir(view.path)
        else:
            real.chdir(self.overlay.upper + view.path)
        self.overlay.cwd = view.path

    def fchdir(self, fd: int) -> None:
        """See `os.fchdir`."""
        self.chdir(fd)

    # Opening

    @naming_path
    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """See `os.open`."""
        if not flags & WRITING and self.overlay.untouched():
            return real.open_fd(path, flags, mode, dir_fd=dir_fd)
        where = self.locate(path, flags, mode, dir_fd)
        if not flags & _CHANGING and real.exists(where):
            flags &= ~os.O_CREAT  # it is there, and will be read
        return real.open_fd(where, flags, mode)

    def locate(self, path: Any, flags: int, mode: int = 0o666, dir_fd: int | None = None) -> str:
        """The real path to open instead of a path of the program's.

        A file that will be written is there afterwards as far as the flags ask for it: copied, or empty.

        Raises:
            OSError: the path cannot be opened with these flags.
        """
        overlay = self.overlay
        exclusive = bool(flags & os.O_CREAT and flags & os.O_EXCL)
        follow = not (exclusive or flags & _NOFOLLOW)
        place = self.place(path, dir_fd, follow=follow)
        if follow and flags & _CHANGING:
            place = overlay.behind(place)
        if _TMPFILE and flags & _TMPFILE == _TMPFILE:
            return self._open_folder(place, changing=True)
        if place.found is None:
            if not flags & os.O_CREAT:
                raise real.failure(errno.ENOENT, path)
            if overlay.text(path).endswith("/"):
                raise real.failure(errno.EISDIR, path)
            if place.where is Where.THROUGH:
                return place.real
            with overlay.changing():
                return overlay.prepare(place)
        if exclusive:
            raise real.failure(errno.EEXIST, path)
        kind = place.found.st_mode
        if place.is_folder:
            if not flags & WRITING:
                return self._open_folder(place)
            raise real.failure(errno.EISDIR, path)
        if not flags & _CHANGING or place.where in (Where.UPPER, Where.THROUGH):
            return place.real
        if not modes.S_ISREG(kind):
            if modes.S_ISBLK(kind):
                raise real.failure(errno.EPERM, path)
            return place.real  # a pipe or a terminal is no file; a link that is not followed fails by itself
        if not real.access(place.real, os.W_OK):
            raise real.failure(errno.EACCES, path)
        with overlay.changing():
            # Another thread or process may have copied it by now, and written to it.
            now = overlay.checked(overlay.look(overlay.view(place.view.path), place.name))
            return overlay.copy_up(now, contents=not flags & os.O_TRUNC)

    def _open_folder(self, place: Place, *, changing: bool = False) -> str:
        """The real path of a folder to open; its descriptor is recognised by that path later."""
        overlay = self.overlay
        view = overlay.enter(place) if place.name else place.view
        if view.through or (self._plain(view) and not changing):
            return view.path
        with overlay.changing():
            return overlay.open_folder(overlay.view(view.path))

    def folder_to_fill(self, path: Any) -> str:
        """The real path of a folder for compiled writers, which make files in it."""
        place = self.existing(self.place(path), path)
        return self._open_folder(place, changing=True)

    # Making

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """See `os.mkdir`."""
        self._make(path, dir_fd, lambda target: real.mkdir(target, mode), folder=True)

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        """See `os.mkfifo`."""
        self._make(path, dir_fd, lambda target: real_mkfifo(target, mode))

    def mknod(self, path: Any, mode: int = 0o600, device: int = 0, *, dir_fd: int | None = None) -> None:
        """See `os.mknod`."""
        self._make(path, dir_fd, lambda target: real_mknod(target, mode, device))

    def symlink(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        """See `os.symlink`."""
        self._make(dst, dir_fd, lambda target: real.symlink(src, target))
        self.overlay.forget_views()

    @naming_path
    def _make(
        self, path: Any, dir_fd: int | None, make: Callable[[str], object], folder: bool = False
    ) -> None:
        overlay = self.overlay
        text = overlay.text(path, dir_fd)
        with overlay.changing():
            place = overlay.find(text.rstrip("/") if folder else text, follow=False)
            if place.found is not None:
                raise real.failure(errno.EEXIST, path)
            if place.where is Where.THROUGH or (folder and overlay.is_parent_of_through(place.path)):
                make(place.path)
                overlay.forget_views()
                return
            make(overlay.prepare(place))
            if folder:
                overlay.made(place.path)

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """See `os.link`; a file below is copied first, so that both names share what is set aside."""
        del follow_symlinks  # Linux links links
        overlay = self.overlay
        try:
            with overlay.changing():
                source = self.existing(self.place(src, src_dir_fd, follow=False), src)
                target = self.place(dst, dst_dir_fd, follow=False)
                if target.found is not None:
                    raise real.failure(errno.EEXIST, dst)
                if source.is_folder:
                    raise real.failure(errno.EPERM, src)
                if target.where is Where.THROUGH and source.where is not Where.THROUGH:
                    raise real.failure(errno.EXDEV, src)
                where = overlay.prepare(target)
                if source.where is Where.THROUGH and target.where is not Where.THROUGH:
                    raise real.failure(errno.EXDEV, src)  # a link could be written by either name
                real.link(overlay.copy_up(source), where, follow_symlinks=False)
        except OSError as error:
            error.filename, error.filename2 = src, dst
            raise

    # Removing

    @naming_path
    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """See `os.unlink`."""
        overlay = self.overlay
        with overlay.changing():
            place = self.existing(self.place(path, dir_fd, follow=False), path)
            if place.is_folder:
                raise real.failure(errno.EISDIR, path)
            if place.where is Where.THROUGH:
                real.unlink(place.real)
                return
            self._remove(place)
            if place.is_link:
                overlay.forget_views()

    def _remove(self, place: Place) -> None:
        """Make a file or an empty folder vanish."""
        overlay = self.overlay
        overlay.may_change(place.view, place.path)
        overlay.open_folder(place.view)
        if place.where is Where.UPPER:
            real.rmdir(place.real) if place.is_folder else real.unlink(place.real)
        if place.is_folder:
            overlay.removed(place.path)
        overlay.hide(place)
        overlay.touch(place.view)

    @naming_path
    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """See `os.rmdir`."""
        overlay = self.overlay
        with overlay.changing():
            text = overlay.text(path, dir_fd)
            if text.rstrip("/").endswith("/."):
                raise real.failure(errno.EINVAL, path)
            place = self.existing(overlay.find(text.rstrip("/") or "/", follow=False), path)
            if not place.is_folder:
                raise real.failure(errno.ENOTDIR, path)
            if place.where is Where.THROUGH:
                real.rmdir(place.real)
                return
            if not place.name:
                raise real.failure(errno.EBUSY, path)
            if overlay.names(overlay.enter(place)):
                raise real.failure(errno.ENOTEMPTY, path)
            self._remove(place)

    # Renaming

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """See `os.rename` and `os.replace`."""
        overlay = self.overlay
        try:
            with overlay.changing():
                source = overlay.find(overlay.text(src, src_dir_fd).rstrip("/") or "/", follow=False)
                target = overlay.find(overlay.text(dst, dst_dir_fd).rstrip("/") or "/", follow=False)
                self.existing(source, src)
                self._rename(source, target, overlay.text(dst, dst_dir_fd).endswith("/"))
        except OSError as error:
            error.filename, error.filename2 = src, dst
            raise

    replace = rename

    def _rename(self, source: Place, target: Place, slash: bool) -> None:
        overlay = self.overlay
        if source.where is Where.THROUGH and target.where is Where.THROUGH:
            real.rename(source.real, target.real)
            overlay.forget_views()
            return
        is_folder = source.is_folder
        if not source.name or not target.name:
            raise real.failure(errno.EBUSY, source.path)
        if is_folder and f"{target.path}/".startswith(f"{source.path}/") and target.path != source.path:
            raise real.failure(errno.EINVAL, source.path)
        if slash and not is_folder:
            raise real.failure(errno.ENOTDIR, source.path)
        if source.path == target.path:
            return
        self._check_target(source, target)
        if source.found and target.found and os.path.samestat(source.found, target.found):
            return  # two names of one file: rename(2) does nothing
        if source.where is Where.THROUGH or target.where is Where.THROUGH:
            self._rename_across(source, target)
        else:
            overlay.may_change(source.view, source.path)
            overlay.may_change(target.view, target.path)
            self._rename_inside(source, target)
        overlay.forget_views()

    def _check_target(self, source: Place, target: Place) -> None:
        if target.is_folder:
            if f"{source.path}/".startswith(f"{target.path}/"):
                raise real.failure(errno.ENOTEMPTY, target.path)
            if not source.is_folder:
                raise real.failure(errno.EISDIR, target.path)
            view = self.overlay.enter(target)
            if real.listdir(view.path) if view.through else self.overlay.names(view):
                raise real.failure(errno.ENOTEMPTY, target.path)
        elif target.found is not None and source.is_folder:
            raise real.failure(errno.ENOTDIR, target.path)

    def _rename_inside(self, source: Place, target: Place) -> None:
        overlay = self.overlay
        if source.is_folder:
            from_path = overlay.open_folder(overlay.enter(source))
            # Opening it opened those above: what lies at the target may have changed its place since.
            target = overlay.checked(overlay.look(overlay.view(target.view.path), target.name))
        else:
            overlay.open_folder(source.view)
            from_path = source.real
        to_path = join(overlay.open_folder(overlay.view(target.view.path)), target.name)
        if target.found is not None and target.where is Where.UPPER:
            if target.is_folder:
                real.rmdir(to_path)
                overlay.removed(target.path)
            elif source.where is not Where.UPPER:
                real.unlink(to_path)
        overlay.hide(target)
        if source.is_folder or source.where is Where.UPPER:
            real.rename(from_path, to_path)
        overlay.hide(source)
        if source.is_folder:
            overlay.renamed(source.path, target.path)
        elif source.where is not Where.UPPER:
            overlay.moved(target, from_path)
        overlay.touch(overlay.view(source.view.path))
        overlay.touch(overlay.view(target.view.path))

    def _rename_across(self, source: Place, target: Place) -> None:
        """Rename a file between what is set aside and what is written for real."""
        overlay = self.overlay
        if source.is_folder:
            raise real.failure(errno.EXDEV, source.path)
        to_path = overlay.prepare(target)
        beside = f"{to_path}.vramfit-{os.getpid()}"
        if not real.copy_contents(source.real, beside, overlay.disk.room()):
            overlay.disk.dropped(target.path)
        real.copy_metadata(source.real, beside)
        real.replace(beside, to_path)
        if target.where is not Where.THROUGH:
            overlay.hide(target)
            overlay.touch(overlay.view(target.view.path))
        if source.where is Where.THROUGH:
            real.unlink(source.real)
        else:
            self._remove(source)

    # Metadata

    def changing_place(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Any:
        """The real path of what is to be changed: a copy of what lies below; for what has no path, its descriptor."""
        overlay = self.overlay
        if isinstance(path, int) and not _has_path(real.fstat(path)):
            return path
        name: Any = overlay.of_fd(path) if isinstance(path, int) else path
        with overlay.changing():
            place = self.existing(self.place(name, dir_fd, follow=follow), path)
            place = self.existing(overlay.behind(place), path) if follow else place
            if is_system(place.path):
                return place.real
            return overlay.copy_up(place)

    @naming_path
    def utime(
        self,
        path: Any,
        times: Any = None,
        *,
        ns: Any = None,
        dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """See `os.utime`."""
        target = self.changing_place(path, dir_fd, follow=follow_symlinks)
        if ns is None:
            real.utime(target, times, follow_symlinks=follow_symlinks)
        elif times is None:
            real.utime(target, ns=ns, follow_symlinks=follow_symlinks)
        else:
            raise ValueError("utime: you may specify either 'times' or 'ns' but not both")

    @naming_path
    def chmod(self, path: Any, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        """See `os.chmod`."""
        real.chmod(self.changing_place(path, dir_fd, follow=follow_symlinks), mode)

    @naming_path
    def truncate(self, path: Any, length: int) -> None:
        """See `os.truncate`."""
        if isinstance(path, int):  # it is open for writing, so it was set aside
            real.truncate(path, length)
        else:
            real.truncate(self.locate(path, os.O_WRONLY), length)

    @naming_path
    def change(self, path: Any, call: Any, *args: Any, **options: Any) -> Any:
        """Make any other call that changes what a path names: owners, attributes, flags."""
        dir_fd, follow = options.pop("dir_fd", None), options.get("follow_symlinks", True)
        return call(self.changing_place(path, dir_fd, follow=follow), *args, **options)

    @naming_path
    def look(self, path: Any, call: Any, *args: Any, **options: Any) -> Any:
        """Make any other call that only looks."""
        if isinstance(path, int) or self.overlay.untouched():
            return call(path, *args, **options)
        return self._call_read(call, path, *args, **options)


def _has_path(found: os.stat_result) -> bool:
    """Whether a descriptor is open on a file or folder that still has a name."""
    return found.st_nlink > 0 and (modes.S_ISREG(found.st_mode) or modes.S_ISDIR(found.st_mode))


real_mkfifo: Any = getattr(os, "mkfifo", None)
real_mknod: Any = getattr(os, "mknod", None)
