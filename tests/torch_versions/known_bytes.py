"""What programs take at their peaks, by the release of torch from which on, and what changed with that release."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch

CHANGES: dict[tuple[int, int], str] = {
    (
        2,
        13,
    ): "FSDP2 lets go of the input of the last reduce-scatter before it makes the next; in 2.12 the variable of the"
    " loop that waits for it keeps it (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward)",
}
"""By release: what of torch's own changed the bytes below, and where that is decided."""

KNOWN: dict[str, dict[tuple[int, int], tuple[int, int]]] = {
    "demo": {(2, 12): (7_521_530_880, 7_918_845_952)},
    "transformers": {(2, 12): (48_953_856, 54_525_952)},
    "accelerate": {(2, 12): (27_488_768, 33_554_432)},
    "peft": {(2, 12): (81_996_800, 104_857_600)},
    "lightning": {(2, 12): (18_565_632, 23_068_672)},
    "diffusers": {(2, 12): (54_980_608, 79_691_776)},
    "cuda-graph": {(2, 12): (68_022_784, 113_246_208)},
    "snapshot": {(2, 12): (184_913_920, 218_103_808)},
    "compiled": {(2, 12): (278_483_968, 299_892_736)},
    "ddp": {(2, 12): (498_303_488, 515_899_392)},
    "fsdp2": {(2, 12): (196_328_448, 327_155_712), (2, 13): (193_164_288, 327_155_712)},
    "first stage": {(2, 12): (159_436_800, 184_549_376)},
    "last stage": {(2, 12): (306_261_504, 327_155_712)},
}
"""By program: bytes allocated and reserved at their peaks, by the release from which on they are these."""

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
"""The versions of libraries with which they are known; with others a program is another one."""


def release() -> tuple[int, int]:
    """The installed release of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def known(program: str) -> tuple[int, int]:
    """What a program takes with the installed release: what it has taken since the newest change up to it."""
    since = [first for first in KNOWN[program] if first <= release()]
    assert since, f"no bytes are known for a release as old as {torch.__version__}"
    return KNOWN[program][max(since)]


def other_versions(libraries: tuple[str, ...]) -> list[str]:
    """Those of some libraries that are here in another version than the bytes are known with."""
    pins = CONSTRAINTS.read_text(encoding="utf-8").split()
    found = [f"{name}=={version(name)}" for name in libraries]
    return [one for one in found if one not in pins]
