"""Train a ViT with Accelerate: mixed precision, accumulation, clipping, evaluation and checkpoints.

Usage:

    python accelerate_train.py                                   # ViT-Base, batch 32 x 224 x 224, bfloat16
    python accelerate_train.py --precision fp16 --grad-accum 4
    python accelerate_train.py --batch-size 2048 --find-batch-size
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTForImageClassification, get_cosine_schedule_with_warmup


class ColouredImages(Dataset):
    """Noise with a tint that tells its class."""

    def __init__(self, length, size, classes, seed):
        self.length, self.size, self.classes, self.seed = length, size, classes, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        label = index % self.classes
        image = torch.randn(3, self.size, self.size, generator=generator) + label / self.classes
        return {"pixel_values": image, "labels": label}


def parse_args():
    parser = argparse.ArgumentParser(description="Train a vision transformer with Accelerate.")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--grad-accum", type=int, default=2)
    parser.add_argument("--precision", choices=["no", "fp16", "bf16"], default="bf16")
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--find-batch-size", action="store_true", help="halve the batch while it does not fit"
    )
    parser.add_argument("--output-dir", default="accelerate_output")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train(args, accelerator, batch_size):
    set_seed(args.seed)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=args.image_size,
            hidden_size=args.hidden_size,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden_size // 64,
            intermediate_size=4 * args.hidden_size,
            num_labels=args.classes,
        )
    )
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    samples = args.steps * args.grad_accum * batch_size
    train_loader = DataLoader(
        ColouredImages(samples, args.image_size, args.classes, args.seed), batch_size, shuffle=True
    )
    val_loader = DataLoader(ColouredImages(batch_size, args.image_size, args.classes, 10**6), batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, args.steps)
    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler
    )

    model.train()
    for step, batch in enumerate(train_loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"batch {step + 1}/{len(train_loader)}  loss {loss.item():.4f}")

    model.eval()
    correct = total = 0
    for batch in val_loader:
        with torch.no_grad():
            predicted = model(pixel_values=batch["pixel_values"]).logits.argmax(dim=-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
        correct += (predicted == labels).sum().item()
        total += labels.numel()
    accelerator.print(f"accuracy {correct / total:.3f}")
    accelerator.save_state(args.output_dir)
    return batch_size


def main():
    args = parse_args()
    accelerator = Accelerator(mixed_precision=args.precision, gradient_accumulation_steps=args.grad_accum)
    accelerator.print(f"{accelerator.device}, {accelerator.mixed_precision}")

    if args.find_batch_size:

        @find_executable_batch_size(starting_batch_size=args.batch_size)
        def attempt(batch_size):
            accelerator.free_memory()
            accelerator.print(f"trying batch {batch_size}")
            return train(args, accelerator, batch_size)

        accelerator.print(f"batch {attempt()} fits")
    else:
        train(args, accelerator, args.batch_size)
    accelerator.print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
