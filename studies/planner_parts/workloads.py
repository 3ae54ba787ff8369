"""Models that people train, with their published configurations: what the planner is timed with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vramfit import Workload


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW on what trains."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-4)


# -- Llama-3-8B with LoRA ----------------------------------------------------------------------------------------


def llama_lora() -> nn.Module:
    """Llama 3 8B in bfloat16, frozen, with adapters of rank 16 on all projections (config.json of meta-llama)."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        rope_theta=500000.0,
        max_position_embeddings=8192,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapters = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=names, task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)  # type: ignore[no-any-return]


def tokens(batch_size: int, sequence_length: int) -> torch.Tensor:
    """Ids that all vocabularies here have."""
    return torch.randint(50257, (batch_size, sequence_length))


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Of the next token."""
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


llama_3_8b_lora = Workload(
    model=llama_lora,
    batch=tokens,
    sizes={"batch_size": 4, "sequence_length": 2048},
    loss=language_loss,
    optimizer=adamw,
)


# -- GPT-2 XL ----------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    """GPT-2 XL without dropout (config.json of openai-community)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False, **dropout))


gpt2_xl = Workload(
    model=gpt2,
    batch=tokens,
    sizes={"batch_size": 4, "sequence_length": 1024},
    loss=language_loss,
    optimizer=adamw,
)


# -- Whisper large -----------------------------------------------------------------------------------------------


def whisper() -> nn.Module:
    """Whisper large-v3 (config.json of openai)."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=51866,
        num_mel_bins=128,
        d_model=1280,
        encoder_layers=32,
        decoder_layers=32,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        use_cache=False,
    )
    return WhisperForConditionalGeneration(config)


def speech(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Half a minute of speech each, and 256 tokens of text."""
    return torch.ones(batch_size, 128, 3000), torch.randint(50000, (batch_size, 256))


def speech_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of the next token."""
    return model(input_features=batch[0], labels=batch[1]).loss  # type: ignore[no-any-return]


whisper_large = Workload(
    model=whisper, batch=speech, sizes={"batch_size": 8}, loss=speech_loss, optimizer=adamw
)


# -- SDXL --------------------------------------------------------------------------------------------------------


def sdxl() -> nn.Module:
    """The U-Net of SDXL (unet/config.json of stabilityai)."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(  # type: ignore[no-any-return]
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def noised(batch_size: int, latent_side: int) -> dict[str, torch.Tensor]:
    """Latents, an eighth of their images in length, with what steers them."""
    return {
        "sample": torch.ones(batch_size, 4, latent_side, latent_side),
        "noise": torch.ones(batch_size, 4, latent_side, latent_side),
        "timestep": torch.zeros(batch_size, dtype=torch.long),
        "states": torch.ones(batch_size, 77, 2048),
        "pooled": torch.ones(batch_size, 1280),
        "ids": torch.ones(batch_size, 6),
    }


def noise_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the noise that was added."""
    found = model(
        batch["sample"],
        batch["timestep"],
        batch["states"],
        added_cond_kwargs={"text_embeds": batch["pooled"], "time_ids": batch["ids"]},
    ).sample
    return F.mse_loss(found, batch["noise"])


sdxl_unet = Workload(
    model=sdxl, batch=noised, sizes={"batch_size": 4, "latent_side": 128}, loss=noise_loss, optimizer=adamw
)


# -- DiT and ConvNeXt --------------------------------------------------------------------------------------------


def dit() -> nn.Module:
    """DiT-XL/2 for images of 256 pixels (transformer/config.json of facebook)."""
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(  # type: ignore[no-any-return]
        num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8, num_layers=28
    )


def latents(batch_size: int) -> dict[str, torch.Tensor]:
    """Latents of 32 x 32, and their classes."""
    return {
        "hidden_states": torch.ones(batch_size, 4, 32, 32),
        "timestep": torch.zeros(batch_size, dtype=torch.long),
        "class_labels": torch.zeros(batch_size, dtype=torch.long),
    }


def dit_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A square of what it makes."""
    return model(**batch).sample.square().mean()  # type: ignore[no-any-return]


dit_xl = Workload(model=dit, batch=latents, sizes={"batch_size": 64}, loss=dit_loss, optimizer=adamw)


def convnext() -> nn.Module:
    """ConvNeXt Large (config.json of facebook)."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(depths=[3, 3, 27, 3], hidden_sizes=[192, 384, 768, 1536], num_labels=1000)
    )


def images(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 224 pixels, with classes."""
    return torch.ones(batch_size, 3, 224, 224), torch.zeros(batch_size, dtype=torch.long)


def image_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of their classes."""
    return F.cross_entropy(model(batch[0]).logits, batch[1])


convnext_large = Workload(
    model=convnext, batch=images, sizes={"batch_size": 64}, loss=image_loss, optimizer=adamw
)
