"""Sixty small workloads, each with a loss, a mask or a state of its own kind, for plans at two budgets.

Losses that take the examples one by one, that weigh them, and that compare them with each other; masks, labels and
lengths that are uneven as in real data; and whatever a forward pass may write beside gradients: buffers that are
written in place or replaced, attributes, frozen parameters, generators, and state that the loss holds itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vramfit.workload import Workload

EXAMPLES, PAIRS, WIDTH, CLASSES = 2048, 512, 256, 10
Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Any], torch.Tensor]

KINDS: dict[str, Callable[[], Workload]] = {}
"""By name."""


def net(out: int = CLASSES, drop: float = 0.0) -> nn.Sequential:
    """Three hidden layers."""
    inner: list[nn.Module] = []
    for _ in range(3):
        inner += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(drop)]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), *inner, nn.Linear(WIDTH, out))


def classes(batch_size: int) -> Batch:
    """Inputs with one class each."""
    return {"x": torch.randn(batch_size, 64), "y": torch.randint(CLASSES, (batch_size,))}


def values(batch_size: int) -> Batch:
    """Inputs with real targets."""
    return {"x": torch.randn(batch_size, 64), "y": torch.randn(batch_size, CLASSES)}


def views(batch_size: int) -> Batch:
    """Two views of each example."""
    x = torch.randn(batch_size, 64)
    return {"x": x, "v": x + 0.1 * torch.randn_like(x)}


def _add(
    name: str,
    loss: Loss | None = None,
    *,
    model: Callable[[], nn.Module] = net,
    batch: Any = classes,
    examples: int = EXAMPLES,
    make_loss: Callable[[], Loss] | None = None,
) -> None:
    def make() -> Workload:
        def seeded() -> nn.Module:
            torch.manual_seed(0)
            return model().train()

        return Workload(
            model=seeded,
            batch=batch,
            sizes={"batch_size": examples},
            loss=loss if make_loss is None else make_loss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        )

    KINDS[name] = make


def _each(m: Any, b: Batch) -> torch.Tensor:
    return F.cross_entropy(m(b["x"]), b["y"], reduction="none")


# -- losses of the examples one by one ------------------------------------------------------------------------------


def _ignoring(batch_size: int) -> Batch:
    b = classes(batch_size)
    return {**b, "y": torch.where(torch.rand(batch_size) < 0.03, -100, b["y"])}


def _focal(m: Any, b: Batch) -> torch.Tensor:
    loss = _each(m, b)
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def _weighted_classes(m: Any, b: Batch) -> torch.Tensor:
    weight = torch.linspace(0.2, 3, CLASSES, device=b["x"].device)
    return F.cross_entropy(m(b["x"]), b["y"], weight=weight)


def _penalty(m: Any, b: Batch) -> torch.Tensor:
    x = b["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return F.cross_entropy(m(x), b["y"]) + (slope.norm(dim=1) - 1).square().mean()


_add("mean of classes", lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
_add("sum of classes", lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="sum"))
_add("3 % of labels ignored", lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), batch=_ignoring)
_add("label smoothing", lambda m, b: F.cross_entropy(m(b["x"]), b["y"], label_smoothing=0.1))
_add("class weights", _weighted_classes)
_add("focal", _focal)
_add("classes and a norm", lambda m, b: F.cross_entropy(o := m(b["x"]), b["y"]) + 0.1 * o.square().mean())
_add("mean square", lambda m, b: F.mse_loss(m(b["x"]), b["y"]), batch=values)
_add("sum of squares", lambda m, b: F.mse_loss(m(b["x"]), b["y"], reduction="sum"), batch=values)
_add("Huber", lambda m, b: F.huber_loss(m(b["x"]), b["y"]), batch=values)
_add(
    "several labels",
    lambda m, b: F.binary_cross_entropy_with_logits(m(b["x"]), (b["y"] > 0).float()),
    batch=values,
)
_add(
    "quantile",
    lambda m, b: (lambda e: torch.maximum(0.9 * e, -0.1 * e).mean())(b["y"] - m(b["x"])),
    batch=values,
)
_add("cosine", lambda m, b: 1 - F.cosine_similarity(m(b["x"]), b["y"]).mean(), batch=values)
_add("gradient penalty", _penalty)
_add("mean over what is negative", lambda m, b: F.relu(-m(b["x"])).sum(1).mean())

# -- losses that compare examples, or change their form with the batch ----------------------------------------------


def _info_nce(m: Any, b: Batch) -> torch.Tensor:
    one, other = F.normalize(m(b["x"]), dim=1), F.normalize(m(b["v"]), dim=1)
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one), device=one.device))


def _barlow(m: Any, b: Batch) -> torch.Tensor:
    one, other = (F.layer_norm(m(b[key]).T, (len(b[key]),)).T for key in ("x", "v"))
    c = one.T @ other / len(one)
    return (c - torch.eye(len(c), device=c.device)).square().sum()


def _vicreg(m: Any, b: Batch) -> torch.Tensor:
    one, other = m(b["x"]), m(b["v"])
    return F.mse_loss(one, other) + F.relu(1 - one.std(0)).mean() + F.relu(1 - other.std(0)).mean()


def _variance_of_many(m: Any, b: Batch) -> torch.Tensor:
    out = m(b["x"])
    loss = F.cross_entropy(out, b["y"])
    return loss + F.relu(1 - out.std(0)).mean() if len(out) >= 32 else loss


def _dice(m: Any, b: Batch, dim: int | None = None) -> torch.Tensor:
    p, t = m(b["x"]).sigmoid(), (b["y"] > 0).float()
    if dim is None:
        return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())
    return (1 - 2 * (p * t).sum(dim) / (p.sum(dim) + t.sum(dim) + 1)).mean()


def _triplet(m: Any, b: Batch) -> torch.Tensor:
    z = F.normalize(m(b["x"]), dim=1)
    far = torch.cdist(z, z)
    same = b["y"][:, None] == b["y"]
    return F.relu((far * same).amax(1) - (far + 9 * same).amin(1) + 0.2).mean()


def _ranking(m: Any, b: Batch) -> torch.Tensor:
    score = m(b["x"])[:, 0]
    order = (b["y"][:, None, 0] - b["y"][:, 0]).sign()
    return F.softplus(-order * (score[:, None] - score)).mean()


_add("InfoNCE", _info_nce, batch=views, examples=PAIRS)
_add("Barlow twins", _barlow, batch=views)
_add("VICReg", _vicreg, batch=views)
_add("hard triplets", _triplet, examples=PAIRS)
_add("ranking of pairs", _ranking, batch=values, examples=PAIRS)
_add("variance from 32 examples on", _variance_of_many)
_add("64 worst losses", lambda m, b: _each(m, b).sort(descending=True).values[:64].mean())
_add("worst quarter", lambda m, b: _each(m, b).topk(len(b["x"]) // 4).values.mean())
_add("worst at a fixed loss", lambda m, b: F.relu(_each(m, b) - 2).mean())
_add("dice of the batch", _dice, batch=values)
_add("dice of each", lambda m, b: _dice(m, b, 1), batch=values)
_add("root of the mean square", lambda m, b: F.mse_loss(m(b["x"]), b["y"]).sqrt(), batch=values)
_add(
    "divided by the batch's deviation",
    lambda m, b: (lambda e: (e / (e.std() + 1e-3)).abs().mean())(m(b["x"])),
)
_add("robust mean", lambda m, b: _each(m, b).logsumexp(0))
_add("covariance", lambda m, b: torch.cov(m(b["x"]).T).square().mean())
_add("centred", lambda m, b: (lambda o: (o - o.mean(0)).square().mean())(m(b["x"])))

# -- masks, weights and lengths -------------------------------------------------------------------------------------


def _two_masks(batch_size: int) -> Batch:
    m1, m2 = (torch.rand(batch_size) < 0.9).float(), (torch.rand(batch_size) < 0.4).float()
    return {**classes(batch_size), "m1": m1, "m2": m2}


def _one_mask(batch_size: int) -> Batch:
    return {**classes(batch_size), "mask": (torch.rand(batch_size) < 0.7).float()}


def _sequences(batch_size: int) -> Batch:
    ends = torch.randint(4, 17, (batch_size, 1))
    tokens = torch.randint(64, (batch_size, 16))
    return {"x": tokens, "mask": (torch.arange(16) < ends).float()}


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(64, 64), net(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.embed(x))  # type: ignore[no-any-return]


def _padded(m: Any, b: Batch) -> torch.Tensor:
    labels = torch.where(b["mask"] > 0, b["x"], -100)
    return F.cross_entropy(m(b["x"])[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _masked_tokens(m: Any, b: Batch) -> torch.Tensor:
    each = F.cross_entropy(m(b["x"]).transpose(1, 2), b["x"], reduction="none")
    return (each * b["mask"]).sum() / b["mask"].sum()


def _mean_of_means(m: Any, b: Batch) -> torch.Tensor:
    each = F.cross_entropy(m(b["x"]).transpose(1, 2), b["x"], reduction="none")
    return ((each * b["mask"]).sum(1) / b["mask"].sum(1).clamp(min=1)).mean()


def _of_two_masks(m: Any, b: Batch) -> torch.Tensor:
    o = m(b["x"])
    loss, other = F.cross_entropy(o, b["y"], reduction="none"), o.square().mean(1)
    return (loss * b["m1"]).sum() / b["m1"].sum().clamp(min=1) + (other * b["m2"]).sum() / b[
        "m2"
    ].sum().clamp(min=1)


_add("one mask", lambda m, b: (_each(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1), batch=_one_mask)
_add("two masks", _of_two_masks, batch=_two_masks)
_add("a mask that is selected", lambda m, b: _each(m, b)[b["mask"] > 0].mean(), batch=_one_mask)
_add("a mask over all", lambda m, b: (_each(m, b) * b["mask"]).mean(), batch=_one_mask)
_add("tokens under a mask", _masked_tokens, model=_Words, batch=_sequences, examples=128)
_add("mean of sequences' means", _mean_of_means, model=_Words, batch=_sequences, examples=128)
_add("next tokens, padded", _padded, model=_Words, batch=_sequences, examples=128)

# -- random numbers -------------------------------------------------------------------------------------------------


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = net(32), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log / 2).exp()
        return F.mse_loss(self.decode(z), x) + (mean.square() + log.exp() - log - 1).mean()


def _denoising(m: Any, b: Batch) -> torch.Tensor:
    level = torch.rand(len(b["x"]), 1, device=b["x"].device)
    noise = torch.randn_like(b["x"])
    return F.mse_loss(m(b["x"] * (1 - level) + noise * level), noise)


def _of_model(m: Any, b: Batch) -> torch.Tensor:
    return m(b["x"])  # type: ignore[no-any-return]


_add("dropout", lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), model=lambda: net(drop=0.1))
_add("noise in the middle", _of_model, model=_Variational)
_add("noise at the input", _denoising, model=lambda: net(64))
_add("one draw for all", lambda m, b: F.cross_entropy(m(b["x"] * torch.rand(()).to(b["x"])), b["y"]))

# -- state of a forward pass ----------------------------------------------------------------------------------------


class _Stateful(nn.Module):
    """Classifies, and writes something beside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.steps, self.smooth = 0, 1.0
        self.history: deque[float] = deque(maxlen=8)
        self.draws = torch.Generator().manual_seed(7)
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.written(self.net(x)), y)

    def written(self, out: torch.Tensor) -> torch.Tensor:
        """The output, after something was written."""
        raise NotImplementedError


def _writes(name: str, written: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    kind = type(name, (_Stateful,), {"written": written, "__module__": __name__})
    _add(name, lambda m, b: m(b["x"], b["y"]), model=kind)


def _centre(s: Any, out: torch.Tensor) -> torch.Tensor:
    shifted = out - s.mean
    s.mean = s.mean * 0.9 + out.detach().mean(0) * 0.1
    return shifted


def _mean_in_place(s: Any, out: torch.Tensor) -> torch.Tensor:
    shifted = out - s.mean.clone()
    s.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
    return shifted


def _largest(s: Any, out: torch.Tensor) -> torch.Tensor:
    s.mean = torch.maximum(s.mean, out.detach().abs().amax(0))
    return out


def _counter(s: Any, out: torch.Tensor) -> torch.Tensor:
    s.count += 1
    return out * (1 + s.count / 10)


def _attribute(s: Any, out: torch.Tensor) -> torch.Tensor:
    s.steps += 1
    return out * (1 + s.steps / 10)


def _examples(s: Any, out: torch.Tensor) -> torch.Tensor:
    s.count += len(out)
    return out


def _remembers(s: Any, out: torch.Tensor) -> torch.Tensor:
    s.history.append(1.0)
    return out * len(s.history)


def _last(s: Any, out: torch.Tensor) -> torch.Tensor:
    s.last = out.detach()
    return out


def _use(s: Any, out: torch.Tensor) -> torch.Tensor:
    s.mean = F.one_hot(out.detach().argmax(1), CLASSES).float().mean(0)
    return out


def _own_draw(s: Any, out: torch.Tensor) -> torch.Tensor:
    return out * torch.rand(1, generator=s.draws).to(out)


def _own_draws(s: Any, out: torch.Tensor) -> torch.Tensor:
    return out * torch.rand(len(out), 1, generator=s.draws).to(out)


for _name, _written in {
    "centre that is replaced": _centre,
    "running mean in place": _mean_in_place,
    "running maximum": _largest,
    "counter in a buffer": _counter,
    "counter in an attribute": _attribute,
    "examples counted": _examples,
    "history in a deque": _remembers,
    "last output kept": _last,
    "use of classes in a buffer": _use,
    "own generator, one draw": _own_draw,
    "own generator, a draw for each": _own_draws,
}.items():
    _writes(_name, _written)


class _Momentum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = net(), net().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for slow, quick in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data = slow.data * 0.99 + quick.data * 0.01
        return F.mse_loss(self.student(x), self.teacher(x + 0.1))


class _Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(32)
        self.register_buffer("queue", F.normalize(torch.randn(8192, 32), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.net(x), dim=1)
        loss = (q @ self.queue[:256].clone().T / 0.2).logsumexp(1).mean() - q.sum(1).mean()
        rows = (torch.arange(len(q), device=q.device) + self.place) % len(self.queue)
        self.queue[rows] = q.detach()
        self.place = (self.place + len(q)) % len(self.queue)
        return loss


class _Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(16)
        self.register_buffer("codes", torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        near = F.one_hot((z.detach() @ self.codes.T).argmax(1), 16).float()
        loss = (z - near @ self.codes.clone()).square().mean()
        means = near.T @ z.detach() / near.sum(0)[:, None].clamp(min=1)
        self.codes.data.mul_(0.9).add_(means, alpha=0.1)
        return loss


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(64)
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(64, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.net(x))  # type: ignore[no-any-return]


def _counted_by_the_loss() -> Loss:
    calls = {"count": 0}

    def loss(m: Any, b: Batch) -> torch.Tensor:
        calls["count"] += 1
        return F.cross_entropy(m(b["x"]), b["y"]) * (1 + calls["count"] / 10)

    return loss


class _CentredLoss:
    """Holds its centre itself."""

    def __init__(self) -> None:
        self.centre: Any = 0.0

    def __call__(self, m: Any, b: Batch) -> torch.Tensor:
        """The loss."""
        out = m(b["x"])
        loss = F.cross_entropy(out - self.centre, b["y"])
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return loss


_add("momentum teacher", _of_model, model=_Momentum)
_add("queue of keys", _of_model, model=_Queue)
_add("codebook", _of_model, model=_Codebook)
_add("spectral norm", lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), model=_Spectral)
_add("a loss that counts", make_loss=_counted_by_the_loss)
_add("a loss with a centre", make_loss=_CentredLoss)
_add(
    "batch norm",
    lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
    model=lambda: nn.Sequential(nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), net_from(WIDTH)),
)


def net_from(width: int) -> nn.Sequential:
    """A net after a layer of so many values."""
    return nn.Sequential(nn.Linear(width, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
