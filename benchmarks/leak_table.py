"""What is reported of innocent programs and of planted leaks after 3, 7 and 20 steps.

    python benchmarks/leak_table.py [--only WORDS] [--plant KIND] [--part 1/2] [--table FILE]

Each program of `leak_programs` runs on a virtual card of 24 GiB until it is ended at its limit of steps, as with
``vramfit run --steps N``, in a fork of a process that has imported everything. A leak is claimed where the report says
that memory is kept with each step, epoch or pass, or that the host's memory grows with each step; what is seen in too
few steps is no claim. A line is right where the program's own is it, or calls the helper that it is in.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from leak_programs import PROGRAMS, LeakProgram, Plant, innocent, with_leaks  # noqa: F401  # they fill the table

from vramfit.analysis import verdict
from vramfit.capture.step_counter import count_steps
from vramfit.launch.host_meter import HostMemoryMeter
from vramfit.launch.stopping import Stopping
from vramfit.options.limits import Limits
from vramfit.patching import PatchStack
from vramfit.virtual.gpu import VirtualGPU

STEPS = (3, 7, 20)
TABLE = Path(__file__).with_suffix(".csv")
FRAMEWORKS = {"trainer": "transformers.trainer", "lightning": "lightning"}
"""What programs whose names begin so import."""
FIELDS = ("program", "plant", "steps", "seen_steps", "claimed", "suspected", "line_right", "kept", "seconds")


def measured(program: LeakProgram, steps: int) -> dict[str, Any]:
    """Run a program in this process, and what is reported of it."""
    torch.manual_seed(0)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder, PatchStack() as patches:
        stopping = Stopping(Path(folder), Limits(steps=steps))
        host = HostMemoryMeter() if program.plant is Plant.HOST else None
        with VirtualGPU("24GiB") as gpu:
            count_steps(gpu.meter, stopping, patches)
            if host is not None:
                stopping.on_step = host.step
                host.start()
            try:
                program.run()
            except SystemExit:
                gc.collect()  # as may happen while a program ends: no figure may come from then
        found = verdict(replace(gpu.run, progress=stopping.progress, host=host.stop() if host else None))
        seen = stopping.progress.steps
        places = [one.place.frames for one in found.kept if one.place]
        lines = [(frame.filename, frame.line) for frame in (places[0] if places else ())]
        words = [f"{one.unit}: {one.bytes_each} bytes" for one in found.kept]
        if host is not None:
            memory = host.seen()
            lines += [(site.file, site.line) for site in memory.growing[:1]]
            words += [f"host step: {memory.grows_by} bytes"] if memory.grows_by else []
    right = any(file == program.file and line in program.lines for file, line in lines)
    return {
        "program": program.name,
        "plant": program.plant.value,
        "steps": steps,
        "seen_steps": seen,
        "claimed": int(bool(words)),
        "suspected": int(found.growth.is_suspected),
        "line_right": int(right) if words else "",
        "kept": "; ".join(words),
    }


def _in_fork(program: LeakProgram, steps: int) -> dict[str, Any]:
    """The same in a child of this process, which computes nothing itself.

    Raises:
        RuntimeError: the program failed.
    """
    began, (reading, writing) = time.perf_counter(), os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        code = 1
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            with os.fdopen(writing, "w") as out:
                json.dump(measured(program, steps), out)
            code = 0
        except BaseException:  # whatever a program raises ends its own process, with its traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as lines:
        text = lines.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError(f"{program.name} failed in {steps} steps")
    return {**json.loads(text), "seconds": round(time.perf_counter() - began, 1)}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each kind of program, and those that came out otherwise than planted."""
    for plant in Plant:
        mine = [row for row in rows if row["plant"] == plant.value]
        if mine:
            count = len({row["program"] for row in mine})
            claims = [sum(row["claimed"] for row in mine if row["steps"] == steps) for steps in STEPS]
            lines = sum(row["line_right"] == 1 for row in mine)
            yield f"{count:4} {plant.value:14} claimed at {STEPS}: {claims}; lines right {lines} of {sum(claims)}"
    for row in rows:
        last = row["steps"] == STEPS[-1]
        missed = row["plant"] != Plant.INNOCENT.value and last and not row["claimed"]
        if missed or (row["plant"] == Plant.INNOCENT.value and row["claimed"]):
            yield f"  {'missed' if missed else 'claimed'}: {row['program']} at {row['steps']}: {row['kept']}"


def main() -> None:
    """Run the programs, write the table and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="programs whose name has these words")
    parser.add_argument("--plant", default="", help="programs of this kind")
    parser.add_argument(
        "--part", default="1/1", help="every so-manieth program, to run parts beside each other"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help=f"where to write it ({TABLE.name})")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a process with several threads is not forked well
    warnings.simplefilter("ignore")
    chosen = [one for one in PROGRAMS if asked.only in one.name and asked.plant in one.plant.value]
    part, parts = map(int, asked.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    for name in {one.name.partition(" ")[0] for one in chosen} & FRAMEWORKS.keys():
        importlib.import_module(FRAMEWORKS[name])  # before programs that use it are forked
    rows = []
    with asked.table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for program in chosen:
            found = [_in_fork(program, steps) for steps in STEPS]
            rows += found
            writer.writerows(found)
            file.flush()
            print(program.name, [row["claimed"] for row in found], flush=True)
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
