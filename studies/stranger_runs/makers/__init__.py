"""Makers of what stands for the data and weights that scripts would download; the same every time."""

from __future__ import annotations

from collections.abc import Callable

from stranger_runs.makers import (
    checkpoints,
    datasets_of_text,
    graphs,
    huggingface,
    pictures,
    sounds,
    tables,
    texts,
)

MAKERS: dict[str, Callable[..., None]] = {
    maker.__name__: maker
    for module in (pictures, texts, datasets_of_text, sounds, graphs, tables, checkpoints, huggingface)
    for maker in module.MAKERS
}
"""All makers by name: called with the path to make, and arguments as text."""
