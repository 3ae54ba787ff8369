"""Folders that look like an installed cuDNN, and libraries that behave as a test wants."""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from vramfit.cudnn.found_library import find_cudnn
from vramfit.cudnn.questions import AttentionPass, AttentionQuestion, ConvPass, ConvQuestion, TensorShape
from vramfit.errors import UsageError

PARTS = ("graph", "heuristic", "engines_precompiled", "engines_runtime_compiled")
ACTIONS = {"refuses": 1, "crashes": 2, "hangs": 3, "answers": 4, "knows-no-card": 5}
COMPILER = shutil.which("cc") or shutil.which("gcc")


def installed(folder: Path, *, version: str = "9.20.0", machine: bytes | None = None) -> Path:
    """A folder of packages with a cuDNN in which nothing can be run; returns its library."""
    lib = folder / "nvidia" / "cudnn" / "lib"
    lib.mkdir(parents=True)
    head = bytearray(Path(sys.executable).resolve().read_bytes()[:64])
    if machine is not None:
        head[18:20] = machine
    for name in ("libcudnn.so.9", *(f"libcudnn_{part}.so.9" for part in PARTS)):
        (lib / name).write_bytes(head)
    (folder / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (folder / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13").touch()
    include = folder / "nvidia" / "cudnn" / "include"
    include.mkdir()
    parts = zip(("MAJOR", "MINOR", "PATCHLEVEL"), version.split("."), strict=True)
    (include / "cudnn_version.h").write_text("".join(f"#define CUDNN_{part} {n}\n" for part, n in parts))
    return lib / "libcudnn.so.9"


def behaving(folder: Path, action: str, *, version: int = 92000) -> Path:
    """Packages with a library that does something; skips where there is no compiler."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    library = installed(folder)
    source = Path(__file__).with_name("fake_cudnn.c")
    flags = [f"-DDOES={ACTIONS[action]}", f"-DVERSION={version}", "-w"]
    subprocess.run([COMPILER, "-shared", "-fPIC", *flags, "-o", str(library), str(source)], check=True)
    return folder


@cache
def real_cudnn() -> str | None:
    """Where a real one is installed; None without one."""
    try:
        return find_cudnn("auto").library
    except UsageError:
        return None


def dense(*dims: int) -> TensorShape:
    strides, step = [], 1
    for size in reversed(dims):
        strides.append(step)
        step *= size
    return TensorShape(dims=dims, strides=tuple(strides[::-1]))


def question(kind: ConvPass = ConvPass.FORWARD, **changes: object) -> ConvQuestion:
    """The second convolution of the recording eor-nn."""
    settings = {
        "kind": kind,
        "dtype": "float32",
        "x": dense(1, 16, 128, 128),
        "y": dense(1, 32, 128, 128),
        "w": dense(32, 16, 3, 3),
        "padding": (1, 1),
        "stride": (1, 1),
        "dilation": (1, 1),
        **changes,
    }
    return ConvQuestion(**settings)


def attention(kind: AttentionPass = AttentionPass.FORWARD, **changes: object) -> AttentionQuestion:
    """Attention of two sequences of 512 with eight heads of 64, laid out as models do."""
    shape = TensorShape(dims=(2, 8, 512, 64), strides=(8 * 512 * 64, 64, 8 * 64, 1))
    settings = {
        "kind": kind,
        "dtype": "bfloat16",
        "query": shape,
        "key": shape,
        "value": shape,
        "out": shape,
        "grad": shape if kind is AttentionPass.BACKWARD else None,
        **changes,
    }
    return AttentionQuestion(**settings)
