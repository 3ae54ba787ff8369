"""Ten architectures, each with the shapes and sizes that pairs are drawn from: real ones, but small.

Dropout, batch norm, tied weights, grouped queries, routing that depends on the data, two losses and two optimizers
are all among them. Each takes tens of MiB and well below a second a step, so that a hundred plans take an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from random_budgets.layers import Gan, GraphNetwork, RecurrentLanguageModel, ResNet
from vramfit import Workload
from vramfit.workload import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A kind of model, and what of it is drawn.

    Attributes:
        words: what it is, for tables.
        shape: the values that each size of the model may have.
        sizes: the values that each size of the batch may have, that of the batch first.
        make: the workload of a shape and sizes.
    """

    words: str
    shape: Mapping[str, Sequence[int]]
    sizes: Mapping[str, Sequence[int]]
    make: Callable[[Mapping[str, int], Mapping[str, int]], Workload]


def workload_of(name: str, shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    """The workload of an architecture with these sizes of the model and of the batch."""
    return ARCHITECTURES[name].make(shape, sizes)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def _own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _tokens(vocabulary: int) -> Callable[..., dict[str, torch.Tensor]]:
    def batch(batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(vocabulary, (batch_size, sequence_length))
        return {"input_ids": tokens, "labels": tokens}

    return batch


def _gpt2(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=shape["vocabulary"],
            n_positions=256,
            n_embd=shape["width"],
            n_layer=shape["layers"],
            n_head=shape["width"] // 32,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        return GPT2LMHeadModel(config)

    return Workload(
        model=model, batch=_tokens(shape["vocabulary"]), sizes=sizes, loss=_own_loss, optimizer=_adamw
    )


def _llama(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    def model() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=shape["vocabulary"],
            hidden_size=shape["width"],
            intermediate_size=shape["width"] * 8 // 3,
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["width"] // 16,
            num_key_value_heads=shape["width"] // 32,
            max_position_embeddings=256,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    return Workload(
        model=model, batch=_tokens(shape["vocabulary"]), sizes=sizes, loss=_own_loss, optimizer=_adamw
    )


def _bert(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    vocabulary = shape["vocabulary"]

    def model() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=shape["width"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["width"] // 32,
            intermediate_size=4 * shape["width"],
            max_position_embeddings=256,
        )
        return BertForMaskedLM(config)

    def batch(batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(1, vocabulary, (batch_size, sequence_length))
        lengths = torch.randint(sequence_length // 2, sequence_length + 1, (batch_size, 1))
        mask = torch.arange(sequence_length) < lengths
        chosen = (torch.rand(tokens.shape) < 0.15) & mask
        chosen[:, 0] = True
        return {
            "input_ids": tokens.masked_fill(~mask, 0),
            "attention_mask": mask.long(),
            "labels": tokens.masked_fill(~chosen, -100),
        }

    return Workload(model=model, batch=batch, sizes=sizes, loss=_own_loss, optimizer=_adamw)


def _vit(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    side = shape["image_size"]

    def model() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=shape["width"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["width"] // 32,
            intermediate_size=4 * shape["width"],
            image_size=side,
            patch_size=8,
            hidden_dropout_prob=0.1,
        )
        config.num_labels = 100
        return ViTForImageClassification(config)

    def batch(batch_size: int) -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.randn(batch_size, 3, side, side),
            "labels": torch.randint(100, (batch_size,)),
        }

    return Workload(model=model, batch=batch, sizes=sizes, loss=_own_loss, optimizer=_adamw)


def _resnet(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    depths = [shape["depth"]] * shape["stages"]

    def batch(batch_size: int, image_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch_size, 3, image_size, image_size), torch.randint(100, (batch_size,))

    return Workload(
        model=lambda: ResNet(depths, shape["width"]),
        batch=batch,
        sizes=sizes,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4),
    )


def _unet(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    width, levels = shape["width"], shape["levels"]

    def model() -> nn.Module:
        from monai.networks.nets.unet import UNet

        return UNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=3,
            channels=[width << level for level in range(levels)],
            strides=[2] * (levels - 1),
            num_res_units=shape["units"],
            dropout=0.1,
        )

    def batch(batch_size: int, image_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        space = (batch_size, image_size, image_size, image_size)
        return torch.randn(space).unsqueeze(1), torch.randint(3, space)

    return Workload(
        model=model,
        batch=batch,
        sizes=sizes,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=_adamw,
    )


def _lstm(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    vocabulary = shape["vocabulary"]

    def batch(batch_size: int, sequence_length: int) -> torch.Tensor:
        return torch.randint(vocabulary, (batch_size, sequence_length + 1))

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(
        model=lambda: RecurrentLanguageModel(vocabulary, shape["width"], shape["layers"]),
        batch=batch,
        sizes=sizes,
        loss=loss,
        optimizer=_adamw,
    )


def _mixtral(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    def model() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=shape["vocabulary"],
            hidden_size=shape["width"],
            intermediate_size=2 * shape["width"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["width"] // 16,
            num_key_value_heads=shape["width"] // 32,
            num_local_experts=shape["experts"],
            max_position_embeddings=256,
            use_cache=False,
        )
        return MixtralForCausalLM(config)

    return Workload(
        model=model, batch=_tokens(shape["vocabulary"]), sizes=sizes, loss=_own_loss, optimizer=_adamw
    )


def _gan(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    side = 4 << shape["levels"]

    def batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch_size, 3, side, side), torch.randn(batch_size, 64)

    def step(state: State, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        model, (real, noise) = state.model, batch
        assert isinstance(model, Gan)
        if "optimizers" not in state.extra:
            state.extra["optimizers"] = (
                torch.optim.Adam(model.generator_parameters(), lr=2e-4, betas=(0.5, 0.999)),
                torch.optim.Adam(model.discriminator_parameters(), lr=2e-4, betas=(0.5, 0.999)),
            )
        generator, discriminator = state.extra["optimizers"]
        fake = model.generate(noise)
        judged = model.discriminate(real), model.discriminate(fake.detach())
        loss = F.softplus(-judged[0]).mean() + F.softplus(judged[1]).mean()
        discriminator.zero_grad()
        loss.backward()
        discriminator.step()
        generator.zero_grad()
        F.softplus(-model.discriminate(fake)).mean().backward()
        generator.step()
        return loss.detach()

    return Workload(
        model=lambda: Gan(shape["width"], shape["levels"]),
        batch=batch,
        sizes=sizes,
        step=step,
    )


def _graph(shape: Mapping[str, int], sizes: Mapping[str, int]) -> Workload:
    def batch(batch_size: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.randn(batch_size, nodes, 16),
            torch.randint(nodes, (batch_size, 2, 4 * nodes)),
            torch.randint(10, (batch_size,)),
        )

    return Workload(
        model=lambda: GraphNetwork(shape["width"], shape["layers"]),
        batch=batch,
        sizes=sizes,
        loss=lambda model, batch: F.cross_entropy(model(batch[0], batch[1]), batch[2]),
        optimizer=_adamw,
    )


_LENGTHS = (96, 128, 192)

ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture(
        words="GPT-2 (transformers), dropout, tied weights",
        shape={"width": (64, 96, 128), "layers": (2, 3), "vocabulary": (500, 2000)},
        sizes={"batch_size": (2, 3, 4), "sequence_length": _LENGTHS},
        make=_gpt2,
    ),
    "llama": Architecture(
        words="Llama (transformers), grouped queries",
        shape={"width": (64, 96, 128), "layers": (2, 3), "vocabulary": (500, 2000)},
        sizes={"batch_size": (2, 3, 4), "sequence_length": _LENGTHS},
        make=_llama,
    ),
    "bert": Architecture(
        words="BERT with masked words (transformers), dropout, padding",
        shape={"width": (64, 96, 128), "layers": (2, 3), "vocabulary": (500, 2000)},
        sizes={"batch_size": (2, 3, 4), "sequence_length": _LENGTHS},
        make=_bert,
    ),
    "vit": Architecture(
        words="ViT (transformers), dropout",
        shape={"width": (64, 96, 128), "layers": (2, 3), "image_size": (48, 64)},
        sizes={"batch_size": (3, 4, 6)},
        make=_vit,
    ),
    "resnet": Architecture(
        words="ResNet of bottlenecks, batch norm, SGD with momentum",
        shape={"width": (8, 16), "depth": (1, 2), "stages": (2, 3)},
        sizes={"batch_size": (8, 12, 16), "image_size": (24, 32)},
        make=_resnet,
    ),
    "unet": Architecture(
        words="U-Net in three dimensions (MONAI), dropout",
        shape={"width": (4, 8), "levels": (3, 4), "units": (1, 2)},
        sizes={"batch_size": (2, 3), "image_size": (24, 32)},
        make=_unet,
    ),
    "lstm": Architecture(
        words="LSTM language model, dropout, tied weights",
        shape={"width": (64, 96, 128), "layers": (2, 3), "vocabulary": (500, 2000)},
        sizes={"batch_size": (3, 4, 6), "sequence_length": (24, 32, 40)},
        make=_lstm,
    ),
    "mixtral": Architecture(
        words="Mixtral (transformers), experts chosen by the data",
        shape={"width": (64, 96), "layers": (2, 3), "experts": (4, 6), "vocabulary": (500, 2000)},
        sizes={"batch_size": (2, 3, 4), "sequence_length": _LENGTHS},
        make=_mixtral,
    ),
    "gan": Architecture(
        words="GAN of convolutions: two losses, two optimizers, a step of its own",
        shape={"width": (8, 16), "levels": (2, 3)},
        sizes={"batch_size": (8, 12, 16)},
        make=_gan,
    ),
    "graph": Architecture(
        words="message passing on graphs, dropout",
        shape={"width": (32, 64), "layers": (2, 3, 4)},
        sizes={"batch_size": (3, 4, 6), "nodes": (48, 64, 96)},
        make=_graph,
    ),
}
"""By name, in the order in which pairs take their turn."""
