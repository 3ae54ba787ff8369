"""The files that searches are kept in between calls, and the evidence that one is still true. Imports no torch.

Runs depend on versions, variables, and the files of the user's that were read.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import stat
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vramfit.files.policy import cache_folder
from vramfit.gpus.measured_profile import profile_folder
from vramfit.plain import to_plain
from vramfit.planner.planner_job import PlannerJob

_PACKAGE = Path(__file__).resolve().parents[1]

_PREFIXES = ("CUBLAS_", "CUDA_", "HF_", "NVIDIA_", "PYTORCH_", "TORCH", "TRANSFORMERS_", "VRAMFIT_")
"""Variables that libraries read to do something else."""

_ASIDE = ("VRAMFIT_CACHE_DIR",)
"""Variables among these that change no run."""

_LARGE = 1 << 26
"""Bytes of a file from which on its size and time stand for what is in it: checkpoints take long to read."""

_NOT_OURS = ("/proc/", "/sys/", "/dev/")


@dataclass(slots=True)
class Evidence:
    """What runs depend on.

    Args:
        beside: a folder whose files are the child's own.

    Attributes:
        head: all that is known before a run, as plain values.
    """

    job: PlannerJob
    beside: Path
    head: dict[str, Any] = field(init=False)
    _read: set[str] = field(default_factory=set)
    _digests: dict[str, str] = field(default_factory=dict)
    _settled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Look at versions and variables."""
        self.head = {
            "target": os.path.abspath(self.job.target),
            "gpu": to_plain(self.job.memory.gpu),
            "alloc_conf": self.job.memory.alloc_conf,
            "python": sys.version,
            "machine": platform.platform(),
            "packages": _packages(),
            "source": _sources(),
            "profiles": _profiles(),
            "variables": _variables(),
        }

    def watch(self) -> None:
        """Note from now on which files this process opens to read; for the rest of its life."""
        sys.addaudithook(self._opened)

    def _opened(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[0], str):
            mode, flags = given[1], given[2]
            reads = "r" in mode if isinstance(mode, str) else not (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if reads:
                self._read.add(given[0])

    def files(self) -> dict[str, str]:
        """Hashes of the files of the user's that were read so far, by path."""
        modules = [getattr(module, "__file__", None) for module in tuple(sys.modules.values())]
        # Asked after every run, of thousands of modules: each path is looked at once.
        for path in {*self._read, *(file for file in modules if isinstance(file, str))} - self._settled:
            full = os.path.abspath(path)
            if full in self._digests or not self._of_user(full):
                if path == full:  # a relative one may be another file elsewhere
                    self._settled.add(path)
            elif digest := digest_of(Path(full)):
                self._digests[full] = digest
        return dict(self._digests)

    def _of_user(self, path: str) -> bool:
        """Whether a file belongs to the user: to no package, not to the system, and not to vramfit."""
        if path.startswith((*_NOT_OURS, *_installed(), f"{_PACKAGE}{os.sep}", f"{self.beside}{os.sep}")):
            return False
        return f"{os.sep}__pycache__{os.sep}" not in path


def digest_of(file: Path) -> str:
    """The hash of a file's contents; empty where it cannot be read."""
    try:
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):
            return ""
        if about.st_size > _LARGE:
            return f"{about.st_size} bytes of {about.st_mtime_ns}"
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""


@cache
def _installed() -> tuple[str, ...]:
    """Folders of Python and of its packages, whose versions are known."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_paths()[name] for name in names}
    found |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    return tuple(f"{os.path.abspath(path)}{os.sep}" for path in found)


@cache
def _packages() -> str:
    """A hash of all installed packages with their versions."""
    found = sorted(f"{one.name} {one.version}" for one in importlib.metadata.distributions())
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


@cache
def _sources() -> str:
    """A hash of vramfit's own source."""
    found = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        found.update(f"{file.relative_to(_PACKAGE)}\n".encode() + file.read_bytes())
    return found.hexdigest()


def _variables() -> dict[str, str]:
    """The environment variables of libraries that a run depends on."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) and name not in _ASIDE)
    return {name: os.environ[name] for name in names}


def _profiles() -> dict[str, str]:
    """What was measured on cards, from which seconds are taken."""
    folder = profile_folder()
    return {str(file): digest_of(file) for file in sorted(folder.glob("*"))} if folder.is_dir() else {}


SEARCH_FILE = "search.jsonl"
"""In the folder of a child's job."""

_VARIABLE = "VRAMFIT_CACHE_DIR"

_KEPT = 32
"""How many searches are kept; the oldest are removed."""


def search_folder() -> Path:
    """Where searches are kept: ``VRAMFIT_CACHE_DIR``, else ``vramfit/searches`` in the user's folder of caches."""
    chosen = os.environ.get(_VARIABLE)
    return Path(chosen) if chosen else Path(cache_folder(os.environ)) / "vramfit" / "searches"


@contextmanager
def earlier_searches(folder: Path, job: PlannerJob) -> Iterator[None]:
    """Lay what earlier searches saw into a job's folder, and keep what is there at the end, however that comes.

    The child decides whether it can be trusted. Where the cache cannot be read or written, nothing is kept.

    Args:
        job: with the workload and the card; one that is ``fresh`` leaves earlier searches aside.
    """
    named = json.dumps([os.path.abspath(job.target), to_plain(job.memory.gpu)], sort_keys=True)
    kept = search_folder() / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.jsonl.gz"
    here = folder / SEARCH_FILE
    if not job.fresh:
        with contextlib.suppress(OSError, EOFError, zlib.error):  # a damaged one counts as none
            here.write_bytes(gzip.decompress(kept.read_bytes()))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _keep(here, kept)


def _keep(here: Path, kept: Path) -> None:
    if not here.exists():
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_name(f"{kept.name}.{os.getpid()}")
    beside.write_bytes(gzip.compress(here.read_bytes(), compresslevel=1))
    beside.replace(kept)
    files = sorted(kept.parent.glob("*.jsonl.gz"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_KEPT:]:
        file.unlink(missing_ok=True)
