"""Fine-tune a language model with TRL's SFTTrainer: whole texts or packed sequences, all weights or LoRA.

Usage:

    python trl_sft.py                                       # 1 B parameters, batch 4 x 1024
    python trl_sft.py --packing
    python trl_sft.py --lora --rank 32
"""

import argparse
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

SIZES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
WORDS = 1000


def parse_args():
    parser = argparse.ArgumentParser(description="Fine-tune a language model with SFTTrainer.")
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--packing", action="store_true", help="fill sequences with several texts")
    parser.add_argument("--lora", action="store_true", help="train adapters of this rank alone")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--output-dir", default="trl_output")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_tokenizer():
    """One token for each of a thousand words."""
    names = ["<unk>", "<pad>", "</s>", *(f"w{number}" for number in range(WORDS))]
    words = models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


def make_texts(args):
    """Texts of an eighth of the sequence to the whole; each batch has one of the longest."""
    drawn = random.Random(args.seed)
    lengths = [drawn.randint(args.seq_len // 8, args.seq_len) for _ in range(8 * args.batch_size)]
    lengths[:: args.batch_size] = [args.seq_len] * 8
    return Dataset.from_list(
        [{"text": " ".join(f"w{drawn.randrange(WORDS)}" for _ in range(length))} for length in lengths]
    )


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=32000, max_position_embeddings=args.seq_len, use_cache=False, **SIZES[args.size]
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        processing_class=tokenizer,
        train_dataset=make_texts(args),
        peft_config=LoraConfig(r=args.rank, task_type="CAUSAL_LM") if args.lora else None,
        args=SFTConfig(
            output_dir=args.output_dir,
            per_device_train_batch_size=args.batch_size,
            max_length=args.seq_len,
            packing=args.packing,
            max_steps=args.steps,
            gradient_checkpointing=args.gradient_checkpointing,
            bf16=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            seed=args.seed,
        ),
    )
    trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    print(f"{trainer.state.global_step} steps, {trained:,} parameters trained")


if __name__ == "__main__":
    main()
