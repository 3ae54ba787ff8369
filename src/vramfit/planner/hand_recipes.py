"""What a person tries first against too little memory, each by its name, with the peak that is to be expected of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from vramfit.planner.activation_ilp.decisions import (
    Decision,
    DecisionKind,
    choosable,
    least_saved,
    predicted_peak,
)
from vramfit.planner.candidates import Candidate
from vramfit.planner.plans import PlanRequest
from vramfit.techniques import Choice, ModelBlock, Numerics, find_technique
from vramfit.techniques.activation_checkpointing import EVERYWHERE, Checkpointing, Mode
from vramfit.techniques.activation_checkpointing.op_facts import keeps
from vramfit.techniques.allocator_settings import AllocatorSetting
from vramfit.techniques.micro_batching import MicroBatchingSetting
from vramfit.techniques.mixed_precision import HalfType, MixedPrecisionSetting

CHECKPOINTING, MICRO_BATCHING, AUTOCAST, ALLOCATOR = (
    "activation-checkpointing",
    "micro-batching",
    "mixed-precision",
    "allocator-settings",
)
"""Techniques that recipes are made of."""

_CHECKPOINTED = {
    "full checkpointing": Checkpointing(mode=Mode.WHOLE),
    "checkpointing of every second block": Checkpointing(mode=Mode.EVERY, every=2),
    "selective checkpointing": Checkpointing(mode=Mode.SELECTIVE, save={EVERYWHERE: ("expensive",)}),
}
"""Of torch's own checkpointing; selective: products, convolutions and attention are kept."""

_CUT = {2: "two micro-batches", 4: "four micro-batches"}

EXPANDABLE = "expandable segments"

_HALVED = 0.6
"""Part of what activations take under autocast, about: losses, norms and masks stay as they are."""

_COPIED = 0.5
"""Autocast's copies of weights, as a part of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandRecipe:
    """Techniques that a person would try together.

    Attributes:
        name: ``full checkpointing with two micro-batches``.
        choices: the techniques.
        parts: names of the recipes that it is made of; its own alone where it is one technique.
    """

    name: str
    choices: tuple[Choice, ...]
    parts: frozenset[str]

    @property
    def numerics(self) -> Numerics:
        """The most that it may change in the results."""
        return max(choice.promise.numerics for choice in self.choices)

    @property
    def cuts(self) -> bool:
        """Whether it cuts the batch, which has to be tried before it is promised."""
        return any(choice.name == MICRO_BATCHING for choice in self.choices)

    @property
    def quickens(self) -> bool:
        """Whether it may make a step quicker by itself."""
        return any(choice.technique.quickens for choice in self.choices)

    def __add__(self, other: HandRecipe) -> HandRecipe:
        """Both together."""
        return HandRecipe(
            name=f"{self.name} with {other.name}",
            choices=(*self.choices, *other.choices),
            parts=self.parts | other.parts,
        )


def single_recipes(
    plain: Candidate, request: PlanRequest, settled: Callable[[Choice], Choice | None], *, cut: bool
) -> Iterator[HandRecipe]:
    """The recipes of one technique that can be applied to a workload, without those of the allocator.

    Args:
        plain: the workload as it is.
        request: which techniques may be used.
        settled: a choice as it may be promised for the workload; None where it may not.
        cut: whether batches are cut; to know whether they can be takes a trial.
    """
    profile = plain.profile
    if not profile.trains:
        return
    blocks = [block for block in plain.step.blocks if choosable(plain.step, block)]
    if blocks and request.may(find_technique(CHECKPOINTING)):
        for name, setting in _CHECKPOINTED.items():
            if setting.mode is Mode.EVERY and len(blocks) < 2:
                continue
            if setting.mode is Mode.SELECTIVE and not any(any(_expensive(block)) for block in blocks):
                continue
            yield _recipe(name, Choice(technique=find_technique(CHECKPOINTING), setting=setting))
    if cut and request.may(technique := find_technique(MICRO_BATCHING)):
        for setting in technique.options(profile):
            name = _CUT.get(setting.count, "")
            if name and (choice := settled(Choice(technique=technique, setting=setting))) is not None:
                yield _recipe(name, choice)
    if request.may(technique := find_technique(AUTOCAST)):
        for setting in technique.options(profile):
            if setting.dtype is HalfType.BFLOAT16:
                yield _recipe("autocast", Choice(technique=technique, setting=setting))


def pairs_of(recipes: list[HandRecipe]) -> Iterator[HandRecipe]:
    """Two recipes each that are of different techniques."""
    for first, second in combinations(recipes, 2):
        if first.choices[0].name != second.choices[0].name:
            yield first + second


def expandable_segments() -> HandRecipe:
    """The allocator's setting that leaves least to fragmentation."""
    setting = AllocatorSetting(conf="expandable_segments:True")
    return _recipe(EXPANDABLE, Choice(technique=find_technique(ALLOCATOR), setting=setting))


def expected_bytes(plain: Candidate, recipe: HandRecipe) -> float:
    """What the device has to have with a recipe, guessed from the plain program; good enough to tell which takes least.

    Checkpointed blocks are taken to be computed again one result at a time, autocast to leave `_HALVED` of activations.
    """
    estimate = plain.estimate
    kept, weights = estimate.kept, estimate.weights
    for choice in recipe.choices:
        setting = choice.setting
        if isinstance(setting, Checkpointing):
            freed = predicted_peak(plain.step, {}) - predicted_peak(plain.step, _decisions(plain, setting))
            kept = max(estimate.reduced, kept - max(0, freed))
    for choice in recipe.choices:
        setting = choice.setting
        if isinstance(setting, MicroBatchingSetting):
            kept /= setting.count
        elif isinstance(setting, MixedPrecisionSetting):
            kept *= _HALVED
            weights += _COPIED * estimate.weights
    return replace(estimate, kept=kept, weights=weights).highest


def _decisions(plain: Candidate, setting: Checkpointing) -> Mapping[str, Decision]:
    blocks = [block for block in plain.step.blocks if choosable(plain.step, block)]
    if setting.mode is Mode.EVERY:
        blocks = blocks[:: setting.every]
    selective = setting.mode is Mode.SELECTIVE
    return {
        block.path: Decision(
            DecisionKind.RECOMPUTE,
            least_saved(block)
            | frozenset(number for number, kept in enumerate(_expensive(block)) if kept and selective),
        )
        for block in blocks
    }


def _expensive(block: ModelBlock) -> list[bool]:
    """Of each op of a block, whether selective checkpointing keeps its results."""
    return keeps(("expensive",), (op.name for op in block.ops))


def _recipe(name: str, choice: Choice) -> HandRecipe:
    return HandRecipe(name=name, choices=(choice,), parts=frozenset((name,)))
