"""Train a Llama-style decoder with DistributedDataParallel: each card has the whole model, and its part of the batch.

Usage:

    torchrun --nproc-per-node 8 ddp_llama.py --size 1b --batch-size 4
    vramfit run --gpu H100 -- torchrun --nproc-per-node 8 ddp_llama.py --size 1b --batch-size 4
"""

import argparse
import os

import torch
import torch.distributed as dist
from llama_sizes import SHAPES, llama
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences on each card")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--autocast", action="store_true", help="float32 parameters, computed in bfloat16")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(dist.get_rank())

    config = llama(args.size)
    model = LlamaForCausalLM(config).to(device, torch.float32 if args.autocast else torch.bfloat16)
    model = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        tokens = torch.randint(config.vocab_size, (args.batch_size, args.seq_len), device=device)
        with torch.autocast("cuda", torch.bfloat16, enabled=args.autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
