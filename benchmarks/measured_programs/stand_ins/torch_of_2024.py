"""Starts a program with what torch of December 2024 did otherwise: torch_of_2024.py PROGRAM [ARGUMENTS].

See NOTE [What torch did then] in torchtitan_llama.py.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


def keep_the_root() -> None:
    """Let FSDP2 keep the root's parameters after the forward pass, whatever it was told."""
    original = FSDPState._lazy_init

    def lazy_init(self: Any) -> None:
        if self._is_root is None:
            self._auto_reshard_after_forward = True
        original(self)

    setattr(FSDPState, "_lazy_init", lazy_init)  # noqa: B010 - mypy lets no method be assigned to


def main() -> None:
    """Run the program that the command line names, as python would."""
    keep_the_root()
    torch.backends.cuda.enable_cudnn_sdp(False)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
