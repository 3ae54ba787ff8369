"""A child process that tries families whose names arrive on its input, one line of JSON each on its output."""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings

MEMORY = 12 << 30
"""Bytes that the process may hold: a family that wants more fails alone."""


def main() -> None:
    """Answer until the input ends: each line says on what to try a family (``virtual`` or ``cpu``), and which."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between
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

    for line in sys.stdin:
        side, name = line.split()
        result = (on_virtual_gpu if side == "virtual" else on_cpu)(name)
        out.write(json.dumps(result) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
