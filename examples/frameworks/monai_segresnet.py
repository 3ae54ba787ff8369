"""Segment volumes with MONAI's SegResNet or U-Net: dictionary transforms, AMP, sliding-window validation.

Usage:

    python monai_segresnet.py                               # SegResNet, batch 2 of 96 x 96 x 96 patches
    python monai_segresnet.py --network unet --patch 128 --batch-size 1
    python monai_segresnet.py --stitch-on-host              # volumes larger than the card
"""

import argparse

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, decollate_batch
from monai.inferers import SlidingWindowInferer
from monai.losses import DiceFocalLoss
from monai.metrics import DiceMetric
from monai.networks.nets import SegResNet, UNet
from monai.transforms import (
    AsDiscrete,
    Compose,
    EnsureChannelFirstd,
    NormalizeIntensityd,
    RandFlipd,
    RandScaleIntensityd,
    RandSpatialCropd,
)
from monai.utils import set_determinism


def make_volume(side, classes, seed):
    """Noise with one bright ball per class at a random place."""
    rng = np.random.default_rng(seed)
    label = np.zeros((side, side, side), dtype=np.uint8)
    axes = np.ogrid[:side, :side, :side]
    for cls in range(1, classes):
        centre, radius = rng.uniform(0.25, 0.75, size=3) * side, rng.uniform(0.08, 0.2) * side
        label[sum((axis - c) ** 2 for axis, c in zip(axes, centre, strict=True)) < radius**2] = cls
    return {"image": rng.normal(0.0, 0.3, label.shape).astype(np.float32) + 0.5 * label, "label": label}


def make_network(args):
    if args.network == "unet":
        return UNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=args.classes,
            channels=[args.filters << depth for depth in range(5)],
            strides=[2] * 4,
            num_res_units=2,
            norm="BATCH",
        )
    return SegResNet(
        spatial_dims=3,
        init_filters=args.filters,
        in_channels=1,
        out_channels=args.classes,
        blocks_down=[1, 2, 2, 4],
        blocks_up=[1, 1, 1],
        dropout_prob=0.2,
    )


def parse_args():
    parser = argparse.ArgumentParser(description="Train a 3D segmentation network with MONAI.")
    parser.add_argument("--network", choices=["segresnet", "unet"], default="segresnet")
    parser.add_argument("--filters", type=int, default=32)
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--patch", type=int, default=96, help="side of the training patches in voxels")
    parser.add_argument("--side", type=int, default=128, help="side of the volumes in voxels")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
    parser.add_argument("--precision", choices=["fp16", "bf16", "fp32"], default="fp16")
    parser.add_argument("--windows", type=int, default=2, help="windows at once during validation")
    parser.add_argument("--stitch-on-host", action="store_true", help="keep the volume's logits on the host")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def validate(model, loader, args):
    model.eval()
    infer = SlidingWindowInferer(
        (args.patch,) * 3,
        sw_batch_size=args.windows,
        overlap=0.25,
        mode="gaussian",
        sw_device="cuda",
        device="cpu" if args.stitch_on_host else None,
    )
    metric = DiceMetric(include_background=False, reduction="mean_batch")
    to_classes = AsDiscrete(argmax=True, to_onehot=args.classes)
    to_one_hot = AsDiscrete(to_onehot=args.classes)
    for batch in loader:
        image, label = batch["image"], batch["label"]
        if not args.stitch_on_host:
            image, label = image.to("cuda"), label.to("cuda")
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16, enabled=args.precision == "fp16"):
            logits = infer(image, model)
        metric(
            y_pred=[to_classes(volume) for volume in decollate_batch(logits)],
            y=[to_one_hot(volume) for volume in decollate_batch(label)],
        )
    return [round(value, 4) for value in metric.aggregate().tolist()]


def main():
    args = parse_args()
    set_determinism(seed=args.seed)
    both = ["image", "label"]
    prepare = [
        EnsureChannelFirstd(keys=both, channel_dim="no_channel"),
        NormalizeIntensityd(keys="image", nonzero=True),
    ]
    augment = [
        RandSpatialCropd(keys=both, roi_size=(args.patch,) * 3, random_size=False),
        RandFlipd(keys=both, prob=0.5, spatial_axis=0),
        RandScaleIntensityd(keys="image", factors=0.1, prob=0.5),
    ]
    volumes = [
        make_volume(args.side, args.classes, args.seed + n) for n in range(args.steps * args.batch_size)
    ]
    loader = DataLoader(
        CacheDataset(volumes, Compose(prepare + augment), progress=False),
        batch_size=args.batch_size,
        shuffle=True,
    )

    model = make_network(args).to("cuda")
    criterion = DiceFocalLoss(to_onehot_y=True, softmax=True, squared_pred=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=1e-5)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[args.precision]
    scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "fp16")
    model.train()
    for step, batch in enumerate(loader):
        image, label = batch["image"].to("cuda"), batch["label"].to("cuda")
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype, enabled=args.precision != "fp32"):
            loss = criterion(model(image), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}")
    print(f"peak memory of training {torch.cuda.max_memory_allocated() / 2**20:.2f} MiB")

    del image, label, loss
    torch.cuda.reset_peak_memory_stats()
    held_out = [make_volume(args.side, args.classes, 10**6)]
    scores = validate(model, DataLoader(CacheDataset(held_out, Compose(prepare), progress=False)), args)
    print(f"Dice per class {scores}")
    print(f"peak memory of validation {torch.cuda.max_memory_allocated() / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
