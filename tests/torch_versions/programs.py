"""One program of each kind that people run, most of them examples, with what each needs beside torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.examples import parallel_cases
from tests.examples.framework_cases import GROUPS

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
FRAMEWORKS = {name: case for group in GROUPS.values() for name, case in group.items()}


def _script(
    path: Path, arguments: str = "", *, gpu: str = "RTX 4090", compiles: bool = False
) -> dict[str, Any]:
    return {"script": str(path), "arguments": arguments.split(), "gpu": gpu, "compiles": compiles}


def _framework(name: str) -> dict[str, Any]:
    case = FRAMEWORKS[name]
    return _script(EXAMPLES / "frameworks" / f"{case.script}.py", case.arguments, gpu=case.gpu)


def _parallel(name: str) -> dict[str, Any]:
    return parallel_cases.case(name, str(EXAMPLES / "parallel"))


CASES: Mapping[str, dict[str, Any]] = {
    "demo": _script(EXAMPLES / "gpt2_train.py", "--steps 2"),
    "transformers": _framework("trainer"),
    "accelerate": _framework("accelerate"),
    "peft": _framework("lora"),
    "lightning": _framework("lightning"),
    "diffusers": _framework("diffusers"),
    "cuda-graph": _framework("graphs-graph"),
    "snapshot": _script(HERE / "recorded_step.py"),
    "compiled": _script(HERE / "compiled_steps.py", compiles=True),
    "ddp": _parallel("ddp_llama"),
    "fsdp2": _parallel("fsdp2_llama"),
}
"""What `tests/examples/framework_runs.py` is given for each, without the name."""

LIBRARIES = {
    "demo": ("transformers",),
    "transformers": ("transformers", "accelerate"),
    "accelerate": ("transformers", "accelerate"),
    "peft": ("transformers", "peft"),
    "lightning": ("lightning",),
    "diffusers": ("transformers", "diffusers"),
    "ddp": ("transformers",),
    "fsdp2": ("transformers",),
    "pipeline": ("transformers",),
}
"""What programs need beside torch, by the names under which they are imported."""


def missing(name: str) -> list[str]:
    """The libraries of a program that are not installed."""
    return [library for library in LIBRARIES.get(name, ()) if find_spec(library) is None]
