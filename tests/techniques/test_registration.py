"""Techniques are found in the package, in the order in which each says what it follows."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vramfit.techniques
from vramfit.techniques import all_techniques

ORDER = (
    "mixed-precision",
    "low-precision-training",
    "half-inference",
    "weight-quantization",
    "tf32",
    "in-place-activations",
    "micro-batching",
    "gradient-caching",
    "chunked-loss",
    "allocator-settings",
    "activation-checkpointing",
    "activation-offload",
    "activation-compression",
    "parameter-offload",
    "fused-norms",
    "parameter-sharing",
    "early-release",
    "channels-last",
    "attention-backend",
    "attention-chunking",
    "input-chunking",
    "optimizer-kernel",
    "step-in-backward",
    "low-bit-optimizer",
    "optimizer-offload",
    "lean-optimizer",
    "gradient-projection",
    "compile",
    "batch-norm-folding",
    "tensor-sharing",
    "uint8-inputs",
    "layerwise-chunking",
    "tiling",
    "weight-streaming",
)
TECHNIQUE = """
from vramfit.techniques import AttachStage, Numerics, Setting, Technique

class Idle(Technique[Setting]):
    name, summary, numerics = {name!r}, "does nothing", Numerics.BITWISE
    phase, setting_type, follows = AttachStage.STEP, Setting, {follows!r}

    def options(self, profile):
        return ()

    def attach(self, live, setting):
        pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A second folder of the package."""
    monkeypatch.setattr(vramfit.techniques, "__path__", [*vramfit.techniques.__path__, str(tmp_path)])
    all_techniques.cache_clear()
    known = set(sys.modules)
    yield tmp_path
    for name in {*sys.modules} - known:
        if name.startswith("vramfit.techniques.idle"):
            del sys.modules[name]
            delattr(vramfit.techniques, name.rpartition(".")[2])
    all_techniques.cache_clear()


def names() -> list[str]:
    return [technique.name for technique in all_techniques()]


def test_each_comes_after_the_one_it_follows() -> None:
    assert tuple(names()) == ORDER


def test_one_file_adds_a_technique(folder: Path) -> None:
    (folder / "idle.py").write_text(TECHNIQUE.format(name="idle", follows="tf32"))
    (folder / "idle_too.py").write_text(TECHNIQUE.format(name="idle-too", follows=""))
    at = ORDER.index("tf32") + 1
    expected = [*ORDER[:at], "idle", *ORDER[at:], "idle-too"]
    assert names() == expected


def test_one_that_follows_none_is_refused(folder: Path) -> None:
    (folder / "idle.py").write_text(TECHNIQUE.format(name="idle", follows="tf-32"))
    with pytest.raises(ValueError, match="'tf-32'"):
        names()


@pytest.mark.parametrize("package", ["core", "support"])
def test_what_techniques_share_imports_none_of_them(package: str) -> None:
    below = {"core": ("core",), "support": ("core", "support")}[package]
    allowed = tuple(f"vramfit.techniques.{one}" for one in below)
    for path in Path(vramfit.techniques.__path__[0], package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vramfit.techniques"):
                assert (node.module or "").startswith(allowed), (path.name, node.module)
