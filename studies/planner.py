"""How long `vramfit plan` takes for models that people train: seconds to the first plan, and to the end.

    python studies/planner.py [--only NAME ...] [--source FOLDER] [--json FILE] [--seconds N]
    python studies/planner.py --before ROWS.json --after ROWS.json --write docs/planner-speed.md

Each case is planned for in a process of its own, one after the other, with nothing remembered of earlier searches.
`--source` takes vramfit from another folder, for a comparison with another revision. Goals: a first plan within 60 s,
the end within 5 minutes, on two cores. The exit code is 3 where a case misses one. *CPU* is the processor's time, which
says more than the clock's on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vramfit.units import format_bytes
from vramfit.writing import write_text

WORKLOADS = Path(__file__).resolve().parent / "planner_parts" / "workloads.py"
HOST = "64GiB"
FIRST, END = 60.0, 300.0
"""Seconds: the goals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan that is asked for."""

    name: str
    gpu: str
    budget: str
    numerics: str = "rounding"


CASES = (
    Case(name="llama_3_8b_lora", gpu="RTX 4090", budget="24GiB"),
    Case(name="sdxl_unet", gpu="A100 80GB", budget="60GiB"),
    Case(name="sdxl_unet", gpu="RTX 4090", budget="24GiB", numerics="precision"),
    Case(name="whisper_large", gpu="A100 40GB", budget="40GiB"),
    Case(name="gpt2_xl", gpu="A100 80GB", budget="40GiB"),
    Case(name="gpt2_xl", gpu="RTX 4090", budget="16GiB", numerics="precision"),
    Case(name="dit_xl", gpu="RTX 4090", budget="24GiB"),
    Case(name="convnext_large", gpu="RTX 4090", budget="24GiB"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of a case.

    Attributes:
        case: it.
        first: seconds to the first plan, since the search began; None without one, or where that is not told.
        end: seconds to the end, all in all.
        cpu: seconds of processors.
        runs: on the virtual card.
        gap: of the solver.
        total: bytes of the plan.
        step: its seconds of a step.
        techniques: their names.
        failed: why there is no plan; empty where there is one.
    """

    case: Case
    first: float | None
    end: float
    cpu: float
    runs: int = 0
    gap: float | None = None
    total: int = 0
    step: float = 0.0
    techniques: tuple[str, ...] = ()
    failed: str = ""

    @property
    def within_goals(self) -> bool:
        """Whether there was a plan soon, and the end in time."""
        return not self.failed and self.end <= END and (self.first is None or self.first <= FIRST)


def planned(case: Case, *, source: Path | None = None, seconds: float = 900.0) -> Row:
    """Plan for a case; what takes longer than so many seconds is ended."""
    command = [sys.executable, "-m", "vramfit", "plan", f"{WORKLOADS}:{case.name}"]
    command += ["--gpu", case.gpu, "--budget", case.budget, "--host-budget", HOST]
    command += ["--numerics", case.numerics, "--json", "-"]
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "VRAMFIT_CACHE_DIR": cache, "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}
        if source is not None:
            environ["PYTHONPATH"] = str(source)
        began, worked = time.perf_counter(), _worked()
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, env=environ, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            cpu = _worked() - worked
            return Row(case=case, first=None, end=seconds, cpu=cpu, failed=f"more than {seconds:.0f} s")
        end, cpu = time.perf_counter() - began, _worked() - worked
    try:
        return row_of(case, json.loads(ran.stdout), end, cpu)
    except ValueError:
        lines = [line for line in ran.stderr.splitlines() if line.strip()] or ["nothing was said"]
        return Row(case=case, first=None, end=end, cpu=cpu, failed=" ".join(lines[-2:]))


def _worked() -> float:
    """Seconds of processors that children took which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row_of(case: Case, plan: Mapping[str, Any], end: float, cpu: float) -> Row:
    """The row of a plan as JSON."""
    solved = plan["solved"]
    return Row(
        case=case,
        first=solved.get("first_plan_seconds"),
        end=end,
        cpu=cpu,
        runs=solved["runs"],
        gap=solved["gap"],
        total=plan["after"]["total_bytes"],
        step=plan["after"]["step_seconds"],
        techniques=tuple(one["name"] for one in plan["techniques"]),
        failed="" if plan["fits"] else "nothing fits",
    )


def table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    shown = Table(
        "model", "card, budget, numerics", "first plan", "end", "CPU", "runs", "gap", "step", "total", "plan"
    )
    for row in rows:
        case = row.case
        shown.add_row(
            case.name,
            f"{case.gpu}, {case.budget}, {case.numerics}",
            "" if row.first is None else f"{row.first:.0f} s",
            f"{row.end:.0f} s",
            f"{row.cpu:.0f} s",
            str(row.runs),
            "" if row.gap is None else f"{row.gap:.2%}",
            f"{row.step:.3f} s" if row.step else "",
            format_bytes(row.total) if row.total else "",
            row.failed or ", ".join(row.techniques),
        )
    return shown


_PAGE = """# How long a plan takes

`python studies/planner.py` plans for models that people train, with their published configurations: one after the
other, each in a process of its own, with nothing remembered from earlier searches, for at most {limit:.0f} s. Goals: a
first plan within {first:.0f} s, the end within {end:.0f} s on two cores. *CPU* is processor time. *Before* is
revision {revision}, which did not report a first plan and is not held to the goals. {note}

- **First plan**: seconds until a plan was known to keep the budget; a search that is stopped then returns that plan.
- **Step**: simulated seconds of a step with the plan, as reported by the revision itself: how copies over the link and
  repeated work are charged has changed between the two.

{rows}"""


def page(before: Sequence[Row], after: Sequence[Row], *, revision: str, limit: float, note: str = "") -> str:
    """The two beside each other, as markdown."""
    known = {_name(row): row for row in before}
    heads = ("model", "card, budget, numerics", "", "first plan", "end", "CPU", "runs", "step", "plan")
    lines = ["| " + " | ".join(heads) + " |", "|---|---|---|---:|---:|---:|---:|---:|---|"]
    for row in after:
        case = row.case
        told = (case.name, f"{case.gpu}, {case.budget}, {case.numerics}")
        if (old := known.get(_name(row))) is not None:
            lines.append("| " + " | ".join((*told, "before", *_figures(old))) + " |")
            told = ("", "")
        lines.append("| " + " | ".join((*told, "now", *_figures(row))) + " |")
    return _PAGE.format(
        first=FIRST,
        end=END,
        revision=revision,
        limit=limit,
        note=note,
        rows="\n".join(lines) + "\n",
    )


def _name(row: Row) -> tuple[str, str, str, str]:
    case = row.case
    return case.name, case.gpu, case.budget, case.numerics


def _figures(row: Row) -> tuple[str, ...]:
    """The cells of a row that differ from revision to revision."""
    return (
        "" if row.first is None else f"{row.first:.0f} s",
        f"{row.end:.0f} s",
        "" if row.failed else f"{row.cpu:.0f} s",
        str(row.runs or ""),
        f"{row.step:.2f} s" if row.step else "",
        row.failed or ", ".join(row.techniques),
    )


def rows_from(file: Path) -> list[Row]:
    """Rows as `--json` writes them."""
    told = json.loads(file.read_text(encoding="utf-8"))
    return [
        Row(**{**one, "case": Case(**one["case"]), "techniques": tuple(one["techniques"])}) for one in told
    ]


def main(arguments: list[str] | None = None) -> int:
    """Plan for what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted({case.name for case in CASES})
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=", ".join(names))
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="vramfit's src of another revision")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--seconds", type=float, default=900.0, help="the longest that a case may take")
    parser.add_argument("--before", type=Path, metavar="FILE", help="rows of an earlier revision")
    parser.add_argument("--after", type=Path, metavar="FILE", help="rows to take in place of new ones")
    parser.add_argument("--revision", default="c3f5cc0", help="the earlier one")
    parser.add_argument("--note", default="", metavar="TEXT", help="what the page says of the measurement")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write a page of both")
    options = parser.parse_args(arguments)
    console = Console()
    rows = [] if options.after is None else rows_from(options.after)
    for case in CASES:
        if options.after is not None or (options.only and case.name not in options.only):
            continue
        rows.append(planned(case, source=options.source, seconds=options.seconds))
        console.print(table(rows[-1:]))
    console.print(table(rows))
    if options.json is not None:
        write_text(options.json, json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if options.write is not None:
        before = [] if options.before is None else rows_from(options.before)
        told = page(before, rows, revision=options.revision, limit=options.seconds, note=options.note)
        write_text(options.write, told)
    return 0 if all(row.within_goals for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
