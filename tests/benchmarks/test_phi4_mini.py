"""Loading Phi-4-mini: what transformers reserves before the weights, then and now."""

from __future__ import annotations

import pytest
import torch
from measured_programs.phi4_mini import CARD, LAYERS, PUBLISHED, VOCABULARY, WIDTH, load

from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU

EMBEDDING = VOCABULARY * WIDTH * 2
LAYER = 2 * (5120 * WIDTH + WIDTH * WIDTH + 3 * 8192 * WIDTH + 2 * WIDTH)
SEGMENT = 2 * MIB


def whole_segments(size: int) -> int:
    return -(-size // SEGMENT) * SEGMENT


def loaded(then: bool) -> tuple[int, int]:
    """Reserved and allocated bytes of a model of one layer."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with VirtualGPU(CARD):
        model = load(1, then)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


def test_then_the_tied_embedding_counted_twice() -> None:
    weights = EMBEDDING + LAYER + 2 * WIDTH
    reserved, allocated = loaded(then=True)
    assert allocated == pytest.approx(weights, abs=4096)
    assert reserved == whole_segments(weights + EMBEDDING) + SEGMENT  # norms are in one of small blocks


def test_now_it_counts_once() -> None:
    weights = EMBEDDING + LAYER + 2 * WIDTH
    reserved, _ = loaded(then=False)
    # accelerate's first tensor leaves 2 MiB unused, which are taken off, so that the last projection does not fit
    assert whole_segments(weights) <= reserved <= whole_segments(weights) + LAYER


def test_the_published_figure_is_that_of_both_embeddings() -> None:
    reserved = whole_segments(2 * EMBEDDING + LAYERS * LAYER + 2 * WIDTH) + SEGMENT
    caches = 4 * SEGMENT
    assert round((reserved + caches) / 1e9, 2) == PUBLISHED
    assert round((reserved + caches - EMBEDDING) / 1e9, 2) == 7.68
