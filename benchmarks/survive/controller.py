"""Sizes for each step of a simulated training with neighbours, drifting lengths and leaks: which policy is worth what.

    python benchmarks/survive/controller.py [SEEDS] [STEPS] [POLICY]

Throughput is that of each policy as a part of that of one who knows the future. Times out of memory are counted for
1,000 steps. What is said of a neighbour that leaves is the steps until a size is 95 % of what the knowing one takes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from statistics import mean

from controller_parts.policies import POLICIES, Done, Policy
from controller_parts.simulator import Card

FULL = 0.95
SOON = 20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a policy did on a seed."""

    throughput: float
    shortages: int
    steps: int
    returns: tuple[int, ...]


def run(card: Card, policy: Policy) -> Outcome:
    tokens = seconds = best_tokens = best_seconds = 0.0
    shortages, waiting, returns = 0, None, []
    for moment in card.moments:
        best, best_mode = card.best(moment)
        best_tokens += best * moment.length
        best_seconds += card.seconds(moment, best, best_mode)
        items, mode = policy.choose(moment.room, moment.length)
        took, taken = card.seconds(moment, items, mode), card.peak(moment, items, mode)
        done = Done(items=items, mode=mode, length=moment.length, taken=taken, seconds=took)
        if moment.left:
            waiting = 0
        if waiting is not None:
            waiting += 1
            if items >= FULL * best and taken <= moment.real_room:
                returns.append(waiting)
                waiting = None
        if taken > moment.real_room:
            shortages += 1
            seconds += took * (1 + card.recovery)
            policy.ran_out(done)
        else:
            tokens, seconds = tokens + items * moment.length, seconds + took
            policy.told(done)
    return Outcome(
        throughput=tokens / seconds / (best_tokens / best_seconds),
        shortages=shortages,
        steps=len(card.moments),
        # One that left just before the end says nothing.
        returns=(*returns, *([len(card.moments)] if waiting is not None and waiting > SOON else [])),
    )


def main(seeds: int = 20, steps: int = 2000, chosen: str = "") -> None:
    print(f"{seeds} seeds of {steps} steps")
    print(f"{'policy':32} {'throughput':>10} {'least':>7} {'OOM/1000':>9} {'worst':>6} {'back at size':>13}")
    for name, make in POLICIES.items():
        if chosen not in name:
            continue
        found = [run(card := Card(seed, steps), make(card)) for seed in range(seeds)]
        returns = [one for outcome in found for one in outcome.returns]
        rates = [1000 * one.shortages / one.steps for one in found]
        print(
            f"{name:32} {mean(one.throughput for one in found):10.1%} {min(o.throughput for o in found):7.1%} "
            f"{mean(rates):9.2f} {max(rates):6.1f} "
            f"{sum(one <= SOON for one in returns):5}/{len(returns)}, max {max(returns, default=0)}",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:4])
