"""Generate with a model that is larger than the card: its layers come from the host in time for their turn.

    python examples/language/stream_large_model.py [--budget 4GiB] [--layers 32] [--width 4096] [--placement FILE]
    vramfit run --gpu "RTX 4090" examples/language/stream_large_model.py

How many layers stay on the card is found by running the call on the virtual GPU, its cache included, and kept in a
file: the next run reads it and looks for nothing. Without a card, ``--gpu`` says for which one to look, and a small
model (``--layers 12 --width 512 --budget 110MiB``) generates on the CPU in the same way. The weights are not set.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

import vramfit


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate within a budget that the weights exceed.")
    parser.add_argument("--budget", default="4GiB", help="what torch may reserve on the card")
    parser.add_argument("--gpu", default="RTX 4090", help="the card to look for, where there is none")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--placement", type=Path, help="a file for the decision, read if it is there")
    return parser.parse_args()


def make_model(layers: int, width: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        dtype=torch.float16,
    )
    with no_init_weights():
        return LlamaForCausalLM(config).half().eval()


def main() -> None:
    args = parse_args()
    has_card = torch.cuda.is_available()
    model = make_model(args.layers, args.width)
    ids = torch.arange(args.prompt).view(1, -1)

    def generate(model: LlamaForCausalLM, device: torch.device) -> torch.Tensor:
        return model.generate(
            input_ids=ids.to(device),
            attention_mask=torch.ones_like(ids, device=device),
            max_new_tokens=args.tokens,
            do_sample=False,
            pad_token_id=0,
        )

    known = args.placement if args.placement is not None and args.placement.exists() else None
    with vramfit.streamed(
        model,
        generate,
        budget=args.budget,
        gpu=None if has_card else args.gpu,
        placement=known,
    ) as streaming:
        found = streaming.placement
        if args.placement is not None and known is None:
            args.placement.write_text(found.to_json(), encoding="utf-8")
        stay = len(found.layers) - len(found.streamed)
        print(f"{stay} of {len(found.layers)} layers stay on the card, {found.slots} slots for the others")
        print(
            f"predicted: {found.peak_reserved_bytes / 2**20:.2f} MiB reserved, {found.seconds:.3f} s simulated"
        )
        tokens = generate(model, torch.device("cuda" if has_card else "cpu"))
        print(
            f"{tokens.shape[1] - args.prompt} new tokens, {streaming.counts.nbytes / 2**30:.2f} GiB carried"
        )
        if has_card:
            print(f"peak {torch.cuda.max_memory_reserved() / 2**20:.2f} MiB reserved")


if __name__ == "__main__":
    main()
