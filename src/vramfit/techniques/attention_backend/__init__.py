"""Which kernels compute attention: fused ones in place of one that writes all weights out."""

from vramfit.techniques.attention_backend.backend_choice import AttentionBackend, AttentionSetting, SdpaName

__all__ = ["AttentionBackend", "AttentionSetting", "SdpaName"]
