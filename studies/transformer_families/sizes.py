"""Tiny configurations: every size that transformers' configurations name, made small."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LENGTH = 32
IMAGE = 32
SPECIAL_TOKENS = 300
"""The first token that stands for a picture or a sound, or marks its begin or end."""

_TABLE = """
64 hidden_size d_model n_embd dim embed_dim embedding_size encoder_hidden_size decoder_hidden_size
64 decoder_hidden_dim encoder_embed_dim decoder_embed_dim projection_dim d_embed emb_dim output_hidden_size
64 token_embedding_size hidden_dim word_embed_proj_dim vocab_projection_dim out_hidden_size
4 num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads
4 encoder_num_attention_heads decoder_num_attention_heads num_encoder_attention_heads attention_heads
4 num_decoder_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts ffn_num_experts
2 num_key_value_heads decoder_num_key_value_heads encoder_num_key_value_heads num_kv_heads num_experts_per_tok
2 num_experts_per_token moe_topk top_k_experts num_attention_groups multi_query_group_num
2 num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_encoder_layers
2 num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_decoder_attention_layers
128 intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size d_inner
128 encoder_ffn_embed_dim decoder_ffn_embed_dim shared_expert_intermediate_size mlp_hidden_size
128 encoder_intermediate_size decoder_intermediate_size feed_forward_size block_ff_dim
16 head_dim d_kv attention_head_size v_head_dim qk_nope_head_dim kv_channels attention_head_dim
16 linear_key_head_dim linear_value_head_dim swa_head_dim mamba_d_head
8 qk_rope_head_dim index_head_dim rotary_dim
32 moe_intermediate_size q_lora_rank kv_lora_rank expert_ffn_hidden_size moe_shared_expert_intermediate_size
32 image_size img_size
1 n_group topk_group n_shared_experts first_k_dense_replace num_shared_experts
320 vocab_size decoder_vocab_size n_vocab vocab_size_per_layer_input
512 max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_seq_len
0 pad_token_id
3 bos_token_id decoder_start_token_id forced_bos_token_id
4 eos_token_id sep_token_id
300 image_token_id image_token_index audio_token_id audio_token_index
301 video_token_id video_token_index
302 vision_start_token_id image_start_token_id boi_token_id boi_token_index
303 vision_end_token_id image_end_token_id eoi_token_id eoi_token_index
"""
"""Sizes, and the names under which configurations have them."""

SMALL = {name: int(size) for size, *names in map(str.split, _TABLE.strip().splitlines()) for name in names}


def tiny(model_type: str, overrides: dict[str, Any]) -> PretrainedConfig:
    """A configuration of a family with every known size made small.

    Args:
        model_type: as in ``AutoConfig.for_model``.
        overrides: what this family wants besides; ``{"text_config": {...}}`` reaches into parts, and None leaves
            a value as the family has it.
    """
    return _shrunk(type(AutoConfig.for_model(model_type)), overrides)


def _shrunk(kind: type[PretrainedConfig], overrides: dict[str, Any]) -> PretrainedConfig:
    default = kind()
    chosen: dict[str, Any] = {}
    names = (
        set(default.to_dict()) | set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    )
    if "qk_rope_head_dim" in names:
        names -= {"head_dim", "num_key_value_heads"}  # follow from the parts of a head, and from the heads
        chosen["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name in sorted(names & set(SMALL)):
        name = kind.attribute_map.get(name, name)
        if _is_size(_value(default, name)) or name.endswith("token_id"):
            chosen[name] = SMALL.get(name, chosen.get(name, _value(default, name)))
    for mapped, name in kind.attribute_map.items():
        if mapped in SMALL and _is_size(_value(default, name)) and name not in SMALL:
            chosen[name] = SMALL[mapped]
    for name, part in kind.sub_configs.items():
        made = _part(_value(default, name), part, overrides.get(name, {}))
        if made is not None:
            chosen[name] = made
    for name, value in overrides.items():
        if name in kind.sub_configs:
            continue
        if value is None:
            chosen.pop(name, None)
        else:
            chosen[name] = value
    return kind(**chosen)


def _value(config: PretrainedConfig, name: str) -> Any:
    """An attribute of a configuration; None where it has none, or a different one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception as error:
        if "PerLayer" in type(error).__name__:
            return None
        raise


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _part(default: Any, kind: Any, overrides: Any) -> Any:
    """The configuration of a part (a vision tower, a decoder), shrunk like the whole."""
    if not isinstance(overrides, dict):
        return overrides
    if "model_type" in overrides:  # another family than the usual one, spelled out
        return AutoConfig.for_model(**overrides)
    known = type(default) if isinstance(default, PretrainedConfig) else kind
    if (
        known is None
        or not isinstance(known, type)
        or not issubclass(known, PretrainedConfig)
        or known is AutoConfig
    ):
        return None
    if known not in CONFIG_MAPPING.values() and known is PretrainedConfig:
        return None
    return _shrunk(known, overrides)
