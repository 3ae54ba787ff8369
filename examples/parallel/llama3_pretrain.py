"""Pretrain a Llama 3 on many cards: FSDP2, tensor and sequence parallelism, activation checkpointing, and a pipeline.

Usage:

    torchrun --nproc-per-node 8 --nnodes 64 ... llama3_pretrain.py --size 405b --tp 8
    vramfit run --gpu H100 --ranks 512 llama3_pretrain.py --size 405b --tp 8
    vramfit run --gpu H100 --ranks 512 llama3_pretrain.py --size 405b --tp 8 --pp 8 --batch-size 16
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

# width, layers, heads, heads of keys and values, width of the feed-forward, vocabulary
SIZES = {
    "tiny": (256, 4, 8, 8, 512, 4096),
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "70b": (8192, 80, 64, 8, 28672, 128256),
    "405b": (16384, 126, 128, 8, 53248, 128256),
}


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        # -1 heads: tensor parallelism leaves each card some of them
        q, k, v = (proj(x).view(batch, seq, -1, self.head_dim) for proj in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rotary), rotate(k, rotary)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


def rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary[:, None]).flatten(3).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, kv_heads)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.ffn_norm(x))


class Stage(nn.Module):
    """The whole model, or the layers of one stage of a pipeline."""

    def __init__(self, size: str, seq: int, layers: range, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        dim, _, heads, kv_heads, hidden, vocabulary = SIZES[size]
        self.seq, self.head_dim = seq, dim // heads
        self.embed = nn.Embedding(vocabulary, dim) if first else None
        self.layers = nn.ModuleDict({str(n): Block(dim, heads, kv_heads, hidden) for n in layers})
        self.norm = nn.RMSNorm(dim, eps=1e-5) if last else None
        self.output = nn.Linear(dim, vocabulary, bias=False) if last else None
        self.register_buffer("rotary", self.rotary_table(), persistent=False)

    def rotary_table(self) -> torch.Tensor:
        steps = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        angles = torch.outer(torch.arange(self.seq).float(), 500000.0**-steps)
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, self.rotary)
        return x if self.output is None else self.output(self.norm(x))

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        with torch.device(self.rotary.device):
            self.rotary = self.rotary_table()


def parallelize(model: Stage, mesh: DeviceMesh, *, reshard: bool) -> None:
    """Tensor parallelism in a node, a checkpoint around each layer, and FSDP2 across nodes."""
    tp, dp = mesh["tp"], mesh["dp"]
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(
        model, tp, {name: how for name, how in ends.items() if getattr(model, name) is not None}
    )
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, layer in model.layers.items():
        parallelize_module(layer, tp, plan)
        model.layers[name] = checkpoint_wrapper(layer)
        fully_shard(model.layers[name], mesh=dp, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=dp, mp_policy=policy, reshard_after_forward=reshard)


def loss_of(predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(predicted.flatten(0, 1).float(), labels.flatten(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="405b")
    parser.add_argument("--tp", type=int, default=8, help="cards that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--interleave", type=int, default=1, help="stages on each card")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of each data-parallel rank")
    parser.add_argument("--micro-batches", type=int, default=None, help="as many as stages, unless given")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dp = dist.get_world_size() // (args.tp * args.pp)
    mesh = init_device_mesh("cuda", (args.pp, dp, args.tp), mesh_dim_names=("pp", "dp", "tp"))
    layers, vocabulary = SIZES[args.size][1], SIZES[args.size][5]
    stages = args.pp * args.interleave
    mine = range(mesh["pp"].get_local_rank(), stages, args.pp)
    parts = []
    for number in mine:
        span = range(layers * number // stages, layers * (number + 1) // stages)
        with torch.device("meta"):
            part = Stage(args.size, args.seq_len, span, first=number == 0, last=number == stages - 1)
        parallelize(part, mesh, reshard=args.pp == 1)
        part.to_empty(device=device)
        with torch.no_grad():
            part.init_weights()
        parts.append(part)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=8e-5)
    schedule = None
    if args.pp > 1:
        group = mesh["pp"].get_group()
        pipe = [
            PipelineStage(part, n, stages, device, group=group) for part, n in zip(parts, mine, strict=True)
        ]
        count = args.micro_batches or stages
        if args.interleave > 1:
            schedule = ScheduleInterleaved1F1B(pipe, count, loss_fn=loss_of)
        else:
            schedule = Schedule1F1B(pipe[0], count, loss_fn=loss_of)

    for step in range(args.steps):
        tokens = torch.randint(vocabulary, (args.batch_size, args.seq_len + 1), device=device)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        with loss_parallel():
            if schedule is None:
                predicted = parts[0](inputs)
                loss = loss_of(predicted, labels)
                del predicted
                loss.backward()
            else:
                schedule.step(
                    *([inputs] if mine[0] == 0 else []),
                    **({"target": labels} if mine[-1] == stages - 1 else {}),
                )
        for part in parts:
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
