"""A child process that tries families whose names arrive on its input, one line of JSON each on its output."""

from __future__ import annotations

import json
import os
import sys
import warnings


def main(device: str) -> None:
    """Answer until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if device == "cuda":
        # before any backward pass on the CPU
        import vramfit

        with vramfit.VirtualGPU("24GiB"):
            pass
    from transformer_families.trial import on_cpu, on_virtual_gpu

    for line in sys.stdin:
        result = (on_virtual_gpu if device == "cuda" else on_cpu)(line.strip())
        out.write(json.dumps(result) + "\n")
        out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
