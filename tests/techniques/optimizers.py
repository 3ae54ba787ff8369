"""Models with large enough parameters, and what is held on the virtual GPU, for the tests of optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.techniques.toys import Language, class_loss, classes, language_loss, numbers
from torch import nn

from vramfit.techniques import AttachedProgram, Profile
from vramfit.trace import Category, EventKind
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload


def wide() -> Workload:
    """A classifier whose middle matrix is large enough for states in blocks."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))

    return Workload(
        model=model,
        batch=lambda batch_size: (numbers(batch_size, 16), classes(3, batch_size)),
        sizes={"batch_size": 4},
        loss=class_loss,
        optimizer=torch.optim.AdamW,
    )


def transformer(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, *, layers: int = 2
) -> Workload:
    """A small transformer whose parameters outweigh its activations."""
    return Workload(
        model=lambda: Language(tied=False, layers=layers, width=128, words=512, dropout=0.0),
        batch=lambda batch_size: torch.zeros(batch_size, 16, dtype=torch.long),
        sizes={"batch_size": 1},
        loss=language_loss,
        optimizer=optimizer,
    )


def profile_of(workload: Workload, **changed: Any) -> Profile:
    """The profile of a workload with AdamW and the like, on a card with much host memory."""
    state = workload.start("cpu")
    usual: dict[str, Any] = {"host_bytes": 1 << 36, "trains": True}
    return Profile(model=state.model, optimizer=state.optimizer, sizes=workload.sizes, **{**usual, **changed})


def train(live: AttachedProgram, *, steps: int, seed: int = 0) -> list[float]:
    """Train a live program of `wide` on the CPU for some steps; the losses."""
    plain, found = wide(), []
    assert plain.loss is not None
    for step in range(steps):
        torch.manual_seed(seed + step)
        loss = plain.loss(live.model, plain.batch(**plain.sizes))
        found.append(float(loss.detach()))
        live.backward(loss)
        live.step()
    return found


def values(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def rounded(nbytes: int) -> int:
    """As the caching allocator counts it."""
    return -(-nbytes // 512) * 512


def held(gpu: VirtualGPU, category: Category) -> tuple[int, int]:
    """Requested bytes of a category: those alive now, and the most that were at once."""
    trace, alive, now, most = gpu.trace, {}, 0, 0
    for row in range(len(trace)):
        if trace.kind[row] == EventKind.ALLOC and trace.category[row] == category:
            alive[int(trace.address[row])] = int(trace.size[row])
            now += int(trace.size[row])
            most = max(most, now)
        elif trace.kind[row] == EventKind.FREE_REQUESTED:
            now -= alive.pop(int(trace.address[row]), 0)
    return now, most


def states_held(gpu: VirtualGPU, workload: Workload) -> int:
    """Bytes of the optimizer's states after two steps on the virtual GPU."""
    state = workload.start("cuda")
    for _ in range(2):
        workload.run_step(state, workload.sizes)
    return held(gpu, Category.OPTIMIZER_STATE)[0]


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run what torchao compiles as it is written: the same arithmetic, without seconds of compiling for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield
