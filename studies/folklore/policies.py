"""Sayings about what chooses a step's size."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from folklore.finding import Answer, Finding

SEEDS, STEPS = 20, 2_000
POLICIES = (
    "fixed items",
    "AIMD",
    "quantile (vramfit)",
    "bandit over sizes (LinUCB)",
    "bandit over margins (Thompson)",
)


def sizes_by_learning() -> Finding:
    """Bandits beside what reads the free memory and fits the peak, on a simulated card with neighbours and leaks."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "survive"))
    try:
        import controller  # type: ignore[import-not-found]  # a script of the benchmarks
    finally:
        sys.path.pop(0)
    found: dict[str, list[Any]] = {}
    for name in POLICIES:
        cards = [controller.Card(seed, STEPS) for seed in range(SEEDS)]
        found[name] = [controller.run(card, controller.POLICIES[name](card)) for card in cards]
    throughput = {name: mean(one.throughput for one in runs) for name, runs in found.items()}
    shortages = {name: mean(1000 * one.shortages / one.steps for one in runs) for name, runs in found.items()}
    ours, sizes, margins = POLICIES[2:]
    return Finding(
        answer=Answer.WRONG,
        why="Not the two bandits that were tried: "
        f"{tenths(throughput[sizes])} and {tenths(throughput[margins])} of the throughput of one who knows the future, "
        f"where fitting the peak and keeping a quantile of its errors free has {tenths(throughput[ours])}, with "
        f"{shortages[ours]:.2f} steps in 1,000 out of memory. Memory is nearly linear in what a batch has, and what is "
        "free can be read: little is left to be found out by trying. (A simulator; one setting of each bandit, no deep "
        "policy.)",
        columns=("policy", "throughput", "worst seed", "out of memory in 1,000 steps"),
        rows=tuple(
            (
                name.replace("vramfit", "ours"),
                tenths(throughput[name]),
                tenths(min(one.throughput for one in runs)),
                f"{shortages[name]:.2f}",
            )
            for name, runs in found.items()
        ),
    )


def tenths(share: float) -> str:
    """A share of 1 in percent, with a decimal."""
    return f"{100 * share:.1f} %"
