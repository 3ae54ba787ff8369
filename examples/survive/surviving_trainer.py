"""Hugging Face's Trainer on texts of which some make a batch too large: it goes on, every batch once.

python examples/survive/surviving_trainer.py                       # on the CPU, or on the card that is there
vramfit run --gpu "RTX 3060" examples/survive/surviving_trainer.py   # without a card
"""

from __future__ import annotations

import argparse
import logging
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from vramfit.integrations.surviving_trainer import TrainerSurvivalCallback

WORDS = 5_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=float, help="GiB that torch may reserve on the card")
    parser.add_argument("--longest", type=int, default=128)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    if given.limit and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit * 2**30 / total)
    config = GPT2Config(vocab_size=WORDS, n_positions=given.longest, n_embd=256, n_layer=4, n_head=8)
    lengths = [given.longest // 8, given.longest // 2, given.longest, given.longest // 4]
    texts = [torch.randint(0, WORDS, (length,)) for length in lengths for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                folder,
                per_device_train_batch_size=8,
                max_steps=len(lengths),
                train_sampling_strategy="sequential",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        )
        survival = TrainerSurvivalCallback(trainer)
        trainer.add_callback(survival)
        trainer.train()
    print(f"{trainer.state.global_step} steps, {len(survival.events)} events")


if __name__ == "__main__":
    main()
