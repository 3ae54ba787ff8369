"""The manifest: which public scripts are run, from which commit, with which arguments, data and packages."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MANIFEST = HERE / "manifest.toml"
REQUIREMENTS = HERE / "requirements"
STAND_INS = HERE / "stand_ins"

STEPS = 3
"""Optimizer steps after which a run ends, unless the manifest says otherwise for a script."""

SECONDS = 600
"""Longest that one script may take, unless the manifest says otherwise."""

_KEYS = {
    *(
        "name",
        "repository",
        "folder",
        "command",
        "group",
        "data",
        "prepare",
        "stand_ins",
        "environment",
        "options",
        "packages",
    ),
    *("steps", "seconds", "only", "made_up"),
}


class ManifestError(Exception):
    """The manifest contradicts itself or what lies beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Data that one maker makes: ``maker arguments...`` put at ``destination``, relative to the script's folder."""

    maker: str
    arguments: tuple[str, ...]
    destination: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """One public script and how it is run."""

    name: str
    repository: str
    """``owner/name`` on GitHub; ``package`` for a command that a package of the group brings."""
    commit: str
    folder: str
    """Where it is run, relative to the checkout."""
    command: tuple[str, ...]
    """Script (or ``-m`` and a module) and arguments; ``{bin}`` is the folder of the environment's commands."""
    group: str
    """The environment: a file of ``requirements``."""
    data: tuple[Made, ...] = ()
    prepare: tuple[tuple[str, ...], ...] = ()
    """Python command lines of the repository itself that are run plainly before, to prepare its data."""
    stand_ins: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """More options of ``vramfit run``."""
    packages: tuple[str, ...] = ()
    """``name==version`` of packages that are not the group's, for a script that was written for older ones."""
    steps: int = STEPS
    seconds: int = SECONDS
    only: tuple[str, ...] = ()
    """Folders of the repository that are checked out; empty for all."""
    made_up: str = ""
    """What is not as its authors meant it: data, weights, sizes."""


def read(path: Path = MANIFEST) -> tuple[Script, ...]:
    """The scripts of a manifest, in its order; raises :class:`ManifestError` with the entry and the reason."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    commits: dict[str, str] = tables["repositories"]
    scripts = tuple(_script(entry, commits) for entry in tables["script"])
    names = [script.name for script in scripts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ManifestError(f"{path.name}: named twice: {', '.join(twice)}")
    return scripts


def _script(entry: dict[str, Any], commits: dict[str, str]) -> Script:
    name = entry.get("name", "an entry without a name")
    if unknown := sorted(set(entry) - _KEYS):
        raise ManifestError(f"{name}: unknown keys {', '.join(unknown)}")
    repository = entry["repository"]
    if repository not in commits and repository != "package":
        raise ManifestError(f"{name}: no commit of {repository} under [repositories]")
    for stand_in in entry.get("stand_ins", ()):
        if not (STAND_INS / stand_in).is_dir():
            raise ManifestError(f"{name}: there is no stand-in {stand_in}")
    return Script(
        name=name,
        repository=repository,
        commit=commits.get(repository, ""),
        folder=entry.get("folder", "."),
        command=tuple(shlex.split(entry["command"])),
        group=entry["group"],
        data=tuple(_made(name, text) for text in entry.get("data", ())),
        prepare=tuple(tuple(shlex.split(line)) for line in entry.get("prepare", ())),
        stand_ins=tuple(entry.get("stand_ins", ())),
        environment=dict(entry.get("environment", {})),
        options=tuple(entry.get("options", ())),
        packages=tuple(entry.get("packages", ())),
        steps=entry.get("steps", STEPS),
        seconds=entry.get("seconds", SECONDS),
        only=tuple(entry.get("only", ())),
        made_up=entry.get("made_up", ""),
    )


def _made(name: str, text: str) -> Made:
    """``mnist -> ../data``, or with arguments of the maker: ``llama tiny -> models/llama``."""
    call, arrow, destination = text.partition("->")
    words = shlex.split(call)
    if not arrow or not words or not destination.strip():
        raise ManifestError(f"{name}: data is written as 'maker arguments -> destination', not {text!r}")
    return Made(maker=words[0], arguments=tuple(words[1:]), destination=shlex.split(destination)[0])
