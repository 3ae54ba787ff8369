"""Techniques two by two, beside the plain program: what one does to a program, the other has to cope with."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.techniques.gradients.architectures import all_architectures
from tests.techniques.gradients.running import faults, numerics_of
from tests.techniques.gradients.settings import exact_choices

from vramfit.errors import UsageError
from vramfit.techniques import Choice, Numerics
from vramfit.techniques.core.technique import check_together

pytestmark = pytest.mark.usefixtures("late_lane")

NAMES = list(all_architectures())


def pairs(name: str) -> list[tuple[Choice, Choice]]:
    """All pairs of techniques that an architecture offers and that do not exclude each other.

    Each pair is in one of its settings; settings take turns, so that each meets some of the other techniques.
    """
    by_name: dict[str, list[Choice]] = {}
    for choice in exact_choices(name):
        by_name.setdefault(choice.name, []).append(choice)
    found = []
    for number, (first, second) in enumerate(itertools.combinations(by_name.values(), 2), NAMES.index(name)):
        pair = first[number % len(first)], second[number % len(second)]
        try:
            check_together(pair)
        except UsageError:
            continue
        found.append(pair)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_pairs_keep_the_larger_of_their_promises(name: str) -> None:
    found = pairs(name)
    assert len(found) >= 15
    broken = {}
    for pair in found:
        steps = 2 if numerics_of(pair) is Numerics.BITWISE else 1
        if wrong := faults(name, pair, steps=steps, dtype=torch.float32):
            broken[" + ".join(choice.words for choice in pair)] = wrong
    assert broken == {}


def test_what_excludes_each_other_says_so_from_either_side() -> None:
    offered = {choice.name: choice for name in NAMES for choice in exact_choices(name)}
    refused = set()
    for first, second in itertools.combinations(offered.values(), 2):
        for pair in ((first, second), (second, first)):
            try:
                check_together(pair)
            except UsageError:
                refused.add((pair[0].name, pair[1].name))
    assert refused == {(second, first) for first, second in refused}
    assert {frozenset(pair) for pair in refused} == {
        frozenset(pair)
        for pair in (
            ("micro-batching", "step-in-backward"),
            ("micro-batching", "gradient-caching"),
            ("parameter-offload", "optimizer-offload"),
            ("optimizer-kernel", "optimizer-offload"),
            ("step-in-backward", "optimizer-offload"),
        )
    }
