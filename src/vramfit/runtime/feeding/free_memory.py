"""What is free where batches are brought to."""

from __future__ import annotations

from pathlib import Path

import torch


def free_for_batches(device: torch.device) -> int:
    """Bytes that no step so far has used: what a card's driver has free, or what the host's kernel could give."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return 0  # nothing tells: no more batches than asked for
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
