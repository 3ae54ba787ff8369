"""Well-known models at their real size: nothing may be computed for real."""

from __future__ import annotations

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

REALISTIC: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama-8b": (
        "llama",
        "LlamaForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
        },
    ),
    "bert-large": (
        "bert",
        "BertForMaskedLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
    ),
    "vit-large": (
        "vit",
        "ViTForImageClassification",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
    ),
    "t5-large": (
        "t5",
        "T5ForConditionalGeneration",
        {
            "d_model": 1024,
            "d_ff": 4096,
            "d_kv": 64,
            "num_layers": 24,
            "num_heads": 16,
            "decoder_start_token_id": 0,
        },
    ),
    "mixtral-8x7b": ("mixtral", "MixtralForCausalLM", {}),
    "whisper-large": (
        "whisper",
        "WhisperForConditionalGeneration",
        {
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
        },
    ),
}


def configuration(name: str) -> tuple[str, PretrainedConfig]:
    """Class and configuration of a model at its real size."""
    family, class_name, sizes = REALISTIC[name]
    return class_name, CONFIG_MAPPING[family](**sizes)
