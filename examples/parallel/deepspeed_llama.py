"""Train a Llama-style decoder with DeepSpeed: ZeRO stage 1, 2 or 3 share out states, gradients and parameters.

Usage:

    deepspeed --num_gpus 8 deepspeed_llama.py --size 1b --zero 3
    vramfit run --gpu H100 -- deepspeed --num_gpus 8 deepspeed_llama.py --size 1b --zero 3
"""

import argparse

import deepspeed
import torch
from llama_sizes import SHAPES, llama
from transformers import LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences on each card")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=3, help="stage of ZeRO")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    args = parser.parse_args()

    settings = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.zero},
        "gradient_clipping": 1.0,
    }
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = llama(args.size)
    # Under stage 3 each parameter is shared out as soon as it is made.
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=args.zero == 3):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(args.steps):
        tokens = torch.randint(config.vocab_size, (args.batch_size, args.seq_len), device=engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step} done")


if __name__ == "__main__":
    main()
