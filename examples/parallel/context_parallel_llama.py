"""Train a Llama-style decoder on long sequences, of which each card has a part: attention goes round in a ring.

Usage:

    torchrun --nproc-per-node 8 context_parallel_llama.py --size 1b --seq-len 131072
    vramfit run --gpu H100 -- torchrun --nproc-per-node 8 context_parallel_llama.py --size 1b --seq-len 131072
"""

import argparse
import os

import torch
import torch.distributed as dist
from llama_sizes import SHAPES, llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaForCausalLM


def without_mask(_module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A ring knows the causal mask by itself; transformers takes positions of several parts for packed sequences."""
    return args, kwargs | {"attention_mask": None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--seq-len", type=int, default=131072, help="tokens on all cards together")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)  # all cards have parts of the same sequence
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))

    config = llama(args.size)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        tokens = torch.randint(config.vocab_size, (1, args.seq_len + 1), device=device)
        inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        positions = torch.arange(args.seq_len, device=device).unsqueeze(0)
        buffers = [inputs, targets, positions]
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            ),
        ):
            logits = model(input_ids=inputs, position_ids=positions).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            del logits
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
