"""Train a Qwen-style language model with the Hugging Face Trainer, on synthetic token sequences.

Usage:

    python hf_trainer.py                                  # 0.5 B parameters, batch 4 x 1024, bfloat16
    python hf_trainer.py --gradient-checkpointing --optim adafactor
    python hf_trainer.py --batch-size 64 --auto-find-batch-size
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

SIZES = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


class CountingSequences(Dataset):
    """Token sequences that count upwards with a stride of their own: easy to learn, different each time."""

    def __init__(self, length, vocab_size, seq_len, seed):
        self.length, self.vocab_size, self.seq_len, self.seed = length, vocab_size, seq_len, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        start = torch.randint(self.vocab_size, (1,), generator=generator)
        stride = torch.randint(1, 8, (1,), generator=generator)
        tokens = (start + stride * torch.arange(self.seq_len)) % self.vocab_size
        return {"input_ids": tokens, "labels": tokens}


def likeliest_tokens(logits, labels):
    """Keep the predicted tokens instead of all logits, which would fill the memory during evaluation."""
    return logits.argmax(dim=-1)


def accuracy(prediction):
    """Share of the next tokens that were predicted."""
    predicted, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels).mean())}


def parse_args():
    parser = argparse.ArgumentParser(description="Train a language model with the Hugging Face Trainer.")
    parser.add_argument("--size", choices=sorted(SIZES), default="0.5b")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
    parser.add_argument("--grad-accum", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--optim", default="adamw_torch_fused", help="as in TrainingArguments")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--empty-cache-steps", type=int, help="empty the allocator's cache this often")
    parser.add_argument(
        "--auto-find-batch-size", action="store_true", help="take a smaller batch if memory runs out"
    )
    parser.add_argument("--output-dir", default="hf_trainer_output")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    config = Qwen2Config(
        vocab_size=args.vocab_size,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=True,
        use_cache=False,
        **SIZES[args.size],
    )
    model = Qwen2ForCausalLM(config)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters")

    training = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=min(args.batch_size, 8),
        gradient_accumulation_steps=args.grad_accum,
        max_steps=args.steps,
        learning_rate=3e-4,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        max_grad_norm=1.0,
        optim=args.optim,
        bf16=args.precision == "bf16",
        fp16=args.precision == "fp16",
        gradient_checkpointing=args.gradient_checkpointing,
        torch_empty_cache_steps=args.empty_cache_steps,
        auto_find_batch_size=args.auto_find_batch_size,
        eval_strategy="steps",
        eval_steps=args.steps,
        save_strategy="steps",
        save_steps=args.steps,
        save_total_limit=1,
        logging_steps=1,
        report_to="none",
        seed=args.seed,
    )
    samples = max(args.steps * args.grad_accum * args.batch_size, 16)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=CountingSequences(samples, args.vocab_size, args.seq_len, args.seed),
        eval_dataset=CountingSequences(8, args.vocab_size, args.seq_len, args.seed + samples),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=likeliest_tokens,
    )
    result = trainer.train()
    print(f"{result.global_step} steps, loss {result.training_loss:.4f}, batch {trainer._train_batch_size}")
    print(trainer.evaluate())
    trainer.save_model()
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
