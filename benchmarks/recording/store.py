"""Recordings as files: what a run said of itself (JSON) beside the trace of its requests (.vft)."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from configurations import ALL, Configuration

from vramfit.errors import TraceFormatError
from vramfit.trace import Frame, MemoryTrace, read_any
from vramfit.writing import write_file, write_text

BENCHMARKS = Path(__file__).parents[1]
SCHEMA = 1
INNERMOST_FRAMES = 3
"""Frames that are kept of a stack, beside the innermost one of the configurations."""


class Source(Enum):
    """What was recorded."""

    CARD = "card"
    VIRTUAL = "virtual"
    """The virtual GPU took the card's place: this tests the machinery and is no evidence of anything."""


@dataclass(frozen=True)
class Recording:
    """One recorded run.

    Attributes:
        name: of its configuration.
        source: a card, or the virtual GPU in its place.
        facts: all that its JSON file holds: ``device``, ``configuration``, ``statistics``, ``steps``,
            ``outside_bytes``, ``oom``, ``seconds``, ``packages``, ``command``, ``key``. Sizes are in bytes.
        file: its JSON file.
    """

    name: str
    source: Source
    facts: Mapping[str, Any]
    file: Path

    @cached_property
    def trace(self) -> MemoryTrace:
        """Every request and every segment, in order."""
        return MemoryTrace.load(self.file.with_suffix(".vft"))

    @property
    def peak_allocated_bytes(self) -> int:
        """``torch.cuda.max_memory_allocated()`` of the whole run."""
        return int(self.facts["statistics"]["allocated_bytes.all.peak"])

    @property
    def peak_reserved_bytes(self) -> int:
        """``torch.cuda.max_memory_reserved()`` of the whole run."""
        return int(self.facts["statistics"]["reserved_bytes.all.peak"])

    @property
    def context_bytes(self) -> int | None:
        """Held on the device outside the allocator when the run ended; None where others used the card too."""
        outside = self.facts["outside_bytes"]
        return None if outside is None else int(outside["end"])

    @property
    def is_of_these_programs(self) -> bool:
        """Whether the configuration and its modules are still those that were recorded."""
        return self.name in ALL and self.facts["key"] == key_of(ALL[self.name])


def key_of(configuration: Configuration) -> str:
    """A digest of all that decides what a configuration asks for: its options and the sources of the programs."""
    digest = hashlib.sha256(json.dumps(asdict(configuration), default=plain, sort_keys=True).encode())
    module = configuration.build.partition(":")[0]
    shared = ("training", "optimizers")
    files = [BENCHMARKS / "configurations" / f"{name}.py" for name in (*shared, module)]
    for file in (*files, BENCHMARKS / "recording" / "program.py"):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def plain(value: object) -> Any:
    """Values of configurations as JSON can hold them."""
    return (
        value.value if isinstance(value, Enum) else dict(value) if isinstance(value, Mapping) else str(value)
    )


def save(
    folder: Path, configuration: Configuration, source: Source, facts: Mapping[str, Any], snapshot: Path
) -> None:
    """Keep what a run left: the trace first, so that a JSON file never stands without one.

    Raises:
        WriteError: no space, no permission.
    """
    trace = slim(read_any(snapshot))
    trace.save(folder / f"{configuration.name}.vft")
    told = {
        "schema": SCHEMA,
        "name": configuration.name,
        "source": source.value,
        "key": key_of(configuration),
        "configuration": asdict(configuration),
        **facts,
    }
    write_text(folder / f"{configuration.name}.json", json.dumps(told, default=plain, indent=1) + "\n")


def slim(trace: MemoryTrace) -> MemoryTrace:
    """The same events with nothing but what a comparison of memory reads; of stacks the innermost frames."""
    none = np.full(len(trace), -1, dtype=np.int32)
    zeros = np.zeros(len(trace), dtype=np.int64)
    stacks = [
        tuple(dict.fromkeys((*stack[:INNERMOST_FRAMES], *_own_frames(trace, stack)[:1])))
        for stack in trace.stacks
    ]
    return replace(
        trace,
        time_us=zeros,
        category=zeros,
        op=none,
        module=none,
        phase=none,
        tensor=none,
        ops=(),
        modules=(),
        phases=(),
        tensors=(),
        frames=tuple(Frame(_short(frame.filename), frame.line, frame.name) for frame in trace.frames),
        stacks=tuple(stacks),
        devices=trace.devices[:1],
    )


def _own_frames(trace: MemoryTrace, stack: tuple[int, ...]) -> list[int]:
    return [frame for frame in stack if "configurations" in trace.frames[frame].filename]


def _short(filename: str) -> str:
    """A path without the part that names a machine."""
    for mark in ("site-packages/", "dist-packages/", "benchmarks/"):
        if mark in filename:
            return filename.rpartition(mark)[2]
    return Path(filename).name


def load(file: Path) -> Recording:
    """Read a recording by its JSON file.

    Raises:
        TraceFormatError: it is none, or its trace is missing.
    """
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        recording = Recording(facts["name"], Source(facts["source"]), facts, file)
        known = facts["schema"] == SCHEMA and "statistics" in facts and "device" in facts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceFormatError(f"{file} is no recording: {error}", "Remove it, or record it again") from None
    if not known:
        raise TraceFormatError(f"{file} is of another version of this benchmark", "Record it again")
    if not file.with_suffix(".vft").exists():
        raise TraceFormatError(f"{file} has no trace beside it", "Record it again")
    return recording


def load_all(folder: Path) -> Iterator[Recording]:
    """Every recording below a folder, by path."""
    for file in sorted(folder.rglob("*.json")):
        yield load(file)


def pack(folder: Path, file: Path) -> int:
    """Put a folder of recordings into one compressed tar file, under the folder's name; returns its bytes.

    Raises:
        WriteError: it cannot be written.
    """

    def write(stream: Any) -> None:
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for path in sorted(folder.iterdir()):
                if path.suffix in (".json", ".vft"):
                    archive.add(path, arcname=f"{folder.name}/{path.name}")

    write_file(file, write)
    return file.stat().st_size
