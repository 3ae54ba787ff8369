"""How much more fits on the same card: the largest batch, model or volume, plain and planned.

    python studies/headline.py [--only NAME ...] [--json FILE] [--fresh]

Workloads of examples/plans on a virtual card. *Plain* is the largest that fits without a change, *planned* the largest
for which a plan was found and run within the same budget. Batches are in one piece: with micro-batching there would be
no largest. Models grow by layers, with the techniques of the plan under examples/plans. Finished rows are kept in
build/headline.jsonl, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import runpy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from study_files import keep, kept

from vramfit import Plan, Workload
from vramfit.gpus import find_gpu
from vramfit.planner.devices.cost import step_cost_with
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.largest_size import CEILING, SizeSearch, search_for
from vramfit.planner.plans import NothingFits, PlanRequest
from vramfit.searching.largest import doubled_from, largest_where
from vramfit.techniques import Numerics
from vramfit.units import format_bytes, parse_bytes
from vramfit.writing import write_text

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "headline.jsonl"
PLANS = ROOT / "examples" / "plans"
WORKLOADS = runpy.run_path(str(PLANS / "workloads.py"))
GPU = "RTX 4090"
HOST = parse_bytes("128GiB")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Something that grows within a budget.

    Attributes:
        name: of the workload.
        grows: the size, or ``layers``.
        budget: of the card.
        start: where the search begins.
        numerics: how far results may differ.
    """

    name: str
    grows: str
    budget: str
    start: int
    numerics: str


CASES = (
    Case(name="bert_large", grows="batch_size", budget="12GiB", start=8, numerics="rounding"),
    Case(name="unet_3d", grows="side", budget="18GiB", start=256, numerics="precision"),
    Case(name="llama_7b", grows="layers", budget="24GiB", start=8, numerics="precision"),
    Case(name="gpt2_xl", grows="layers", budget="16GiB", start=24, numerics="precision"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What fits.

    Attributes:
        name: of the workload.
        grows: what does.
        budget: of the card.
        plain: the largest without a plan; 0 if nothing fits.
        planned: the largest with one.
        techniques: of that plan.
    """

    name: str
    grows: str
    budget: str
    plain: int
    planned: int
    techniques: tuple[str, ...]


def device() -> VirtualBackend:
    """The card."""
    return VirtualBackend(find_gpu(GPU), alloc_conf="", host_bytes=HOST)


def by_size(case: Case, say: Say) -> Row:
    """A size of the batch that grows."""
    workload, limit = WORKLOADS[case.name], parse_bytes(case.budget)
    sizes = {**workload.sizes, case.grows: case.start}
    plain = SizeSearch(device(), workload, sizes, case.grows, limit, say).largest().value
    request = PlanRequest(
        workload=workload,
        sizes={**sizes, case.grows: max(1, plain)},
        budget_bytes=limit,
        host_bytes=HOST,
        numerics=Numerics(case.numerics),
        objective=case.grows,
        entries=False,
    )
    try:
        plan = search_for(device(), request, say)[1]
    except NothingFits:
        return _row(case, plain, 0, ())
    return _row(case, plain, plan.aim.sizes[case.grows], tuple(choice.words for choice in plan.choices))


def by_layers(case: Case, say: Say) -> Row:
    """A model that grows, a batch of one sequence."""
    plan = Plan.load(PLANS / f"{case.name}.toml")
    # What names blocks, or cuts the batch, belongs to one depth and one batch.
    choices = tuple(c for c in plan.choices if not _names_blocks(c.setting) and c.name != "micro-batching")
    limit = parse_bytes(case.budget)

    def fits(with_plan: bool) -> Callable[[int], bool]:
        def fit(layers: int) -> bool:
            say(f"{case.name}, {layers} layers, {'planned' if with_plan else 'plain'}")
            workload = deep(case.name, layers)
            sizes = {**workload.sizes, "batch_size": 1}
            chosen = choices if with_plan else ()
            return step_cost_with(device(), workload, chosen, sizes, limit).fits

        return fit

    plain, planned = (
        largest_where(fits(with_plan), doubled_from(case.start, CEILING)).value for with_plan in (False, True)
    )
    return _row(case, plain, planned, tuple(choice.words for choice in choices))


def deep(name: str, layers: int) -> Workload:
    """The workload with so many layers."""
    workload = WORKLOADS[name]
    return replace(workload, model=lambda: WORKLOADS["llama" if name == "llama_7b" else "gpt2"](layers))


def _names_blocks(setting: object) -> bool:
    return bool(getattr(setting, "modules", ()) or getattr(setting, "saved", ()))


def _row(case: Case, plain: int, planned: int, techniques: tuple[str, ...]) -> Row:
    return Row(
        name=case.name,
        grows=case.grows,
        budget=case.budget,
        plain=plain,
        planned=planned,
        techniques=techniques,
    )


def show(rows: list[Row], console: Console) -> None:
    """The table."""
    table = Table(title=f"The largest that fits on a virtual {GPU} with a budget")
    for name in ("workload", "budget", "grows", "plain", "planned", "times", "techniques"):
        table.add_column(name, justify="right" if name in ("plain", "planned", "times") else "left")
    for row in rows:
        times = f"{row.planned / row.plain:.1f}" if row.plain else ""
        budget = format_bytes(parse_bytes(row.budget))
        figures = (f"{row.plain:,}", f"{row.planned:,}", times)
        table.add_row(row.name, budget, row.grows, *figures, "; ".join(row.techniques))
    console.print(table)


def main() -> None:
    """Work out what is missing, and show all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    if options.fresh:
        KEPT.unlink(missing_ok=True)
    rows = {one["name"]: Row(**one | {"techniques": tuple(one["techniques"])}) for one in kept(KEPT)}
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        for case in CASES:
            if case.name in rows or (options.only and case.name not in options.only):
                continue
            work = by_layers if case.grows == "layers" else by_size
            rows[case.name] = work(case, lambda text: bar.update(task, description=text))
            keep(KEPT, asdict(rows[case.name]))
    show([rows[case.name] for case in CASES if case.name in rows], Console(width=150))
    if options.json is not None:
        write_text(options.json, json.dumps([asdict(row) for row in rows.values()], indent=2))


if __name__ == "__main__":
    main()
