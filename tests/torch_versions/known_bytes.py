"""What programs take at their peaks, by the release of torch from which on, and what changed with that release."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch

CHANGES: dict[tuple[int, int], tuple[str, ...]] = {
    (2, 12): (
        "cuBLASLt shares cuBLAS's workspace; before, it had a MiB of its own (ATen/cuda/CublasHandlePool.cpp,"
        " unified_cublas_and_lt_workspaces)",
        "FSDP2 lists its reduce-scatters, and the variable of the loop that waits for them keeps the last one's input"
        " while the next is made (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward)",
    ),
    (2, 13): (
        "FSDP2 deletes that variable: the input of the last reduce-scatter goes before the next is made",
    ),
    (2, 15): (
        "cuBLAS's workspaces last for one operation; before, one was kept for each handle and stream, and blocks that"
        " come after it lay elsewhere (ATen/cuda/CublasHandlePool.cpp)",
    ),
}
"""By release: what of torch's own changed the bytes below, and where that is decided."""

KNOWN: dict[str, dict[tuple[int, int], tuple[int, int]]] = {
    "demo": {
        (2, 10): (7_522_579_456, 7_918_845_952),
        (2, 12): (7_521_530_880, 7_918_845_952),
        (2, 15): (7_502_774_272, 7_906_263_040),
    },
    "transformers": {
        (2, 10): (50_002_432, 54_525_952),
        (2, 12): (48_953_856, 54_525_952),
        (2, 15): (38_195_712, 54_525_952),
    },
    "accelerate": {
        (2, 10): (28_537_344, 33_554_432),
        (2, 12): (27_488_768, 33_554_432),
        (2, 15): (18_924_544, 33_554_432),
    },
    "peft": {
        (2, 10): (81_996_800, 104_857_600),
        (2, 15): (64_957_440, 83_886_080),
    },
    "lightning": {
        (2, 10): (19_614_208, 25_165_824),
        (2, 12): (18_565_632, 23_068_672),
        (2, 15): (9_769_984, 25_165_824),
    },
    "diffusers": {
        (2, 10): (56_029_184, 79_691_776),
        (2, 12): (54_980_608, 79_691_776),
        (2, 15): (43_821_568, 58_720_256),
    },
    "cuda-graph": {
        (2, 10): (70_119_936, 117_440_512),
        (2, 12): (68_022_784, 113_246_208),
        (2, 15): (42_797_568, 94_371_840),
    },
    "snapshot": {
        (2, 10): (185_962_496, 218_103_808),
        (2, 12): (184_913_920, 218_103_808),
        (2, 15): (167_874_560, 188_743_680),
    },
    "compiled": {
        (2, 10): (278_483_968, 299_892_736),
        (2, 15): (259_871_744, 283_115_520),
    },
    "ddp": {
        (2, 10): (498_303_488, 515_899_392),
        (2, 15): (431_194_624, 452_984_832),
    },
    "fsdp2": {
        (2, 10): (193_196_544, 327_155_712),
        (2, 12): (196_360_704, 327_155_712),
        (2, 13): (193_196_544, 327_155_712),
        (2, 15): (126_087_680, 243_269_632),
    },
    "first stage": {
        (2, 10): (159_436_800, 184_549_376),
        (2, 15): (112_569_344, 119_537_664),
    },
    "last stage": {
        (2, 10): (306_261_504, 327_155_712),
        (2, 15): (239_152_640, 264_241_152),
    },
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
