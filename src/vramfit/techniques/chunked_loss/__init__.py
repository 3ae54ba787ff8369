"""Chunked losses: cross-entropy of a large vocabulary without all the logits."""

from vramfit.techniques.chunked_loss.finding import find_head
from vramfit.techniques.chunked_loss.technique import ChunkedLoss, ChunkedLossSetting

__all__ = ["ChunkedLoss", "ChunkedLossSetting", "find_head"]
