"""Whether plans keep their word: gradients of every parameter beside the plain program's.

    python studies/plan_gradients.py                       # all workloads, exact plans and lower precision
    python studies/plan_gradients.py --only CLIP --numerics rounding
    python studies/plan_gradients.py --part kinds --kinds kinds.json
    python studies/plan_gradients.py --write docs/gradients.md

Sixty kinds of losses, masks and states (`gradient_parts/kinds.py`) are planned at two budgets each. A step is taken at
the full batch in a loop that shares nothing with the planner's comparison, and the gradients of all parameters, buffers
and what else the step wrote are compared with the plain program's.

Each workload of `gradient_parts/subjects.py` is planned for its lowest peak, with the techniques that change how
gradients come about: that uses as many of them as possible. Then a step with the plan and one without are taken for
real on the CPU, from the same seed and at the plan's own sizes, and the gradient of each parameter is compared. Where
micro-batches would be wrong, the plan's own words say why they were left out. The exit code is 3 if a gradient differs
by more than was promised, or a batch whose examples are coupled was cut under a promise of rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from gradient_parts.kinds import EXAMPLES, KINDS
from gradient_parts.single import ALONE_HEADS, STEPS, Trial, alone_cells, alone_table, trials
from gradient_parts.subjects import SUBJECTS, Subject
from gradient_parts.two_budgets import HEADS, BudgetRow, cells, rows_of
from rich.console import Console
from rich.table import Table

from vramfit.errors import VramfitError
from vramfit.gpus import find_gpu
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.devices.cpu_backend import CpuBackend
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.plans import MEMORY, Plan, PlanRequest
from vramfit.planner.verification import compare
from vramfit.techniques import Numerics
from vramfit.units import format_bytes
from vramfit.writing import write_text

LEVELS = ("rounding", "precision")

PARTS = ("kinds", "plans", "alone")

BUDGETS = """## Sixty kinds at two budgets

Losses, masks and states of a forward pass, each of its own kind ({examples} examples, fewer where a loss makes all
pairs), planned so that the part *saved* of the plain program's activations has no room. A step is taken at the full
batch in a loop of its own, which shares nothing with the planner's comparison. *Worst gradient* is the largest
difference of a parameter's gradient, *worst state* that of a buffer, a frozen parameter, a number in an attribute or a
generator, each as a part of its norm. Dropout is off where a plan cuts the batch.
"""

TECHNIQUES = {
    "rounding": (
        *("micro-batching", "gradient-caching", "activation-checkpointing", "chunked-loss"),
        *("in-place-activations", "fused-norms"),
    ),
    "precision": (
        *("mixed-precision", "low-precision-training", "low-bit-optimizer"),
        *("activation-checkpointing", "chunked-loss", "fused-norms"),
    ),
}
"""Those that change how gradients come about, for each level; the others move or step what is there. Precision is
without those that run a batch in pieces: at these sizes they win by themselves, and nothing else is tried."""

CARD = "RTX 4090"

HEAD = """# Gradients of plans

With {versions}. `python studies/plan_gradients.py --write docs/gradients.md` makes this page.
Small workloads whose gradients are easy to get wrong are planned for their lowest peak on a virtual {card} (DETR, whose
matching needs values, on the CPU), with the techniques that change how gradients are computed, and trained for a step
on the CPU at the plan's own sizes, with and without the plan. *Equal* gradients are equal bit for bit; *worst* is the
one that comes closest to its promised bound, as a fraction of its norm. *Left out* is what the plan says about a
technique that was not used because it would have been wrong or was not tried.
"""

ALONE = """## Each technique on its own

Techniques that compute with fewer bits or with other mathematics, each of their settings on its own: {steps} steps of
the same workloads, compared with as many of the plain program. *Worst gradient* is that of the first step, the largest
of any parameter of any workload, as a fraction of its norm; *allowed* is the bound that is promised for each. What an
optimizer changes shows in the losses alone: *worst loss* is the largest difference of any step, as a fraction of the
plain loss. A CPU has no TF32: the inputs of products are rounded to its 10 bits instead. Half precision is accumulated
as on a card (a CPU's layer norm adds the gradients of its weights in bfloat16, a quarter off with 16,384 rows, and a
card in float32). *Beyond* names the workloads where the technique alone exceeds what it promises: plans are compared
before they are written, and leave it out there.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One plan.

    Attributes:
        subject: the workload's name.
        numerics: what was asked for.
        techniques: of the plan.
        promise: of the plan.
        parameters: whose gradients were compared.
        equal: how many are equal, bit for bit.
        worst: difference as a part of the gradient's norm.
        worst_name: of that parameter.
        allowed: by the promise; None for anything.
        passes: whether all gradients keep the promise, and nothing was cut that must not be.
        before: bytes allocated at the peak without the plan.
        after: with it.
        left_out: what the plan says of techniques that it does not use.
        seconds: for the plan and the comparison.
    """

    subject: str
    numerics: str
    techniques: tuple[str, ...]
    promise: str
    parameters: int
    equal: int
    worst: float
    worst_name: str
    allowed: float | None
    passes: bool
    before: int
    after: int
    left_out: tuple[str, ...]
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    """Try what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="WHAT", help="workloads with these words in their names")
    parser.add_argument("--numerics", choices=LEVELS, nargs="+", default=LEVELS, help="what plans may change")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the rows; those that it has are not made anew"
    )
    parser.add_argument(
        "--part", choices=PARTS, nargs="+", default=PARTS, help="which of the three parts to run"
    )
    parser.add_argument("--kinds", type=Path, metavar="FILE", help="as --json, for the kinds at two budgets")
    parser.add_argument("--alone", type=Path, metavar="FILE", help="as --json, for each technique on its own")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page")
    options = parser.parse_args(arguments)
    wanted = [word.lower() for word in options.only or [""]]
    subjects = SUBJECTS if {"plans", "alone"} & set(options.part) else {}
    kinds = KINDS if "kinds" in options.part else {}
    names = [name for name in subjects if any(word in name.lower() for word in wanted)]
    of_kinds = [name for name in kinds if any(word in name.lower() for word in wanted)]
    if not names and not of_kinds:
        parser.error(f"no workload has such a name: there are {', '.join((*subjects, *kinds))}")
    console = Console(stderr=True)
    at_budgets = _at_budgets(of_kinds, options.kinds, console)
    known = _read(options.json)
    rows = []
    for name in names if "plans" in options.part else ():
        for level in options.numerics:
            rows.append(known.pop((name, level), None) or row_of(name, level))
            if options.json is not None:
                _write(options.json, [*known.values(), *rows])
            console.print(f"{name}, {level}: {'✓' if rows[-1].passes else '✗'} in {rows[-1].seconds:.0f} s")
    tried = []
    alone = _read_trials(options.alone)
    for name in names if "alone" in options.part else ():
        tried += alone.pop(name, None) or list(trials(name))
        if options.alone is not None:
            write_text(options.alone, json.dumps([asdict(one) for one in tried], indent=1) + "\n")
        console.print(f"{name}, each technique on its own")
    out = Console()
    if not out.is_terminal:
        out.width = 200  # a file has no edge
    if at_budgets:
        out.print(_budget_table(at_budgets))
    if rows:
        out.print(_table(rows))
    if tried:
        out.print(alone_table(tried))
    if options.write is not None:
        write_text(options.write, page(rows, tried, at_budgets))
    return 0 if all(row.passes for row in (*rows, *at_budgets)) else 3


def _at_budgets(kinds: Sequence[str], file: Path | None, console: Console) -> list[BudgetRow]:
    """The plans for some kinds at two budgets; those that a file has are not made anew."""
    known: dict[str, list[BudgetRow]] = {}
    if file is not None and file.exists():
        for row in json.loads(file.read_text(encoding="utf-8")):
            made = BudgetRow(**row | {"techniques": tuple(row["techniques"])})
            known.setdefault(made.kind, []).append(made)
    rows: list[BudgetRow] = []
    for kind in kinds:
        rows += known.pop(kind, None) or list(rows_of(kind))
        if file is not None:
            kept = [*rows, *(row for more in known.values() for row in more)]
            write_text(file, json.dumps([asdict(row) for row in kept], indent=1) + "\n")
        console.print(f"{kind}: {' '.join('✓' if row.passes else '✗' for row in rows if row.kind == kind)}")
    return rows


def _budget_table(rows: Sequence[BudgetRow]) -> Table:
    table = Table(*HEADS)
    for row in cells(rows):
        table.add_row(*row)
    return table


def _read(file: Path | None) -> dict[tuple[str, str], Row]:
    """The rows of an earlier run."""
    if file is None or not file.exists():
        return {}
    found = (
        Row(**row | {name: tuple(row[name]) for name in ("techniques", "left_out")})
        for row in json.loads(file.read_text(encoding="utf-8"))
    )
    return {(row.subject, row.numerics): row for row in found}


def _read_trials(file: Path | None) -> dict[str, list[Trial]]:
    """The trials of an earlier run, by workload."""
    found: dict[str, list[Trial]] = {}
    if file is not None and file.exists():
        for one in json.loads(file.read_text(encoding="utf-8")):
            found.setdefault(one["subject"], []).append(Trial(**one))
    return found


def _write(file: Path, rows: Iterable[Row]) -> None:
    write_text(file, json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def row_of(name: str, level: str, allowed: Iterable[str] | None = None) -> Row:
    """Plan for a workload and compare its gradients.

    Args:
        name: of the workload.
        level: of numerics.
        allowed: names of the techniques to choose from; None for `TECHNIQUES`.
    """
    began = time.perf_counter()
    subject = SUBJECTS[name]
    workload = subject.make()
    request = PlanRequest(
        workload=workload,
        sizes=workload.sizes,
        budget_bytes=find_gpu(CARD).total_bytes,
        host_bytes=1 << 34,
        numerics=Numerics.parse(level),
        objective=MEMORY,
        allowed=frozenset(TECHNIQUES[level] if allowed is None else allowed),
        time_limit=2.0,
        entries=False,
    )
    _, plan = promised_plan(_device(subject), request, lambda _text: None)
    check, _, _ = compare(workload, plan, workload.sizes, steps=1)
    return Row(
        subject=name,
        numerics=level,
        techniques=tuple(choice.name for choice in plan.choices),
        promise=plan.numerics.value,
        parameters=check.parameters,
        equal=check.equal,
        worst=check.worst,
        worst_name=check.worst_name,
        allowed=check.allowed,
        passes=check.passes and not _wrongly_cut(subject, plan),
        before=plan.before.peak_allocated_bytes,
        after=plan.after.peak_allocated_bytes,
        left_out=tuple(note for note in plan.notes if "left out" in note),
        seconds=time.perf_counter() - began,
    )


def _wrongly_cut(subject: Subject, plan: Plan) -> bool:
    return subject.couples and any(
        choice.name == "micro-batching" and choice.promise.numerics <= Numerics.ROUNDING
        for choice in plan.choices
    )


def _device(subject: Subject) -> DeviceBackend:
    if subject.on_card:
        return VirtualBackend(find_gpu(CARD), alloc_conf="", host_bytes=1 << 34)
    return CpuBackend()


def _table(rows: Sequence[Row]) -> Table:
    table = Table("workload", "asked for", "techniques", "equal", "worst", "promised", "peak")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    worst = f"{row.worst:.1e} ({row.worst_name})" if row.equal < row.parameters else "0"
    promised = "0" if row.allowed == 0 else "anything" if row.allowed is None else f"{row.allowed:g}"
    return (
        row.subject + ("" if row.passes else " ✗"),
        row.numerics,
        ", ".join(row.techniques) or "none",
        f"{row.equal} of {row.parameters}",
        worst,
        promised if row.equal < row.parameters else row.promise,
        f"{format_bytes(row.before)} → {format_bytes(row.after)}",
    )


def page(rows: Sequence[Row], tried: Sequence[Trial] = (), at_budgets: Sequence[BudgetRow] = ()) -> str:
    """The page of docs/."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    lines = [HEAD.format(versions=versions, card=CARD)]
    kept = sum(row.passes for row in rows)
    lines.append(f"{kept} of {len(rows)} plans keep their word in every gradient.\n")
    lines.append("| workload | asked for | techniques | equal | worst | promised | allocated at the peak |")
    lines.append("|---|---|---|---|---|---|---|")
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    if tried:
        lines.append("\n" + ALONE.format(steps=STEPS))
        lines.append(f"| {' | '.join(ALONE_HEADS)} |\n{'|---' * len(ALONE_HEADS)}|")
        lines += [f"| {' | '.join(cells)} |" for cells in alone_cells(tried)]
    if at_budgets:
        lines += _budget_section(at_budgets)
    lines.append("\n## Left out\n")
    said = dict.fromkeys((row.subject, note) for row in rows for note in row.left_out)
    lines += [f"- {subject}: {note}" for subject, note in said]
    return "\n".join(lines) + "\n"


def _budget_section(rows: Sequence[BudgetRow]) -> list[str]:
    planned = [row for row in rows if row.promise]
    kept = sum(row.passes for row in planned)
    kinds = len({row.kind for row in rows})
    without = len(rows) - len(planned)
    return [
        "\n" + BUDGETS.format(examples=f"{EXAMPLES:,}"),
        f"{kept} of {len(planned)} plans for {kinds} kinds keep their word; at {without} budgets nothing fits.\n",
        f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|",
        *(f"| {' | '.join(row)} |" for row in cells(rows)),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        sys.exit(main())
    except VramfitError as error:
        sys.exit(f"{error}")
