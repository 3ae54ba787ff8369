"""Train a Llama-style decoder with FSDP2: each card has a shard of parameters, gradients and optimizer states.

Usage:

    torchrun --nproc-per-node 8 fsdp2_llama.py --size 7b --batch-size 2
    vramfit run --gpu H100 -- torchrun --nproc-per-node 8 fsdp2_llama.py --size 7b --batch-size 2
    vramfit fit fsdp2_llama.py --gpu "A100 80GB" --ranks auto -- --size 7b
"""

import argparse
import os

import torch
import torch.distributed as dist
from llama_sizes import SHAPES, llama
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="7b")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences on each card")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(dist.get_rank())

    config = llama(args.size)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        tokens = torch.randint(config.vocab_size, (args.batch_size, args.seq_len), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
