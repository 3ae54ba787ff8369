"""A script that records what its training step takes and leaves a snapshot of it, as PyTorch's documentation shows."""

import pickle

import torch
from torch import nn


def main() -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    for _ in range(2):
        model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.memory._dump_snapshot("snapshot.pickle")
    torch.cuda.memory._record_memory_history(enabled=None)
    with open("snapshot.pickle", "rb") as file:
        snapshot = pickle.load(file)
    entries = snapshot["device_traces"][0]
    frames = {frame["name"] for entry in entries for frame in entry.get("frames", ())}
    print(f"{len(entries)} entries from main: {'main' in frames}")


if __name__ == "__main__":
    main()
