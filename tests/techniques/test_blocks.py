"""Blocks of models as people write them, found by their structure."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.techniques.resnet import ResNet
from tests.techniques.toys import all_toys
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.support.blocks import checked_module, find_blocks, refused_blocks


def paths(model: nn.Module) -> list[str]:
    return [place.path for place in find_blocks(model)]


def test_the_layers_of_a_decoder_are_its_blocks() -> None:
    blocks = find_blocks(all_toys()["language-tied"].model())
    assert [(place.path, place.kind) for place in blocks] == [(f"layers.{i}", "Block") for i in range(3)]


def test_bottlenecks_are_found_inside_their_stages() -> None:
    expected = [
        f"stages.{stage}.{index}" for stage, depth in enumerate((3, 4, 6, 3)) for index in range(depth)
    ]
    assert paths(ResNet(width=4)) == expected


def test_an_encoder_and_a_decoder_of_torch() -> None:
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    assert paths(model) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]
    decoder = find_blocks(model)[2]
    assert decoder.parts == ("decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn")


def test_what_does_not_repeat_is_no_block() -> None:
    assert paths(all_toys()["two-losses"].model()) == []
    assert paths(all_toys()["mlp"].model()) == []


class Shared(nn.Module):
    """Blocks that have a second name: one by itself, two in a list that another module holds too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.block()
        self.layers = nn.ModuleList([self.first, self.block(), self.first])
        self.again = nn.ModuleDict({"layers": self.layers, "own": self.block()})

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 4)))


def test_a_block_with_several_names_is_found_once() -> None:
    model = Shared()
    found = [model.get_submodule(path) for path in paths(model)]
    assert found == [model.layers[0], model.layers[1], model.again["own"]]


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
TRANSFORMERS: dict[str, tuple[dict[str, Any], list[str], tuple[str, ...]]] = {
    "GPT2LMHeadModel": (
        {"n_layer": 2, "n_embd": 32, "n_head": 4},
        ["transformer.h.0", "transformer.h.1"],
        ("attn", "mlp"),
    ),
    "LlamaForCausalLM": (SMALL, ["model.layers.0", "model.layers.1"], ("self_attn", "mlp")),
    "BertForMaskedLM": (
        SMALL,
        ["bert.encoder.layer.0", "bert.encoder.layer.1"],
        ("attention", "intermediate", "output"),
    ),
    "T5ForConditionalGeneration": (
        {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8},
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
        ("layer.0", "layer.1"),
    ),
    "ViTForImageClassification": (
        {**SMALL, "image_size": 32, "patch_size": 8},
        ["vit.layers.0", "vit.layers.1"],
        ("attention", "mlp"),
    ),
    "SwinForImageClassification": (
        {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "image_size": 32, "window_size": 4},
        [f"swin.encoder.layers.{stage}.blocks.{index}" for stage in range(2) for index in range(2)],
        ("attention", "mlp"),
    ),
    "MixtralForCausalLM": (
        {**SMALL, "num_local_experts": 4, "num_key_value_heads": 2},
        ["model.layers.0", "model.layers.1"],
        ("self_attn", "mlp"),
    ),
    "AlbertModel": (
        {**SMALL, "embedding_size": 16},
        ["encoder.albert_layer_groups.0"],  # one layer that is called again and again
        ("albert_layers.0",),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, expected, parts = TRANSFORMERS[name]
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(**config))
    found = find_blocks(model)
    assert [place.path for place in found] == expected
    assert found[0].parts == tuple(f"{expected[0]}.{part}" for part in parts)


MONAI: dict[str, tuple[dict[str, Any], list[str]]] = {
    "UNet": (
        {"spatial_dims": 3, "channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 2},
        [
            "model.0",
            "model.1.submodule.0",
            "model.1.submodule.1.submodule",
            "model.1.submodule.2",
            "model.2",
        ],
    ),
    "BasicUNet": (
        {"spatial_dims": 3, "features": (8,) * 6},
        [
            "conv_0",
            *(f"down_{level}" for level in range(1, 5)),
            *(f"upcat_{level}" for level in range(4, 0, -1)),
        ],
    ),
    "SwinUNETR": (
        {"spatial_dims": 3, "feature_size": 12},
        [
            *(f"swinViT.layers{stage}.0.blocks.{index}" for stage in range(1, 5) for index in range(2)),
            *("encoder1", "encoder2", "encoder3", "encoder4", "encoder10"),
            *(f"decoder{level}" for level in range(5, 0, -1)),
        ],
    ),
}


@pytest.mark.parametrize("name", MONAI)
def test_networks_of_monai(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        nets = pytest.importorskip("monai.networks.nets")
    options, expected = MONAI[name]
    assert paths(getattr(nets, name)(in_channels=1, out_channels=2, **options)) == expected


def test_blocks_that_are_named() -> None:
    model = ResNet(width=4)
    assert [place.path for place in find_blocks(model, ("stem", "stages.1.*"))] == [
        "stem",
        *(f"stages.1.{index}" for index in range(4)),
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("stage.0",), r"the model has no module 'stage\.0'\. Did you mean stages\.0\?"),
        (("stages.1", "stages.1.0"), r"the block stages\.1 contains stages\.1\.0"),
    ],
)
def test_names_that_cannot_be_blocks(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_blocks(ResNet(width=4), names)


def test_a_list_is_no_block() -> None:
    with pytest.raises(UsageError, match="layers is a list without a forward pass"):
        find_blocks(all_toys()["language-tied"].model(), ("layers",))


def _in_place() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4))


def _spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))


def _recurrent() -> nn.Module:
    return nn.Sequential(nn.LSTM(4, 4, num_layers=2, dropout=0.1), nn.Linear(4, 4))


def _checkpointed() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made.gradient_checkpointing = True  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_in_place, "its first layer, ReLU, changes the block's input in place"),
        (_spectral, "0.parametrizations.weight.0 changes its buffers in each forward pass (spectral norm)"),
        (_recurrent, "0 draws dropout from cuDNN's own random state, which cannot be restored"),
        (_checkpointed, "Sequential is checkpointed already (gradient_checkpointing is set)"),
    ],
)
def test_what_must_not_run_twice_is_left_out_with_the_reason(
    make: Callable[[], nn.Module], reason: str
) -> None:
    good = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.ModuleList([good, make(), make()])
    assert paths(model) == ["0"]
    assert [(place.path, place.reason) for place in refused_blocks(model)] == [("1", reason), ("2", reason)]
    with pytest.raises(UsageError, match="1 cannot be recomputed"):
        checked_module(model, "1")
