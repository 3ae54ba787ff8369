"""Which torch runs, and where."""

from __future__ import annotations

import platform

import torch


def torch_version() -> tuple[int, int]:
    """Major and minor version of the torch that runs."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def platform_text() -> str:
    """Operating system and architecture."""
    return f"{platform.system()} {platform.machine()}"
