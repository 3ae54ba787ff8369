"""What happens to the files that a virtual run writes, and which folders it may write to for real. No torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from vramfit.errors import UsageError

MOST_DISK = 32 << 30
"""Bytes that set-aside files occupy at most, however much is free."""
_PART_OF_FREE = 4
_SYSTEM = ("/dev", "/proc", "/sys", "/run/user")
"""Devices and the kernel's own files. /dev/shm is not among what passes: see `is_through`."""
_SHARED_MEMORY = "/dev/shm"


class Writes(Enum):
    """What happens to what a virtual run writes."""

    DISCARD = "discard"
    """Set aside while the program runs, then dropped."""
    KEEP = "keep"
    """Set aside, and left in a folder for a look."""
    REAL = "real"
    """Written where the program says, over what lies there."""


class Backend(Enum):
    """What keeps writes from the real files."""

    AUTO = "auto"
    """The best that this machine allows."""
    NAMESPACE = "namespace"
    """A mount namespace with overlayfs (Linux): it also covers subprocesses and compiled writers."""
    PATCHES = "patches"
    """Replaced functions of Python and of libraries, and Landlock below them where the kernel has it."""
    NONE = "none"
    """Nothing does: `Writes.REAL`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePolicy:
    """What a protection keeps.

    Attributes:
        folder: absolute: where set-aside files lie. The program never sees it; nothing else may lie in it.
        temporary: absolute: where the program's temporary files go, for real, in place of the system's folder. It is
            removed after the run. Sockets, subprocesses and compiled libraries meet there.
        through: absolute paths that are written for real: caches of downloads, our own results.
        cap_bytes: disk that set-aside files may really occupy; beyond it contents are dropped, sizes stay true.
    """

    writes: Writes
    folder: str
    temporary: str
    through: tuple[str, ...] = ()
    backend: Backend = Backend.AUTO
    cap_bytes: int = MOST_DISK


def make_policy(
    writes: Writes | str,
    *,
    workplace: str | os.PathLike[str],
    through: Iterable[str | os.PathLike[str]] = (),
    ours: Iterable[str | os.PathLike[str]] = (),
    beside: str | os.PathLike[str] | None = None,
    backend: Backend | str = Backend.AUTO,
) -> FilePolicy:
    """The policy of one run.

    Args:
        writes: ``discard``, ``keep`` or ``real``.
        workplace: a folder of the run's own, removed after it: set-aside files and temporary files lie in it.
        through: paths of the user's that are written for real, besides the caches of `default_through`.
        ours: our own files: written for real, and never reported to the user.
        beside: with ``keep``: where the folder of set-aside files is left; by default the current folder.
        backend: the one to use.

    Raises:
        UsageError: there is no such way to treat writes, or ``keep`` cannot be done here.
    """
    chosen = writes_of(writes)
    place = os.path.realpath(workplace)
    folder = os.path.join(place, "files")
    if chosen is Writes.KEEP:
        where = os.path.realpath(Path.cwd() if beside is None else beside)
        try:
            folder = tempfile.mkdtemp(prefix="vramfit-files-", dir=where)
        except OSError as error:
            raise UsageError(
                f"the files of the run cannot be kept in {where}: {error.strerror}",
                "Run it in a folder that can be written to, or leave --writes keep out",
            ) from error
    else:
        os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(place, "temporary")
    os.makedirs(temporary, exist_ok=True)
    paths = [*default_through(os.environ), *through, *ours, place]
    return FilePolicy(
        writes=chosen,
        folder=folder,
        temporary=temporary,
        through=tuple(dict.fromkeys(os.path.realpath(os.path.expanduser(path)) for path in paths)),
        backend=Backend(backend),
        cap_bytes=min(MOST_DISK, shutil.disk_usage(folder).free // _PART_OF_FREE),
    )


def writes_of(writes: Writes | str) -> Writes:
    """The way of treating writes that a word names.

    Raises:
        UsageError: the word is not one of `Writes`.
    """
    try:
        return Writes(writes)
    except ValueError:
        known = ", ".join(one.value for one in Writes)
        raise UsageError(f"writes={writes!r} is unknown", f"Choose one of {known}") from None


def cache_folder(environ: Mapping[str, str]) -> str:
    """The folder of all caches (specifications.freedesktop.org/basedir-spec)."""
    return environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")


def default_through(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Caches of downloads and of compiled code, which hold nothing that a virtual run computed.

    The caches of Hugging Face's datasets are not among them: they keep what functions of the program returned, zeros
    of a virtual run, under a name that a real run would look up. Nor is a folder in which the user works: variables
    are pointed at /tmp or at a project, where more than a cache lies.
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    cache = cache_folder(environ)
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    face = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    torch = environ.get("TORCH_HOME") or os.path.join(cache, "torch")
    paths = (
        *(environ[name] for name in _CACHE_VARIABLES if environ.get(name)),
        *(path for path in environ.get("NLTK_DATA", "").split(os.pathsep) if path),
        # These two name what lies above the cache, often a folder of the user's work.
        os.path.join(environ.get("TRITON_HOME") or home, ".triton"),
        os.path.join(environ.get("YOLO_CONFIG_DIR") or config, "Ultralytics"),
        *(os.path.join(face, name) for name in ("hub", "xet", "assets", "modules")),
        *(os.path.join(torch, name) for name in ("hub", "kernels", "sentence_transformers")),
        *(os.path.join(cache, name) for name in _CACHES),
        os.path.join(config, "matplotlib"),
        os.path.join(home, ".nv", "ComputeCache"),
        os.path.join(home, "nltk_data"),
    )
    places = _places_of_work(home)
    return tuple(path for path in paths if not _holds(path, places))


def _places_of_work(home: str) -> list[str]:
    """Folders that are never a cache alone; nor is a folder that holds one of them."""
    places = [home, "/tmp", "/var/tmp", tempfile.gettempdir()]
    with contextlib.suppress(FileNotFoundError):  # it was removed under us
        places.append(os.getcwd())
    return [os.path.realpath(place) for place in places]


def _holds(path: str, places: Iterable[str]) -> bool:
    """Whether a path is one of some folders, or holds one."""
    folder = os.path.realpath(os.path.expanduser(path)).rstrip(os.sep) + os.sep
    return any(f"{place}{os.sep}".startswith(folder) for place in places)


_CACHES = (
    *(
        "torch_extensions",
        "pip",
        "uv",
        "matplotlib",
        "fontconfig",
        "clip",
        "whisper",
        "kagglehub",
        "modelscope",
    ),
    *("triton", "vramfit"),
)
_CACHE_VARIABLES = (
    *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE"),
    *("HF_MODULES_CACHE", "TORCH_EXTENSIONS_DIR", "PYTORCH_KERNEL_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR"),
    *(
        "TRITON_CACHE_DIR",
        "CUDA_CACHE_PATH",
        "PIP_CACHE_DIR",
        "UV_CACHE_DIR",
        "MPLCONFIGDIR",
        "NUMBA_CACHE_DIR",
    ),
    *("SENTENCE_TRANSFORMERS_HOME", "MODELSCOPE_CACHE", "KAGGLEHUB_CACHE", "TIKTOKEN_CACHE_DIR"),
    *("DATA_GYM_CACHE_DIR", "PYTHONPYCACHEPREFIX"),
)


def is_system(path: str) -> bool:
    """Whether an absolute path is a device's or the kernel's, which are no files that a run could harm."""
    # Nor is the folder of devices, since shared memory lies in it.
    if path.startswith(_SHARED_MEMORY) or path == os.path.dirname(_SHARED_MEMORY):
        return False
    return path.startswith(tuple(f"{folder}/" for folder in _SYSTEM)) or path in _SYSTEM


def is_bytecode(path: str) -> bool:
    """Whether a path is of Python's own cache of compiled modules, beside the libraries of this interpreter."""
    if "__pycache__" not in path:
        return False
    return path.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep))
