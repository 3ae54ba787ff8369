"""A training on the card that keeps a tensor of each step, until memory runs out; for watching.py.

    python benchmarks/survive/leaking.py [--leak MIB] [--pause SECONDS] [--batch N]

It prints the time at which memory ran out, and ends with exit code 3.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leak", type=float, default=64.0)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100_000)
    given = parser.parse_args()
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    began = time.time()
    try:
        for step in range(given.steps):  # noqa: B007  # it is told where it ends
            loss = model(torch.randn(given.batch, 1024, device="cuda")).square().mean()
            time.sleep(given.pause / 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if given.leak:
                kept.append(torch.empty(int(given.leak * 2**18), device="cuda"))
            time.sleep(given.pause / 2)
    except torch.OutOfMemoryError:
        print(f"out of memory at {time.time():.3f} in step {step}, begun at {began:.3f}", flush=True)
        sys.exit(3)
    print("done", flush=True)


if __name__ == "__main__":
    main()
