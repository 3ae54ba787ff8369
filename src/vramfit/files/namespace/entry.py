"""Enters the namespace, after finding out in a process that ends at once whether that would go well."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vramfit import units
from vramfit.files.namespace import islands, mounts, syscalls, tree, ways
from vramfit.files.namespace.contents import PLACE, Manifest
from vramfit.files.namespace.overlay_storage import Medium, Storage
from vramfit.files.namespace.ways import Way
from vramfit.files.policy import FilePolicy, Writes

_OLDEST = (5, 12)
"""Linux: user.overlay.* since 5.11, mount_setattr since 5.12."""
_HIGH = 900
"""Descriptors of ours get high numbers: programs that close all low ones would close them too."""
_SETTINGS = Path("/proc/sys")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamespaceEntry:
    """How a namespace is entered: the way, and where overlays keep what is written."""

    way: Way
    medium: Medium


@dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """What a process has once it is inside.

    Attributes:
        outside: the path of the real tree, as this process reaches it. Only we write there, what must outlive the
            process.
        real: that tree again, where nothing can be written and reading changes no time.
        uppers: for overlays in memory: the path of what is written there.
        mounts: those that were seen before.
    """

    manifest: Manifest
    outside: str
    real: str
    uppers: dict[str, str]
    mounts: list[mounts.Mount]


def find_entry(policy: FilePolicy) -> NamespaceEntry | str:
    """The best entry that this machine allows, or why there is none."""
    if not sys.platform.startswith("linux"):
        return f"namespaces are Linux's, this is {sys.platform}"
    if (release := _release()) < _OLDEST:
        return f"overlays need Linux {_OLDEST[0]}.{_OLDEST[1]}, this is {release[0]}.{release[1]}"
    reason = ""
    entries = [NamespaceEntry(way=way, medium=medium) for medium in Medium for way in ways.possible_ways()]
    for number, entry in enumerate(entries):
        refusal = _try(policy, entry, os.path.join(policy.folder, f"{PLACE}-{number}"))
        if refusal is None and (others := len(os.listdir("/proc/self/task")) - 1):
            return f"{others} other threads run in this process already"
        if refusal is None:
            return entry
        if entry.medium is Medium.FOLDER:
            reason = refusal  # the last way asks for the least
    return reason


def enter(policy: FilePolicy, entry: NamespaceEntry, trial: str | None = None) -> Inside:
    """Take this process into a namespace in which the policy holds. It cannot be left.

    `trial` is a folder in place of the policy's for a process that only tries, which then checks more.

    Raises:
        OSError: the system refuses; the process may be half inside then and must end.
    """
    before, seen = ways.capabilities(), mounts.seen_mounts()
    knows = functools.cache(functools.partial(ways.knows, entry.way))
    missing = tuple(path for path in policy.through if not os.path.lexists(path))
    known = [*islands.known_paths(dict(os.environ)), *missing]
    found = islands.find_islands(seen, knows, known, policy.folder)
    for place in (os.curdir, os.path.expanduser("~")):
        if (strange := islands.uncoverable(os.path.realpath(place), knows)) is not None:
            raise tree.UncoverableError(errno.EOVERFLOW, strange, place)
    kept = Storage(
        folder=trial or os.path.join(policy.folder, PLACE), medium=entry.medium, marks=entry.way.marks
    )
    beside = islands.islands_beside_mounts(seen, knows)
    os.makedirs(kept.folder, exist_ok=True)
    outside = _hold("/")
    ways.enter(entry.way)
    real = _keep(syscalls.read_only_copy("/"))
    composed = tree.Tree(
        storage=kept,
        mounts=seen,
        real=real,
        beside=beside,
        through=[path for path in policy.through if path not in missing],
        hidden=[policy.folder],
    )
    kept.prepare(policy.cap_bytes)
    if trial is not None:
        kept.check()
    composed.compose(found)
    uppers = {each.point: _hold(each.upper) for each in composed.overlays if each.in_memory}
    composed.enter()
    ways.give_back(entry.way, before)
    manifest = Manifest(
        folder=kept.folder,
        overlays=tuple(composed.overlays),
        missing=missing,
        notes=_notes(entry, policy),
    )
    manifest.write(outside)
    return Inside(manifest=manifest, outside=outside, real=real, uppers=uppers, mounts=seen)


def _notes(entry: NamespaceEntry, policy: FilePolicy) -> tuple[str, ...]:
    if entry.medium is Medium.FOLDER:
        return ()
    return (
        f"files were set aside in memory, since {policy.folder} cannot hold an overlay: "
        f"{units.format_bytes(policy.cap_bytes)} at most",
    )


@contextlib.contextmanager
def any_policy() -> Iterator[FilePolicy]:
    """A policy to try with where there is none."""
    with tempfile.TemporaryDirectory(prefix="vramfit-", ignore_cleanup_errors=True) as name:
        place = os.path.realpath(name)
        yield FilePolicy(
            writes=Writes.DISCARD,
            folder=os.path.join(place, "files"),
            temporary=place,
            through=(place,),
            cap_bytes=1 << 30,
        )


def _try(policy: FilePolicy, entry: NamespaceEntry, folder: str) -> str | None:
    """Enter in a child that ends at once; returns why that was refused. Its mounts end with it, its files are left."""
    with _termination_waits():
        return _try_apart(policy, entry, folder)


@contextlib.contextmanager
def _termination_waits() -> Iterator[None]:
    """Hold SIGTERM back until after the block, where it would leave the process that tries behind, making files."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _try_apart(policy: FilePolicy, entry: NamespaceEntry, folder: str) -> str | None:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads. The child calls nothing that waits for one, and libraries of linear algebra
        # end theirs here, which a namespace asks for anyway (OpenBLAS: blas_server.c, pthread_atfork).
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _report_entry(policy, entry, folder, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read().decode("utf-8", "surrogateescape")
    os.waitpid(child, 0)
    if told == "entered":
        return None
    return told or "a process that tried it was killed"


def _report_entry(policy: FilePolicy, entry: NamespaceEntry, folder: str, pipe: int) -> None:
    told = ""
    try:
        enter(policy, entry, folder)
        told = "entered"
    except OSError as error:
        told = _explain(error, entry)
    finally:
        os.write(pipe, told.encode("utf-8", "surrogateescape"))
        os._exit(0)


def _explain(error: OSError, entry: NamespaceEntry) -> str:
    if isinstance(error, tree.UncoverableError):
        return str(error.strerror)
    if error.filename == "unshare":
        return _explain_unshare(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
            return (
                "AppArmor keeps user namespaces from mounting "
                "(kernel.apparmor_restrict_unprivileged_userns is 1, as in Ubuntu 24.04)"
            )
        return f"mounting is not allowed here ({error.strerror}: {error.filename})"
    if error.errno == errno.ENODEV:
        return "this kernel has no overlayfs"
    where = "" if error.filename is None else f" at {error.filename}"
    return (
        f"overlays do not work here: {error.strerror}{where} ({entry.medium.value}, {entry.way.marks.value})"
    )


def _explain_unshare(error: OSError) -> str:
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return "user namespaces are switched off (kernel.unprivileged_userns_clone is 0)"
    if error.errno in (errno.ENOSPC, errno.EUSERS) or _setting("user/max_user_namespaces") == "0":
        return "no more user namespaces are allowed (user.max_user_namespaces)"
    if error.errno == errno.EPERM:
        return "this machine or container allows no user namespaces (unshare: operation not permitted)"
    return f"no namespace can be made: {error.strerror}"


def _setting(name: str) -> str | None:
    try:
        return (_SETTINGS / name).read_text("utf-8").strip()
    except OSError:
        return None


def _release() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _hold(path: str) -> str:
    """A path that leads to a folder from wherever this process is, for as long as it lives."""
    return _keep(os.open(path, os.O_PATH | os.O_DIRECTORY))


def _keep(number: int) -> str:
    """The path of a descriptor, which gets a high number."""
    import fcntl  # here, since Windows has neither
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = _HIGH if most == resource.RLIM_INFINITY else min(_HIGH, max(3, most - 64))
    high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(number)
    return f"/proc/self/fd/{high}"
