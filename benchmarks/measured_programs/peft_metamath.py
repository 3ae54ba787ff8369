"""Fine-tunings of Llama-3.2-3B that the authors of PEFT measured on an L40S: reserved memory, predicted and published.

    python benchmarks/measured_programs/peft_metamath.py [NAME ...] [--first N] [--longest N] [--seed N] [--json FILE]

Needs transformers; the adapters need peft too. Weights and texts are not needed: weights are virtual, and of the texts
only their lengths matter.

Source: github.com/huggingface/peft (Apache-2.0), folder ``method_comparison/MetaMathQA`` at commit 5d602fdb:
``run.py``, ``utils.py``, ``data.py``, ``default_training_params.json``, and ``results/*.json`` for the figures. The
loop below does what theirs does, in code of our own. They ran torch 2.13.0+cu130, transformers 5.13.1 and peft
0.19.2.dev0 (d787f51b).

What the figures mean: ``accelerator_memory_max`` is `torch.cuda.max_memory_reserved` of the whole run, less the 2 MiB
that stood before the model; ``..._reserved_99th`` and ``..._reserved_avg`` are of `torch.cuda.memory_reserved` after
each of 5,000 training steps, less the same.

Settings: bfloat16 throughout, four texts a batch, each batch padded to its longest text; AdamW (foreach), gradients
clipped to norm 1; no autocast, no checkpointing. Before training, the loss of 100 articles of 768 tokens is computed.
Texts come in buckets of 80, sorted from long to short; the cache is emptied every ten steps, so twice a bucket.

NOTE [The lengths decide]
Between two emptyings the cache holds blocks of the lengths seen so far, and with every weight being trained, 6.4 GB of
gradients and as many bytes of the optimizer's temporaries are laid into what the activations left, differently in each
step. Reserved memory is then 3 to 5 GB above the peak of what is allocated, and depends on the lengths and on their
order: no single length stands for a run. Repeated at 704 tokens without padding, the same model reserves 37.0 to 42.6
GB, by the steps in which the state of the optimizer was made. Three things have to be as in the program:

- the lengths vary within the ten steps between two emptyings, and fall;
- batches hold padding, so that attention gets a mask, the memory-efficient kernel instead of flash attention, and
  keys and values repeated for every query head (0.9 GB at 692 tokens);
- the logits of the step before live until those of the next are made, so the second batch of a bucket, if it is longer
  than two thirds of the first, needs one more block of float32 logits: 0.7 to 1.2 GB, seen with LoRA.

NOTE [The draw]
The texts are not here, so their lengths are drawn: characters from a log-normal distribution of which 6.2 % lie above
the limit of 1,300 and are left out (``data.py`` states both), times tokens per character. Of its three free figures
the mean is that of their tokens; the median of the characters and the spread of tokens per character were chosen so
that one adapter, LoRA of rank 32, comes near its three figures, and the seed is the first with which an estimate of
them is within 1.2 %. Full fine-tuning and the other adapters play no part in that: their figures are predictions. What
is published fixes the distribution and not the order, and other draws that suit LoRA as well, or other buckets before
the longest, move the maximum of full fine-tuning by about 1 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vramfit.virtual.gpu import VirtualGPU

CARD = "L40S"
BATCH = 4
BATCHES_IN_BUCKET = 20
BUCKETS = 250
EMPTYING = 10
"""Steps between two emptyings of the cache."""

LONGEST_TEXT = 1300
"""Characters; ``CHAR_LIMIT`` of ``data.py``."""

ABOVE = 1.538
"""Standard deviations above the median that 6.2 % of a normal distribution exceed."""

MEDIAN = 600
"""Characters of a text before the limit."""

RATIO_SPREAD = 0.16
"""Standard deviation of the logarithm of tokens per character."""

PROMPT = 15
"""Tokens of their template and of the first token, in every text."""

MEAN = 208.9
"""Tokens of a text: ``train total tokens`` of the results, over 20,000 texts, less one each."""

LEAST_LONGEST = 6
"""Of 5,000 steps 50 lie above the 99th percentile: all steps between two emptyings, in five buckets of the longest."""

LIMIT = 768
"""Tokens; ``max_seq_length``."""

ARTICLES = 100
END_OF_TEXT = 128_001
SEED = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """Reserved bytes of a run.

    Attributes:
        maximum: the most at any time.
        percentile_99: of the values after each step.
        average: of the same.
    """

    maximum: int
    percentile_99: int
    average: int


FULL = "full-finetuning"
PUBLISHED = {
    FULL: Reserved(maximum=38_868_615_168, percentile_99=37_345_097_154, average=34_338_935_878),
    "lora-rank32": Reserved(maximum=22_292_725_760, percentile_99=20_120_076_288, average=14_397_338_969),
    "lora-rank32-dora": Reserved(
        maximum=24_532_484_096, percentile_99=22_179_479_552, average=15_414_576_807
    ),
    "ln-tuning": Reserved(maximum=21_181_235_200, percentile_99=19_144_900_608, average=13_816_696_720),
    "ia3": Reserved(maximum=23_234_347_008, percentile_99=20_931_674_112, average=14_785_922_360),
    "oft-rank32": Reserved(maximum=22_332_571_648, percentile_99=20_138_950_656, average=14_572_767_831),
}
"""By name: ``full-finetuning/llama-3.2-3B-lr_0.00001``, ``lora/llama-3.2-3B-rank32``, ``.../llama-3.2-3B-rank32-dora``,
``ln_tuning/llama-3.2-3B-default``, ``ia3/llama-3.2-3B-default`` and ``oft/llama-3.2-3B-rank32`` of their results."""


DRAW = 0.01
"""Part of the maximum by which draws of lengths differ that suit the published figures equally well."""


def main(arguments: list[str] | None = None) -> int:
    """Print a row a training; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PUBLISHED)} (default: all)")
    parser.add_argument("--first", type=int, default=25, help="buckets of 20 steps from the start (of 250)")
    parser.add_argument(
        "--longest", type=int, default=10, help="and so many of the others, with the longest batches"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the lengths")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--row", action="store_true", help="print the maximum of one training for accuracy.py"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(PUBLISHED))
    if unknown:
        parser.error(f"no training is called {unknown[0]}: there are {', '.join(PUBLISHED)}")
    if options.first < 1 or options.longest < LEAST_LONGEST:
        parser.error(f"--first has to be at least 1, and --longest {LEAST_LONGEST} (for the 99th percentile)")
    drawn = chosen(buckets(options.seed), options.first, options.longest)
    if options.row:
        size = predicted(options.names[0], drawn).maximum
        print(json.dumps({"predicted": size, "below": round(DRAW * size), "above": round(DRAW * size)}))
        return 0
    results = {}
    print("| training | maximum | published | | 99th percentile | published | | average | published | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.names or PUBLISHED:
        results[name] = predicted(name, drawn)
        print(told(name, results[name]), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({name: asdict(row) for name, row in results.items()}, indent=1) + "\n"
        )
    return 0


def told(name: str, ours: Reserved) -> str:
    """A row of the table."""
    pairs = ((getattr(ours, part), getattr(PUBLISHED[name], part)) for part in Reserved.__slots__)
    return (
        f"| {name} | "
        + " | ".join(f"{ours:,} | {theirs:,} | {ours / theirs - 1:+.2%}" for ours, theirs in pairs)
        + " |"
    )


# -- the lengths ---------------------------------------------------------------------------------------------


def lengths(seed: int) -> Iterator[int]:
    """Tokens of one text after the other, without end: see NOTE [The draw]."""
    draw = random.Random(seed)
    spread = math.log(LONGEST_TEXT / MEDIAN) / ABOVE
    mean = (
        MEDIAN * math.exp(spread**2 / 2) * _normal(ABOVE - spread) / _normal(ABOVE)
    )  # of those within the limit
    while True:
        characters = draw.lognormvariate(math.log(MEDIAN), spread)
        if characters <= LONGEST_TEXT:
            ratio = draw.lognormvariate(-(RATIO_SPREAD**2) / 2, RATIO_SPREAD)
            yield min(LIMIT, round(PROMPT + (MEAN - PROMPT) * characters / mean * ratio))


def _normal(value: float) -> float:
    """Share of a normal distribution below ``value`` standard deviations."""
    return (1 + math.erf(value / math.sqrt(2))) / 2


Bucket = list[list[int]]
"""Lengths of the texts of each batch, from long to short."""


def buckets(seed: int) -> list[Bucket]:
    """A whole run of 5,000 batches."""
    texts = lengths(seed)
    run = []
    for _ in range(BUCKETS):
        bucket = sorted((next(texts) for _ in range(BATCHES_IN_BUCKET * BATCH)), reverse=True)
        run.append([bucket[at : at + BATCH] for at in range(0, len(bucket), BATCH)])
    return run


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Buckets to run, in order.

    Attributes:
        buckets: of them the first ``first`` stand for the average.
        first: how many.
        whole: how many buckets they were chosen from.
    """

    buckets: list[Bucket]
    first: int
    whole: int

    @property
    def batches(self) -> Iterator[list[int]]:
        """Batch after batch."""
        return (batch for bucket in self.buckets for batch in bucket)

    def reserved(self, after_steps: list[int], maximum: int) -> Reserved:
        """The three figures of the whole run.

        Steps that were not run are taken to lie below its 99th percentile. For adapters that holds, because longer
        texts reserve more; for full fine-tuning the percentile is a lower bound unless every bucket is run.
        """
        start = after_steps[: self.first * BATCHES_IN_BUCKET]
        place = self.whole * BATCHES_IN_BUCKET // 100
        highest = sorted(after_steps, reverse=True)
        return Reserved(
            maximum=maximum,
            percentile_99=highest[place],
            average=round(sum(start) / len(start)),
        )


def chosen(run: list[Bucket], first: int, longest: int) -> Drawn:
    """The first buckets, and of the others those with the longest batches."""
    rest = sorted(range(first, len(run)), key=lambda at: run[at][0][0], reverse=True)[:longest]
    return Drawn(buckets=run[:first] + [run[at] for at in sorted(rest)], first=first, whole=len(run))


# -- the program ---------------------------------------------------------------------------------------------


def predicted(name: str, drawn: Drawn) -> Reserved:
    """Run one of the trainings on the virtual GPU."""
    with VirtualGPU(CARD):
        nn.Linear(1, 1).to("cuda")  # theirs too: what this reserves is taken off
        before = torch.cuda.memory_reserved()
        model = load(name)
        after_steps = [reserved - before for reserved in train(model, drawn.batches)]
        return drawn.reserved(after_steps, torch.cuda.max_memory_reserved() - before)


def load(name: str) -> nn.Module:
    """The model on the card, placed by `from_pretrained`: it reserves one segment for all weights, and fills it."""
    try:
        from transformers import LlamaForCausalLM
    except ImportError:
        sys.exit("the model is transformers', which is not installed\nTry: pip install transformers")
    config = architecture()
    weights = LlamaForCausalLM(config).to(torch.bfloat16).state_dict()
    del weights["lm_head.weight"]  # tied to the embedding, and not in the file
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, device_map="cuda", dtype=torch.bfloat16
    )
    return model if name == FULL else adapted(model, name)


def architecture() -> Any:
    """Llama-3.2-3B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=128_000,
        eos_token_id=END_OF_TEXT,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def adapted(model: Any, name: str) -> nn.Module:
    """The model with an adapter as in their ``experiments`` folder; adapters are float32."""
    try:
        from peft import IA3Config, LNTuningConfig, LoraConfig, OFTConfig, get_peft_model
    except ImportError:
        sys.exit("the adapters are peft's, which is not installed\nTry: pip install peft")
    config = {
        "lora-rank32": lambda: LoraConfig(r=32, lora_alpha=64, task_type="CAUSAL_LM"),
        "lora-rank32-dora": lambda: LoraConfig(r=32, lora_alpha=64, task_type="CAUSAL_LM", use_dora=True),
        "ln-tuning": lambda: LNTuningConfig(),
        "ia3": lambda: IA3Config(),
        "oft-rank32": lambda: OFTConfig(r=32, oft_block_size=0, target_modules=["q_proj", "v_proj"]),
    }[name]
    adapted: nn.Module = get_peft_model(model, config(), autocast_adapter_dtype=True)
    return adapted


def train(model: nn.Module, batches: Iterable[list[int]]) -> Iterator[int]:
    """Their loop; yields the bytes reserved after each step.

    ``outputs`` holds the logits and the cache of keys and values of one step until the next has made its own, and
    gradients live until then as well. Their evaluations, by `generate`, are left out: see the benchmarks' README.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
    model.eval()
    for _ in range(ARTICLES // BATCH):
        losses_of_text(model, [LIMIT] * BATCH)
    model.train()
    for step, texts in enumerate(batches, start=1):
        tokens, mask = padded(texts, left=False)
        labels = tokens.clone()
        for row, length in enumerate(texts):
            labels[row, length + 1 :] = -100  # the first token of the padding counts as the end of the text
        items = mask.sum().item()
        optimizer.zero_grad()
        outputs = model(input_ids=tokens, attention_mask=mask, labels=labels, num_items_in_batch=items)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        yield torch.cuda.memory_reserved()
        if step % EMPTYING == 0:
            torch.cuda.empty_cache()


def padded(texts: list[int], *, left: bool) -> tuple[Tensor, Tensor]:
    """Tokens and mask of a batch on the card, both (texts, longest text); int64."""
    longest = max(texts)
    mask = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, length in enumerate(texts):
        mask[row, longest - length if left else 0 : longest if left else length] = 1
    return torch.zeros_like(mask).to("cuda"), mask.to("cuda")


@torch.inference_mode()
def losses_of_text(model: nn.Module, texts: list[int]) -> list[float]:
    """Loss of each token, text by text."""
    tokens, mask = padded(texts, left=True)
    losses: list[float] = []
    for logits, targets, row in zip(
        model(input_ids=tokens, attention_mask=mask).logits, tokens, mask, strict=True
    ):
        length = int(row.sum())
        losses.extend(
            nn.functional.cross_entropy(logits[-length:-1], targets[-length:][1:], reduction="none").tolist()
        )
    return losses


if __name__ == "__main__":
    sys.exit(main())
