"""Writes JSON documents where ``--json`` names: a file, or standard output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

STANDARD_OUTPUT = Path("-")


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, indented, whole or not at all; ``-`` is standard output.

    Raises:
        WriteError: the file cannot be written.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if path == STANDARD_OUTPUT:
        typer.echo(text, nl=False)
        return
    from vramfit.report import write_text

    write_text(path, text)
