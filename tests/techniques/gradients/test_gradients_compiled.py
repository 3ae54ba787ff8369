"""Compiled programs beside the plain one: what the partitioner computes again, by itself and with other techniques.

Graphs are parted by torch's compiler and run operation by operation; generated code has tests of its own.
"""

from __future__ import annotations

import pytest
import torch
from tests.techniques.gradients.running import faults
from tests.techniques.gradients.settings import exact_choices

from vramfit.techniques import Choice, find_technique
from vramfit.techniques.compiled import CompileSetting

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # Hooks for saved tensors and checkpoints end a graph, which Dynamo tells by warnings; the results count here.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def compiled(budget: float) -> Choice:
    return Choice(technique=find_technique("compile"), setting=CompileSetting(memory_budget=budget))


@pytest.mark.parametrize(
    ("name", "budget"), [("decoder", 0.0), ("branches", 0.25), ("denoiser", 0.5), ("adapted", 0.0)]
)
def test_compiled_programs_keep_their_promise(name: str, budget: float) -> None:
    assert faults(name, (compiled(budget),), steps=1, dtype=torch.float32) == []


@pytest.mark.slow
def test_compiling_goes_with_every_technique_of_a_small_model() -> None:
    by_name = {choice.name: choice for choice in exact_choices("branches")}
    broken = {}
    for choice in by_name.values():
        if found := faults("branches", (compiled(0.0), choice), steps=1, dtype=torch.float32):
            broken[choice.words] = found
    assert len(by_name) > 8
    assert broken == {}
