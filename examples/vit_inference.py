"""Classify images with a ViT-Large in half precision and report the throughput.

Usage:

    python vit_inference.py                             # ViT-L/16, batch 64
    python vit_inference.py --batch-size 256 --dtype bfloat16
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification


def parse_args():
    parser = argparse.ArgumentParser(description="Run ViT-Large over a set of images.")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--patch-size", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)

    config = ViTConfig(
        image_size=args.image_size,
        patch_size=args.patch_size,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_labels=args.num_classes,
    )
    model = ViTForImageClassification(config).eval().to("cuda", dtype)

    count = args.batches * args.batch_size
    images = torch.randint(0, 256, (count, 3, args.image_size, args.image_size), dtype=torch.uint8)
    labels = torch.randint(0, args.num_classes, (count,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=args.batch_size, pin_memory=True)

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    correct = torch.zeros((), dtype=torch.long, device="cuda")
    predictions = []
    with torch.inference_mode():
        for index, (pixels, target) in enumerate(loader):
            pixels = pixels.cuda(non_blocking=True).to(dtype).div_(127.5).sub_(1.0)
            target = target.cuda(non_blocking=True)
            start.record()
            logits = model(pixel_values=pixels).logits
            end.record()
            torch.cuda.synchronize()
            predicted = logits.argmax(dim=-1)
            correct += (predicted == target).sum()
            predictions.append(predicted.cpu())
            milliseconds = start.elapsed_time(end)
            print(
                f"batch {index + 1}/{args.batches}  {milliseconds:.2f} ms"
                f"  {1000 * args.batch_size / max(milliseconds, 1e-3):.0f} images/s"
            )

    classes = torch.cat(predictions).unique().numel()
    print(f"top-1 accuracy {100 * correct.item() / count:.2f} %, {classes} distinct classes predicted")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
