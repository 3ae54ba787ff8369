"""A training whose optimizer states are twice what the device may hold of them, and a cache that outgrows it too.

    python examples/survive/states_in_tiers.py [--steps 20] [--folder /dev/shm]

States and cached features are on the device while they are used, else in pinned memory, else in files. On a machine
without a card the "device" is a budget of the CPU's memory: the moves are the same.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import nn

import vramfit
from vramfit.units import format_bytes

WIDTH, LAYERS, BATCHES = 256, 8, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where files go, such as /dev/shm")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    states = 2 * sum(parameter.nbytes for parameter in model.parameters())

    with vramfit.TieredStore(
        states // 2, device=device, pinned=states, file="64MiB", folder=options.folder
    ) as store:
        for batch in range(BATCHES):  # features that were computed once and are read in each epoch
            store["features", batch] = torch.randn(64, WIDTH, device=device)
        held = store.hold_optimizer(optimizer)  # optimizer.step() now brings the states slice by slice
        for step in range(options.steps):
            with store.reading(("features", step % BATCHES)) as (features,):
                loss = (model(features) - features).square().mean()
            loss.backward()
            del features, loss  # what is held cannot go down
            optimizer.step()
            optimizer.zero_grad()
        for usage in store.usage().values():
            most = f"{format_bytes(usage.peak)} at most of {format_bytes(usage.capacity)}"
            print(f"{usage.name}: {usage.tensors} tensors, {most}")
        traffic = store.traffic
        print(
            f"{traffic.woken} brought when asked for, {traffic.awaited} before, {traffic.sent_down} sent down, "
            f"{traffic.spared} dropped without a copy"
        )
        held.undo()  # the states are the optimizer's own again
    assert all("exp_avg" in one for one in optimizer.state.values())


if __name__ == "__main__":
    main()
