"""Each technique by itself, in each of its settings, beside the plain program: gradients, buffers, draws and states."""

from __future__ import annotations

import pytest
import torch
from tests.techniques.gradients.architectures import all_architectures
from tests.techniques.gradients.running import faults
from tests.techniques.gradients.settings import exact_choices

from vramfit.inference.host_lane import CopyLane
from vramfit.techniques import Numerics, activation_offload, all_techniques

pytestmark = pytest.mark.usefixtures("late_lane")

NAMES = list(all_architectures())
ALL_IN_DTYPE = [name for name in NAMES if all_architectures()[name].all_in_dtype]

# What has no setting that leaves gradients as they are, but for rounding: their losses are compared instead.
INEXACT = {
    "mixed-precision",
    "low-precision-training",
    "tf32",
    "low-bit-optimizer",
    "lean-optimizer",
    "gradient-projection",
}
# What is for inference, which has no gradients.
FOR_INFERENCE = {
    "attention-chunking",
    "batch-norm-folding",
    "half-inference",
    "input-chunking",
    "layerwise-chunking",
    "tensor-sharing",
    "tiling",
    "uint8-inputs",
    "weight-quantization",
    "weight-streaming",
}


@pytest.mark.parametrize("name", NAMES)
def test_promises_are_kept(name: str) -> None:
    broken = {}
    for choice in exact_choices(name):
        steps = 2 if choice.promise.numerics is Numerics.BITWISE else 1
        if found := faults(name, (choice,), steps=steps, dtype=torch.float32):
            broken[choice.words] = found
    assert broken == {}


@pytest.mark.parametrize("name", ALL_IN_DTYPE)
def test_what_rounds_does_no_more_in_float64(name: str) -> None:
    broken = {}
    for choice in exact_choices(name):
        if choice.promise.numerics is Numerics.BITWISE:
            continue
        if found := faults(name, (choice,), steps=2, dtype=torch.float64):
            broken[choice.words] = found
    assert broken == {}


@pytest.mark.parametrize("name", ["decoder", "repeated", "denoiser", "mixture"])
def test_what_rounds_does_no_more_in_bfloat16(name: str) -> None:
    # Not those with batch norm: gradients of biases before it cancel, and are nothing but rounding in so few bits.
    broken = {}
    for choice in exact_choices(name):
        if found := faults(name, (choice,), steps=1, dtype=torch.bfloat16):
            broken[choice.words] = found
    assert broken == {}


@pytest.mark.parametrize("name", ["recurrent", "resnet", "gpt2"])
def test_activations_that_leave_at_once_are_those_of_their_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offload, "lane_of", lambda _device: CopyLane())
    offloads = [choice for choice in exact_choices(name) if choice.name == "activation-offload"]
    assert offloads
    for choice in offloads:
        assert faults(name, (choice,), steps=2, dtype=torch.float32) == []


def test_every_technique_is_met_by_some_architecture() -> None:
    met = {choice.name for name in NAMES for choice in exact_choices(name)}
    assert met == {technique.name for technique in all_techniques()} - INEXACT - FOR_INFERENCE - {"compile"}
