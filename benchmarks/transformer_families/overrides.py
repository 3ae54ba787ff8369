"""What single families want besides small sizes, and which are left out with the reason."""

from __future__ import annotations

from typing import Any

from transformer_families.perception import HEARING, READING, SEEING

CLASSES: dict[str, str] = {}
"""The class to take where the first of the mapping is not meant for use by itself."""

_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 8},
    "bamba": {**_MAMBA_HEADS, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "falcon_h1": {**_MAMBA_HEADS, "mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA_HEADS, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {"num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16},
    "nemotron_h": {"num_hidden_layers": 4},
    "longt5": {"decoder_start_token_id": 0},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen4_exp_text": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "t5": {"decoder_start_token_id": 0},
    **SEEING,
    **HEARING,
    **READING,
}
"""Keyword arguments of the configuration."""

LEFT_OUT: dict[str, str] = {}
"""Families that are not tried, with the reason."""
