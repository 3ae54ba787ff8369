"""Train a ResNet-style classifier with Lightning: mixed precision, validation, checkpoints, clipping.

Usage:

    python lightning_train.py                               # batch 64 x 224 x 224, 16-mixed
    python lightning_train.py --precision bf16-mixed --epochs 2 --averaging
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


class Classifier(L.LightningModule):
    """A small ResNet and how it is trained."""

    def __init__(self, channels=64, depth=2, classes=100, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        layers = [
            nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        layers.append(nn.MaxPool2d(3, 2, 1))
        width = channels
        for stage in range(4):
            for block in range(depth):
                stride = 2 if stage and not block else 1
                layers.append(Block(width, channels << stage, stride))
                width = channels << stage
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        return self.head(self.features(images).mean(dim=(2, 3)))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ColouredImages(Dataset):
    """Noise with a tint that tells its class."""

    def __init__(self, length, size, classes, seed):
        self.length, self.size, self.classes, self.seed = length, size, classes, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        label = index % self.classes
        return torch.randn(3, self.size, self.size, generator=generator) + label / self.classes, label


def parse_args():
    parser = argparse.ArgumentParser(description="Train a convolutional network with Lightning.")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2, help="blocks per stage")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps per epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--precision", default="16-mixed", help="as in lightning.Trainer")
    parser.add_argument("--averaging", action="store_true", help="average the weights of the last epochs")
    parser.add_argument("--output-dir", default="lightning_output")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    L.seed_everything(args.seed, workers=True)
    samples = args.steps * args.grad_accum * args.batch_size
    loaders = [
        DataLoader(
            ColouredImages(count, args.image_size, args.classes, seed), args.batch_size, pin_memory=True
        )
        for count, seed in ((samples, args.seed), (args.batch_size, 10**6))
    ]
    callbacks = [
        ModelCheckpoint(args.output_dir, monitor="val_loss", save_last=True),
        LearningRateMonitor("step"),
    ]
    if args.averaging:
        callbacks.append(StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.5))
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision=args.precision,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.grad_accum,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=CSVLogger(args.output_dir),
        log_every_n_steps=1,
    )
    model = Classifier(args.channels, args.depth, args.classes)
    trainer.fit(model, *loaders)
    metrics = trainer.validate(model, loaders[1], ckpt_path="best")
    print(metrics)
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
