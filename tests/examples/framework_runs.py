"""Runs scripts one after the other on virtual GPUs, in one interpreter: importing the frameworks takes longest.

Usage: ``python framework_runs.py CASES.json FOLDER``. A case has a name, a script, its arguments, a card, and whether
``torch.compile`` does its work; one of a world's ranks has its place and its launcher's variables too. Its report,
output and error go to ``FOLDER/NAME.json``. The scripts' libraries are transformers, torchao, Lightning, MONAI and
diffusers.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import vramfit

CONTEXT_BYTES = 256 << 20


def run(
    script: str,
    arguments: list[str],
    gpu: str,
    place: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Report, output and error of one script; ranks' blocks are split to the size of what they hold."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)  # as python sets it
    output, error = io.StringIO(), None
    conf = "" if place is None else "expandable_segments:True"
    machine = vramfit.VirtualGPU(gpu, alloc_conf=conf, context_bytes=CONTEXT_BYTES, **place or {})
    with mock.patch.dict(os.environ, environ or {}), contextlib.redirect_stdout(output):
        try:
            with machine:
                runpy.run_path(script, run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    forget_singletons()
    return {**machine.report.to_dict(), "output": output.getvalue(), "traceback": error}


def forget_singletons() -> None:
    """Drop what a framework keeps per process, as if each script had one of its own."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    gc.collect()
    gc.freeze()  # the libraries: runs collect often, and looking through them takes longest


def main(cases: str, folder: str) -> None:
    """Run all cases."""
    for case in json.loads(Path(cases).read_text(encoding="utf-8")):
        with torch.compiler.set_stance("default" if case["compiles"] else "force_eager"):
            result = run(
                case["script"], case["arguments"], case["gpu"], case.get("place"), case.get("environ")
            )
        target = Path(folder, f"{case['name']}.json")
        target.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # autograd's threads may outlive the interpreter
