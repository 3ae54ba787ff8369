"""Runs one half of a trial in a process of its own, in which nothing has run before.

The process is a fork of one that has imported the libraries and done nothing with them: importing transformers anew
would take longer than most plans.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 300
"""Longest that one half may take before its process is ended."""

_LIBRARIES = (
    "torch.profiler",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "transformers.models.vit.modeling_vit",
    "transformers.models.mixtral.modeling_mixtral",
    "monai.networks.nets",
    "random_budgets.trial",
    "vramfit.api.programs",
    "vramfit.record.cpu_recorder",
)


class TrialError(Exception):
    """A half of a trial failed; the text is the end of what its process wrote."""


def preload() -> None:
    """Import what the trials need, in silence."""
    with _silence():
        for library in _LIBRARIES:
            importlib.import_module(library)
        importlib.import_module("vramfit.techniques").all_techniques()
    gc.freeze()  # a collection in a process need not look at the libraries


def alone(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a function gives that runs in a process of its own.

    Raises:
        TrialError: it failed, ended its process, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(work, arguments, answer, log), daemon=True
        )
        process.start()
        try:
            process.join(SECONDS)
            if process.is_alive():
                raise TrialError(f"took more than {SECONDS} s")
        finally:
            process.kill()
            process.join()
        if answer.is_file():
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return found
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
        raise TrialError(said[-1] if said else f"its process ended with code {process.exitcode}")


def _run(work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], answer: Path, log: Path) -> None:
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            found = work(*arguments)
            partial = answer.with_suffix(".part")
            partial.write_text(json.dumps(found), encoding="utf-8")
            partial.rename(answer)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # threads of autograd may outlive the interpreter


@contextlib.contextmanager
def _silence() -> Any:
    """Libraries warn while they are imported."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
