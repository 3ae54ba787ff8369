"""Train a ResNet with bottleneck blocks on random images of ImageNet's size.

Usage:

    python resnet_train.py                              # ResNet-50, batch 64
    python resnet_train.py --depth 152 --amp --channels-last
"""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEPTHS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, in_channels, width, stride):
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, depth, num_classes):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        channels = 64
        stages = []
        for index, blocks in enumerate(DEPTHS[depth]):
            width = 64 * 2**index
            layers = []
            for block in range(blocks):
                layers.append(Bottleneck(channels, width, stride=2 if index > 0 and block == 0 else 1))
                channels = width * Bottleneck.expansion
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)

    def forward(self, x):
        x = self.pool(self.stages(self.stem(x)))
        return self.fc(torch.flatten(x, 1))


class RandomImages(Dataset):
    """PIL images with a colour cast that tells their class, cropped, flipped and normalised."""

    def __init__(self, length, num_classes, image_size, seed):
        self.length, self.num_classes, self.image_size, self.seed = length, num_classes, image_size, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = np.random.default_rng((self.seed, index))
        label = int(rng.integers(self.num_classes))
        cast = np.random.default_rng(label).integers(0, 128, size=3)
        side = self.image_size + self.image_size // 7
        noise = rng.integers(0, 128, size=(side, side, 3))
        return self.augment(Image.fromarray((noise + cast).astype(np.uint8)), rng), label

    def augment(self, image, rng):
        left, top = rng.integers(0, image.width - self.image_size + 1, size=2).tolist()
        image = image.crop((left, top, left + self.image_size, top + self.image_size))
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = (np.asarray(image, dtype=np.float32) / 255 - MEAN) / STD
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def topk_correct(logits, target, topk=(1, 5)):
    """How many of the batch have their class among the k best, for each k."""
    best = logits.topk(min(max(topk), logits.size(1)), dim=1).indices
    hits = best.eq(target.unsqueeze(1))
    return [hits[:, :k].any(dim=1).sum().item() for k in topk]


def parse_args():
    parser = argparse.ArgumentParser(description="Train a ResNet on random images.")
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS), default=50)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1, help="for a batch of 256, scaled to the real one")
    parser.add_argument("--amp", action="store_true", help="float16 autocast with loss scaling")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda:0")
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format

    model = ResNet(args.depth, args.num_classes).to(device, memory_format=memory_format)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * args.batch_size / 256, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp, init_scale=2.0**12)
    loader = DataLoader(
        RandomImages(args.steps * args.batch_size, args.num_classes, args.image_size, args.seed),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=True,
        drop_last=True,
    )

    model.train()
    seen = top1 = top5 = 0
    start = time.perf_counter()
    for step, (images, target) in enumerate(loader):
        images = images.to(device, non_blocking=True, memory_format=memory_format)
        target = target.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            logits = model(images)
            loss = criterion(logits, target)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

        correct1, correct5 = topk_correct(logits.detach(), target)
        seen, top1, top5 = seen + target.size(0), top1 + correct1, top5 + correct5
        print(
            f"step {step + 1}/{args.steps}  loss {loss.item():.4f}"
            f"  acc@1 {100 * top1 / seen:.2f}  acc@5 {100 * top5 / seen:.2f}"
        )

    model.eval()
    with torch.no_grad():
        probabilities = F.softmax(model(images), dim=1).max(dim=1).values.cpu().numpy()
    print(f"mean confidence {probabilities.mean():.4f}")
    print(f"{seen / (time.perf_counter() - start):.1f} images/s")
    print(torch.cuda.memory_summary(device, abbreviated=True))


if __name__ == "__main__":
    main()
