"""Versions of the libraries that people have beside torch, month by month, and the examples that run with them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from torch_rows.rows import ROOT

RUNS = ROOT / "tests" / "examples" / "framework_runs.py"
SECONDS = 900
"""Longest that the examples of a month may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Month:
    """What was new in a month.

    Attributes:
        name: the month.
        versions: of each library.
    """

    name: str
    versions: Mapping[str, str]

    @property
    def packages(self) -> list[str]:
        """As requirements; what these need besides is resolved for them."""
        return [f"{library}=={version}" for library, version in self.versions.items()]


LIBRARIES = ("transformers", "accelerate", "peft", "trl", "lightning", "diffusers")
BESIDE = "torchao"
"""Imported by PEFT, transformers and an example: in a version that goes with both them and torch."""


def _month(name: str, *versions: str) -> Month:
    return Month(name=name, versions=dict(zip((*LIBRARIES, BESIDE), versions, strict=True)))


MONTHS = (
    _month("2025-04", "4.51.3", "1.6.0", "0.15.2", "0.17.0", "2.5.1", "0.33.1", "0.10.0"),
    _month("2025-07", "4.53.3", "1.9.0", "0.16.0", "0.20.0", "2.5.2", "0.34.0", "0.14.1"),
    _month("2025-10", "4.57.1", "1.11.0", "0.17.1", "0.24.0", "2.5.5", "0.35.2", "0.14.1"),
    _month("2026-01", "5.0.0", "1.12.0", "0.18.1", "0.27.1", "2.6.1", "0.36.0", "0.15.0"),
    _month("2026-05", "5.9.0", "1.13.0", "0.19.1", "1.5.1", "2.6.4", "0.38.0", "0.17.0"),
    _month("2026-11", "5.24.0", "1.15.0", "0.21.2", "1.16.0", "2.6.6", "0.42.1", "0.18.0"),
)

EXAMPLES: dict[str, tuple[str, ...]] = {
    "transformers": (
        *("gpt2_train", "llm_generate", "bert_large_finetune", "vit_train"),
        *("trainer", "trainer-checkpointing", "trainer-fp16-adafactor", "trainer-search", "generate"),
    ),
    "accelerate": ("accelerate", "accelerate-fp16", "accelerate-search", "big-model", "big-model-host"),
    "peft": ("lora", "dora", "full"),
    "trl": ("sft", "sft-packed", "sft-lora"),
    "lightning": ("lightning",),
    "diffusers": ("diffusers", "diffusers-ema", "diffusers-checkpointing"),
}
"""Of each library: scripts of examples/, and cases of tests/examples/framework_cases.py."""

ALONE = {
    "gpt2_train": "--steps 1 --batch-size 1 --seq-len 128",
    "llm_generate": "--size tiny --prompt-len 16 --new-tokens 4",
    "bert_large_finetune": "--steps 1 --batch-size 2 --max-length 64 --layers 2",
    "vit_train": "--steps 1 --batch-size 8 --layers 2",
}
"""Small arguments of the scripts among them."""

NEWER = {"llm_generate": ("transformers", "4.56"), "generate": ("transformers", "5.23")}
"""Examples that ask a library for what it has since a version only, by its present name (``dtype``, a cache's kind)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What became of one example.

    Attributes:
        allocated, reserved: bytes at the peak.
        error: the line of the error that ended it; empty where it ran to its end.
    """

    allocated: int = 0
    reserved: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonthOutcome:
    """What became of a month's examples.

    Attributes:
        torch: the version of torch beside the libraries.
        examples: by name.
        reason: why none was run; empty where they were.
        sources: a digest of what was tested.
    """

    torch: str = ""
    examples: Mapping[str, Ran] = field(default_factory=dict)
    reason: str = ""
    sources: str = ""

    @property
    def good(self) -> bool:
        """Whether all ran."""
        return (
            not self.reason and bool(self.examples) and not any(one.error for one in self.examples.values())
        )


def examples(month: Month) -> list[str]:
    """The examples that a month's libraries are new enough for."""
    return [name for names in EXAMPLES.values() for name in names if is_for(name, month)]


def is_for(example: str, month: Month) -> bool:
    """Whether an example's library has by then what it asks for."""
    library, since = NEWER.get(example, (LIBRARIES[0], "0"))
    return Version(month.versions[library]) >= Version(since)


def _case(name: str) -> dict[str, Any]:
    """What `framework_runs.py` is given."""
    from tests.examples.framework_cases import GROUPS, TRL

    if name in ALONE:
        script, arguments, gpu = name, ALONE[name], "RTX 4090"
    else:
        case = next(group[name] for group in (*GROUPS.values(), TRL) if name in group)
        script, arguments, gpu = f"frameworks/{case.script}", case.arguments, case.gpu
    path = str(ROOT / "examples" / f"{script}.py")
    return {"name": name, "script": path, "arguments": arguments.split(), "gpu": gpu, "compiles": False}


def run(month: Month, python: Path, folder: Path, told: Callable[[int], None]) -> dict[str, Ran]:
    """Run a month's examples in one interpreter, and what is left in another where one has ended it.

    Args:
        month: what they are run with.
        python: of its environment.
        folder: where reports go.
        told: called with the percentage that is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    every = [_case(name) for name in examples(month)]
    waiting, ended = every, dict[str, str]()
    while waiting:
        printed = _run(python, waiting, folder)
        waiting = [case for case in waiting if not (folder / f"{case['name']}.json").exists()]
        told(100 * (len(every) - len(waiting)) // len(every))
        if waiting:
            ended[waiting.pop(0)["name"]] = printed
    names = [case["name"] for case in every]
    return {name: _read(folder / f"{name}.json", ended.get(name, "")) for name in names}


def _run(python: Path, waiting: Sequence[dict[str, Any]], folder: Path) -> str:
    """Returns the last line that the interpreter printed, with its exit code."""
    given = folder / "cases"
    given.write_text(json.dumps(waiting), encoding="utf-8")
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
        "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(python), str(RUNS), str(given), str(folder)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took more than {SECONDS} s"
    (folder / "errors").write_text(done.stderr, encoding="utf-8")
    last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
    return f"the interpreter ended with exit code {done.returncode}: {''.join(last)}"


def _read(file: Path, printed: str) -> Ran:
    if not file.is_file():
        return Ran(error=printed[:300])
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    peak = report["peak"]
    error = _line(report["traceback"] or "")
    return Ran(allocated=peak["allocated_bytes"], reserved=peak["reserved_bytes"], error=error)


def _line(traceback: str) -> str:
    """The error at the end of a traceback, in a line: its last lines may be advice."""
    lines = [line for line in traceback.splitlines() if line and not line.startswith((" ", "\t"))]
    named = [
        line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Exit", "Interrupt"))
    ]
    return (named or lines or [""])[-1][:300]


def save(folder: Path, month: Month, outcome: MonthOutcome) -> None:
    """Keep what became of a month: written beside, then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"libraries-{month.name}.part"
    part.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    part.rename(folder / f"libraries-{month.name}.json")


def load(folder: Path) -> dict[str, MonthOutcome]:
    """What became of months, by name, now or in earlier runs."""
    found = {}
    for month in MONTHS:
        if (file := folder / f"libraries-{month.name}.json").is_file():
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            examples = {name: Ran(**one) for name, one in values.pop("examples").items()}
            found[month.name] = MonthOutcome(**values, examples=examples)
    return found
