"""Pages of what ``vramfit.track`` recorded."""

from __future__ import annotations

from pathlib import Path

import torch

import vramfit
from vramfit.units import MIB, format_bytes


def test_a_recording_is_saved_as_a_page_and_shows_itself(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with vramfit.track(device="cpu") as tracked:
        tracked.mark("half way")
        kept = torch.zeros(3 * MIB // 4)
    tracked.save(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "metered on the CPU" in text
    assert format_bytes(kept.nbytes) in text
    assert tracked._repr_html_().count("<svg") == 1
