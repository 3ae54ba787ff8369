"""Train a Llama-style decoder with Accelerate, which shards it as the launcher is told: FSDP of either version.

Usage:

    accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --mixed_precision bf16 \
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP accelerate_llama.py
    vramfit run --gpu H100 -- accelerate launch --num_processes 8 --use_fsdp ... accelerate_llama.py
"""

import argparse

import torch
from accelerate import Accelerator
from llama_sizes import SHAPES, llama
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences on each card")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    accelerator = Accelerator()
    config = llama(args.size)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = args.steps * args.batch_size * accelerator.num_processes
    tokens = torch.randint(config.vocab_size, (samples, args.seq_len))
    loader = DataLoader(TensorDataset(tokens), batch_size=args.batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (batch,) in enumerate(loader):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step} done")
    accelerator.end_training()


if __name__ == "__main__":
    main()
