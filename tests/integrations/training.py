"""What the tests of plans in trainers share: plans made by hand, and the comparison of two trainings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vramfit.planner.plan_file import PlanFigures, PlanTarget
from vramfit.planner.plans import Plan, plan_of
from vramfit.techniques import Choice, find_technique, setting_from_plain

NOTHING = PlanFigures(peak_allocated_bytes=0, peak_reserved_bytes=0, total_bytes=0)
TOLERANCE = 2e-5
"""Of parameters after some steps in float32, relative and absolute: sums in another order, through Adam's division."""


def plan_with(**techniques: Mapping[str, Any]) -> Plan:
    """A plan of techniques by name, underscores for dashes, with their settings as a plan's file has them."""
    choices = []
    for name, setting in techniques.items():
        technique = find_technique(name.replace("_", "-"))
        choices.append(Choice(technique=technique, setting=setting_from_plain(technique, setting)))
    return plan_of(choices, PlanTarget(device="CPU", budget_bytes=0), NOTHING, NOTHING)


def check_same(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, exact: bool
) -> None:
    """Compare the parameters of two trainings."""
    assert list(found) == list(expected)
    tolerance = 0.0 if exact else TOLERANCE
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def check_trained(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """Make sure that a training moved many parameters by far more than the tolerance; Adafactor moves zeros little."""
    far = [bool((after[name] - value).abs().max() > 20 * TOLERANCE) for name, value in before.items()]
    assert sum(far) > len(far) / 3
