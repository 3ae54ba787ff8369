"""Finished results, kept by the content that they depend on: a changed source, recording or version makes a new one."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vramfit.writing import write_text

ROOT = Path(__file__).parents[2]

ABSENT = "absent"
"""The version of a package that is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """A folder of finished results.

    Attributes:
        folder: where they lie.
        fresh: whether those from before are left unread.
    """

    folder: Path
    fresh: bool = False

    def get(self, name: str, key: str) -> Any | None:
        """The result of that name and content, None if it has to be worked out."""
        file = self._file(name, key)
        if self.fresh or not file.exists():
            return None
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return None

    def put(self, name: str, key: str, value: Any) -> None:
        """Keep a result; an earlier one of that name goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self._file(name, key), json.dumps(value))
        for old in self.folder.glob(f"{name}@*.json"):
            if old != self._file(name, key):
                old.unlink(missing_ok=True)

    def _file(self, name: str, key: str) -> Path:
        return self.folder / f"{name}@{key}.json"


def digest(*parts: str | bytes | Path) -> str:
    """A short digest of texts and of the contents of files and folders."""
    state = hashlib.sha256()
    for part in parts:
        for piece in _contents(part):
            state.update(hashlib.sha256(piece).digest())
    return state.hexdigest()[:20]


def _contents(part: str | bytes | Path) -> Iterable[bytes]:
    if isinstance(part, str):
        yield part.encode()
    elif isinstance(part, bytes):
        yield part
    elif part.is_dir():
        for file in sorted(part.rglob("*")):
            if file.suffix in (".py", ".toml"):
                yield file.name.encode() + file.read_bytes()
    else:
        yield part.read_bytes()


@cache
def of_vramfit() -> str:
    """A digest of vramfit itself, of torch and of Python: what every prediction depends on."""
    import vramfit

    return digest(Path(vramfit.__file__).parent, f"{versions('torch')} {platform.python_version()}")


def versions(*packages: str) -> str:
    """Versions of packages as one text."""
    return " ".join(f"{name}={version_of(name)}" for name in packages)


def version_of(name: str) -> str:
    """The installed version of a package; `ABSENT` where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT
