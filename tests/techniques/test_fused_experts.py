"""Experts of a mixture in one parameter: given formats like linear layers, and streamed with their block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import vramfit
from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.quantization.fused_experts import split_experts
from vramfit.techniques.quantization.weight_formats import quantisable
from vramfit.techniques.weight_streaming import layer_bytes

pytest.importorskip("torchao.quantization")

TOKENS = torch.arange(24).view(2, 12) % 50


def mixture(kind: str) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
    }
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4)).eval()
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**shape, num_experts=4, moe_intermediate_size=96, head_dim=16)
    ).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_experts_are_packed_and_come_back_bit_for_bit(kind: str) -> None:
    model = mixture(kind)
    before, plain = {name: one.clone() for name, one in model.state_dict().items()}, logits(model)
    names = [
        f"model.layers.{layer}.mlp.experts.{one}" for layer in (0, 1) for one in ("gate_up_proj", "down_proj")
    ]
    live = vramfit.quantized(model, formats=dict.fromkeys(names, "int8"))
    held = sum(model.get_submodule(name).weight.data.qdata.nbytes for name in names)
    assert held == sum(before[name].numel() for name in names)
    assert 0 < (logits(model) - plain).abs().max() < 0.02 * plain.abs().max()
    # The same as weights that were rounded expert by expert.
    rounded = mixture(kind)
    for name in names:
        fused = rounded.get_parameter(name)
        scale = fused.detach().abs().amax(-1, keepdim=True) / 127.5
        fused.data = (fused.detach() / scale).round().clamp(-128, 127) * scale
    assert (logits(model) - logits(rounded)).abs().max() < 0.01 * plain.abs().max()
    live.undo()
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(logits(model), plain)


def test_split_experts_give_what_the_loop_gives_and_are_layers_of_the_search() -> None:
    model = mixture("mixtral")
    model.set_experts_implementation("eager")
    plain = logits(model)
    live = AttachedProgram(model, None)
    assert split_experts(live) == 4
    assert sum("experts" in name for name in quantisable(model)) == 4
    assert torch.equal(logits(model), plain)
    live.undo()


def test_formats_that_round_inputs_are_not_for_experts_and_an_error_leaves_the_model() -> None:
    model = mixture("mixtral")
    keys = list(model.state_dict())
    with pytest.raises(UsageError, match="rounds inputs too"):
        vramfit.quantized(model, formats={"model.layers.0.mlp.experts.down_proj": "int8-dynamic"})
    assert list(model.state_dict()) == keys


def test_a_budget_below_the_smallest_weights_is_refused_by_their_sum() -> None:
    model = mixture("mixtral")
    with pytest.raises(UsageError, match=r"the weights alone take .* in the smallest formats"):
        vramfit.quantized(model, TOKENS, budget="100KiB", gpu="RTX 4090")
    assert list(model.state_dict()) == list(mixture("mixtral").state_dict())


def test_experts_are_streamed_with_their_block() -> None:
    model = mixture("mixtral")
    block = model.model.layers[0]
    assert layer_bytes(model, ["model.layers.0"])["model.layers.0"] == sum(
        p.nbytes for p in block.parameters()
    )
