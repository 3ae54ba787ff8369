"""Models and losses whose forward pass writes something beside gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vramfit.workload import Workload

Batch = tuple[torch.Tensor, torch.Tensor]
EXAMPLES = 64


def pair(batch_size: int) -> Batch:
    return torch.randn(batch_size, 16), torch.randint(4, (batch_size,))


def layers(out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, out))


class Centre(nn.Module):
    """DINO's: a mean over the batch in a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.layers(x)
        target = ((z.detach() - self.centre) / 0.04).softmax(1)
        self.centre = self.centre * 0.9 + z.detach().mean(0) * 0.1
        return -(target * (z / 0.1).log_softmax(1)).sum(1).mean()


class Counter(nn.Module):
    """Anneals by the number of its steps, in a buffer that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        out = self.layers(x)
        return F.cross_entropy(out, y) + self.steps / 10 * out.square().mean()


class Seen(nn.Module):
    """Counts steps and examples in attributes that are no buffers, and averages its loss as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.steps, self.seen, self.smoothed = 0, 0, 0.0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.seen += len(x)
        loss = (self.layers(x) - F.one_hot(y, 4)).square().mean()
        self.smoothed = 0.9 * self.smoothed + 0.1 * float(loss.detach())
        return loss * (1 + 0.1 * self.steps)


class Teacher(nn.Module):
    """A momentum teacher, whose frozen parameters are written through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = layers(8), layers(8)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for slow, quick in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data = slow.data * 0.9 + quick.data * 0.1
        return (self.student(x) - self.teacher(x)).square().mean()


class Queue(nn.Module):
    """MoCo's: a queue of the examples' keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(8)
        self.register_buffer("queue", F.normalize(torch.randn(128, 8), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.layers(x), dim=1)
        loss = (q @ self.queue.clone().T / 0.2).logsumexp(1).mean() - q.sum(1).mean()
        place = int(self.place)
        rows = (torch.arange(len(q)) + place) % len(self.queue)
        self.queue[rows] = q.detach()
        self.place.fill_((place + len(q)) % len(self.queue))
        return loss


class Codebook(nn.Module):
    """A codebook that follows the means of what falls to its codes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(8)
        self.register_buffer("codes", torch.randn(8, 8))
        self.register_buffer("sizes", torch.ones(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.layers(x)
        nearest = F.one_hot(torch.cdist(z.detach(), self.codes).argmin(1), 8).float()
        loss = (z - nearest @ self.codes.clone()).square().mean()
        self.sizes.mul_(0.9).add_(nearest.sum(0), alpha=0.1)
        self.codes.mul_(0.9).add_(nearest.T @ z.detach() / self.sizes[:, None].clamp(min=1), alpha=0.1)
        return loss


class OwnDraw(nn.Module):
    """Draws from a generator of its own: one number for a pass, or one for each example."""

    def __init__(self, *, each: bool) -> None:
        super().__init__()
        self.layers, self.each = layers(), each
        self.draws = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = len(x) if self.each else 1
        return F.cross_entropy(self.layers(x * (0.5 + torch.rand(rows, 1, generator=self.draws))), y)


class LastOutput(nn.Module):
    """Keeps its last output for whoever looks at it, and reads it never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)
        self.last = out.detach()
        return F.cross_entropy(out, y)


class LastUse(LastOutput):
    """The same in a buffer, which goes to checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)
        self.last = out.detach().abs().amax(0)
        return F.cross_entropy(out, y)


def of_model(model: nn.Module, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = model(*batch)
    return found


def annealed() -> Callable[[nn.Module, Batch], torch.Tensor]:
    """A loss that counts its calls itself."""
    calls = 0

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + calls / 10 * out.square().mean()

    return loss


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return made


def workload(
    make: Callable[[], nn.Module],
    loss: Callable[[Any, Any], torch.Tensor] = of_model,
    batch: Callable[..., Any] = pair,
) -> Workload:
    return Workload(
        model=seeded(make),
        batch=batch,
        sizes={"batch_size": EXAMPLES},
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
