"""Segment random volumes with MONAI's 3D U-Net, Dice and cross-entropy loss.

Usage:

    python unet3d_segmentation.py                       # batch 2 of 96 x 96 x 96 patches, four modalities
    python unet3d_segmentation.py --patch 128 --batch-size 1 --amp
"""

import argparse

import numpy as np
import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.networks.utils import one_hot
from monai.utils import set_determinism
from torch.utils.data import DataLoader, Dataset


class SphereVolumes(Dataset):
    """Noise volumes with one bright ball per class at a random place."""

    def __init__(self, length, modalities, classes, side, seed):
        self.length, self.modalities, self.classes = length, modalities, classes
        self.side, self.seed = side, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = np.random.default_rng((self.seed, index))
        shape = (self.side, self.side, self.side)
        volume = rng.normal(0.0, 0.3, size=(self.modalities, *shape)).astype(np.float32)
        label = np.zeros((1, *shape), dtype=np.int64)
        axes = np.ogrid[: self.side, : self.side, : self.side]
        for cls in range(1, self.classes):
            centre = rng.uniform(0.25, 0.75, size=3) * self.side
            radius = rng.uniform(0.08, 0.2) * self.side
            distance = sum((axis - c) ** 2 for axis, c in zip(axes, centre, strict=True))
            label[0][distance < radius**2] = cls
        volume += label.astype(np.float32) * 0.5
        return {"image": torch.from_numpy(volume), "label": torch.from_numpy(label)}


@torch.no_grad()
def validate(model, loader, classes, patch, device):
    model.eval()
    metric = DiceMetric(include_background=False, reduction="mean")
    for batch in loader:
        image, label = batch["image"].to(device), batch["label"].to(device)
        logits = sliding_window_inference(image, (patch,) * 3, sw_batch_size=2, predictor=model, overlap=0.25)
        predicted = one_hot(logits.argmax(dim=1, keepdim=True), num_classes=classes)
        metric(y_pred=predicted, y=one_hot(label, num_classes=classes))
    return metric.aggregate().item()


def parse_args():
    parser = argparse.ArgumentParser(description="Train a 3D U-Net on random volumes.")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--patch", type=int, default=96, help="side of the training volumes in voxels")
    parser.add_argument("--val-side", type=int, default=128, help="side of the validation volume; 0: none")
    parser.add_argument("--modalities", type=int, default=4)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--channels", type=int, nargs="+", default=[32, 64, 128, 256, 320])
    parser.add_argument("--res-units", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--amp", action="store_true", help="float16 autocast with loss scaling")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    set_determinism(seed=args.seed)
    device = torch.device("cuda")

    model = UNet(
        spatial_dims=3,
        in_channels=args.modalities,
        out_channels=args.classes,
        channels=args.channels,
        strides=[2] * (len(args.channels) - 1),
        num_res_units=args.res_units,
        norm="INSTANCE",
        dropout=0.1,
    ).to(device)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True, squared_pred=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-5)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=max(args.steps, 1), power=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp, init_scale=2.0**10)

    dataset = SphereVolumes(
        args.steps * args.batch_size, args.modalities, args.classes, args.patch, args.seed
    )
    loader = DataLoader(
        dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True
    )
    for step, batch in enumerate(loader):
        model.train()
        image = batch["image"].to(device, non_blocking=True)
        label = batch["label"].to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = criterion(model(image), label)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 12.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}")

    if args.val_side:
        volumes = SphereVolumes(1, args.modalities, args.classes, args.val_side, args.seed + 1)
        dice = validate(model, DataLoader(volumes, batch_size=1), args.classes, args.patch, device)
        print(f"validation Dice {dice:.4f}")
    print(f"peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
