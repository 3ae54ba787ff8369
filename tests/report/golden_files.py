"""Compares text with a file beside the tests; VRAMFIT_UPDATE_GOLDEN=1 writes the file instead."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("VRAMFIT_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    assert text == expected, f"differs from {path.name}; VRAMFIT_UPDATE_GOLDEN=1 accepts the new text"
