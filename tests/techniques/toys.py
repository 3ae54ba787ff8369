"""Small models of many kinds, with the losses that belong to them, for the tests of techniques."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from vramfit.workload import Batch, Workload


class Block(nn.Module):
    """A transformer block before norms, with dropout."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.proj(mixed.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), self.dropout, self.training)


class Language(nn.Module):
    """A decoder with embeddings that may be tied."""

    def __init__(
        self, *, tied: bool = True, layers: int = 3, width: int = 32, words: int = 97, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Frozen(nn.Module):
    """A frozen trunk with a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.adapter = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Dropout(0.2), nn.Linear(48, 7))
        for parameter in self.trunk.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.trunk(x))


class Residual(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class TwoHeads(nn.Module):
    """One trunk, two outputs and two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 40), nn.SiLU())
        self.kind, self.amount = nn.Linear(40, 5), nn.Linear(40, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.trunk(x)
        return self.kind(seen), self.amount(seen)


class Recurrent(nn.Module):
    """An LSTM over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(12, 16, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Unet(nn.Module):
    """An encoder and a decoder with a skip connection, in three dimensions, with instance norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1), nn.InstanceNorm3d(width, affine=True), nn.PReLU()
        )
        self.deep = nn.Sequential(
            nn.Conv3d(width, 2 * width, 3, stride=2, padding=1), nn.InstanceNorm3d(2 * width), nn.PReLU()
        )
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.head = nn.Conv3d(2 * width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = self.down(x)
        return self.head(torch.cat([top, self.up(self.deep(top))], 1))


def tokens(batch_size: int, sequence_length: int = 12) -> torch.Tensor:
    """The same random tokens each time."""
    return torch.randint(97, (batch_size, sequence_length), generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> torch.Tensor:
    """The same random numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def classes(count: int, batch_size: int) -> torch.Tensor:
    """The same random classes each time."""
    return torch.randint(count, (batch_size,), generator=torch.Generator().manual_seed(3))


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    logits = model(batch)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))


def class_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the class."""
    return F.cross_entropy(model(batch[0]), batch[1])


def two_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The sum of both heads' losses."""
    kind, amount = model(batch[0])
    return F.cross_entropy(kind, batch[1]) + 0.5 * F.mse_loss(amount.squeeze(1), batch[2])


def voxel_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared distance of volumes."""
    return F.mse_loss(model(batch[0])[:, :1], batch[1])


def _workload(
    model: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    loss: Callable[..., torch.Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return model()

    return Workload(
        model=seeded,
        batch=lambda batch_size: batch(batch_size),
        sizes={"batch_size": 4},
        loss=loss,
        optimizer=optimizer,
    )


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def all_toys() -> dict[str, Workload]:
    """A workload of each kind."""
    return {
        "language-tied": _workload(lambda: Language(), tokens, language_loss),
        "language-untied": _workload(lambda: Language(tied=False), tokens, language_loss),
        "frozen-trunk": _workload(lambda: Frozen(), lambda n: (numbers(n, 24), classes(7, n)), class_loss),
        "batch-norm": _workload(
            lambda: Residual(), lambda n: (numbers(n, 3, 8, 8), classes(10, n)), class_loss, sgd
        ),
        "two-losses": _workload(
            lambda: TwoHeads(), lambda n: (numbers(n, 20), classes(5, n), numbers(n)), two_losses
        ),
        "lstm": _workload(lambda: Recurrent(), lambda n: (numbers(n, 6, 12), classes(4, n)), class_loss),
        "unet-3d": _workload(
            lambda: Unet(), lambda n: (numbers(n, 1, 8, 8, 8), numbers(n, 1, 8, 8, 8)), voxel_loss
        ),
        "mlp": _workload(
            lambda: nn.Sequential(
                nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
            ),
            lambda n: (numbers(n, 16), classes(3, n)),
            class_loss,
            sgd,
        ),
    }


def gradients(workload: Workload, *, seed: int = 5, steps: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of the last of some steps on the CPU, by parameter name; earlier steps change the model."""
    found: dict[str, torch.Tensor] = {}
    state = workload.start("cpu")
    assert state.optimizer is not None
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found[names[id(parameter)]] = parameter.grad.detach().clone()

    handle = state.optimizer.register_step_pre_hook(look)
    for step in range(steps):
        torch.manual_seed(seed + step)
        found.clear()
        workload.run_step(state, workload.sizes)
    handle.remove()
    return found


def losses(workload: Workload, *, steps: int, seed: int = 5) -> list[float]:
    """The loss of each of some steps on the CPU."""
    state = workload.start("cpu")
    found = []
    for step in range(steps):
        torch.manual_seed(seed + step)
        found.append(float(workload.run_step(state, workload.sizes)))
    return found
