"""Train a transformer with the memory-saving optimizers of torchao.

Usage:

    python torchao_optimizers.py                            # AdamW with 8-bit states
    python torchao_optimizers.py --optimizer adamw4bit
    python torchao_optimizers.py --optimizer offload --offload-gradients
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8, CPUOffloadOptimizer, _AdamW


def parse_args():
    parser = argparse.ArgumentParser(description="Train with low-bit and offloaded optimizer states.")
    parser.add_argument(
        "--optimizer",
        choices=["adamw", "adamw8bit", "adamw4bit", "adamwfp8", "adamw-bf16", "offload"],
        default="adamw8bit",
    )
    parser.add_argument(
        "--offload-gradients", action="store_true", help="free gradients once they are on the host"
    )
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class LanguageModel(nn.Module):
    """(N, T) tokens -> (N, T, V) logits."""

    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab_size, args.width)
        self.place = nn.Embedding(args.seq_len, args.width)
        layer = nn.TransformerEncoderLayer(
            args.width, args.width // 64, 4 * args.width, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.width, args.vocab_size, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.embed(tokens) + self.place(positions), mask=mask, is_causal=True)
        return self.head(hidden)


def make_optimizer(args, model):
    match args.optimizer:
        case "adamw":
            return torch.optim.AdamW(model.parameters(), lr=3e-4)
        case "adamw8bit":
            return AdamW8bit(model.parameters(), lr=3e-4)
        case "adamw4bit":
            return AdamW4bit(model.parameters(), lr=3e-4)
        case "adamwfp8":
            return AdamWFp8(model.parameters(), lr=3e-4)
        case "adamw-bf16":
            return _AdamW(model.to(torch.bfloat16).parameters(), lr=3e-4, bf16_stochastic_round=True)
    return CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, lr=3e-4, offload_gradients=args.offload_gradients
    )


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    model = LanguageModel(args).to("cuda")
    optimizer = make_optimizer(args, model)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.1f} M parameters, {args.optimizer}")
    for step in range(args.steps):
        tokens = torch.randint(args.vocab_size, (args.batch_size, args.seq_len + 1)).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        del logits
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    torch._C._cuda_clearCublasWorkspaces()
    held = torch.cuda.memory_allocated() - weights
    pinned = torch.cuda.host_memory_stats()["active_bytes.current"]
    print(f"states on the card {held / 2**20:.2f} MiB, {held / count:.2f} B per parameter")
    print(f"pinned on the host {pinned / 2**20:.2f} MiB")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
