"""Losses of techniques that compute with fewer bits or other mathematics, beside the plain program's."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.techniques.gradients.architectures import all_architectures
from tests.techniques.gradients.running import plain, run
from tests.techniques.gradients.settings import choices

from vramfit.planner.verification import judge_losses
from vramfit.techniques import Choice, Numerics, find_technique, setting_from_plain

STEPS = 30
LEAST_FALL = 0.3
"""Part of the plain curve's fall that other mathematics has to reach: it trains, though along another curve."""

# By technique, with how a setting differs from the default: these train along the plain curve, within what
# ``vramfit verify`` allows.
ALONG: list[tuple[str, dict[str, object], tuple[str, ...]]] = [
    ("mixed-precision", {}, ("adapted", "resnet", "encoder")),
    ("mixed-precision", {"dtype": "float16"}, ("repeated",)),
    ("low-precision-training", {"float32_norms": True}, ("branches", "recurrent")),
    ("low-precision-training", {"bfloat16_states": True}, ("adapted", "repeated")),
    (
        "low-precision-training",
        {"bfloat16_states": True, "master": "stochastic-rounding"},
        ("denoiser",),
    ),
    ("tf32", {}, ("repeated",)),
    ("activation-compression", {"method": "quantized"}, ("recurrent", "encoder")),
    ("activation-compression", {"method": "quantized", "bits": 4}, ("adapted",)),
    ("low-bit-optimizer", {}, ("repeated",)),
]
# These train along another curve.
APART: list[tuple[str, dict[str, object], tuple[str, ...]]] = [
    ("activation-compression", {"method": "top-k"}, ("adapted", "encoder")),
    ("low-bit-optimizer", {"bits": "fp8"}, ("repeated",)),
    ("low-bit-optimizer", {"bits": "4"}, ("repeated",)),
    ("lean-optimizer", {}, ("recurrent", "denoiser")),
    ("lean-optimizer", {"kind": "sgd"}, ("branches",)),
    ("gradient-projection", {"rank": 8}, ("branches", "encoder")),
    ("micro-batching", {"batch_norm": "per-piece"}, ("branches", "resnet")),
]


@cache
def curves(name: str, technique: str, **fields: object) -> tuple[list[float], list[float], Numerics]:
    """Losses of the plain program and of that with a technique, and what it promises; each set of them runs once."""
    found = find_technique(technique)
    if technique == "activation-compression":
        fields = {**fields, "min_bytes": 0}
    choice = Choice(technique=found, setting=setting_from_plain(found, fields))
    workload = found.apply(all_architectures()[name].workload(), choice.setting)
    ours = run(workload, steps=STEPS).losses
    theirs = plain(name, torch.float32, STEPS, True).losses
    return list(map(float, theirs)), list(map(float, ours)), choice.promise.numerics


def cases(table: list[tuple[str, dict[str, object], tuple[str, ...]]]) -> list[object]:
    """A test for each architecture of each row."""
    return [
        pytest.param(name, technique, fields, id=f"{technique}-{'-'.join(map(str, fields.values()))}-{name}")
        for technique, fields, names in table
        for name in names
    ]


@pytest.mark.parametrize(("name", "technique", "fields"), cases(ALONG))
def test_losses_fall_along_the_plain_curve(name: str, technique: str, fields: dict[str, object]) -> None:
    theirs, ours, numerics = curves(name, technique, **fields)
    assert numerics > Numerics.ROUNDING
    assert theirs[0] - theirs[-1] > 0.1
    assert judge_losses(theirs, ours, numerics).passes


@pytest.mark.parametrize(("name", "technique", "fields"), cases(APART))
def test_losses_fall_along_a_curve_of_their_own(name: str, technique: str, fields: dict[str, object]) -> None:
    theirs, ours, numerics = curves(name, technique, **fields)
    assert numerics is Numerics.APPROXIMATE
    assert ours[0] - ours[-1] > LEAST_FALL * (theirs[0] - theirs[-1]) > 0


def test_every_technique_that_changes_more_than_rounding_has_a_curve() -> None:
    offered = {
        choice.name
        for name in ("branches", "repeated", "encoder")
        for choice in choices(name)
        if choice.promise.numerics > Numerics.ROUNDING
    }
    assert offered - {"compile"} == {technique for technique, _, _ in (*ALONG, *APART)}
