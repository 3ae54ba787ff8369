"""The trainings that PEFT's authors measured: lengths as published, the steps that are run, and what padding costs."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
from measured_programs import peft_metamath
from measured_programs.peft_metamath import (
    LIMIT,
    PUBLISHED,
    Drawn,
    buckets,
    chosen,
    main,
    told,
    train,
)

import vramfit
from vramfit.units import MIB

LAYERS, HEADS, KV_HEADS, HEAD = 2, 6, 2, 128
BF16 = 2


def test_the_lengths_are_those_that_were_published() -> None:
    run = buckets(peft_metamath.SEED)
    texts = [text for bucket in run for batch in bucket for text in batch]
    assert len(texts) == 20_000
    assert fmean(texts) == pytest.approx(208.9, abs=1)
    assert max(texts) <= LIMIT
    # what they have allocated after a step, less weights, adapter and state, by what a token of logits and cache takes:
    # LoRA (6,924,458,053 - 6,600,283,426) / 371,224 / 4
    assert fmean(batch[0] for bucket in run for batch in bucket) == pytest.approx(218.3, rel=0.01)
    for bucket in run:
        texts = [text for batch in bucket for text in batch]
        assert texts == sorted(texts, reverse=True)
    assert buckets(1) == buckets(1) != buckets(2)


def test_the_first_buckets_are_run_and_the_longest_of_the_others() -> None:
    run = [[[longest]] for longest in (5, 9, 1, 7, 3, 8)]
    drawn = chosen(run, first=2, longest=2)
    assert [batch[0] for batch in drawn.batches] == [5, 9, 7, 8]
    assert (drawn.first, drawn.whole) == (2, 6)


def test_figures_are_of_the_whole_run() -> None:
    drawn = Drawn(buckets=[], first=1, whole=10)  # 200 steps: two lie above the 99th percentile
    found = drawn.reserved([100] * 20 + [900, 300, 500, 700], 1000)
    assert (found.maximum, found.percentile_99, found.average) == (1000, 500, 100)


def test_a_row_says_how_far_each_figure_is_off() -> None:
    published = PUBLISHED["ia3"]
    row = told("ia3", published)
    assert row.count("+0.00%") == 3
    assert "23,234,347,008" in row


@pytest.mark.parametrize("arguments", [["lora"], ["--longest", "1"], ["--first", "0"]])
def test_wrong_arguments_are_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "no training is called lora" in told or "has to be at least" in told


def small() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512,
        hidden_size=HEADS * HEAD,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
    )


def peak(monkeypatch: pytest.MonkeyPatch, batches: list[list[int]]) -> tuple[int, list[int]]:
    monkeypatch.setattr(peft_metamath, "architecture", small)
    monkeypatch.setattr(peft_metamath, "ARTICLES", 0)
    with vramfit.VirtualGPU(peft_metamath.CARD, alloc_conf="", context_bytes=0) as gpu:
        reserved = list(train(peft_metamath.load(peft_metamath.FULL), batches))
    return gpu.peak_allocated_bytes, reserved


def test_padding_makes_attention_repeat_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the peak of a step is lower: flash attention takes keys and values as they are."""
    pytest.importorskip("transformers")
    length = 512
    whole, _ = peak(monkeypatch, [[length] * 4])
    mixed, _ = peak(monkeypatch, [[length, length - 1, length - 2, length - 3]])
    repeated = LAYERS * 2 * 4 * length * HEADS * HEAD * BF16
    assert repeated // 2 < mixed - whole < 3 * repeated


def test_lengths_that_fall_reserve_more_than_the_longest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason why no single length stands for a run."""
    pytest.importorskip("transformers")
    _, alone = peak(monkeypatch, [[700, 690, 680, 670]] * 4)
    _, falling = peak(monkeypatch, [[length, *[length - 10] * 3] for length in (700, 600, 550, 500)])
    assert max(falling) > max(alone) + MIB


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(SystemExit, match="pip install transformers"):
        peft_metamath.load(peft_metamath.FULL)


def test_the_model_is_the_one_that_they_trained() -> None:
    """Its parameters are as many as their results say."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(peft_metamath.architecture())
    assert model.num_parameters() == 3_212_749_824
