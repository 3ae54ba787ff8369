"""Programs whose ops are counted and timed: training, generation token by token, and ops that do next to nothing.

Each is a function that builds its model on the current (virtual) card and gives one that runs a *round* of it. Rounds
are numbered, so that a program which never repeats a shape within one run of its own does not do so over rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Round = Callable[[int], None]
TOKENS = 40


def gpt2_training() -> Round:
    """GPT-2 small of transformers, 4 x 1024, AdamW, bfloat16: one step a round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).to(torch.bfloat16).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 50257, (4, 1024), device="cuda")

    def step(_: int) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Bottleneck(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(
                nn.Conv2d(inside, outside // 4, 1, bias=False),
                nn.BatchNorm2d(outside // 4),
                nn.ReLU(inplace=True),
            ),
            nn.Conv2d(outside // 4, outside // 4, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(outside // 4), nn.ReLU(inplace=True)),
            *(nn.Conv2d(outside // 4, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        self.shortcut = nn.Sequential()
        if inside != outside or stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet_training() -> Round:
    """ResNet-50 at 32 x 224 x 224, SGD with momentum, mixed precision with a GradScaler: one step a round."""
    inside, blocks = 64, []
    for depth, (count, outside) in enumerate(zip((3, 4, 6, 3), (256, 512, 1024, 2048), strict=True)):
        for number in range(count):
            blocks.append(_Bottleneck(inside, outside, 2 if depth and not number else 1))
            inside = outside
    stem = (
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    model = nn.Sequential(*stem, *blocks, *head).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    images = torch.randn(32, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (32,), device="cuda")

    def step(_: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def cache_generation() -> Round:
    """``generate()`` of transformers with its growing cache: 40 tokens of a Llama of four layers a round.

    Prompts of different rounds are so different in length that no round meets the lengths of another.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_hidden_layers": 4}
    model = (
        LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=1 << 16))
        .to(torch.bfloat16)
        .cuda()
        .eval()
    )

    def generate(number: int) -> None:
        prompt = torch.randint(5, 32000, (1, 16 + number * (TOKENS + 16)), device="cuda")
        mask = torch.ones_like(prompt)
        model.generate(
            prompt,
            attention_mask=mask,
            do_sample=True,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            pad_token_id=0,
        )

    return generate


class _RotaryAttention(nn.Module):
    """Attention of a decoder with rotary positions and a cache of fixed size, as gpt-fast's model.py has it."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.part = heads, width // heads
        self.wqkv, self.wo = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, self.part, dtype=torch.bfloat16))

    def forward(
        self, x: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, self.part) for t in self.wqkv(x).split(width, dim=-1))
        q, k, v = (t.transpose(1, 2) for t in (_turned(q, turns), _turned(k, turns), v))
        self.keys[:, :, positions] = k
        self.values[:, :, positions] = v
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, width))


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    turns = turns.view(1, pairs.size(1), 1, pairs.size(3), 2)
    first = pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1]
    second = pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1]
    return torch.stack([first, second], -1).flatten(3).type_as(x)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class _DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        inside = -(-8 * width // 3 // 256) * 256
        self.attention = _RotaryAttention(width, heads, length)
        self.attention_norm, self.feed_forward_norm = _Norm(width), _Norm(width)
        self.w1, self.w3 = nn.Linear(width, inside, bias=False), nn.Linear(width, inside, bias=False)
        self.w2 = nn.Linear(inside, width, bias=False)

    def forward(
        self, x: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns, mask, positions)
        y = self.feed_forward_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class _Decoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(_DecoderLayer(width, heads, length) for _ in range(layers))
        self.norm, self.output = _Norm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(length, length, dtype=torch.bool)))
        self.register_buffer("turns", torch.ones(length, width // heads // 2, 2, dtype=torch.bfloat16))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mask, turns = self.mask[None, None, positions], self.turns[positions]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, turns, mask, positions)
        return self.output(self.norm(x))


def _sampled(logits: torch.Tensor, kept: int = 200, temperature: float = 0.8) -> torch.Tensor:
    logits = logits[:, -1] / temperature
    best, _ = torch.topk(logits, min(kept, logits.size(-1)))
    logits = torch.where(logits < best.select(-1, -1).unsqueeze(-1), -float("inf"), logits)
    probabilities = F.softmax(logits, dim=-1)
    drawn = torch.empty_like(probabilities).exponential_(1)
    return torch.argmax(probabilities / drawn, dim=-1, keepdim=True).to(dtype=torch.int)


def static_generation() -> Round:
    """Generation with a cache of fixed size, written after gpt-fast (model.py and generate.py, before its
    ``flex_attention``): the 12 layers of stories110M, 8 tokens a round."""
    length = 256
    model = _Decoder(layers=12, width=768, heads=12, words=32000, length=length).to(torch.bfloat16)
    model = model.cuda().eval()

    @torch.no_grad()
    def generate(_: int) -> None:
        prompt = torch.randint(0, 32000, (1, 8), device="cuda", dtype=torch.int)
        token = _sampled(model(prompt, torch.arange(8, device="cuda"))).clone()
        position = torch.tensor([8], device="cuda", dtype=torch.int)
        tokens = [token]
        for _ in range(8):
            token = _sampled(model(token.view(1, -1), position))
            position += 1
            tokens.append(token.clone())
        torch.cat(tokens, dim=1).tolist()

    return generate


def tiny_ops() -> Round:
    """Adding to large tensors, 2000 times a round: what any op costs at least."""
    x, y = torch.zeros(512, 512, device="cuda"), torch.ones(512, 512, device="cuda")

    def run(_: int) -> None:
        for _ in range(1000):
            z = x + y
            z.mul_(2.0)

    return run


PROGRAMS: dict[str, Callable[[], Round]] = {
    "gpt2-training": gpt2_training,
    "resnet-training": resnet_training,
    "cache-generation": cache_generation,
    "static-generation": static_generation,
    "tiny-ops": tiny_ops,
}
"""By name, in the order of the table."""
