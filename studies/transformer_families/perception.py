"""What single families that see or hear want besides small sizes."""

from __future__ import annotations

from typing import Any

RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
"""A convolutional trunk that needs no further library, in place of one of timm's."""

_HGNET = {
    "embedding_size": 8,
    "hidden_sizes": [16, 24, 32, 48],
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 24, 32],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 24, 32, 48],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
_HGNET_FROM_1 = {**_HGNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
_RT_RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [16, 24, 32, 48],
    "depths": [1, 1, 1, 1],
    "layer_type": "bottleneck",
    "out_features": ["stage2", "stage3", "stage4"],
}
_REAL_TIME = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [24, 32, 48],
    "encoder_layers": 1,
    "encode_proj_layers": [2],
    "d_model": 32,
    "decoder_in_channels": [32, 32, 32],
    "num_queries": 12,
    "num_denoising": 4,
    "num_feature_levels": 3,
    "head_dim": 8,
}
_WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "hidden_size": None}
_TRUNK = {
    "image_size": 32,
    "patch_size": 8,
    "num_hidden_layers": 4,
    "out_indices": [1, 2, 3, 4],
    "reshape_hidden_states": False,
}
_NECK = {"neck_hidden_sizes": [16, 16, 16, 16], "fusion_hidden_size": 16, "head_hidden_size": 8}
_QUERIES = {"num_queries": 8}
_SWIN = {
    "model_type": "swin",
    "image_size": 32,
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "window_size": 4,
}
_THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
"""Rotary positions in time, height and width for heads of 16."""
_SAM = {
    "vision_config": {
        "hidden_size": 64,
        "image_size": 64,
        "patch_size": 8,
        "output_channels": 64,
        "num_pos_feats": 32,
        "mlp_dim": 128,
        "global_attn_indexes": [1],
    },
    "prompt_encoder_config": {"image_size": 64, "patch_size": 8, "image_embedding_size": 8},
    "mask_decoder_config": {"iou_head_hidden_dim": 64},
}

SEEING: dict[str, dict[str, Any]] = {
    "align": {
        "projection_dim": 16,
        "vision_config": {"width_coefficient": 0.05, "depth_coefficient": 0.1, "image_size": 64},
    },
    "blip-2": {"image_token_index": 300, "num_query_tokens": 4},
    "beit": {"num_hidden_layers": 4},
    "chmv2": {
        "backbone_config": {
            "model_type": "dinov3_vit",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "image_size": 32,
            "patch_size": 8,
            "out_indices": [1, 2, 3, 4],
            "reshape_hidden_states": True,
            "apply_layernorm": True,
            "return_class_token": True,
        },
        "patch_size": 8,
        "post_process_channels": [16, 16, 16, 16],
        "fusion_hidden_size": 16,
        "head_hidden_size": 16,
        "number_output_channels": 16,
    },
    "conditional_detr": {"backbone_config": RESNET, **_QUERIES},
    "convnext": {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "num_stages": 4},
    "convnextv2": {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "num_stages": 4},
    "d_fine": {"backbone_config": _HGNET, **_REAL_TIME},
    "dab-detr": {"backbone_config": RESNET, **_QUERIES},
    "deformable_detr": {
        "backbone_config": {**RESNET, "out_features": ["stage2", "stage3", "stage4"]},
        **_QUERIES,
    },
    "deimv2": {"backbone_config": _HGNET, **_REAL_TIME},
    "depth_anything": {"backbone_config": _TRUNK, "patch_size": 8, "reassemble_hidden_size": 64, **_NECK},
    "depth_pro": {
        "patch_size": 32,
        "image_size": 64,
        "image_model_config": {"image_size": 32, "patch_size": 8},
        "patch_model_config": {"image_size": 32, "patch_size": 8, "num_hidden_layers": 4},
        "fov_model_config": {"image_size": 32, "patch_size": 8},
        "intermediate_hook_ids": [2, 0],
        "intermediate_feature_dims": [16, 16],
        "scaled_images_ratios": [0.5, 1.0],
        "scaled_images_overlap_ratios": [0.0, 0.2],
        "scaled_images_feature_dims": [16, 16],
        "fusion_hidden_size": 16,
    },
    "detr": {"backbone_config": RESNET, **_QUERIES},
    "donut-swin": _WINDOWS,
    "dpt": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "patch_size": 8,
        "neck_hidden_sizes": [16, 16, 16, 16],
        "fusion_hidden_size": 16,
    },
    "efficientnet": {"width_coefficient": 0.05, "depth_coefficient": 0.1, "image_size": 64},
    "grounding-dino": {
        "backbone_config": {**_SWIN, "out_features": ["stage2", "stage3", "stage4"]},
        **_QUERIES,
    },
    "groupvit": {
        "projection_intermediate_dim": 64,
        "vision_config": {
            "depths": [1, 1, 1],
            "num_group_tokens": [8, 4, 0],
            "num_output_groups": [8, 4, 4],
            "patch_size": 8,
        },
    },
    "idefics3": {"vision_config": {"patch_size": 8}},
    "instructblip": {"image_token_index": 300, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 300, "num_query_tokens": 4},
    "llava_next": {"image_grid_pinpoints": [[64, 64]], "vision_config": {"patch_size": 8}},
    "llava_next_video": {"image_grid_pinpoints": [[64, 64]], "vision_config": {"patch_size": 8}},
    "llava_onevision": {"image_grid_pinpoints": [[64, 64]], "vision_config": {"patch_size": 8}},
    "lw_detr": {
        "backbone_config": {
            "image_size": 64,
            "pretrain_image_size": 64,
            "patch_size": 8,
            "num_windows": 4,
            "window_block_indices": [0],
            "out_indices": [1, 2],
        },
        "group_detr": 2,
        "d_model": 64,
        "projector_scale_factors": [1.0],
        **_QUERIES,
    },
    "mask2former": {
        "backbone_config": {**_SWIN, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "feature_size": 64,
        "mask_feature_size": 64,
        "train_num_points": 64,
        **_QUERIES,
    },
    "maskformer": {
        "backbone_config": {**_SWIN, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "decoder_config": {**_QUERIES},
        "fpn_feature_size": 64,
    },
    "maskformer-swin": _WINDOWS,
    "mllama": {"vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 128}},
    "mgp-str": {"image_size": [32, 128]},
    "mm-grounding-dino": {
        "backbone_config": {**_SWIN, "out_features": ["stage2", "stage3", "stage4"]},
        **_QUERIES,
    },
    "mobilevitv2": {"image_size": 64, "base_attn_unit_dims": [16, 24, 32], "n_attn_blocks": [1, 1, 1]},
    "oneformer": {
        "backbone_config": {**_SWIN, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "num_queries": 24,
        "train_num_points": 64,
        "conv_dim": 64,
        "mask_dim": 64,
        "text_encoder_width": 64,
        "text_encoder_context_length": 32,
        "text_encoder_n_layers": 1,
        "text_encoder_num_layers": 1,
        "text_encoder_vocab_size": 320,
        "task_seq_len": 32,
        "use_auxiliary_loss": False,
    },
    "perceiver": {
        "num_latents": 8,
        "d_latents": 64,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "max_position_embeddings": 32,
    },
    "pp_doclayout_v2": {
        "backbone_config": _HGNET,
        **_REAL_TIME,
        "class_thresholds": [0.5, 0.5],
        "class_order": [0, 1],
    },
    "pp_doclayout_v3": {"backbone_config": _HGNET_FROM_1, **_REAL_TIME, "x4_feat_dim": 16},
    "pp_doclayout_v4": {"backbone_config": _HGNET, **_REAL_TIME, "d_model": None, "hidden_size": 32},
    "prompt_depth_anything": {
        "backbone_config": _TRUNK,
        "patch_size": 8,
        "reassemble_hidden_size": 64,
        **_NECK,
    },
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "rf_detr": {
        "backbone_config": {
            "image_size": 64,
            "patch_size": 8,
            "num_windows": 2,
            "window_block_indexes": [0],
            "out_indices": [1, 2],
        },
        "group_detr": 2,
        **_QUERIES,
    },
    "qwen2_5_vl": {"text_config": {"rope_parameters": _THREE_AXES}},
    "qwen2_vl": {"text_config": {"rope_parameters": _THREE_AXES}},
    "qwen3_vl": {"text_config": {"rope_parameters": _THREE_AXES}},
    "qwen3_vl_moe": {"text_config": {"rope_parameters": _THREE_AXES}},
    "glm4v": {"text_config": {"rope_parameters": _THREE_AXES}},
    "glm4v_moe": {"text_config": {"rope_parameters": {**_THREE_AXES, "mrope_section": [1, 1, 2]}}},
    "glm46v": {"text_config": {"rope_parameters": _THREE_AXES}},
    "glmga": {"text_config": {"rope_parameters": _THREE_AXES}},
    "glm_ocr": {"text_config": {"rope_parameters": _THREE_AXES}},
    "hunyuan_vl": {"text_config": {"head_dim": 16}},
    "kosmos-2": {"latent_query_num": 8},
    "eomt": {"num_blocks": 1},
    "eomt_dinov3": {"num_blocks": 1},
    "sam": _SAM,
    "sam_hq": {**_SAM, "mask_decoder_config": {"iou_head_hidden_dim": 64, "vit_dim": 64}},
    "smolvlm": {"vision_config": {"patch_size": 8}},
    "swin2sr": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "image_size": 32},
    "rt_detr": {"backbone_config": _RT_RESNET, **_REAL_TIME},
    "rt_detr_v2": {"backbone_config": _RT_RESNET, **_REAL_TIME},
    "swin": _WINDOWS,
    "swinv2": {**_WINDOWS, "pretrained_window_sizes": [0, 0]},
    "table-transformer": {"backbone_config": RESNET, **_QUERIES},
    "textnet": {"image_size": [64, 64]},
    "tipsv2_dpt": {
        "backbone_config": _TRUNK,
        "neck_hidden_sizes": [16, 16, 16, 16],
        "fusion_hidden_size": 16,
    },
    "upernet": {
        "backbone_config": RESNET,
        "auxiliary_channels": 16,
        "auxiliary_in_channels": 24,
        "hidden_size": 32,
    },
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "xclip": {
        "projection_dim": 64,
        "vision_config": {"mit_hidden_size": 64, "mit_intermediate_size": 64, "mit_num_attention_heads": 4},
        "prompt_num_attention_heads": 4,
    },
    "zoedepth": {
        "backbone_config": {
            "model_type": "beit",
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "out_indices": [1, 2, 3, 4],
            "reshape_hidden_states": False,
        },
        "neck_hidden_sizes": [16, 16, 16, 16],
        "fusion_hidden_size": 16,
        "bottleneck_features": 16,
        "num_relative_features": 8,
        "bin_embedding_dim": 16,
    },
}
"""Keyword arguments of the configuration of families that see."""

HEARING: dict[str, dict[str, Any]] = {
    "clap": {
        "projection_dim": 64,
        "audio_config": {
            "hidden_size": 64,
            "patch_embeds_hidden_size": 16,
            "depths": [1, 1, 1],
            "num_attention_heads": [2, 2, 2],
            "num_hidden_layers": 3,
            "spec_size": 64,
            "window_size": 4,
            "projection_dim": 64,
        },
        "text_config": {"projection_dim": 64},
    },
    "dia": {
        "decoder_config": {
            "cross_hidden_size": 64,
            "cross_num_attention_heads": 4,
            "cross_num_key_value_heads": 4,
            "cross_head_dim": 16,
        }
    },
    "csm": {"codec_config": {"upsample_groups": 64}},
    "granite_speech5_ctc": {"encoder_config": {"num_key_value_heads": 4}},
    "mimi": {"upsample_groups": 64},
    "pop2piano": {"decoder_start_token_id": 0},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "speech_to_text": {"conv_channels": 32, "num_mel_bins": 80},
    "wav2vec2-bert": {"vocab_size": 320},
    "wav2vec2-conformer": {"vocab_size": 320},
}
"""Keyword arguments of the configuration of families that hear."""

_HORIZON = {"prediction_length": 8, "context_length": 16}

READING: dict[str, dict[str, Any]] = {
    "autoformer": {**_HORIZON, "num_time_features": 1, "label_length": 8, "lags_sequence": [1, 2, 3]},
    "dpr": {},
    "informer": {**_HORIZON, "num_time_features": 1, "lags_sequence": [1, 2, 3]},
    "switch_transformers": {"decoder_start_token_id": 0},
    "time_series_transformer": {**_HORIZON, "num_time_features": 1, "lags_sequence": [1, 2, 3]},
    "udop": {"decoder_start_token_id": 0},
    "esm": {"vocab_size": 320, "mask_token_id": 5, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16, "input_size": 32},
    "lilt": {"hidden_size": 96},
}
"""Keyword arguments of the configuration of families that read, pages and proteins among them."""
