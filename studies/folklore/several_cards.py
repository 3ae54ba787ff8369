"""Sayings about training on several cards: the first rank of each world runs, and the others are like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from folklore.finding import UNLIMITED, Answer, Finding, gib, measure
from folklore.networks import gpt2

TOKENS = 1024
Wrap = Callable[[nn.Module], nn.Module]


def _large() -> nn.Module:
    """GPT-2 XL: 1.6 billion parameters."""
    return gpt2(layers=48, width=1600, heads=25)


def _train(wrap: Wrap, batch: int, *, recompute: bool = False, autocast: bool = True) -> None:
    """Two steps of AdamW."""
    dist.init_process_group("nccl")
    model = _large().train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        tokens = torch.zeros(batch, TOKENS, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def _replicate(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model.cuda())


def _shard(model: nn.Module) -> nn.Module:
    """FSDP2 of each block, which it brings to the card by itself, with its own mixed precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def fsdp() -> Finding:
    """The peak of each card under full sharding and under replication."""
    rows, saved = [], []
    for recompute in (False, True):
        plain = _peak(_replicate, 1, 8, recompute=recompute)
        for cards in (8, 64):
            lean = _peak(_shard, 1, cards, recompute=recompute, autocast=False)
            saved.append(plain / lean)
            kept = "recomputed" if recompute else "kept"
            rows.append((str(cards), kept, gib(plain), gib(lean), f"{saved[-1]:.1f}"))
    return Finding(
        answer=Answer.DEPENDS,
        why=f"From {min(saved):.1f} to {max(saved):.1f} times here, beside DDP under autocast. Full sharding divides "
        "parameters, gradients and optimizer state by the number of cards, and does without DDP's buckets. "
        "Activations, logits, the block that is computed, the one that is gathered meanwhile, and the embedding with "
        "its gradient stay whole. How often less it is follows from what these are beside the state: a small batch, "
        "recomputed blocks and many cards make it more than ten, a large batch little.",
        columns=("cards, GPT-2 XL, 1 x 1024 each", "activations of blocks", "DDP", "FSDP2", "times less"),
        rows=tuple(rows),
    )


def ddp() -> Finding:
    """The peak of each card under replication."""
    alone = {batch: _peak(lambda model: model.cuda(), batch, 1) for batch in (1, 8)}
    rows = [("1", "nothing", str(batch), str(batch), gib(peak)) for batch, peak in alone.items()]
    found = {}
    for cards, batch in ((8, 1), (8, 8), (64, 8)):
        found[cards, batch] = _peak(_replicate, batch, cards)
        rows.append((str(cards), "DDP", str(batch), str(cards * batch), gib(found[cards, batch])))
    views = _peak(lambda model: DistributedDataParallel(model.cuda(), gradient_as_bucket_view=True), 1, 8)
    rows.append(("8", "DDP, gradients as views of its buckets", "1", "8", gib(views)))
    return Finding(
        answer=Answer.WRONG,
        why="Each card holds all parameters, gradients and optimizer states, whatever their number: a model that does "
        f"not fit one card fits none of 64. Its buckets make it {gib(found[8, 8] - alone[8])} more than one card "
        "alone. Only a batch is shared out: the eight sequences of one card, one on each of eight, take "
        f"{gib(found[8, 1])} there. Memory is pooled by FSDP, by tensor parallelism and by pipelines.",
        columns=("cards, GPT-2 XL", "wrapped by", "sequences on each", "in all", "peak of each card"),
        rows=tuple(rows),
    )


def _peak(wrap: Wrap, batch: int, cards: int, *, recompute: bool = False, autocast: bool = True) -> int:
    """Bytes allocated at most on the first of so many cards."""
    found = measure(
        lambda: _train(wrap, batch, recompute=recompute, autocast=autocast), card=UNLIMITED, cards=cards
    )
    return found.allocated
