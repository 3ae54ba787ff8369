"""Writes JSON documents where ``--json`` names: a file, or standard output."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

STANDARD_OUTPUT = Path("-")


@contextlib.contextmanager
def reader() -> Iterator[None]:
    """Print inside for a reader who may leave early (``| head``): what is then left unsaid changes no exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _mute()
    except SystemExit:  # rich's console ends the process where its reader has left
        _mute()


def _mute() -> None:
    """Let what is still to be printed, at the interpreter's exit too, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, indented, whole or not at all; ``-`` is standard output.

    Raises:
        WriteError: the file cannot be written.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if path == STANDARD_OUTPUT:
        with reader():
            typer.echo(text, nl=False)
        return
    from vramfit.report import write_text

    write_text(path, text)
