"""Fine-tune a BERT-Large classifier: padded sentence pairs, mixed precision, linear warm-up.

Usage:

    python bert_large_finetune.py                       # batch 32 x 384 tokens, float16 with loss scaling
    python bert_large_finetune.py --precision fp32 --batch-size 8
"""

import argparse
import random

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

CLS, SEP, PAD, FIRST_WORD = 101, 102, 0, 1000


class SentencePairs(Dataset):
    """Pairs of random sentences; the label says whether the second repeats words of the first."""

    def __init__(self, length, vocab_size, max_length, seed):
        self.length, self.vocab_size, self.max_length, self.seed = length, vocab_size, max_length, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = random.Random(self.seed * 1_000_003 + index)
        room = (self.max_length - 3) // 2
        first = [rng.randrange(FIRST_WORD, self.vocab_size) for _ in range(rng.randint(room // 2, room))]
        label = rng.randint(0, 1)
        words = first if label else range(FIRST_WORD, self.vocab_size)
        second = [rng.choice(words) for _ in range(rng.randint(room // 2, room))]
        return {"first": first, "second": second, "label": label}


class PadToLength:
    """Joins the pairs as [CLS] a [SEP] b [SEP] and pads every example to the same length."""

    def __init__(self, max_length):
        self.max_length = max_length

    def __call__(self, examples):
        shape = (len(examples), self.max_length)
        ids = torch.full(shape, PAD)
        segments = torch.zeros(shape, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, example in enumerate(examples):
            tokens = [CLS, *example["first"], SEP, *example["second"], SEP]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            segments[row, len(example["first"]) + 2 : len(tokens)] = 1
            mask[row, : len(tokens)] = 1
        labels = torch.tensor([example["label"] for example in examples])
        return {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask, "labels": labels}


def parameter_groups(model, weight_decay):
    """No weight decay on biases and layer norms."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        (plain if name.endswith("bias") or "LayerNorm" in name else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


@torch.no_grad()
def evaluate(model, loader, device, autocast):
    model.eval()
    correct = total = 0
    for batch in loader:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with autocast():
            logits = model(**batch).logits
        correct += (logits.argmax(dim=-1) == batch["labels"]).sum().item()
        total += batch["labels"].numel()
    return correct / total


def parse_args():
    parser = argparse.ArgumentParser(description="Fine-tune BERT-Large on synthetic sentence pairs.")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=384)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--eval-batches", type=int, default=1)
    parser.add_argument("--precision", choices=["fp16", "bf16", "fp32"], default="fp16")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=30522)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    device = torch.device("cuda")

    config = BertConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden,
        num_labels=2,
    )
    model = BertForSequenceClassification(config).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=args.lr)
    warmup_steps = max(1, int(args.warmup * args.steps))
    scheduler = get_linear_schedule_with_warmup(optimizer, warmup_steps, args.steps)
    scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "fp16")

    def autocast():
        dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
        return torch.autocast("cuda", dtype=dtype, enabled=args.precision != "fp32")

    def loader(batches, seed, shuffle):
        dataset = SentencePairs(batches * args.batch_size, args.vocab_size, args.max_length, seed)
        return DataLoader(
            dataset,
            batch_size=args.batch_size,
            shuffle=shuffle,
            collate_fn=PadToLength(args.max_length),
            num_workers=args.workers,
            pin_memory=True,
        )

    model.train()
    for step, batch in enumerate(loader(args.steps, args.seed, shuffle=True)):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with autocast():
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # a lowered scale means that the step was skipped
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}  scale {scaler.get_scale():.0f}")

    accuracy = evaluate(model, loader(args.eval_batches, args.seed + 1, shuffle=False), device, autocast)
    print(f"accuracy {accuracy:.3f}")
    print(f"peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
