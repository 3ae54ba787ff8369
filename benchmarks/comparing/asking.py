"""Asks the other tools about the program of a row, in a process of its own that may take only so long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import recordings
from configurations import ALL
from recording import store

from comparing import published, results
from comparing.results import Results
from comparing.rows import Figure, Origin, Row, Tool

COMPARING = Path(__file__).parent
PEERS = COMPARING / "peers.py"


def ask_peers(row: Row, kept: Results, *, seconds: float) -> Row:
    """The row with the figures of the other tools, where its program can be given to them.

    Args:
        row: a row.
        kept: finished results.
        seconds: how long they may take together; what they have not said by then counts as not said.
    """
    peers = (Tool.MEM_TRACKER, Tool.ACCELERATE, Tool.FORMULA)
    if row.origin is Origin.PUBLISHED:
        if row.name not in published.REPRODUCED:
            return row
        kind = "published"
        script = recordings.MODELS / published.REPRODUCED[row.name].script
        sources: list[str | Path] = [script, COMPARING / "published.py"]
    elif row.figures[Tool.VRAMFIT].reason is not None:
        return row
    else:
        kind, sources = "configuration", [store.key_of(ALL[row.name])]
    packages = results.versions("torch", "accelerate", "transformers")
    formula = COMPARING / "formula.py"
    key = results.digest(PEERS, formula, packages, str(seconds), *sources)
    name = f"peers-{row.name}"
    found = kept.get(name, key)
    if found is None:
        found = _peers(kind, row.name, seconds)
        kept.put(name, key, found)
    figures = {}
    for tool in peers:
        told = found.get(tool.value, {"reason": found.get("reason", f"not done in {seconds:.0f} s")})
        size = told.get("bytes")
        figures[tool] = Figure(
            allocated=size, reserved=size, seconds=told.get("seconds"), reason=told.get("reason")
        )
    return row.with_figures(figures)


def _peers(kind: str, name: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, str(PEERS), kind, name]
    reason = None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, env={**os.environ}
        )
        output = done.stdout
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    found: dict[str, Any] = {} if reason is None else {"reason": reason}
    for line in output.splitlines():
        if line.startswith('{"tool"'):
            told = json.loads(line)
            found[told.pop("tool")] = told
    return found
