"""What became of each family, judged from both runs, and the tables of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.table import Table

STEPS = ("train", "infer", "generate")


class Status(Enum):
    """How a family fared."""

    RUNS = "runs"
    FAILED = "failed"
    """On the virtual GPU, though it runs on the CPU."""
    CONFIGURATION = "configuration"
    """It fails on the CPU too: the tiny configuration is at fault, or a library is missing."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One family.

    Attributes:
        family: its model type.
        status: how it fared.
        model: its class.
        parameters: how many.
        steps: "ok" or the reason, for each step that it has.
        train_bytes: peak of the training step on the virtual GPU.
        peak_bytes: peak of all steps.
        seconds: of the whole family on the virtual GPU.
        resident_bytes: most memory that the process held so far.
    """

    family: str
    status: Status
    model: str
    parameters: int
    steps: dict[str, str]
    train_bytes: int
    peak_bytes: int
    seconds: float
    resident_bytes: int


def judge(virtual: dict[str, Any], cpu: dict[str, Any] | None) -> Entry:
    """Compare what happened on the virtual GPU with what happened on the CPU (None: not run there)."""
    steps = {step: virtual[step] for step in ("build", *STEPS) if step in virtual}
    failed = [step for step, result in steps.items() if result != "ok"]
    status = Status.FAILED if failed else Status.RUNS
    if cpu is not None:
        if failed and all(cpu.get(step, cpu.get("build", "ok")) != "ok" for step in failed):
            status = Status.CONFIGURATION
        elif not failed:
            for key, step in (("outputs", "infer"), ("loss", "train"), ("generated", "generate")):
                if key in cpu and cpu[key] != virtual.get(key):
                    steps[step] = f"gives {virtual.get(key)} and not {cpu[key]}"
                    status = Status.FAILED
    return Entry(
        family=virtual["family"],
        status=status,
        model=virtual.get("class", ""),
        parameters=virtual.get("parameters", 0),
        steps=steps,
        train_bytes=virtual.get("train_bytes", 0),
        peak_bytes=virtual.get("peak_bytes", 0),
        seconds=virtual.get("seconds", 0.0),
        resident_bytes=virtual.get("resident_bytes", 0),
    )


def terminal_table(entries: list[Entry]) -> Table:
    """For the terminal."""
    table = Table("family", "class", "parameters", *STEPS, "peak MiB", "s")
    for entry in entries:
        row = _cells(entry)
        style = {Status.FAILED: "red", Status.CONFIGURATION: "bright_black"}.get(entry.status, "")
        table.add_row(*row, style=style)
    return table


def _cells(entry: Entry) -> list[str]:
    steps = [entry.steps.get(step, entry.steps.get("build", "")) for step in STEPS]
    return [
        entry.family,
        entry.model,
        f"{entry.parameters:,}",
        *steps,
        f"{entry.peak_bytes / 2**20:,.1f}",
        f"{entry.seconds:.1f}",
    ]


def summary(entries: list[Entry]) -> str:
    """How many run, in a sentence."""
    runs = sum(entry.status is Status.RUNS for entry in entries)
    failed = sum(entry.status is Status.FAILED for entry in entries)
    apart = sum(entry.status is Status.CONFIGURATION for entry in entries)
    share = 100 * runs / max(1, runs + failed)
    text = f"{runs} of {runs + failed} families run ({share:.1f} %)"
    return text + (f"; {apart} more have no tiny configuration that runs on the CPU." if apart else ".")


def page(entries: list[Entry]) -> str:
    """The page in Markdown."""
    import torch
    import transformers

    lines = [
        "# Model families of transformers on the virtual GPU",
        "",
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, a virtual A100 80GB. Each "
        "family is built from a tiny configuration, moved to the card, trained for a step with AdamW, run without "
        "gradients, and asked for four tokens where it generates. It runs if all of that succeeds and every output has "
        "the type and shape that the same model has for real on the CPU. "
        "`python benchmarks/families.py --write docs/families.md` makes this page.",
        "",
        f"**{summary(entries)}**",
        "",
        "| family | class | parameters | training | inference | generation | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        if entry.status is not Status.CONFIGURATION:
            family, model, parameters, *steps, peak, _ = _cells(entry)
            lines.append(f"| {family} | {model} | {parameters} | {' | '.join(map(_cell, steps))} | {peak} |")
    apart = [entry for entry in entries if entry.status is Status.CONFIGURATION]
    if apart:
        lines += ["", "## Not tried", "", "Their tiny configuration, or a library, fails on the CPU too.", ""]
        lines += ["| family | reason |", "|---|---|"]
        lines += [f"| {entry.family} | {_cell(_reason(entry))} |" for entry in apart]
    return "\n".join(lines) + "\n"


def _reason(entry: Entry) -> str:
    return next(result for result in entry.steps.values() if result != "ok")


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) < 140 else text[:137] + "..."
