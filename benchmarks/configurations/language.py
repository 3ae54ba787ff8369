"""Language models in plain PyTorch: GPT-2, Llama with grouped queries, BERT, T5, mixtures of experts.

Shapes: B batch, S sequence, D model width, H heads, G groups of keys and values, K head width, V vocabulary, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from configurations.training import DEVICE, Program, inference, place, tokens, training

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a transformer; ``groups`` of keys and values, as many as heads without grouped queries."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    positions: int = 2048
    groups: int | None = None


SHAPES = {
    "gpt2-tiny": Shape(width=64, layers=2, heads=4, hidden=256, vocabulary=512),
    "gpt2-small": Shape(width=768, layers=12, heads=12, hidden=3072, vocabulary=50257),
    "gpt2-medium": Shape(width=1024, layers=24, heads=16, hidden=4096, vocabulary=50257),
    "llama-tiny": Shape(width=64, layers=2, heads=4, groups=2, hidden=128, vocabulary=512),
    "llama-160m": Shape(width=768, layers=12, heads=12, groups=4, hidden=2048, vocabulary=32000),
    "llama-1b": Shape(width=2048, layers=16, heads=32, groups=8, hidden=8192, vocabulary=128256),
    "llama-3b": Shape(width=3072, layers=28, heads=24, groups=8, hidden=8192, vocabulary=128256),
    "bert-base": Shape(width=768, layers=12, heads=12, hidden=3072, vocabulary=30522, positions=512),
    "bert-large": Shape(width=1024, layers=24, heads=16, hidden=4096, vocabulary=30522, positions=512),
    "t5-small": Shape(width=512, layers=6, heads=8, hidden=2048, vocabulary=32128),
    "t5-base": Shape(width=768, layers=12, heads=12, hidden=3072, vocabulary=32128),
}


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[B, S, H*K] to [B, H, S, K]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# -- GPT-2 ---------------------------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (heads_of(part, self.heads) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        hidden = F.gelu(self.up(self.norm_2(x)), approximate="tanh")
        return x + F.dropout(self.down(hidden), self.dropout, self.training)


class GPT(nn.Module):
    """Tokens [B, S] in, logits [B, S, V] out; the head shares the embedding's weights."""

    def __init__(self, shape: Shape, dropout: float = 0.1, recompute: str = "no") -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.blocks = nn.ModuleList(GPTBlock(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        where = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x = self.embedding(tokens_BS) + self.positions(where)
        for block in self.blocks:
            x = run_block(block, x, self.recompute)
        return self.head(self.norm(x))


def run_block(block: nn.Module, x: Tensor, recompute: str) -> Tensor:
    """A block, its activations kept or recomputed by either form of checkpointing."""
    if recompute == "no":
        return block(x)
    return checkpoint(block, x, use_reentrant=recompute == "reentrant")


def next_token_loss(logits: Tensor, tokens_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens_BS[:, 1:].flatten())


def gpt(
    *,
    size: str = "gpt2-small",
    batch: int = 4,
    length: int = 512,
    precision: str,
    optimizer: str,
    recompute: str = "no",
    attention: str | None = None,
    offload: bool = False,
    **loop: Any,
) -> Program:
    """GPT-2 in training. ``attention`` names the one backend that is allowed, None leaves the choice to torch;
    ``offload`` keeps saved tensors on the host."""
    shape = SHAPES[size]
    model = place(lambda: GPT(shape, recompute=recompute), precision)
    batch_BS = tokens(batch, length, shape.vocabulary)

    def loss() -> Tensor:
        chosen = sdpa_kernel(BACKENDS[attention]) if attention else contextlib.nullcontext()
        saving = torch.autograd.graph.save_on_cpu() if offload else contextlib.nullcontext()
        with chosen, saving:
            return next_token_loss(model(batch_BS), batch_BS)

    return training(model, loss, precision=precision, optimizer=optimizer, **loop)


def gpt_inference(*, size: str = "gpt2-small", batch: int = 8, length: int = 1024, precision: str) -> Program:
    """Logits of one batch."""
    shape = SHAPES[size]
    model = place(lambda: GPT(shape), precision)
    batch_BS = tokens(batch, length, shape.vocabulary)
    return inference(model, lambda: model(batch_BS), precision=precision)


# -- Llama ---------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Root mean square norm step by step, in float32, as Llama's published code has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def rotation(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine [S, K] of the rotary embedding."""
    frequency = 1.0 / 500_000 ** (torch.arange(0, width, 2, device=device).float() / width)
    angle = torch.outer(torch.arange(length, device=device).float(), frequency)
    both = torch.cat((angle, angle), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine.to(x.dtype) + torch.cat((-second, first), dim=-1) * sine.to(x.dtype)


class Cache:
    """Keys and values of the tokens so far, [B, G, S, K] for each layer: grown by concatenation, or preallocated."""

    def __init__(self, layers: int, preallocated: tuple[int, ...] | None, dtype: torch.dtype) -> None:
        self.length = 0
        self.held: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self.fixed = preallocated is not None
        if preallocated is not None:
            new = [torch.zeros(preallocated, device=DEVICE, dtype=dtype) for _ in range(2 * layers)]
            self.held = list(zip(new[::2], new[1::2], strict=True))

    def add(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        before = self.held[layer]
        if not self.fixed:
            if before is not None:
                key, value = torch.cat((before[0], key), dim=2), torch.cat((before[1], value), dim=2)
            self.held[layer] = (key, value)
            return key, value
        assert before is not None
        end = self.length + key.shape[2]
        before[0][:, :, self.length : end] = key
        before[1][:, :, self.length : end] = value
        return before[0][:, :, :end], before[1][:, :, :end]


class LlamaBlock(nn.Module):
    def __init__(self, shape: Shape, feed_forward: Callable[[], nn.Module], layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.groups = layer, shape.heads, shape.groups or shape.heads
        kept = shape.width // shape.heads * self.groups
        self.norm_1 = RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, kept, bias=False)
        self.value = nn.Linear(shape.width, kept, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_2 = RMSNorm(shape.width)
        self.feed_forward = feed_forward()

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, cache: Cache | None = None) -> Tensor:
        normed = self.norm_1(x)
        query = rotate(heads_of(self.query(normed), self.heads), cosine, sine)
        key = rotate(heads_of(self.key(normed), self.groups), cosine, sine)
        value = heads_of(self.value(normed), self.groups)
        if cache is not None:
            key, value = cache.add(self.layer, key, value)
        causal = query.shape[2] > 1
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=self.heads != self.groups
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_2(x))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    """Tokens [B, S] in, logits [B, S, V] out."""

    def __init__(
        self, shape: Shape, recompute: str = "no", feed_forward: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.shape, self.recompute = shape, recompute
        make = feed_forward or (lambda: SwiGLU(shape.width, shape.hidden))
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape, make, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens_BS: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.embedding(tokens_BS)
        start = 0 if cache is None else cache.length
        cosine, sine = rotation(
            start + tokens_BS.shape[1], self.shape.width // self.shape.heads, tokens_BS.device
        )
        cosine, sine = cosine[start:], sine[start:]
        for block in self.blocks:
            if self.recompute == "no":
                x = block(x, cosine, sine, cache)
            else:
                x = checkpoint(block, x, cosine, sine, use_reentrant=self.recompute == "reentrant")
        if cache is not None:
            cache.length += tokens_BS.shape[1]
        return self.head(self.norm(x))


def llama(
    *,
    size: str = "llama-1b",
    batch: int = 2,
    length: int = 2048,
    precision: str,
    optimizer: str,
    recompute: str = "no",
    adapters: int = 0,
    **loop: Any,
) -> Program:
    """Llama in training; with ``adapters`` only low-rank updates of that rank are trained."""
    shape = SHAPES[size]
    model = place(lambda: Llama(shape, recompute), precision, on_card=True)
    if adapters:
        adapt(model, adapters)
    batch_BS = tokens(batch, length, shape.vocabulary)
    return training(
        model,
        lambda: next_token_loss(model(batch_BS), batch_BS),
        precision=precision,
        optimizer=optimizer,
        **loop,
    )


class Adapted(nn.Module):
    """A frozen projection with a trained low-rank update."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, base.out_features, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze a model and give every query and value projection an update of this rank."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.query, block.value = Adapted(block.query, rank), Adapted(block.value, rank)


def llama_inference(*, size: str = "llama-1b", batch: int = 4, length: int = 2048, precision: str) -> Program:
    """Logits of one batch."""
    shape = SHAPES[size]
    model = place(lambda: Llama(shape), precision, on_card=True)
    batch_BS = tokens(batch, length, shape.vocabulary)
    return inference(model, lambda: model(batch_BS), precision=precision)


def generate(
    *,
    size: str = "llama-1b",
    batch: int = 8,
    prompt: int = 512,
    new: int = 64,
    fixed_cache: bool = False,
    precision: str,
) -> Program:
    """Greedy generation with a cache of keys and values, all sequences to the same length."""
    shape = SHAPES[size]
    model = place(lambda: Llama(shape), precision, on_card=True)
    prompt_BS = tokens(batch, prompt, shape.vocabulary)
    room = (batch, shape.groups or shape.heads, prompt + new, shape.width // shape.heads)

    def ask() -> Tensor:
        cache = Cache(shape.layers, room if fixed_cache else None, next(model.parameters()).dtype)
        told = prompt_BS
        latest = prompt_BS
        for _ in range(new):
            latest = model(latest, cache)[:, -1].argmax(-1, keepdim=True)
            told = torch.cat((told, latest), dim=1)
        return told

    return inference(model, ask, precision=precision)


# -- BERT ----------------------------------------------------------------------------------------------------


class Bert(nn.Module):
    """Tokens [B, S] and a padding mask in, logits of masked tokens [B, S, V] out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.norm = nn.LayerNorm(shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, shape.hidden, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, tokens_BS: Tensor, padding_BS: Tensor) -> Tensor:
        where = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x = self.norm(self.embedding(tokens_BS) + self.positions(where))
        return self.head(self.encoder(x, src_key_padding_mask=padding_BS))


def bert(
    *,
    size: str = "bert-base",
    batch: int = 16,
    length: int = 256,
    precision: str,
    optimizer: str,
    **loop: Any,
) -> Program:
    """BERT on masked tokens, every sequence padded by an eighth."""
    shape = SHAPES[size]
    model = place(lambda: Bert(shape), precision)
    batch_BS = tokens(batch, length, shape.vocabulary)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[:, length - length // 8 :] = True
    padding_BS = padding.to(DEVICE)

    def loss() -> Tensor:
        logits = model(batch_BS, padding_BS)
        return F.cross_entropy(logits.flatten(0, 1), batch_BS.flatten(), ignore_index=0)

    return training(model, loss, precision=precision, optimizer=optimizer, **loop)


# -- T5 ------------------------------------------------------------------------------------------------------


class T5Attention(nn.Module):
    """Attention with a learned bias of relative positions, the scores written out."""

    def __init__(self, shape: Shape, *, biased: bool) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.bias = nn.Embedding(32, shape.heads) if biased else None

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Any]:
        query, key, value = (
            heads_of(project(side), self.heads)
            for project, side in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        scores = query @ key.transpose(-1, -2)
        if self.bias is not None:
            rows = torch.arange(x.shape[1], device=x.device)[:, None]
            columns = torch.arange(memory.shape[1], device=x.device)[None]
            bias = self.bias((columns - rows).clamp(-16, 15) + 16).permute(2, 0, 1).unsqueeze(0)
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        weights = F.dropout(F.softmax(scores.float(), dim=-1).type_as(scores), 0.1, self.training)
        return self.out((weights @ value).transpose(1, 2).flatten(2)), bias


class T5Block(nn.Module):
    def __init__(self, shape: Shape, *, decoder: bool, first: bool) -> None:
        super().__init__()
        self.attention = T5Attention(shape, biased=first)
        self.cross = T5Attention(shape, biased=False) if decoder else None
        self.norms = nn.ModuleList(RMSNorm(shape.width) for _ in range(3 if decoder else 2))
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None, mask: Tensor | None, bias: Any) -> tuple[Tensor, Any]:
        normed = self.norms[0](x)
        mixed, bias = self.attention(normed, normed, mask, bias)
        x = x + F.dropout(mixed, 0.1, self.training)
        if self.cross is not None and memory is not None:
            x = x + F.dropout(self.cross(self.norms[1](x), memory, None, None)[0], 0.1, self.training)
        hidden = F.dropout(F.relu(self.up(self.norms[-1](x))), 0.1, self.training)
        return x + F.dropout(self.down(hidden), 0.1, self.training), bias


class T5(nn.Module):
    """Encoder and decoder tokens in, logits [B, S, V] out; one embedding for all."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.encoder = nn.ModuleList(T5Block(shape, decoder=False, first=i == 0) for i in range(shape.layers))
        self.decoder = nn.ModuleList(T5Block(shape, decoder=True, first=i == 0) for i in range(shape.layers))
        self.norms = nn.ModuleList(RMSNorm(shape.width) for _ in range(2))

    def forward(self, source_BS: Tensor, target_BS: Tensor) -> Tensor:
        x, bias = self.embedding(source_BS), None
        for block in self.encoder:
            x, bias = block(x, None, None, bias)
        memory = self.norms[0](x)
        length = target_BS.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target_BS.device).triu(1)
        x, bias = self.embedding(target_BS), None
        for block in self.decoder:
            x, bias = block(x, memory, mask, bias)
        return F.linear(self.norms[1](x), self.embedding.weight)


def t5(
    *,
    size: str = "t5-small",
    batch: int = 8,
    length: int = 256,
    precision: str,
    optimizer: str,
    **loop: Any,
) -> Program:
    """T5 in training; targets are half as long as sources."""
    shape = SHAPES[size]
    model = place(lambda: T5(shape), precision)
    source, target = (
        tokens(batch, length, shape.vocabulary),
        tokens(batch, length // 2, shape.vocabulary),
    )

    def loss() -> Tensor:
        return F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())

    return training(model, loss, precision=precision, optimizer=optimizer, **loop)


# -- mixtures of experts -------------------------------------------------------------------------------------


class CapacityExperts(nn.Module):
    """Top-1 routing with a fixed capacity for each expert (Switch Transformer): no shape depends on the data."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        capacity = 5 * flat.shape[0] // (4 * self.experts)
        gate, choice = F.softmax(self.router(flat).float(), dim=-1).max(dim=-1)
        chosen = F.one_hot(choice, self.experts)
        place_in_queue = (chosen.cumsum(0) * chosen).sum(-1) - 1
        slot = torch.where(
            place_in_queue < capacity, choice * capacity + place_in_queue, self.experts * capacity
        )
        room = flat.new_zeros(self.experts * capacity + 1, flat.shape[1]).index_copy(0, slot, flat)
        queues = room[:-1].view(self.experts, capacity, -1)
        done = torch.bmm(F.gelu(torch.bmm(queues, self.up.to(flat.dtype))), self.down.to(flat.dtype))
        back = torch.cat((done.flatten(0, 1), done.new_zeros(1, done.shape[-1])))[slot]
        return (back * gate.unsqueeze(-1).to(back.dtype)).view_as(x)


class RoutedExperts(nn.Module):
    """Top-2 routing expert by expert, as many tokens for each as chose it: shapes depend on the data."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, choice = F.softmax(self.router(flat).float(), dim=-1).topk(2, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, rank = torch.where(choice == index)
            out.index_add_(0, row, expert(flat[row]) * weights[row, rank, None])
        return out.view_as(x)


EXPERTS = {"capacity": CapacityExperts, "routed": RoutedExperts}


def moe(
    *,
    size: str = "llama-160m",
    routing: str = "capacity",
    experts: int = 8,
    batch: int = 4,
    length: int = 1024,
    precision: str,
    optimizer: str,
    **loop: Any,
) -> Program:
    """A Llama whose feed-forward layers are mixtures of experts, in training."""
    shape = SHAPES[size]
    kind = EXPERTS[routing]
    model = place(
        lambda: Llama(shape, feed_forward=lambda: kind(shape.width, shape.hidden, experts)),
        precision,
        on_card=True,
    )
    batch_BS = tokens(batch, length, shape.vocabulary)
    return training(
        model,
        lambda: next_token_loss(model(batch_BS), batch_BS),
        precision=precision,
        optimizer=optimizer,
        **loop,
    )
