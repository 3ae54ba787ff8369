"""What became of each family, judged from both runs, and the tables of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from rich.table import Table
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from transformer_families.overrides import LEFT_OUT

STEPS = ("train", "infer", "generate")
_OK = "ok"
_ASSUMED = "ok, sizes assumed"
_DATA = {"shape-from-data", "guess-flipped"}
"""Warnings of a run whose sizes depend on values that nobody computed."""


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
        train_bytes: peak of the training step on the virtual GPU; None without one.
        infer_bytes: peak of the pass without gradients.
        live_bytes: most bytes of tensors alive at once in a pass without gradients, on the virtual GPU.
        real_bytes: the same for real on the CPU; None where it was not counted.
        seconds: of the whole family on the virtual GPU.
        resident_bytes: by how much the memory of the process grew above what it had ever held.
    """

    family: str
    status: Status
    model: str
    parameters: int
    steps: dict[str, str]
    train_bytes: int | None
    infer_bytes: int | None
    live_bytes: int | None
    real_bytes: int | None
    seconds: float
    resident_bytes: int

    @property
    def assumed(self) -> bool:
        """Whether sizes depend on values that only a real run computes."""
        return _ASSUMED in self.steps.values()


def judge(virtual: dict[str, Any], cpu: dict[str, Any] | None) -> Entry:
    """Compare what happened on the virtual GPU with what happened on the CPU (None: not run there)."""
    entry = Entry(
        family=virtual["family"],
        status=Status.RUNS,
        model=virtual.get("class", ""),
        parameters=virtual.get("parameters", 0),
        steps={step: virtual[step] for step in ("build", *STEPS) if step in virtual},
        train_bytes=virtual.get("train_bytes"),
        infer_bytes=virtual.get("infer_bytes"),
        live_bytes=virtual.get("live_bytes"),
        real_bytes=None if cpu is None else cpu.get("live_bytes"),
        seconds=virtual.get("seconds", 0.0),
        resident_bytes=virtual.get("resident_bytes", 0),
    )
    failed = [step for step, result in entry.steps.items() if result != _OK]
    if failed:
        alike = cpu is not None and all(cpu.get(step, cpu.get("build", _OK)) != _OK for step in failed)
        return replace(entry, status=Status.CONFIGURATION if alike else Status.FAILED)
    if "untrained" in virtual:
        entry.steps["train"] = virtual["untrained"]
    return entry if cpu is None else _compared(entry, virtual, cpu)


def _compared(entry: Entry, virtual: dict[str, Any], cpu: dict[str, Any]) -> Entry:
    """The entry, judged by types and shapes of what came out."""
    for key, step in (("outputs", "infer"), ("loss", "train"), ("generated", "generate")):
        real, found = cpu.get(key), virtual.get(key)
        if real is None or real == found:
            continue
        if _DATA & set(virtual.get("warnings", ())) and _but_for_sizes(real) == _but_for_sizes(found):
            entry.steps[step] = _ASSUMED
            continue
        entry.steps[step] = f"gives {found} and not {real}"
        entry = replace(entry, status=Status.FAILED)
    return entry


def _but_for_sizes(outputs: Any) -> Any:
    """Types and dimensions of results, without how large they are."""
    if not isinstance(outputs, list):
        return outputs
    return [o.split("[")[0] + str(o.count(",")) if isinstance(o, str) else 0 for o in outputs]


# -- tables ------------------------------------------------------------------------------------------------------


def terminal_table(entries: list[Entry]) -> Table:
    """For the terminal."""
    table = Table("family", "class", "parameters", *STEPS, "train MiB", "infer MiB", "live / CPU", "s")
    for entry in entries:
        style = {Status.FAILED: "red", Status.CONFIGURATION: "bright_black"}.get(entry.status, "")
        table.add_row(*_cells(entry), style=style)
    return table


def _cells(entry: Entry) -> list[str]:
    steps = [entry.steps.get(step, entry.steps.get("build", "")) for step in STEPS]
    return [
        entry.family,
        entry.model,
        f"{entry.parameters:,}",
        *steps,
        _mebibytes(entry.train_bytes),
        _mebibytes(entry.infer_bytes),
        _ratio(entry),
        f"{entry.seconds:.1f}",
    ]


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f}"


def _ratio(entry: Entry) -> str:
    if not entry.live_bytes or not entry.real_bytes:
        return ""
    return "equal" if entry.live_bytes == entry.real_bytes else f"{entry.live_bytes / entry.real_bytes:.4f}"


def summary(entries: list[Entry]) -> str:
    """How many run, in a sentence."""
    runs = [entry for entry in entries if entry.status is Status.RUNS]
    failed = sum(entry.status is Status.FAILED for entry in entries)
    apart = sum(entry.status is Status.CONFIGURATION for entry in entries)
    tried = len(runs) + failed
    text = f"{len(runs)} of {tried} families run ({100 * len(runs) / max(1, tried):.1f} %)"
    if assumed := sum(entry.assumed for entry in runs):
        text += f", {assumed} of them with sizes that depend on data"
    return f"{text}; {apart} more fail on the CPU too." if apart else f"{text}."


def _listed(entries: list[Entry]) -> str:
    """How many run of all families that could have been tried, in a sentence."""
    runs = sum(entry.status is Status.RUNS for entry in entries)
    apart = sum(entry.status is Status.CONFIGURATION for entry in entries)
    left_out = len(LEFT_OUT)
    listed = len(entries) + left_out
    others = len(CONFIG_MAPPING_NAMES) - listed
    return (
        f"Of all {listed} that transformers lists with a class of a kind tried here that is "
        f"{100 * runs / max(1, listed):.1f} %: {apart + left_out} have no tiny configuration that runs on the CPU, so "
        f"nothing can be compared; the last table says why. {max(0, others)} further model types are not counted: they "
        "have no class of these kinds, and most are parts of others (a vision tower, a text model)."
    )


def _live_summary(entries: list[Entry]) -> str:
    """How the bytes of live tensors compare, in a sentence."""
    errors = sorted(
        abs(entry.live_bytes / entry.real_bytes - 1)
        for entry in entries
        if entry.live_bytes and entry.real_bytes and not entry.assumed
    )
    if not errors:
        return ""
    equal, close = sum(not error for error in errors), sum(error <= 0.001 for error in errors)
    return (
        f"In {equal} of {len(errors)} families the most bytes of tensors alive at once are equal on both sides, in "
        f"{close} within 0.1 %; the largest difference is {100 * errors[-1]:.1f} %."
    )


_INTRODUCTION = """\
Each family is built from a tiny configuration, moved to the card, trained for a step with AdamW, run without gradients,
and asked for four tokens if it generates. It runs if all of that succeeds and every output has the type and shape that
the same model gives for real on the CPU. Peaks are those of `torch.cuda.max_memory_allocated`, on a card whose cuBLAS
workspaces alone take 8 MiB or more. *live / CPU* compares the most bytes of tensors alive at once in a pass without
gradients, with attention in plain operators, with those of the real run: the CPU runs some operators in one piece that
a card runs in several, or the other way round, so a few differ. *Sizes assumed* means that the size of a result depends
on values (points found, steps until the end of a text), for which the virtual GPU states an assumption.
`python studies/families.py --write docs/families.md` makes this page, `--realistic` its last table but one.
"""


def page(entries: list[Entry], realistic: list[Entry], versions: str) -> str:
    """The page in Markdown.

    Args:
        entries: the families in their tiny form.
        realistic: models at their real size.
        versions: of torch and transformers.
    """
    shown = [entry for entry in entries if entry.status is not Status.CONFIGURATION]
    lines = [
        "# Model families of transformers on the virtual GPU",
        "",
        f"With {versions}, on a virtual A100 80GB. {_INTRODUCTION}",
        f"**{summary(entries)}** {_listed(entries)}",
        "",
        _live_summary(shown),
        "",
        "| family | class | parameters | training | inference | generation | train MiB | infer MiB | live / CPU | s |",
        "|---|---|---:|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {' | '.join(map(_cell, _cells(entry)))} |" for entry in shown]
    return "\n".join(lines + _realistic(realistic) + _not_tried(entries)) + "\n"


def _realistic(entries: list[Entry]) -> list[str]:
    if not entries:
        return []
    lines = [
        "",
        "## At their real size",
        "",
        "Nothing is computed for real: neither the seconds nor the memory of the process grow with the model.",
        "",
        "| model | parameters | training | inference | train GiB | infer GiB | s | process grew by, MiB |",
        "|---|---:|---|---|---:|---:|---:|---:|",
    ]
    for entry in entries:
        train, infer = ((size or 0) / 2**30 for size in (entry.train_bytes, entry.infer_bytes))
        lines.append(
            f"| {entry.family.partition(':')[2]} | {entry.parameters:,} | {_cell(entry.steps.get('train', ''))} | "
            f"{_cell(entry.steps.get('infer', ''))} | {train:,.2f} | {infer:,.2f} | {entry.seconds:.1f} | "
            f"{entry.resident_bytes / 2**20:,.0f} |"
        )
    return lines


def _not_tried(entries: list[Entry]) -> list[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for family, reason in LEFT_OUT.items():
        reasons[reason].append(family)
    for entry in entries:
        if entry.status is Status.CONFIGURATION:
            failure = next(result for result in entry.steps.values() if result != _OK)
            reasons[f"its tiny configuration fails on the CPU too: {failure}"].append(entry.family)
    lines = ["", "## Not compared", "", "| reason | families |", "|---|---|"]
    return lines + [f"| {_cell(reason)} | {', '.join(sorted(names))} |" for reason, names in reasons.items()]


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) < 140 else text[:137] + "..."
