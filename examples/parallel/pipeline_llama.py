"""Train a Llama-style decoder as a pipeline: each card has some of the layers, and batches go through in parts (1F1B).

Usage:

    torchrun --nproc-per-node 4 pipeline_llama.py --size 1b --micro-batches 8
    vramfit run --gpu H100 -- torchrun --nproc-per-node 4 pipeline_llama.py --size 1b --micro-batches 8
"""

import argparse
import os

import torch
import torch.distributed as dist
from llama_sizes import SHAPES, llama
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class Stage(nn.Module):
    """Some layers, with the embedding before the first of all and the head after the last."""

    def __init__(self, config: LlamaConfig, number: int, stages: int) -> None:
        super().__init__()
        each, more = divmod(config.num_hidden_layers, stages)
        start = number * each + min(number, more)
        layers = range(start, start + each + (number < more))
        first, last = number == 0, number == stages - 1
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if first else None
        self.rotary = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in layers)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if last else None
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if last else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = given if self.embed is None else self.embed(given)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary)
        return hidden if self.head is None else self.head(self.norm(hidden))


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in all micro-batches")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank, stages = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)

    config = llama(args.size)
    config._attn_implementation = "sdpa"
    module = Stage(config, rank, stages).to(device, torch.bfloat16)
    stage = PipelineStage(module, rank, stages, device)
    schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    for step in range(args.steps):
        tokens = torch.randint(config.vocab_size, (args.batch_size, args.seq_len), device=device)
        if rank == 0:
            schedule.step(tokens)
        elif rank == stages - 1:
            schedule.step(target=tokens)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
