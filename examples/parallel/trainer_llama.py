"""Train a Llama-style decoder with the Hugging Face Trainer and FSDP.

Usage:

    torchrun --nproc-per-node 8 trainer_llama.py --size 1b
    vramfit run --gpu H100 -- torchrun --nproc-per-node 8 trainer_llama.py --size 1b
"""

import argparse

import torch
from llama_sizes import SHAPES, llama
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments


class RandomTokens(Dataset):
    """Sequences of tokens drawn at random."""

    def __init__(self, length: int, seq_len: int, vocabulary: int) -> None:
        self.tokens = torch.randint(vocabulary, (length, seq_len))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences on each card")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    args = parser.parse_args()

    config = llama(args.size)
    training = TrainingArguments(
        output_dir="trainer_llama_output",
        per_device_train_batch_size=args.batch_size,
        max_steps=args.steps,
        bf16=True,
        fsdp=True,
        fsdp_config={
            "version": args.fsdp_version,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    samples = args.steps * args.batch_size * training.world_size
    data = RandomTokens(samples, args.seq_len, config.vocab_size)
    trainer = Trainer(model=LlamaForCausalLM(config), args=training, train_dataset=data)
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{result.global_step} steps done")


if __name__ == "__main__":
    main()
