"""What a process does that tries one family, on the virtual GPU or for real on the CPU."""

from __future__ import annotations

import resource
import warnings
from typing import Any

MEMORY = 12 << 30
"""Bytes that the process may hold: a family that wants more fails alone."""


def attempt(side: str, name: str) -> dict[str, Any]:
    """Try a family, in this process alone.

    Args:
        side: ``virtual`` or ``cpu``.
        name: of the family.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    import torch
    import transformers

    import vramfit

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with vramfit.VirtualGPU("24GiB"):
        pass  # before any backward pass on the CPU
    from transformer_families.trial import on_cpu, on_virtual_gpu

    return (on_virtual_gpu if side == "virtual" else on_cpu)(name)
