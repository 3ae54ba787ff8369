"""The forms that a recording is written in, each chosen by the ending of the file's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from vramfit.analysis import DeviceTimeline, Measure, Verdict, run_from_trace
from vramfit.analysis import verdict as judge
from vramfit.errors import UsageError
from vramfit.report.drawing import to_png, to_svg
from vramfit.report.html import write_page
from vramfit.report.perfetto import write_perfetto
from vramfit.report.rendering import json_text
from vramfit.report.table_file import write_csv
from vramfit.report.timeline_picture import draw_timeline
from vramfit.trace import MemoryTrace, Run, write_snapshot
from vramfit.writing import write_file, write_text


@dataclass(frozen=True, kw_only=True)
class Material:
    """What there is to write.

    Attributes:
        source: a run, or a recording alone.
        judged: the verdict on the run; None has it found where a form needs it.
        name: what to call the program where the recording does not say, such as the name of its file.
        device: the device of a picture; None means the fullest.
        root: the user's folder; file names below it are shown relative to it.
    """

    source: Run | MemoryTrace
    judged: Verdict | None = None
    name: str = ""
    device: int | None = None
    root: Path | None = None

    @property
    def trace(self) -> MemoryTrace:
        """Every allocation and free."""
        return self.source if isinstance(self.source, MemoryTrace) else self.source.trace

    @cached_property
    def run(self) -> Run:
        """The run, made of the recording where that is all there is."""
        return (
            run_from_trace(self.source, name=self.name)
            if isinstance(self.source, MemoryTrace)
            else self.source
        )

    @cached_property
    def verdict(self) -> Verdict:
        """Whether it fits."""
        return judge(self.run) if self.judged is None else self.judged

    def pictured(self) -> int:
        """The chosen device, else the one with the most reserved bytes."""
        if self.device is not None:
            return self.device
        trace = self.trace
        return max(
            devices_of(trace) or [0],
            key=lambda index: DeviceTimeline.of(trace, index).curves.peak(Measure.RESERVED),
        )


Writer = Callable[[Path, Material], None]


def devices_of(trace: MemoryTrace) -> list[int]:
    """Indices of the devices that a recording names or has events of."""
    return sorted({device.index for device in trace.devices} | set(np.unique(trace.device).tolist()))


def writer_of(path: str | os.PathLike[str]) -> Writer:
    """What writes the form that a file's name asks for.

    Raises:
        UsageError: none is known by it.
    """
    name = Path(path).name.lower()
    for ending, write in _FORMS.items():
        if name.endswith(ending):
            return write
    raise UsageError(f"{path} does not say which form to write", f"End it in {', '.join(_FORMS)}")


def write_as(path: str | os.PathLike[str], material: Material) -> None:
    """Write the form that the file's name asks for, whole or not at all.

    Raises:
        UsageError: its ending is that of no form.
        WriteError: no space, no permission, no such folder.
    """
    writer_of(path)(Path(path), material)


def _png(path: Path, material: Material) -> None:
    image = to_png(draw_timeline(material.trace, material.pictured()))
    write_file(path, lambda stream: stream.write(image))


_FORMS: dict[str, Writer] = {
    ".html": lambda path, material: write_page(path, material.run, material.verdict, root=material.root),
    ".perfetto.json": lambda path, material: write_perfetto(material.trace, path),
    ".json": lambda path, material: write_text(path, json_text(material.run, material.verdict)),
    ".pickle": lambda path, material: write_snapshot(material.trace, path),
    ".csv": lambda path, material: write_csv(material.trace, path),
    ".svg": lambda path, material: write_text(
        path, to_svg(draw_timeline(material.trace, material.pictured()))
    ),
    ".png": _png,
    ".vft": lambda path, material: material.trace.save(path),
}
"""Endings, those that end like others first."""
