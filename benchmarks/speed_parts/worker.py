"""Runs rounds of one program on the virtual GPU of whichever vramfit is on the path, each when its number comes in.

    python worker.py PROGRAM

Answers are lines of JSON: seconds of the processor that the round took, and how many ops it ran.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])


def main() -> None:
    from speed_parts.programs import PROGRAMS
    from vramfit import VirtualGPU

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a program prints is no answer
    with VirtualGPU("80GiB") as gpu:
        run = PROGRAMS[sys.argv[1]]()
        for line in sys.stdin:
            ops, start = gpu.meter.ops, time.process_time()
            run(int(line))
            seconds = time.process_time() - start
            print(json.dumps({"seconds": seconds, "ops": gpu.meter.ops - ops}), file=answers, flush=True)
    os._exit(0)  # autograd's threads outlive the interpreter


if __name__ == "__main__":
    main()
