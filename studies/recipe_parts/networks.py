"""Ten small networks of ten kinds, as workloads: small enough that a search of half a minute is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vramfit import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network that is trained.

    Attributes:
        title: what it is, and its batch.
        workload: with its sizes.
    """

    title: str
    workload: Workload


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _workload(
    model: Callable[[], nn.Module], batch: Callable[..., Any], loss: Callable[..., Any], **sizes: int
) -> Workload:
    return Workload(model=model, batch=batch, sizes=sizes, loss=loss, optimizer=_adamw)


# -- text --------------------------------------------------------------------------------------------------------


def _tokens(batch_size: int, sequence_length: int) -> torch.Tensor:
    return torch.randint(4000, (batch_size, sequence_length))


def _next_tokens(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=4096, n_embd=384, n_layer=4, n_head=6, use_cache=False, **none)
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=6,
            use_cache=False,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=4096,
            hidden_size=384,
            num_hidden_layers=4,
            num_attention_heads=6,
            intermediate_size=1536,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=4096,
            d_model=256,
            d_kv=32,
            d_ff=1024,
            num_layers=3,
            num_heads=8,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


# -- pictures ----------------------------------------------------------------------------------------------------


def _pictures(batch_size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(batch_size, 3, side, side), torch.randint(100, (batch_size,))


def _classes(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1])


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=384,
            num_hidden_layers=4,
            num_attention_heads=6,
            intermediate_size=1536,
            num_labels=100,
            hidden_dropout_prob=0.0,
        )
    )


def _swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(
        SwinConfig(embed_dim=48, depths=[2, 2, 2], num_heads=[2, 4, 8], num_labels=100, drop_path_rate=0.0)
    )


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(depths=[1, 2, 2, 1], hidden_sizes=[48, 96, 192, 384], num_labels=100)
    )


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(depths=[1, 2, 2, 1], hidden_sizes=[128, 256, 512, 1024], num_labels=100)
    )


# -- pictures from pictures --------------------------------------------------------------------------------------


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(  # type: ignore[no-any-return]
        sample_size=64,
        block_out_channels=(64, 128, 256),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )


def _noised(batch_size: int, side: int) -> dict[str, torch.Tensor]:
    return {
        "sample": torch.rand(batch_size, 3, side, side),
        "noise": torch.rand(batch_size, 3, side, side),
        "timestep": torch.randint(1000, (batch_size,)),
    }


def _noise(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["sample"], batch["timestep"]).sample, batch["noise"])


class VectorQuantised(nn.Module):
    """An autoencoder whose codes are those of a codebook (van den Oord et al. 2017, arXiv:1711.00937)."""

    def __init__(self, width: int = 128, codes: int = 512) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1), *self._blocks(width)
        )
        self.codebook = nn.Embedding(codes, width)
        self.decoder = nn.Sequential(
            *self._blocks(width),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )

    @staticmethod
    def _blocks(width: int) -> list[nn.Module]:
        return [Residual(width) for _ in range(3)]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The picture again, and how far its codes are from those of the codebook."""
        found = self.encoder(x)
        rows = found.permute(0, 2, 3, 1).flatten(0, 2)
        nearest = torch.cdist(rows, self.codebook.weight).argmin(1)
        codes = self.codebook(nearest).view(found.shape[0], *found.shape[2:], -1).permute(0, 3, 1, 2)
        apart = F.mse_loss(codes, found.detach()) + 0.25 * F.mse_loss(found, codes.detach())
        return self.decoder(found + (codes - found).detach()), apart


class Residual(nn.Module):
    """Two convolutions beside what they are given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return x + self.layers(x)  # type: ignore[no-any-return]


def _plain_pictures(batch_size: int, side: int) -> torch.Tensor:
    return torch.rand(batch_size, 3, side, side)


def _again(model: Any, batch: torch.Tensor) -> torch.Tensor:
    picture, apart = model(batch)
    return F.mse_loss(picture, batch) + apart


def networks() -> dict[str, Network]:
    """All of them, by name."""
    text = {"batch_size": 16, "sequence_length": 512}
    return {
        "unet": Network(
            title="UNet with attention, 16 x 64 x 64",
            workload=_workload(_unet, _noised, _noise, batch_size=16, side=64),
        ),
        "swin": Network(
            title="Swin, 32 x 224 x 224",
            workload=_workload(_swin, _pictures, _classes, batch_size=32, side=224),
        ),
        "gpt2": Network(title="GPT-2, 16 x 512", workload=_workload(_gpt2, _tokens, _next_tokens, **text)),
        "llama": Network(title="Llama, 16 x 512", workload=_workload(_llama, _tokens, _next_tokens, **text)),
        "bert": Network(title="BERT, 16 x 512", workload=_workload(_bert, _tokens, _next_tokens, **text)),
        "t5": Network(title="T5, 16 x 512", workload=_workload(_t5, _tokens, _next_tokens, **text)),
        "vit": Network(
            title="ViT-S/16, 64 x 224 x 224",
            workload=_workload(_vit, _pictures, _classes, batch_size=64, side=224),
        ),
        "convnext": Network(
            title="ConvNeXt, 64 x 224 x 224",
            workload=_workload(_convnext, _pictures, _classes, batch_size=64, side=224),
        ),
        "resnet": Network(
            title="ResNet with bottlenecks, 64 x 224 x 224",
            workload=_workload(_resnet, _pictures, _classes, batch_size=64, side=224),
        ),
        "vqvae": Network(
            title="VQ-VAE, 32 x 128 x 128",
            workload=_workload(VectorQuantised, _plain_pictures, _again, batch_size=32, side=128),
        ),
    }
