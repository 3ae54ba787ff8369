"""Train a Llama-style decoder on a mesh of two dimensions: tensor parallel within a node, FSDP2 across nodes.

Usage:

    torchrun --nproc-per-node 8 --nnodes 2 tp_fsdp_llama.py --size 8b --tp 8
    vramfit run --gpu H100 -- torchrun --nproc-per-node 8 --nnodes 2 tp_fsdp_llama.py --size 8b --tp 8
"""

import argparse
import os

import torch
import torch.distributed as dist
from llama_sizes import SHAPES, llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaForCausalLM

LAYER = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="8b")
    parser.add_argument("--tp", type=int, default=8, help="cards that share out each layer")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences on each group of --tp cards")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(mesh["dp"].get_local_rank())

    config = llama(args.size)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    whole = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], whole)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], LAYER)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
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
