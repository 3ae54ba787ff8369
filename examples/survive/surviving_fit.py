"""Lightning's Trainer on texts of which some make a batch too large: it goes on, every batch once.

python examples/survive/surviving_fit.py                       # on the CPU, or on the card that is there
vramfit run --gpu "RTX 3060" examples/survive/surviving_fit.py   # without a card
"""

from __future__ import annotations

import argparse
import logging

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from vramfit.integrations.surviving_lightning import LightningSurvivalCallback

WORDS, WIDTH = 5_000, 256


class Reader(lightning.LightningModule):
    """A small transformer that tells the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["ids"][:, :-1]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        logits = self.head(self.layers(self.embed(ids), mask=mask, is_causal=True))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=float, help="GiB that torch may reserve on the card")
    parser.add_argument("--longest", type=int, default=128)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    if given.limit and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit * 2**30 / total)
    lengths = [given.longest // 8, given.longest // 2, given.longest, given.longest // 4]
    texts = [{"ids": torch.randint(0, WORDS, (length + 1,))} for length in lengths for _ in range(16)]
    survival = LightningSurvivalCallback()
    trainer = lightning.Trainer(
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[survival],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Reader(), DataLoader(texts, batch_size=16))
    print(f"{trainer.global_step} steps, {len(survival.events)} events")


if __name__ == "__main__":
    main()
