"""Trainings that differ in what a step moves: buffers, queues, attributes, other optimizers, generators, schedules."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import vramfit

STEPS = 4

Batch = Any


@dataclass(kw_only=True)
class Parts:
    """A training before its first step.

    Attributes:
        loss: of the model and a batch.
        batch: of a number.
        more: what else `vramfit.survive` is given.
        extra: what else the training holds, compared at the end.
        after: called after each step, outside of what is guarded.
        second: another model with its optimizer and loss, stepped after the first, by a survivor of its own.
        accumulates: batches of an update.
    """

    model: nn.Module
    optimizer: Any
    loss: Callable[[nn.Module, Batch], Any]
    batch: Callable[[int], Batch]
    more: dict[str, Any] = field(default_factory=dict)
    extra: Callable[[], Any] = tuple
    after: Callable[[], None] | None = None
    second: tuple[nn.Module, Any, Callable[[nn.Module, Batch], Any]] | None = None
    accumulates: int = 1


@dataclass(frozen=True)
class Training:
    """A training by name."""

    name: str
    make: Callable[[], Parts]


def run(training: Training, allocator: Any = None, *, survives: bool = True) -> dict[str, Any]:
    """All that a training holds after its steps.

    Args:
        allocator: counts what is allocated inside of the steps.
        survives: if not, the loop is a plain one.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the generator that augmentations draw from
    parts = training.make()
    survivors = [
        vramfit.survive(
            parts.model, parts.optimizer, loss=parts.loss, numerics="bitwise", enabled=survives, **parts.more
        )
    ]
    if parts.second is not None:
        model, optimizer, loss = parts.second
        survivors.append(vramfit.survive(model, optimizer, loss=loss, numerics="bitwise", enabled=survives))
    losses = []
    for number in range(STEPS):
        batches = [parts.batch(number + 100 * part) for part in range(parts.accumulates)]
        with nullcontext() if allocator is None else allocator.counting():
            losses += [survivors[0].accumulate(batch) for batch in batches[:-1]]
            losses += [survivor.step(batches[-1]) for survivor in survivors]
        if parts.after is not None:
            parts.after()
    for survivor in survivors:
        survivor.close()
    models = [parts.model, *(() if parts.second is None else parts.second[:1])]
    optimizers = [parts.optimizer, *(() if parts.second is None else parts.second[1:2])]
    return {
        "models": [dict(one.state_dict()) for one in models],
        "attributes": [_plain(vars(module)) for one in models for module in one.modules()],
        "optimizers": [one.state_dict() for one in optimizers],
        "of the optimizers": [_plain(vars(one)) for one in optimizers],
        "schedule": parts.more["scheduler"].state_dict() if "scheduler" in parts.more else None,
        "scaler": parts.more["scaler"].state_dict() if "scaler" in parts.more else None,
        "extra": parts.extra(),
        "losses": losses,
        "gradients": [one.grad for model in models for one in model.parameters()],
        "draws": (torch.rand(()), random.random(), float(np.random.rand())),  # noqa: NPY002
    }


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes that are values, not what torch keeps of hooks and modules."""
    kinds = (int, float, str, torch.Tensor, list, collections.deque, np.ndarray)
    return {
        name: value for name, value in attributes.items() if isinstance(value, kinds) and "hook" not in name
    }


def same(one: Any, other: Any, where: str = "") -> str:
    """Where two structures differ first; empty if nowhere."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor):
            return where
        if hasattr(one, "__tensor_flatten__"):  # of a class of tensors, e.g. a quantised one
            return same(
                *(
                    {name: getattr(each, name) for name in each.__tensor_flatten__()[0]}
                    for each in (one, other)
                ),
                where,
            )
        first, second = (
            value.detach().to_dense() if value.is_sparse else value.detach() for value in (one, other)
        )
        equal = first.shape == second.shape and first.dtype == second.dtype
        return (
            ""
            if equal and bool(((first == second) | ((first != first) & (second != second))).all())
            else where
        )
    if isinstance(one, dict):
        if not isinstance(other, dict) or list(one) != list(other):
            return f"{where}: {sorted(map(str, set(one) ^ set(other)))}"
        return next(filter(None, (same(one[key], other[key], f"{where}/{key}") for key in one)), "")
    if isinstance(one, list | tuple | collections.deque):
        if len(one) != len(other):
            return where
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (same(a, b, f"{where}/{number}") for number, (a, b) in pairs)), "")
    if isinstance(one, np.ndarray):
        return "" if np.array_equal(one, other) else where
    if isinstance(one, int | float | str | bytes | type(None)):
        return "" if one == other else where
    return ""


def draws(number: int) -> torch.Generator:
    """A generator for a batch."""
    return torch.Generator().manual_seed(number)


def rows(*shape: int) -> Callable[[int], torch.Tensor]:
    """Batches of normal values."""
    return lambda number: torch.randn(*shape, generator=draws(number))


def pairs(count: int, features: int, classes: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Batches of inputs and classes."""
    return lambda number: (
        torch.randn(count, features, generator=draws(number)),
        torch.randint(0, classes, (count,), generator=draws(number)),
    )


def classifies(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean square of what the model gives."""
    return model(batch).square().mean()  # type: ignore[no-any-return]


def small() -> nn.Sequential:
    """A model of two layers."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _convolutional() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 5)
    )

    def batch(number: int) -> Batch:
        return torch.randn(6, 3, 6, 6, generator=draws(number)), torch.randint(
            0, 5, (6,), generator=draws(number)
        )

    return Parts(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        loss=classifies,
        batch=batch,
        more={"clip_norm": 1.0},
    )


def _channels_last() -> Parts:
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 2, 1)
    )
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return Parts(
        model=model,
        optimizer=optimizer,
        loss=squares,
        batch=lambda n: rows(2, 3, 5, 5)(n).to(memory_format=torch.channels_last),
    )


def _recurrent() -> Parts:
    model = nn.LSTM(4, 6, num_layers=2, dropout=0.3, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return Parts(
        model=model,
        optimizer=optimizer,
        loss=lambda net, batch: net(batch)[0].square().mean(),
        batch=rows(3, 5, 4),
        more={"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)},
    )


class _Tied(nn.Module):
    """A language model whose output layer is its embedding, and which draws from NumPy and Python too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 11)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())  # noqa: NPY002
        return self.out(self.layer(x))  # type: ignore[no-any-return]


def _language() -> Parts:
    model = _Tied()
    named = dict(model.named_parameters())
    groups = [{"params": [named.pop("embed.weight")], "lr": 0.01}, {"params": list(named.values())}]

    def batch(number: int) -> Batch:
        ids = torch.randint(0, 11, (2, 8), generator=draws(number))
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    return Parts(
        model=model,
        optimizer=torch.optim.NAdam(groups, lr=0.02, weight_decay=0.1),
        loss=lambda net, b: F.cross_entropy(net(b["ids"]).flatten(0, 1), b["labels"].flatten()),
        batch=batch,
    )


def _scaled() -> Parts:
    """The second step finds gradients that are no numbers, and is left out."""
    model = small()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=2)
    return Parts(
        model=model,
        optimizer=optimizer,
        loss=lambda net, b: net(b).square().mean() * (1e38 if float(b[0, 0]) > 9 else 1e-20),
        batch=lambda n: rows(4, 6)(n) + (10 if n == 1 else 0),
        more={"scaler": scaler, "clip_norm": 1.0},
    )


def _autocast() -> Parts:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def loss(net: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(batch).float().square().mean()  # type: ignore[no-any-return]

    return Parts(
        model=model,
        optimizer=torch.optim.RAdam(model.parameters(), lr=0.01),
        loss=loss,
        batch=rows(4, 8),
        more={"clip_norm": 0.1},
    )


def _autoencoder() -> Parts:
    """Noise from a generator of its own, and metrics beside the loss."""
    encoder, decoder = nn.Linear(8, 6), nn.Linear(3, 8)
    model = nn.ModuleList([encoder, decoder])
    noise = draws(7)

    def loss(_net: nn.Module, x: Batch) -> Any:
        mean, spread = encoder(x).chunk(2, 1)
        z = mean + spread.exp() * torch.randn(mean.shape, generator=noise)
        off, apart = F.mse_loss(decoder(z), x), (mean.square() + spread.exp() - spread).mean()
        return off + 0.1 * apart, {"off": off, "apart": apart}

    return Parts(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
        loss=loss,
        batch=rows(4, 8),
        extra=lambda: [torch.rand((), generator=noise)],
    )


def _adversarial_networks() -> Parts:
    """Two models, two optimizers, two survivors."""
    g = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def of_d(net: nn.Module, x: Batch) -> torch.Tensor:
        return F.softplus(-net(x)).mean() + F.softplus(net(g(torch.randn(len(x), 4)).detach())).mean()

    def of_g(net: nn.Module, x: Batch) -> torch.Tensor:
        return F.softplus(-d(net(torch.randn(len(x), 4)))).mean()

    return Parts(
        model=d,
        optimizer=torch.optim.Adam(d.parameters(), 1e-2),
        loss=of_d,
        batch=rows(4, 6),
        second=(g, torch.optim.Adam(g.parameters(), 1e-2), of_g),
    )


def _critic_inside() -> Parts:
    """The loss of one model steps the optimizer of another."""
    model, critic = small(), nn.Linear(3, 1)
    inner = torch.optim.AdamW(critic.parameters(), lr=0.05)

    def loss(net: nn.Module, x: Batch) -> torch.Tensor:
        out = net(x)
        inner.zero_grad()
        critic(out.detach()).square().mean().backward()
        inner.step()
        for one in critic.parameters():
            one.requires_grad_(False)
        value = critic(out).mean() + out.square().mean()
        for one in critic.parameters():
            one.requires_grad_(True)
        return value  # type: ignore[no-any-return]

    return Parts(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
        loss=loss,
        batch=rows(4, 6),
        extra=lambda: [critic.state_dict(), inner.state_dict()],
    )


class _Queued(nn.Module):
    """Momentum contrast: a slow copy of the encoder, and a queue of its outputs, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.slow = nn.Linear(6, 4), nn.Linear(6, 4)
        self.slow.load_state_dict(self.encoder.state_dict())
        self.slow.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 4), dim=1))
        self.place = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = F.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            keys = F.normalize(self.slow(x + 0.1 * torch.randn_like(x)), dim=1)
        scores = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.clone().T], 1)
        self.queue[self.place : self.place + len(keys)] = keys
        self.place = (self.place + len(keys)) % len(self.queue)
        return F.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.int64))


def _contrast() -> Parts:
    model = _Queued()
    return Parts(
        model=model,
        optimizer=torch.optim.SGD(model.encoder.parameters(), lr=0.1, momentum=0.9),
        loss=lambda net, x: net(x),
        batch=rows(4, 6),
    )


def _averaged() -> Parts:
    """An average of the weights in a dictionary, replaced with each step, and one of torch's."""
    model = small()
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    swa = torch.optim.swa_utils.AveragedModel(model)

    def loss(net: nn.Module, x: Batch) -> torch.Tensor:
        for name, value in net.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * value.detach()
        swa.update_parameters(net)
        return F.mse_loss(net(x), swa(x).detach()) + net(x).square().mean()

    return Parts(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, centered=True),
        loss=loss,
        batch=rows(4, 6),
        extra=lambda: [average, swa.state_dict()],
    )


class _Codebook(nn.Module):
    """Vector quantisation: centres that are averages, as buffers that each pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("centres", torch.randn(5, 4))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.inside(x)
        nearest = torch.cdist(z.detach(), self.centres).argmin(1)
        hits = F.one_hot(nearest, 5).float()
        self.counts = 0.9 * self.counts + 0.1 * hits.sum(0)
        self.centres = 0.9 * self.centres + 0.1 * (hits.T @ z.detach()) / self.counts[:, None]
        chosen = z + (self.centres[nearest] - z).detach()
        return F.mse_loss(self.outside(chosen), x) + F.mse_loss(z, self.centres[nearest])


def _quantised() -> Parts:
    model = _Codebook()
    return Parts(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True),
        loss=lambda net, x: net(x),
        batch=rows(4, 6),
    )


def _spectral() -> Parts:
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), norm(nn.Linear(8, 3)))
    return Parts(
        model=model, optimizer=torch.optim.Adamax(model.parameters(), lr=0.02), loss=squares, batch=rows(4, 6)
    )


def _fast_gradient_sign() -> Parts:
    model = small()

    def loss(net: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch[0].clone().requires_grad_(True)
        classifies(net, (x, batch[1])).backward()
        net.zero_grad()
        assert x.grad is not None
        return classifies(net, ((x + 0.1 * x.grad.sign()).detach(), batch[1]))

    return Parts(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), loss=loss, batch=pairs(4, 6, 3)
    )


def _gradient_penalty() -> Parts:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(net: nn.Module, x: Batch) -> torch.Tensor:
        x = x.clone().requires_grad_(True)
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()  # type: ignore[no-any-return]

    return Parts(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), loss=loss, batch=rows(4, 6)
    )


class _Agent:
    """A policy's loop: a baseline, a memory of what was seen, and draws of Python's and NumPy's own generators."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.baseline, self.seen = net, 0.0, 0
        self.memory: collections.deque[torch.Tensor] = collections.deque(maxlen=6)
        self.chance, self.numbers = random.Random(3), np.random.default_rng(4)
        self.lasts = np.zeros(3)

    def loss(self, _net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.memory.append(x)
        old = self.memory[self.chance.randrange(len(self.memory))]
        chances = F.log_softmax(self.net(torch.cat([x, old])), 1)
        actions = torch.multinomial(chances.exp().detach(), 1)[:, 0]
        reward = float(self.numbers.normal()) + actions.float()
        self.baseline = 0.9 * self.baseline + 0.1 * float(reward.mean())
        self.lasts[self.seen % 3] = self.baseline
        self.seen += 1
        return -(chances.gather(1, actions[:, None])[:, 0] * (reward - self.baseline)).mean()


def _reinforced() -> Parts:
    model = small()
    agent = _Agent(model)
    return Parts(
        model=model,
        optimizer=torch.optim.Rprop(model.parameters(), lr=0.01),
        loss=agent.loss,
        batch=rows(4, 6),
        extra=lambda: [
            agent.baseline, agent.seen, agent.memory, agent.lasts, agent.chance.random(), float(agent.numbers.normal())
        ],
    )  # fmt: skip


COUNTS = {"steps": 0, "losses": []}
"""What a loss counts, as a global of its module."""


def _counted() -> Parts:
    model = nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum"), nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    COUNTS["steps"], COUNTS["losses"] = 0, []

    def loss(net: nn.Module, batch: Batch) -> torch.Tensor:
        COUNTS["steps"] += 1  # type: ignore[operator]
        value = classifies(net, batch)
        COUNTS["losses"].append(float(value.detach()))  # type: ignore[attr-defined]
        return value

    def batch(number: int) -> Batch:
        return torch.randint(0, 20, (4, 3), generator=draws(number)), torch.randint(
            0, 3, (4,), generator=draws(number)
        )

    return Parts(
        model=model,
        optimizer=optimizer,
        loss=loss,
        batch=batch,
        after=lambda: plateau.step(COUNTS["losses"][-1]),  # type: ignore[index]
        extra=lambda: [dict(COUNTS), plateau.state_dict()],
    )


def _sparse() -> Parts:
    model = nn.Embedding(30, 4, sparse=True)
    return Parts(
        model=model,
        optimizer=torch.optim.SparseAdam(model.parameters(), lr=0.1),
        loss=lambda net, b: (net(b[0]) * net(b[1])).sum(1).sigmoid().log().neg().mean(),
        batch=lambda n: torch.randint(0, 30, (2, 6), generator=draws(n)),
    )


def _one_cycle() -> Parts:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
    return Parts(
        model=model, optimizer=optimizer, loss=squares, batch=rows(4, 6), more={"scheduler": schedule}
    )


def _accumulated() -> Parts:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
    return Parts(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
        loss=classifies,
        batch=pairs(4, 6, 3),
        accumulates=3,
        more={"clip_norm": 0.5},
    )


def _low_rank() -> Parts:
    """LoRA+: a frozen base, and two groups with rates of their own."""
    base = nn.Linear(6, 6).requires_grad_(False)
    a, b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
    nn.init.zeros_(b.weight)
    model = nn.ModuleList([base, a, b])
    groups = [{"params": [a.weight], "lr": 0.01}, {"params": [b.weight], "lr": 0.16}]
    return Parts(
        model=model,
        optimizer=torch.optim.AdamW(groups),
        loss=lambda _net, x: (base(x) + b(F.dropout(a(x), 0.1))).square().mean(),
        batch=rows(4, 6),
    )


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + F.dropout(self.layer(self.norm(x)), 0.1)


def _blocks() -> Parts:
    """Blocks that write buffers: they cannot run twice."""
    model = nn.Sequential(*[_Block() for _ in range(3)], nn.Linear(8, 2))
    return Parts(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        loss=squares,
        batch=rows(4, 8),
    )


def _diffusion() -> Parts:
    model = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))
    keeps = torch.linspace(0.99, 0.1, 10)

    def loss(net: nn.Module, x: Batch) -> torch.Tensor:
        when = torch.randint(0, 10, (len(x), 1))
        noise, part = torch.randn_like(x), keeps[when]
        noisy = part.sqrt() * x + (1 - part).sqrt() * noise
        return F.mse_loss(net(torch.cat([noisy, when / 10], 1)), noise)

    return Parts(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=loss,
        batch=rows(4, 6),
        more={"clip_norm": 1.0},
    )


def _complex() -> Parts:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
    return Parts(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=lambda net, x: (x.to(torch.complex64) @ net.weight).abs().mean(),
        batch=rows(4, 6),
    )


def _cuts_in_place() -> Parts:
    """The loss cuts its own model's weights, and a hook changes gradients."""
    model = small()
    for one in model.parameters():
        one.register_hook(lambda gradient: gradient * 0.5)

    def loss(net: nn.Module, x: Batch) -> torch.Tensor:
        with torch.no_grad():
            for one in net.parameters():
                one.clamp_(-0.4, 0.4)
        return net(x).mean()  # type: ignore[no-any-return]

    return Parts(
        model=model, optimizer=torch.optim.RMSprop(model.parameters(), lr=0.05), loss=loss, batch=rows(4, 6)
    )


def _from_an_iterator() -> Parts:
    """The loss draws from an iterator, which nobody can set back."""
    model = small()

    def numbers() -> Iterator[torch.Tensor]:
        number = 0
        while True:
            number += 1
            yield torch.randn(4, 6, generator=draws(number))

    more = numbers()
    return Parts(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=lambda net, x: net(x + next(more)).square().mean(),
        batch=rows(4, 6),
    )


TRAININGS = (
    Training("convolutions, batch norm, dropout, AdamW", _convolutional),
    Training("channels last, group norm, SGD fused", _channels_last),
    Training("LSTM, SGD with momentum, StepLR", _recurrent),
    Training("language model, tied weights, groups, NAdam", _language),
    Training("GradScaler, Adagrad", _scaled),
    Training("autocast, RAdam", _autocast),
    Training("variational autoencoder, own generator, Adam amsgrad", _autoencoder),
    Training("GAN, two survivors, Adam", _adversarial_networks),
    Training("critic stepped inside of the loss, AdamW", _critic_inside),
    Training("momentum contrast, queue, SGD", _contrast),
    Training("averages of weights, RMSprop", _averaged),
    Training("codebook of replaced buffers, AdamW foreach", _quantised),
    Training("spectral norm, Adamax", _spectral),
    Training("adversarial examples, SGD", _fast_gradient_sign),
    Training("gradient penalty, Adam", _gradient_penalty),
    Training("policy gradient, memory, baseline, Rprop", _reinforced),
    Training("counters in a global, ReduceLROnPlateau, Adam", _counted),
    Training("sparse embedding, SparseAdam", _sparse),
    Training("OneCycleLR, AdamW", _one_cycle),
    Training("accumulation, AdamW", _accumulated),
    Training("LoRA+, AdamW", _low_rank),
    Training("blocks that write buffers, AdamW fused", _blocks),
    Training("diffusion, Adam", _diffusion),
    Training("complex weights, Adam", _complex),
    Training("weights cut in the loss, RMSprop", _cuts_in_place),
    Training("an iterator in the loss, Adam", _from_an_iterator),
)
