"""Chunked losses: cross-entropy of a large vocabulary without all the logits."""

from vramfit.techniques.chunked_loss.chunking import ChunkedLoss, ChunkedLossSetting
from vramfit.techniques.chunked_loss.finding import find_head

__all__ = ["ChunkedLoss", "ChunkedLossSetting", "find_head"]
