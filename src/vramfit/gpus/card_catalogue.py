"""Read the catalogue: a TOML file in the package, one table per card, every figure with its source."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from vramfit.gpus.card_file import card_from_table
from vramfit.gpus.spec import GpuSpec


@cache
def _document() -> dict[str, Any]:
    text = files("vramfit.gpus").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def catalogue() -> tuple[GpuSpec, ...]:
    """Give every card of the catalogue, in the order of the file: by generation, then from small to large."""
    return tuple(card_from_table(table, where="catalogue.toml") for table in _document()["card"])


@cache
def ambiguous_names() -> dict[str, tuple[str, ...]]:
    """Give the names that are used for different cards, with the cards each could mean."""
    return {name: tuple(cards) for name, cards in _document()["ambiguous"].items()}
