"""Which release of torch is installed, and which ones vramfit has been run on."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion


def at_least(major: int, minor: int) -> bool:
    """Whether the installed torch is of this release, its pre-releases included, or newer."""
    return TorchVersion(torch.__version__) >= f"{major}.{minor}.0.dev0"
