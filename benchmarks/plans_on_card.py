"""Plans on a card: what they promise of memory and time beside what is measured, and beside full checkpointing.

    python benchmarks/plans_on_card.py [--only NAME ...] [--plans DIR] [--json FILE]
    python benchmarks/plans_on_card.py --plan-for H200    makes the plans alone, which needs no card
    python benchmarks/plans_on_card.py --gpu H200 ...     the virtual GPU takes the card's place, to test the machinery

Workloads of examples/plans are planned for this machine's card within a budget far below it, then trained on it for
real under ``torch.cuda.set_per_process_memory_fraction``, each in a process of its own. Full checkpointing is the same
plan with every block recomputed in place of what the plan chose for activations; it may have the whole card. Plans are
kept in a folder (`--plans`), so that a run that was stopped goes on and a card is held for the measuring alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

from vramfit import Plan
from vramfit.errors import VramfitError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.planner import asking
from vramfit.planner.plan_file import PlanStep
from vramfit.planner.planner_job import MemoryBudget
from vramfit.planner.planner_run import measure_in_child
from vramfit.planner.verification import CardRun
from vramfit.planner.verify_questions import AskedRun
from vramfit.techniques import Choice, find_technique
from vramfit.techniques.activation_checkpointing import Checkpointing
from vramfit.units import format_bytes, parse_bytes
from vramfit.writing import write_text

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "build" / "plans-on-card"
ACTIVATIONS = ("activation-checkpointing", "activation-offload", "activation-compression")
"""Techniques in whose place full checkpointing stands."""

PEAK_ERROR = 0.01
"""By how much a measured peak may be off."""

PROBE = "import torch; print(torch.cuda.get_device_name(0))"
STAND_IN = """
import sys
from vramfit.gpus import find_gpu
from vramfit.files import Writes
from vramfit.options.run_options import RunOptions
from vramfit.virtual.virtual_run import run_in_child
sys.exit(run_in_child(sys.argv[2:], RunOptions(gpu=find_gpu(sys.argv[1]), writes=Writes.REAL)).exit_code)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A workload and what it may take.

    Attributes:
        name: of the case.
        target: the workload, as ``FILE.py:NAME``.
        budget: bytes of the card, the context included.
        numerics: how far results may differ.
    """

    name: str
    target: str
    budget: int
    numerics: str = "precision"


def _case(name: str, budget: str) -> Case:
    target = f"{ROOT / 'examples' / 'plans' / 'workloads.py'}:{name}"
    return Case(name=name, target=target, budget=parse_bytes(budget))


CASES = (_case("bert_large", "12GiB"), _case("unet_3d", "18GiB"), _case("gpt2_xl", "16GiB"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of a case. Sizes are bytes of the card, the context included.

    Attributes:
        name: of the case.
        card: on which it ran.
        budget: that it had.
        planned_bytes: the plan's peak.
        measured_bytes: the peak on the card.
        peak_error: of the peak of reserved bytes, as a part of the planned one.
        fits: whether it ran within the budget.
        planned_seconds: of a step, estimated.
        measured_seconds: of a step, the median of some.
        full_bytes: full checkpointing's peak on the card.
        full_seconds: full checkpointing's step there; 0 where it does not fit the card, or cannot be applied.
        techniques: of the plan, in words.
        note: what a reader should know.
    """

    name: str
    card: str
    budget: int
    planned_bytes: int
    measured_bytes: int
    peak_error: float
    fits: bool
    planned_seconds: float
    measured_seconds: float
    full_bytes: int
    full_seconds: float
    techniques: tuple[str, ...]
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it fits, as planned, and is no slower than full checkpointing."""
        slower = 0 < self.full_seconds < self.measured_seconds
        return self.fits and abs(self.peak_error) <= PEAK_ERROR and not slower


def plan_for(case: Case, gpu: GpuSpec, folder: Path) -> Path:
    """The plan's file, found anew unless there is one for the same card and budget.

    Raises:
        VramfitError: nothing fits, or the workload fails.
    """
    file = folder / f"{case.name}.toml"
    if file.exists():
        aim = Plan.load(file).aim
        if (aim.device, aim.budget_bytes, aim.target) == (gpu.name, case.budget, case.target):
            return file
    import vramfit

    vramfit.plan(case.target, gpu=gpu, budget=case.budget, numerics=case.numerics).save(file)
    return file


def fully_checkpointed(plan: Plan) -> Plan:
    """The same plan, but every block is recomputed."""
    whole = Choice(technique=find_technique("activation-checkpointing"), setting=Checkpointing())
    others = (choice for choice in plan.choices if choice.name not in ACTIVATIONS)
    return replace(plan, entries=tuple(PlanStep(choice=choice) for choice in (*others, whole)))


def measured(case: Case, gpu: GpuSpec, folder: Path) -> Row:
    """Plan a case and run it on the card, then full checkpointing.

    Raises:
        VramfitError: there is no plan, or it cannot be run.
    """
    file = plan_for(case, gpu, folder)
    plan = Plan.load(file)
    room = MemoryBudget(gpu=gpu, budget=case.budget)
    limit = plan.aim.budget_bytes - plan.aim.margin_bytes
    card, ours = _on_card(case, room, file, plan, limit)
    full_file = folder / f"{case.name}-full-checkpointing.toml"
    fully_checkpointed(plan).save(full_file)
    note = ""
    try:
        _, full = _on_card(case, room, full_file, plan, None)
    except VramfitError as error:
        full, note = None, f"full checkpointing: {error.message}"
    else:
        note = f"full checkpointing: {full.oom}" if full.oom else ""
    return Row(
        name=case.name,
        card=card,
        budget=case.budget,
        planned_bytes=plan.after.total_bytes,
        measured_bytes=ours.figures.total_bytes,
        peak_error=ours.figures.peak_reserved_bytes / plan.after.peak_reserved_bytes - 1,
        fits=ours.fits,
        planned_seconds=plan.after.step_seconds,
        measured_seconds=ours.figures.step_seconds,
        full_bytes=0 if full is None else full.figures.total_bytes,
        full_seconds=0.0 if full is None else full.figures.step_seconds,
        techniques=tuple(choice.words for choice in plan.choices),
        note=note or ours.oom,
    )


def _on_card(
    case: Case, room: MemoryBudget, file: Path, plan: Plan, limit: int | None
) -> tuple[str, CardRun]:
    asked = AskedRun(name=case.name, plan=str(file), sizes=plan.aim.sizes, limit=limit)
    made = measure_in_child(case.target, room, [asked], card=True)
    return made.card, made.runs[0]


@contextlib.contextmanager
def in_place_of_the_card(gpu: GpuSpec) -> Iterator[None]:
    """Let children that ask for the card have a virtual one."""
    plain = asking.child_command

    def command(folder: Path, device: str) -> list[str]:
        if device != "card":
            return plain(folder, device)
        return [
            sys.executable,
            "-P",
            "-c",
            STAND_IN,
            gpu.name,
            "-m",
            "vramfit.planner.planner_child",
            str(folder),
        ]

    with patch.object(asking, "child_command", command):
        yield


def table(rows: Sequence[Row]) -> str:
    """The rows as people read them."""
    head = (
        "workload",
        "budget",
        "planned",
        "measured",
        "reserved",
        "step planned",
        "measured",
        "full checkpointing",
        "holds",
    )
    body = [
        (
            row.name,
            format_bytes(row.budget),
            format_bytes(row.planned_bytes),
            format_bytes(row.measured_bytes),
            f"{row.peak_error:+.2%}",
            f"{row.planned_seconds:.3f} s",
            f"{row.measured_seconds:.3f} s",
            "-" if not row.full_seconds else f"{row.full_seconds:.3f} s, {format_bytes(row.full_bytes)}",
            "yes" if row.holds else "no",
        )
        for row in rows
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    rule = "|" + "|".join("---:" if index else "---" for index in range(len(head))) + "|"
    return "\n".join((lines[0], rule, *lines[1:]))


def card_name() -> str | None:
    """The card of this machine, None without one; asked in a child, which alone wakes it up."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[-1] if done.returncode == 0 else None


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument(
        "--only", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--plans", type=Path, default=PLANS, metavar="DIR", help="where plans are kept")
    parser.add_argument("--plan-for", metavar="CARD", help="make the plans for a card and leave; needs none")
    parser.add_argument("--gpu", metavar="NAME", help="let the virtual GPU take the card's place")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON too")
    return parser.parse_args()


def main() -> int:
    """Measure; exit code 2 without a card, 1 if a plan does not hold."""
    options = parse()
    stand_in = options.plan_for or options.gpu
    name = stand_in or card_name()
    if name is None:
        print(
            "PyTorch sees no CUDA card on this machine, so no plan can be run on one. --gpu NAME lets the virtual GPU "
            "take its place, which tests the machinery and proves nothing; --plan-for CARD makes the plans.",
            file=sys.stderr,
        )
        return 2
    try:
        gpu = find_gpu(name)
    except VramfitError as error:
        print(f"{error.message}. {error.hint}", file=sys.stderr)
        return 2
    cases = [case for case in CASES if case.name in options.only]
    return measure_all(
        cases,
        gpu,
        options.plans,
        virtual=options.gpu is not None,
        only_plan=bool(options.plan_for),
        out=options.json,
    )


def measure_all(
    cases: Sequence[Case],
    gpu: GpuSpec,
    plans: Path,
    *,
    virtual: bool,
    only_plan: bool = False,
    out: Path | None = None,
) -> int:
    """Print the table of some cases; 0 where all hold."""
    folder = plans / gpu.name.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    rows, failed = [], 0
    with in_place_of_the_card(gpu) if virtual else contextlib.nullcontext():
        for case in cases:
            try:
                if only_plan:
                    print(f"{case.name}: {plan_for(case, gpu, folder)}", flush=True)
                    continue
                rows.append(measured(case, gpu, folder))
                print(f"{case.name}: {', '.join(rows[-1].techniques)}", flush=True)
            except VramfitError as error:
                failed += 1
                print(f"{case.name}: {error.message}. {error.hint}", flush=True)
    if rows:
        where = f"the virtual {gpu.name} in the place of a card: no evidence" if virtual else rows[0].card
        print(f"\n{where}\n\n{table(rows)}")
        for row in rows:
            if row.note:
                print(f"{row.name}: {row.note}")
    if out is not None:
        told = [asdict(row) | {"holds": row.holds} for row in rows]
        write_text(out, json.dumps({"virtual": virtual, "rows": told}, indent=1) + "\n")
    return 0 if not failed and all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
