"""How large a page is, how long it takes to write and to open: ours, and that of torch's own viewer.

    python benchmarks/pages.py [--events 1000000] [--json FILE]

The traces: training loops of so many events, one bare and one with categories, modules, operators, shapes and stacks
for every block, and the recordings of the tests. Each is written to a file first; then a process of its own makes the
page of that file (``vramfit export FILE -o page.html``), and its wall and processor seconds are counted with all
imports; "pickle s" are those of the same from a torch snapshot of the trace. "Paint" is the first contentful
paint in a headless Chromium, "drawn" when all pictures are there. Torch's page is what
``torch.cuda._memory_viz.trace_plot`` makes of the same events, its seconds those of the call alone, with the snapshot
in memory already.

Torch's page loads its viewer from a server when it is opened, so that it shows nothing without the network, as here:
its paint is not measured. Where no Chromium or no playwright is found, neither is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replay import Program

from vramfit.allocator import AllocatorEventKind
from vramfit.trace import (
    Category,
    EventKind,
    Frame,
    MemoryTrace,
    read_any,
    snapshot_from_trace,
    write_snapshot,
)

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
)
GOALS = {"seconds": 10.0, "pickle_seconds": 10.0, "page_mb": 6.0, "paint_s": 2.0}
"""What a page of a million events is meant to stay below."""

_STACKS, _DEPTH, _LAYERS = 600, 28, 48


@dataclass(frozen=True, kw_only=True)
class Row:
    """A trace and its pages; None for what was not measured. Megabytes are of 10^6 bytes."""

    trace: str
    events: int
    file_mb: float
    seconds: float
    cpu_seconds: float
    page_mb: float
    paint_s: float | None
    drawn_s: float | None
    pickle_seconds: float
    pickle_cpu_seconds: float
    torch_seconds: float | None
    torch_page_mb: float | None


class DescribedProgram(Program):
    """The training loop with all that a virtual run tells of a block."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        draw = random.Random(seed + 1)
        files = [f"/venv/lib/python3.11/site-packages/library/part_{number}.py" for number in range(60)]
        frames = [
            Frame(draw.choice(files), draw.randrange(1, 2000), f"function_{number}") for number in range(900)
        ]
        outer = tuple(draw.sample(frames, _DEPTH // 2))
        self.stacks = [
            self.builder.stack((*draw.sample(frames, _DEPTH // 2), *outer)) for _ in range(_STACKS)
        ]
        parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1")
        self.modules = [
            self.builder.module(f"Model.h.{layer}.{part}") for layer in range(_LAYERS) for part in parts
        ]
        self.ops = [self.builder.op(f"aten.operator_{number}.default") for number in range(120)]
        self.categories = list(Category)
        self.draw = draw

    def record(self, kind: AllocatorEventKind, address: int, size: int, _stream: int) -> None:
        if kind != AllocatorEventKind.ALLOC:
            super().record(kind, address, size, _stream)
            return
        self.clock += 7
        place = self.draw.randrange(_STACKS)
        self.builder.append(
            EventKind.ALLOC,
            device=0,
            address=address,
            size=size,
            block=self.allocator.block_size(address),
            time_us=self.clock,
            category=self.categories[place % len(self.categories)],
            op=self.ops[place % len(self.ops)],
            stack=self.stacks[place],
            module=self.modules[place % len(self.modules)],
            tensor=self.builder.tensor(f"bfloat16[{size // 2}]"),
        )


def traces(events: int, recordings: Path) -> list[tuple[str, MemoryTrace]]:
    """The traces by name; the long ones first."""
    found = []
    if events:
        found.append(("training loop, bare", Program().run(events)))
        found.append(("training loop, described", DescribedProgram().run(events)))
    found += [
        (path.name.removesuffix(".json.gz"), read_any(path)) for path in sorted(recordings.glob("*.json.gz"))
    ]
    return found


def measure(name: str, trace: MemoryTrace, folder: Path, browser: Any | None) -> Row:
    """Write and open the pages of a trace."""
    file, page = folder / "trace.vft", folder / "page.html"
    trace.save(file)
    seconds, cpu = make_page(file, page)
    paint, drawn = (None, None) if browser is None else open_page(browser, page)
    snapshot = folder / "snapshot.pickle"
    write_snapshot(trace, snapshot)
    pickle_seconds, pickle_cpu = make_page(snapshot, folder / "page_of_snapshot.html")
    torch_seconds, torch_bytes = torch_page(trace)
    return Row(
        trace=name,
        events=len(trace),
        file_mb=file.stat().st_size / 1e6,
        seconds=seconds,
        cpu_seconds=cpu,
        page_mb=page.stat().st_size / 1e6,
        paint_s=paint,
        drawn_s=drawn,
        pickle_seconds=pickle_seconds,
        pickle_cpu_seconds=pickle_cpu,
        torch_seconds=torch_seconds,
        torch_page_mb=None if torch_bytes is None else torch_bytes / 1e6,
    )


def make_page(file: Path, page: Path) -> tuple[float, float]:
    """Wall and processor seconds of the command line that turns a recording into a page."""
    command = [sys.executable, "-m", "vramfit", "export", os.fspath(file), "-o", os.fspath(page)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def open_page(browser: Any, page: Path) -> tuple[float, float]:
    """Seconds until the first contentful paint, and until every picture is drawn."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    opened = context.new_page()
    began = time.perf_counter()
    opened.goto(page.as_uri())
    opened.wait_for_selector("#loading", state="hidden", timeout=60_000)
    drawn = time.perf_counter() - began
    paint = opened.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    context.close()
    return paint / 1000, drawn


def torch_page(trace: MemoryTrace) -> tuple[float | None, int | None]:
    """Seconds and bytes of torch's page; None where this torch has no such viewer."""
    try:
        from torch.cuda._memory_viz import trace_plot
    except ImportError:
        return None, None
    snapshot = snapshot_from_trace(trace)
    began = time.perf_counter()
    text = trace_plot(snapshot)
    return time.perf_counter() - began, len(text.encode())


def print_table(rows: Sequence[Row]) -> None:
    head = (
        "trace",
        "events",
        "file MB",
        "s",
        "CPU s",
        "page MB",
        "paint s",
        "drawn s",
        "pickle s",
        "CPU s",
        "torch s",
        "torch MB",
    )
    lines = [head]
    for row in rows:
        figures = list(asdict(row).values())[2:]
        lines.append((row.trace, f"{row.events:,}", *("-" if f is None else f"{f:.2f}" for f in figures)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print(
            "  ".join(
                [f"{line[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))]
            )
        )


def print_goals(rows: Sequence[Row], events: int) -> None:
    for row in rows:
        if row.events < events or not events:
            continue
        for name, goal in GOALS.items():
            found = getattr(row, name)
            said = (
                "not measured" if found is None else f"{found:.2f}, {'within' if found <= goal else 'BEYOND'}"
            )
            print(f"{row.trace}: {name} {said} the goal of {goal:g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--events", type=int, default=1_000_000, help="length of the long traces; 0 leaves them out"
    )
    parser.add_argument("--recordings", type=Path, default=Path(__file__).parents[1] / "tests/data/traces")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    with tempfile.TemporaryDirectory() as folder:
        given = traces(arguments.events, arguments.recordings)
        if chromium is None:
            rows = [measure(name, trace, Path(folder), None) for name, trace in given]
        else:
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=chromium, args=FLAGS.split())
                rows = [measure(name, trace, Path(folder), browser) for name, trace in given]
                browser.close()
    print_table(rows)
    print()
    print_goals(rows, arguments.events)
    if arguments.json is not None:
        figures = {"goals": GOALS, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
