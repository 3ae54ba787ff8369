"""Between the program's decisions and the techniques that carry them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from vramfit.planner.activation_ilp.decisions import Decision, DecisionKind, kept_results
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import Choice, find_technique
from vramfit.techniques.activation_checkpointing import setting_for
from vramfit.techniques.activation_offload import ActivationOffloadSetting
from vramfit.techniques.support.blocks import find_blocks
from vramfit.techniques.support.rerunning import reason_against_rerun

_LEAST_WINDOW = 1 << 20

_LAYERS = 400
"""Of a model whose results are decided on one by one; with more there are too many for the solver."""


def places(model: nn.Module) -> Sequence[str]:
    """The paths of a model's blocks."""
    return [place.path for place in find_blocks(model)]


def finer_places(model: nn.Module) -> Sequence[str]:
    """The model as a whole, whose results are then decided on one by one; of a large one, the parts of its blocks."""
    layers = sum(1 for module in model.modules() if next(module.children(), None) is None)
    if layers <= _LAYERS and reason_against_rerun(model) is None:
        return [""]
    found: list[str] = []
    for place in find_blocks(model):
        found += place.parts or (place.path,)
    return found


def window_bytes(step: StepProfile) -> int:
    """The window through which activations go to the host: what two blocks keep, within bounds."""
    most = max((block.kept_bytes for block in step.blocks), default=0)
    return min(max(2 * most, _LEAST_WINDOW), ActivationOffloadSetting().window)


def activation_choices(step: StepProfile, decisions: Mapping[str, Decision]) -> tuple[Choice, ...]:
    """The techniques that carry decisions out."""
    choices = []
    recomputed = {
        block.path: kept_results(block, decisions[block.path].saved)
        for block in step.blocks
        if block.path in decisions and decisions[block.path].kind is DecisionKind.RECOMPUTE
    }
    offloaded = tuple(path for path, decision in decisions.items() if decision.kind is DecisionKind.OFFLOAD)
    if recomputed:
        setting = setting_for(recomputed, step.blocks)
        choices.append(Choice(technique=find_technique("activation-checkpointing"), setting=setting))
    if offloaded:
        choices.append(
            Choice(
                technique=find_technique("activation-offload"),
                setting=ActivationOffloadSetting(modules=offloaded, window=window_bytes(step)),
            )
        )
    return tuple(choices)
