"""Runs one configuration and records its memory: a plain CUDA script.

    python program.py NAME --out FOLDER [--stacks] [--in-company]

It writes ``FOLDER/NAME.pickle``, the snapshot that `torch.cuda.memory` makes of the whole run, and
``FOLDER/NAME.json``, what the device and the allocator say of themselves. Recording begins when the context is
there and nothing has been asked of the allocator yet.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configurations import ALL, Configuration

STATISTICS = (
    "allocated_bytes.all.peak",
    "allocated_bytes.all.current",
    "reserved_bytes.all.peak",
    "reserved_bytes.all.current",
    "active_bytes.all.peak",
    "requested_bytes.all.peak",
    "inactive_split_bytes.all.peak",
    "allocation.all.allocated",
    "segment.all.allocated",
    "segment.all.freed",
    "num_alloc_retries",
    "num_ooms",
)
MOST_EVENTS = 5_000_000


def outside_bytes() -> int:
    """Used on the device beyond what the allocator holds: the context, libraries, other processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def describe_device() -> dict[str, Any]:
    """The device and the software that decides what it is asked for."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": torch.cuda.get_device_name(0),
        "total_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
    }


def record(configuration: Configuration, snapshot: Path, *, stacks: bool) -> dict[str, Any]:
    """Run a configuration from an empty allocator; returns what was found, beside the snapshot's file."""
    torch.cuda.init()
    torch.cuda.synchronize()
    facts: dict[str, Any] = {"device": describe_device(), "oom": None, "steps": []}
    if configuration.memory_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(
            configuration.memory_bytes / facts["device"]["total_bytes"]
        )
    facts["outside_bytes"] = {"context": outside_bytes()}
    torch.cuda.memory._record_memory_history(
        context="alloc" if stacks else None, stacks="python", max_entries=MOST_EVENTS
    )
    began = time.perf_counter()
    try:
        run(configuration, facts["steps"])
    except torch.OutOfMemoryError as error:
        facts["oom"] = {"step": len(facts["steps"]), "message": str(error)}
    facts["seconds"] = time.perf_counter() - began
    torch.cuda.memory._dump_snapshot(str(snapshot))
    torch.cuda.memory._record_memory_history(enabled=None)
    facts["outside_bytes"]["end"] = outside_bytes()
    statistics = torch.cuda.memory_stats()
    facts["statistics"] = {name: statistics.get(name, 0) for name in STATISTICS}
    return facts


def run(configuration: Configuration, steps: list[dict[str, Any]]) -> None:
    """Build the program and run its steps; the peaks so far are noted after each."""
    gc.collect()
    # Cycles are collected when Python sees fit, which depends on all that was ever imported: only we may ask for it.
    gc.disable()
    torch.manual_seed(0)
    program = configuration.load()
    note(steps, time.perf_counter())
    for _ in range(configuration.steps):
        began = time.perf_counter()
        program.step()
        note(steps, began)


def note(steps: list[dict[str, Any]], began: float) -> None:
    """Add the peaks so far; the first entry is of the program's building."""
    torch.cuda.synchronize()
    steps.append(
        {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "outside_bytes": outside_bytes(),
            "seconds": time.perf_counter() - began,
        }
    )


def main() -> None:
    """Record the configuration of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=ALL, metavar="NAME", help="a configuration")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--stacks", action="store_true", help="record Python stacks too (larger files)")
    parser.add_argument(
        "--in-company", action="store_true", help="other processes use the card: only the allocator's figures"
    )
    options = parser.parse_args()
    configuration = ALL[options.name]
    if not torch.cuda.is_available():
        parser.exit(1, "program.py: PyTorch sees no CUDA card on this machine\n")
    facts = record(configuration, options.out / f"{options.name}.pickle", stacks=options.stacks)
    if options.in_company:
        if facts["oom"] is not None and configuration.memory_bytes is None:
            parser.exit(1, "program.py: ran out of memory beside other processes, which says nothing\n")
        facts["outside_bytes"] = None
        for step in facts["steps"]:
            step["outside_bytes"] = step["seconds"] = None
    facts["packages"] = {name: importlib.metadata.version(name) for name in configuration.packages}
    (options.out / f"{options.name}.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
