"""What single families want besides small sizes, and which are left out with the reason."""

from __future__ import annotations

from typing import Any

from transformer_families.perception import HEARING, READING, SEEING

CLASSES: dict[str, str] = {}
"""The class to take where the first of the mapping is not meant for use by itself."""

SEES = frozenset(("gemma3", "git", "got_ocr2", "mllama", "qwen3_5", "qwen3_5_moe", "qwen4_exp"))
"""Families that are tried with pictures, although a mapping lists their text model too."""

FURTHER: dict[str, str] = {
    "autoformer": "AutoformerForPrediction",
    "bros": "BrosForTokenClassification",
    "clap": "ClapModel",
    "dac": "DacModel",
    "decision_transformer": "DecisionTransformerModel",
    "dpr": "DPRContextEncoder",
    "encodec": "EncodecModel",
    "groupvit": "GroupViTModel",
    "informer": "InformerForPrediction",
    "lxmert": "LxmertForQuestionAnswering",
    "mgp-str": "MgpstrForSceneTextRecognition",
    "mimi": "MimiModel",
    "splinter": "SplinterForQuestionAnswering",
    "time_series_transformer": "TimeSeriesTransformerForPrediction",
    "visual_bert": "VisualBertForPreTraining",
    "vit_mae": "ViTMAEForPreTraining",
    "xclip": "XCLIPModel",
}
"""Families that no mapping of the kinds lists, with a class each."""

_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}

_QWEN4 = {
    "num_hidden_layers": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 8},
    "bamba": {**_MAMBA_HEADS, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {**_MAMBA_HEADS, "mamba_d_ssm": 128},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0},
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
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"num_hidden_layers": 4},
    "longcat_flash": {"head_dim": 8},
    "longt5": {"decoder_start_token_id": 0},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "t5": {"decoder_start_token_id": 0},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "qwen3_5": {"text_config": {"num_hidden_layers": 4}},
    "qwen3_5_moe": {"text_config": {"num_hidden_layers": 4}},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 2,
    },
    "xlstm": {"num_hidden_layers": 2, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {"num_hidden_layers": 2, "layer_types": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
    **SEEING,
    **HEARING,
    **READING,
}
"""Keyword arguments of the configuration."""

_TIMM = "needs timm"
_OWN = "no small configuration was worked out: sizes of its parts depend on each other"
_PARTS = "its inputs come from several other models"

_UNSIZED = [
    "aria",
    "blt",
    "chameleon",
    "cohere_compass",
    "cohere_compass_text",
    "cosmos3_edge",
    "deepseek_ocr2",
    "deepseek_vl_hybrid",
    "diffusion_gemma",
    "dots3_note",
    "dots3_note_text",
    "edgetam_video",
    "efficientloftr",
    "emu3",
    "ernie4_5_vl_moe",
    "fun_asr_nano",
    "gemma4",
    "gemma4_assistant",
    "gemma4_unified",
    "gemma4_unified_assistant",
    "gemma4_unified_text",
    "glm5_next",
    "gradium_phonon_tts",
    "granite4_vision",
    "granite_docling",
    "hunyuan_vl",
    "inkling2",
    "inkling_mm_model",
    "kimi_k25",
    "kyutai_speech_to_text",
    "lfm2_vl",
    "lfm3_vl",
    "llama4",
    "lw_detr_vit",
    "minicpm_ocr",
    "minicpmv4_6",
    "minicpmv4_7",
    "molmo2",
    "muse_glimmer",
    "muse_spark",
    "musicgen",
    "musicgen_melody",
    "nemo_speechlm",
    "nemotron_h_omni",
    "paddleocr_vl",
    "pi0",
    "pix2struct",
    "pocket_tts",
    "pp_ocrv5_mobile_det",
    "pp_ocrv5_server_det",
    "pp_ocrv6_medium_det",
    "pp_ocrv6_small_det",
    "pp_ocrv6_tiny_det",
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
    "rf_detr_dinov2",
    "sam2",
    "sam2_video",
    "sam3_tracker",
    "sapiens2",
    "shieldgemma2",
    "slanet",
    "step3p7",
    "superglue",
    "unlimited_ocr",
    "vibevoice",
    "video_llama_3",
    "vitpose_backbone",
    "voxtral_realtime",
]

LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        ("edgetam", "fast_vlm", "gemma3n", "omdet-turbo", "perception_lm", "timm_backbone", "timm_wrapper"),
        _TIMM,
    ),
    "dinat": "needs natten",
    "layoutlmv2": "needs detectron2",
    **dict.fromkeys(("bark", "qwen2_5_omni", "qwen3_omni_moe", "sam3_video"), "has no forward of its own"),
    "fastspeech2_conformer": _PARTS,
    "fastspeech2_conformer_with_hifigan": _PARTS,
    "vits": "untrained, it speaks for minutes",
    **dict.fromkeys(_UNSIZED, _OWN),
}
"""Families that are not tried, with the reason."""

UNTRAINED: dict[str, str] = {
    "pp_doclayout_v2": "transformers does not train it",
    "pp_doclayout_v3": "transformers does not train it",
    "pp_doclayout_v4": "transformers does not train it",
    "videomt": "transformers does not train it on clips",
}
"""Families that only run without gradients, with the reason."""

SILENT: dict[str, str] = {"pop2piano": "wants the list of composers of a checkpoint"}
"""Families that are not asked to generate, with the reason."""
