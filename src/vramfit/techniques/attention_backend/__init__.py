"""Which kernels compute attention: fused ones in place of one that writes all weights out."""

from vramfit.techniques.attention_backend.technique import AttentionBackend, AttentionSetting, SdpaName

__all__ = ["AttentionBackend", "AttentionSetting", "SdpaName"]
