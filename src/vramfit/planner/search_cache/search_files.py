"""Where searches are kept between calls: a file for each workload and card in the user's cache. Imports no torch."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vramfit.files.policy import cache_folder

NAME = "search.jsonl"
"""In the folder of a child's job."""

_VARIABLE = "VRAMFIT_CACHE_DIR"

_KEPT = 32
"""Searches that are kept; the oldest go."""


def search_folder() -> Path:
    """Where they are kept: ``VRAMFIT_CACHE_DIR``, else ``vramfit/searches`` in the user's folder of caches."""
    chosen = os.environ.get(_VARIABLE)
    return Path(chosen) if chosen else Path(cache_folder(os.environ)) / "vramfit" / "searches"


@contextmanager
def remembered(folder: Path, job: Mapping[str, Any], target: str, *, fresh: bool) -> Iterator[None]:
    """Lay what earlier searches saw into a job's folder, and keep what is there at the end, however that comes.

    The child decides whether it is to be believed. Where the cache cannot be read or written, nothing is kept.

    Args:
        folder: of the job.
        job: with the card.
        target: ``FILE.py:NAME``.
        fresh: whether earlier searches are left aside.
    """
    named = json.dumps([os.path.abspath(target), job["gpu"]], sort_keys=True)
    kept = search_folder() / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.jsonl.gz"
    here = folder / NAME
    if not fresh:
        with contextlib.suppress(OSError, EOFError, zlib.error):  # a damaged one is as good as none
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
