"""Channels that go together, and weights with zeros: beside the plain model with those channels' parts set to zero."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.techniques.pruning.channel_groups import channel_groups, entries
from vramfit.techniques.pruning.channels import prune_channels
from vramfit.techniques.pruning.zeros import two_of_four, zero_smallest
from vramfit.workload import Batch, call_model

transformers = pytest.importorskip("transformers")


def llama() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).eval(), {"input_ids": torch.arange(20).view(2, 10)}


def bert() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.BertModel(config).eval(), {"input_ids": torch.arange(20).view(2, 10)}


def resnet() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[2, 1], layer_type="bottleneck", num_labels=5
    )
    model = transformers.ResNetForImageClassification(config).eval()
    for module in model.modules():  # drawn statistics, so that batch norms do something
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]
    return model, {"pixel_values": torch.rand(2, 3, 32, 32)}


def chain() -> tuple[nn.Module, Batch]:
    """A map that is flattened: each channel has four columns of the last layer."""
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.GELU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10)).eval(), torch.rand(
        2, 3, 12, 12
    )


def first(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return found


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (llama, ["model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj"]),
        (bert, ["encoder.layer.0.intermediate.dense", "encoder.layer.1.intermediate.dense"]),
        (chain, ["0", "3"]),
        (resnet, None),
    ],
)
def test_channels_that_go_are_those_that_nothing_reads(make: Any, names: list[str] | None) -> None:
    """The pruned model gives what the plain one gives whose next layers have zeros for these channels."""
    model, batch = make()
    groups = {group.name: group for group in channel_groups(model, batch)}
    assert names is None or list(groups) == names
    blind = copy.deepcopy(model)
    with torch.no_grad():
        plain = first(call_model(model, batch))
        pruned = prune_channels(model, batch, share=0.4, multiple=4)
        for name, kept in pruned.kept.items():
            gone = torch.tensor(sorted(set(range(groups[name].size)) - set(kept)))
            for place in groups[name].places:
                if place.dim == 1:
                    blind.get_parameter(place.name).index_fill_(1, entries(place, gone), 0)
        expected, found = first(call_model(blind, batch)), first(call_model(model, batch))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found, plain)
        assert pruned.after == sum(t.nbytes for t in (*model.parameters(), *model.buffers())) < pruned.before
        pruned.undo()
        assert torch.equal(first(call_model(model, batch)), plain)


def test_modules_say_their_new_sizes_and_the_old_ones_after_the_undo() -> None:
    model, batch = chain()
    before = repr(model)
    pruned = prune_channels(model, batch, share=0.5, multiple=4)
    assert (model[0].out_channels, model[1].num_features, model[3].in_channels) == (8, 8, 8)  # type: ignore[index]
    assert (model[3].out_channels, model[7].in_features) == (12, 48)  # type: ignore[index]
    pruned.undo()
    assert repr(model) == before


class Joined(nn.Module):
    """Channels that are put side by side, multiplied as a matrix, and read by a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.one(x), self.two(x)], dim=-1)
        result: torch.Tensor = self.last(joined) + self.three(x) * self.scale
        return result


def test_what_is_not_understood_stays() -> None:
    assert channel_groups(Joined(), torch.rand(2, 16)) == []
    with pytest.raises(UsageError, match="no channels that could be removed"):
        prune_channels(Joined(), torch.rand(2, 16))
    tied = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    tied[2].weight = tied[0].weight
    assert channel_groups(tied, torch.rand(2, 16)) == []


def test_zeros_are_the_smallest_values_and_save_nothing() -> None:
    model, _ = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    live = zero_smallest(model, share=0.75)
    weight, plain = model.get_parameter("lm_head.weight"), before["lm_head.weight"]
    assert int((weight == 0).sum()) == round(0.75 * weight.numel())
    assert plain[weight == 0].abs().max() <= plain[weight != 0].abs().min()
    assert sum(value.nbytes for value in model.state_dict().values()) == sum(
        v.nbytes for v in before.values()
    )
    live.undo()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_of_four_are_the_larger_ones() -> None:
    model = nn.Linear(8, 4).eval()
    before = model.weight.detach().clone()
    live = two_of_four(model)
    for plain, left in zip(before.view(-1, 4), model.weight.detach().view(-1, 4), strict=True):
        assert set(left.nonzero().flatten().tolist()) == set(plain.abs().topk(2).indices.tolist())
    live.undo()
    assert torch.equal(model.weight, before)
    with pytest.raises(UsageError, match="the CPU has no kernels for two of four values"):
        two_of_four(model, packed=True)


def test_a_card_keeps_two_of_four_in_nine_sixteenths() -> None:
    """torch/sparse/semi_structured.py: half of the values, and two bits for the place of each."""
    with vramfit.VirtualGPU("RTX 4090"), torch.no_grad():
        model = nn.Linear(512, 1024, bias=False, dtype=torch.bfloat16, device="cuda")
        before = torch.cuda.memory_allocated()
        live = two_of_four(model)
        assert torch.cuda.memory_allocated() == before * 9 // 16
        assert model(torch.empty(64, 512, dtype=torch.bfloat16, device="cuda")).shape == (64, 1024)
        live.undo()
        assert torch.cuda.memory_allocated() == before
    with vramfit.VirtualGPU("RTX 2080 Ti"):
        model = nn.Linear(512, 1024, device="cuda", dtype=torch.float16)
        with pytest.raises(UsageError, match="has no kernels for two of four values"):
            two_of_four(model)


def test_a_weight_that_an_embedding_holds_too_stays_on_the_card() -> None:
    with vramfit.VirtualGPU("RTX 4090"), torch.no_grad():
        model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 64), nn.Linear(64, 128, bias=False))
        model[2].weight = model[0].weight
        model.to("cuda", torch.bfloat16)
        before = torch.cuda.memory_allocated()
        live = two_of_four(model)
        assert torch.cuda.memory_allocated() == before - 64 * 64 * 2 * 7 // 16
        assert model[2].weight is model[0].weight
        ids = torch.zeros(64, dtype=torch.long, device="cuda")
        assert model(ids).shape == (64, 128)
        live.undo()


def test_an_undo_without_room_leaves_the_weight_on_the_host() -> None:
    with vramfit.VirtualGPU("RTX 4090"), torch.no_grad():
        model = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16, device="cuda")
        own = model.weight
        live = two_of_four(model)
        packed = model.weight  # held, so that its memory is not free either
        torch.cuda.empty_cache()
        filling = torch.empty(torch.cuda.mem_get_info()[0] - (4 << 20), dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError):
            live.undo()
        assert model.weight is own
        assert own.device.type == "cpu"
        del filling, packed
