"""Plans beside what people do in two minutes: ten networks at four budgets, by the simulated seconds of a step.

    python studies/hand_recipes.py [--only NETWORK ...] [--seconds N] [--fresh] [--write docs/recipes.md]

By hand: full checkpointing of the blocks, of every second one, torch's selective checkpointing, two and four
micro-batches, expandable segments, and pairs of checkpointing and micro-batches; each applied and run on the virtual
card with the budget as its memory. Nothing here is the planner's own list. Budgets lie 10, 30, 55 and 80 % of the way
from the lowest peak by hand to that of the plain program. A plan may do what promises rounding at most, and has
`--seconds` of a core for its search, with the comparison of its gradients in them.

Each network is worked out in a process of its own, and kept under build/hand_recipes at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from recipe_parts.networks import Network, networks
from rich.console import Console
from study_files import keep, kept, markdown_table
from torch import nn

from vramfit import Workload
from vramfit.gpus import find_gpu
from vramfit.launch.tasks import Task, run_all
from vramfit.planner.candidates import key_of
from vramfit.planner.devices.cost import StepCost, step_cost_with
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.plans import NothingFits, PlanRequest
from vramfit.planner.search_clock import SearchClock
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import (
    AppliedWorkload,
    Choice,
    Numerics,
    Profile,
    find_technique,
    setting_from_plain,
)
from vramfit.writing import write_text

RESULTS = Path(__file__).resolve().parent.parent / "build" / "hand_recipes" / "rows.jsonl"
CARD = find_gpu("RTX 4090")
SHARES = (0.1, 0.3, 0.55, 0.8)
"""Where budgets lie between the lowest peak by hand and the plain one."""

SECONDS = 30.0
"""Of each search."""

IMPORTS = ("vramfit.planner.planner_child", "vramfit.virtual.gpu")

_EQUAL = 1e-6
"""Part of a step by which two sums of the same operations may differ."""


def _choice(name: str, **setting: object) -> Choice:
    technique = find_technique(name)
    return Choice(technique=technique, setting=setting_from_plain(technique, setting))


def recipes() -> dict[str, tuple[Choice, ...]]:
    """What people do, by name."""
    checkpointed = {
        "full": _choice("activation-checkpointing", mode="whole"),
        "every second": _choice("activation-checkpointing", mode="every", every=2),
        "selective": _choice("activation-checkpointing", mode="selective", save={"*": ["expensive"]}),
    }
    cut = {f"{count} pieces": _choice("micro-batching", count=count) for count in (2, 4)}
    found = {name: (choice,) for name, choice in (checkpointed | cut).items()}
    found["expandable"] = (_choice("allocator-settings", conf="expandable_segments:True"),)
    for first, one in checkpointed.items():
        for second, other in cut.items():
            found[f"{first}, {second}"] = (one, other)
    return found


class Remembering(VirtualBackend):
    """A card on which a workload runs once with each set of techniques: other budgets see the same runs."""

    def __init__(self) -> None:
        super().__init__(CARD, alloc_conf="", host_bytes=32 << 30, own_process=True)
        self._costs: dict[Any, StepCost] = {}
        self._profiles: dict[Any, tuple[Profile, StepProfile]] = {}

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        """See `DeviceBackend.step_cost`."""
        key = (*_key(workload, sizes), budget)
        if key not in self._costs:
            self._costs[key] = super().step_cost(workload, sizes, budget)
        return self._costs[key]

    def profile_step(
        self, workload: Workload, sizes: dict[str, int], places: Callable[[nn.Module], Sequence[str]]
    ) -> tuple[Profile, StepProfile]:
        """See `DeviceBackend.profile_step`."""
        key = (*_key(workload, sizes), places.__name__)
        if key not in self._profiles:
            self._profiles[key] = super().profile_step(workload, sizes, places)
        return self._profiles[key]


def _key(workload: Workload, sizes: dict[str, int]) -> tuple[Any, ...]:
    choices = workload.choices if isinstance(workload, AppliedWorkload) else ()
    return key_of(choices), tuple(sizes.items())


def by_hand(device: VirtualBackend, network: Network) -> dict[str, StepCost]:
    """What each recipe that can be applied takes on a card without a limit; the plain program as ``plain``."""
    workload, found = network.workload, {}
    for name, choices in {"plain": (), **recipes()}.items():
        try:
            found[name] = step_cost_with(device, workload, choices, workload.sizes, None)
        except Exception as error:  # a recipe that this network does not take
            print(f"{name}: {error}", file=sys.stderr)
    return found


def best_by_hand(
    device: VirtualBackend, network: Network, costs: dict[str, StepCost], budget: int
) -> tuple[str, StepCost] | None:
    """The quickest recipe that runs within a budget; None where none does."""
    workload, fitting = network.workload, {}
    for name, choices in {"plain": (), **recipes()}.items():
        cost = costs.get(name)
        if cost is None or cost.peak_allocated_bytes + cost.outside_bytes > budget:
            continue
        if cost.total_bytes > budget:  # it may fit where caches are emptied
            cost = step_cost_with(device, workload, choices, workload.sizes, budget)
        if cost.fits:
            fitting[name] = cost
    name = min(fitting, key=lambda one: fitting[one].step_seconds, default=None)
    return None if name is None else (name, fitting[name])


def rows_of(name: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The rows of a network: a budget each."""
    torch.set_num_threads(1)
    network = networks()[name]
    device = Remembering()
    costs = by_hand(device, network)
    high, low = costs["plain"].total_bytes, min(cost.total_bytes for cost in costs.values())
    for share in SHARES:
        budget = round(low + share * (high - low))
        hand = best_by_hand(device, network, costs, budget)
        request = PlanRequest(
            workload=network.workload,
            sizes=dict(network.workload.sizes),
            budget_bytes=budget,
            host_bytes=32 << 30,
            numerics=Numerics.ROUNDING,
            search_seconds=seconds,
        )
        began = time.process_time()
        try:
            # Of the processor, not of the wall: others may be at work on the machine.
            clock = SearchClock(limit=seconds, now=time.process_time)
            _, plan = promised_plan(device, request, lambda _text: None, clock)
        except NothingFits as error:
            plan = error.plan
        yield {
            "network": name,
            "share": share,
            "budget": budget,
            "plain": high,
            "hand": None if hand is None else hand[0],
            "hand_seconds": None if hand is None else hand[1].step_seconds,
            "plain_seconds": costs["plain"].step_seconds,
            "fits": plan.fits,
            "plan_seconds": plan.after.step_seconds,
            "plan": [choice.words for choice in plan.choices],
            "first": plan.solved.first_plan_seconds,
            "runs": plan.solved.runs,
            "seconds": time.process_time() - began,
        }


def keep_rows(name: str, seconds: float, file: Path) -> None:
    """Work out the rows of a network and keep each at once, in this process alone."""
    for row in rows_of(name, seconds):
        keep(file, row)


def work_out(wanted: Sequence[str], seconds: float) -> None:
    """Work out the networks of which rows are missing.

    Raises:
        SystemExit: one failed.
    """
    tasks = (
        Task(key=name, function=keep_rows, arguments=(name, seconds, RESULTS))
        for name in wanted
        if sum(row["network"] == name for row in kept(RESULTS)) < len(SHARES)
    )
    for result in run_all(tasks, imports=IMPORTS):
        if not result.has_value:
            raise SystemExit(f"{result.key}: {result.failure}")


HEADS = ("network", "budget", "best by hand", "its step", "step of the plan", "difference", "search", "plan")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row for people."""
    hand, planned = row["hand_seconds"], row["plan_seconds"]
    difference = "" if hand is None or not row["fits"] else f"{100 * (planned / hand - 1):+.1f} %"
    return (
        networks()[row["network"]].title,
        f"{row['budget'] / (1 << 20):,.0f} MiB",
        row["hand"] or "none fits",
        "" if hand is None else f"{1e3 * hand:.2f} ms",
        f"{1e3 * planned:.2f} ms" if row["fits"] else "nothing found",
        difference,
        f"{row['seconds']:.0f} s",
        "; ".join(row["plan"]) or "nothing to change",
    )


def is_worse(row: dict[str, Any]) -> bool:
    """Whether a plan is slower than a recipe, or missing where one fits."""
    hand = row["hand_seconds"]
    if hand is None:
        return False
    return not row["fits"] or row["plan_seconds"] > hand * (1 + _EQUAL)


_PAGE = """# Plans beside what people do by hand

`python studies/hand_recipes.py --write docs/{name}` makes this page: ten networks, trained in float32 with AdamW on
a virtual {card}, at four budgets each. *By hand*: full checkpointing of the blocks, checkpointing of every second
block, torch's selective checkpointing (products, convolutions and attention are kept), two and four micro-batches,
expandable segments, and pairs of checkpointing and micro-batches; the quickest that runs within the budget counts.
The networks with batch norm are cut by no plan, since that is more than rounding, nor by hand. Steps are simulated;
a plan had {seconds:.0f} s of one core for its search, with the comparison of its gradients in them. The four
searches of a network share their runs, and those by hand.

{verdict}

"""


def page(rows: Sequence[dict[str, Any]], seconds: float, name: str) -> str:
    """The page as markdown."""
    compared = [row for row in rows if row["hand_seconds"] is not None]
    worse = sum(map(is_worse, rows))
    changes = sorted(row["plan_seconds"] / row["hand_seconds"] - 1 for row in compared if row["fits"])
    middle = 100 * changes[len(changes) // 2] if changes else 0.0
    verdict = (
        f"{len(compared) - worse} of {len(compared)} plans are no slower than the best by hand, {worse} are slower; "
        f"the median difference is {middle:+.1f} %."
    )
    text = _PAGE.format(name=name, card=CARD.name, seconds=seconds, verdict=verdict)
    right = set(HEADS) - {"network", "best by hand", "plan"}
    return text + "\n".join(markdown_table(HEADS, map(cells, rows), right=right)) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Work out what the command line names; returns the exit code: 3 if a plan is slower than a recipe."""
    known = networks()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NETWORK", choices=sorted(known), help=", ".join(known))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each search")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the page")
    options = parser.parse_args(arguments)
    if options.fresh:
        RESULTS.unlink(missing_ok=True)
    wanted = options.only or list(known)
    console = Console(width=180)
    work_out(wanted, options.seconds)
    rows = [json.loads(line) for line in {json.dumps(row) for row in kept(RESULTS)}]
    rows = sorted(
        (row for row in rows if row["network"] in wanted),
        key=lambda row: (wanted.index(row["network"]), row["share"]),
    )
    for row in rows:
        console.print(" | ".join(cells(row)[:-1]), markup=False, highlight=False)
    if options.write is not None:
        write_text(options.write, page(rows, options.seconds, options.write.name))
    return 3 if any(map(is_worse, rows)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
