"""The transformer of the gpt-2.7b recordings: a plain CUDA script that records its own memory.

    python gpt_2_7b.py --out DIR [--autocast] train:128 [forward:128 ...]

It runs the tasks one after the other in one process, each with a model of its own, and writes what
``torch.cuda.memory`` recorded of each to ``DIR/TASK-CONTEXT.pickle``. Architecture and order of operations are those
of the public code behind the recordings (github.com/kkaitlyn111/cs336-a2-systems and cs336-assignment1); the code
here is written anew, for memory alone: weights are left uninitialised, which allocates the same.

Shapes: B batch, S sequence, D model width, H heads, K head width, F feed-forward width, V vocabulary.
"""

# ruff: noqa: RET504  # a local name that is assigned again decides when a tensor is given back

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

BATCH = 4
VOCABULARY = 10_000
SIZES = {"2.7b": (2560, 10240, 32, 32), "small": (768, 3072, 12, 12)}  # D, F, layers, H
THETA = 10_000.0


def lowered(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Operands as einsum sees them: autocast lowers both when it is entered."""
    if not torch.is_autocast_enabled("cuda"):
        return left, right
    dtype = torch.get_autocast_dtype("cuda")
    return left.to(dtype), right.to(dtype)


class Projection(nn.Module):
    """A matrix without bias; it is made on the host and moved with the model."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        # As torch 2.6's einsum does it: weight times transposed input. Later versions swap the two.
        weight, x = lowered(self.weight, x)
        batch, length, inputs = x.shape
        product = torch.bmm(weight.unsqueeze(0), x.permute(2, 0, 1).reshape(1, inputs, batch * length))
        return product.view(-1, batch, length).permute(1, 2, 0)


class Embedding(nn.Module):
    def __init__(self, count: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width, device=device))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Norm(nn.Module):
    """Root mean square over the last dimension, in float32 whatever comes in."""

    def __init__(self, width: int, device: torch.device, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device))
        self.width = width
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.sqrt(length**2 / self.width + self.epsilon)
        scaled = x / scale
        out = torch.einsum("d,bsd->bsd", self.weight, scaled)
        return out.to(given)


class Gated(nn.Module):
    """SwiGLU, the gate's sigmoid and product apart."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Projection(hidden, width)
        self.down = Projection(width, hidden)
        self.up = Projection(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        up = self.up(x)
        swish = torch.sigmoid(gate) * gate
        product = swish * up
        out = self.down(product)
        return out


class Rotary(nn.Module):
    """Rotates pairs of neighbours by their position; each layer has a table of its own."""

    def __init__(self, head: int, length: int, device: torch.device) -> None:
        super().__init__()
        position = torch.arange(length, device=device)
        pair = torch.arange(0, head, 2, device=device)
        frequency = 1.0 / (THETA ** (pair.float() / head))
        angle = torch.outer(position, frequency)
        table = torch.zeros(length, head // 2, 2, device=device)
        table[:, :, 0] = torch.cos(angle)
        table[:, :, 1] = torch.sin(angle)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x_BHSK: Tensor, position_BS: Tensor) -> Tensor:
        pairs = x_BHSK.reshape(*x_BHSK.shape[:-1], -1, 2)
        cosine = self.table[position_BS, :, 0]
        sine = self.table[position_BS, :, 1]
        cosine = cosine.unsqueeze(1)
        sine = sine.unsqueeze(1)
        rotated = torch.zeros_like(pairs)
        rotated[..., 0] = cosine * pairs[..., 0] - sine * pairs[..., 1]
        rotated[..., 1] = sine * pairs[..., 0] + cosine * pairs[..., 1]
        out = rotated.reshape(x_BHSK.shape)
        return out


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, step by step."""
    highest = torch.max(scores, dim=-1, keepdim=True)[0]
    exponents = torch.exp(scores - highest)
    total = torch.sum(exponents, dim=-1, keepdim=True)
    out = exponents / total
    return out


def matrix_product(left: Tensor, right: Tensor) -> Tensor:
    """Batched product of [B, H, m, n] and [B, H, n, p], operands brought into one batch as torch 2.6's einsum does."""
    left, right = lowered(left, right)
    batch, heads, rows, inner = left.shape
    columns = right.shape[-1]
    product = torch.bmm(left.reshape(-1, rows, inner), right.reshape(-1, inner, columns))
    return product.view(batch, heads, rows, columns)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention with the whole score matrix in memory."""
    scores = matrix_product(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712  # the comparison makes a tensor, as recorded
    weights = softmax(scores)
    out = matrix_product(weights, value)
    return out


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, length: int, device: torch.device) -> None:
        super().__init__()
        self.heads = heads
        self.query = Projection(width, width)
        self.key = Projection(width, width)
        self.value = Projection(width, width)
        self.out = Projection(width, width)
        self.rotary = Rotary(width // heads, length, device)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        flat_query, flat_key, flat_value = self.query(x), self.key(x), self.value(x)
        query = flat_query.reshape(batch, length, self.heads, -1).permute(0, 2, 1, 3)
        key = flat_key.reshape(batch, length, self.heads, -1).permute(0, 2, 1, 3)
        value = flat_value.reshape(batch, length, self.heads, -1).permute(0, 2, 1, 3)
        position = torch.arange(length, device=x.device).unsqueeze(0).expand(batch, -1)
        query = self.rotary(query, position)
        key = self.rotary(key, position)
        mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).to(torch.bool)
        mask = ~mask
        mask = mask.unsqueeze(0).unsqueeze(0).expand(batch, self.heads, -1, -1)
        result = attend(query, key, value, mask)
        result = result.permute(0, 2, 1, 3).reshape(batch, length, width)
        result = self.out(result)
        return result


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, length: int, device: torch.device) -> None:
        super().__init__()
        self.norm_1 = Norm(width, device)
        self.attention = Attention(width, heads, length, device)
        self.norm_2 = Norm(width, device)
        self.feed_forward = Gated(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        h = self.attention(h)
        x = x + h
        h = self.norm_2(x)
        h = self.feed_forward(h)
        x = x + h
        return x


class Transformer(nn.Module):
    """Tokens [B, S] in, logits [B, S, V] out."""

    def __init__(self, size: str, length: int, device: torch.device) -> None:
        super().__init__()
        width, hidden, layers, heads = SIZES[size]
        self.embedding = Embedding(VOCABULARY, width, device)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, length, device) for _ in range(layers))
        self.norm = Norm(width, device)
        self.head = Projection(VOCABULARY, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in range(len(self.blocks)):
            x = self.blocks[index](x)
        x = self.norm(x)
        x = self.head(x)
        return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log likelihood, step by step."""
    logits = logits.reshape(-1, logits.size(-1))
    targets = targets.reshape(-1)
    highest = torch.max(logits, dim=-1, keepdim=True).values
    logits = logits - highest
    exponents = torch.exp(logits)
    total = exponents.sum(dim=-1)
    rows = torch.arange(logits.shape[0])
    chosen = logits[rows, targets]
    losses = torch.log(total) - chosen
    return losses.mean()


class AdamW(torch.optim.Optimizer):
    """AdamW parameter by parameter; the denominator takes two temporaries."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01})

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.data
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(parameter.data)
                    state["square"] = torch.zeros_like(parameter.data)
                mean, square = state["mean"], state["square"]
                state["step"] += 1
                first, second = group["betas"]
                mean.mul_(first).add_(gradient, alpha=1 - first)
                square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
                correction = math.sqrt(1 - second ** state["step"])
                denominator = (square.sqrt() / correction).add_(group["eps"])
                rate = group["lr"] / (1 - first ** state["step"])
                parameter.data.addcdiv_(mean, denominator, value=-rate)
                parameter.data.add_(parameter.data, alpha=-group["lr"] * group["weight_decay"])


def run(task: str, size: str, length: int, *, autocast: bool, empty_cache: bool, file: Path) -> None:
    """One task with a model of its own, recorded from the first forward pass to its end."""
    device = torch.device("cuda")
    model = Transformer(size, length, device)
    model.to(device)
    optimizer = AdamW(model.parameters())
    batch = torch.randint(low=0, high=VOCABULARY, size=(BATCH, length))
    batch = batch.to(device)
    cast = torch.autocast("cuda", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with cast:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        if empty_cache:
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.empty_cache()
        torch.cuda.synchronize()
        if task == "forward":
            logits = model(batch)
        else:
            optimizer.zero_grad()
            logits = model(batch)
            loss = cross_entropy(logits, batch)
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)


def main() -> None:
    """Run the tasks of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", metavar="TASK:CONTEXT", help="forward:128 or train:128, in order")
    parser.add_argument("--out", type=Path, required=True, help="folder for the recordings")
    parser.add_argument("--size", choices=SIZES, default="2.7b")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 autocast")
    parser.add_argument(
        "--empty-cache", action="store_true", help="give cached memory back when recording begins"
    )
    options = parser.parse_args()
    if not options.autocast:
        torch.set_float32_matmul_precision("high")
    for text in options.tasks:
        task, _, length = text.partition(":")
        file = options.out / f"{task}-{length}.pickle"
        run(
            task,
            options.size,
            int(length),
            autocast=options.autocast,
            empty_cache=options.empty_cache,
            file=file,
        )


if __name__ == "__main__":
    main()
