"""Small programs of many architectures, in any dtype: what they are made of is what techniques have to cope with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.resnet import ResNet
from tests.techniques.toys import Block, Language, classes, language_loss, numbers, tokens
from torch import nn

from vramfit.workload import Batch, State, Workload

WORDS = 97


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A kind of program.

    Attributes:
        has: what of it is worth a test.
        model: makes it, in float32.
        batch: makes a batch of so many examples, in float32.
        loss: of a batch; None where `step` owns the step.
        optimizer: of its parameters.
        step: as a workload's.
        all_in_dtype: whether it computes in the dtype of its parameters throughout; otherwise float32 is in between.
    """

    has: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    step: Callable[[State, Any], Any] | None = None
    all_in_dtype: bool = True

    @cache  # noqa: B019  # there are as many as there are architectures
    def workload(self, dtype: torch.dtype = torch.float32) -> Workload:
        """As a workload whose floating-point numbers are of one dtype; each model that it makes is the same."""

        @cache
        def first() -> nn.Module:
            torch.manual_seed(0)
            return self.model().to(dtype)

        def another() -> nn.Module:
            return copy.deepcopy(first())  # quicker than making it anew

        def batch(batch_size: int) -> Batch:
            return _cast(self.batch(batch_size), dtype)

        return Workload(
            model=another,
            batch=batch,
            sizes={"batch_size": 4},
            loss=self.loss,
            optimizer=self.optimizer,
            step=self.step,
        )


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: _cast(value, dtype) for name, value in batch.items()}
    return type(batch)(_cast(value, dtype) for value in batch)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


# -- the models ----------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it."""

    def __init__(self, inside: int, outside: int, rank: int = 4) -> None:
        super().__init__()
        self.frozen = nn.Linear(inside, outside).requires_grad_(False)
        self.down, self.up = nn.Linear(inside, rank, bias=False), nn.Linear(rank, outside, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(self.drop(x)))


class Adapted(nn.Module):
    """A decoder whose embedding is frozen and tied to its head, and whose layers are adapted."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width).requires_grad_(False), LowRank(width, 32), nn.ReLU(), LowRank(32, width)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Branches(nn.Module):
    """A trunk with batch norm and activations of many kinds, and three outputs with a loss each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ELU()),
            nn.Sequential(nn.Linear(32, 32), nn.LeakyReLU(0.1), nn.Dropout(0.1)),
            nn.Sequential(nn.Linear(32, 32), nn.SELU(), nn.AlphaDropout(0.1)),
        )
        self.kind, self.amount, self.again = nn.Linear(32, 5), nn.Linear(32, 1), nn.Linear(32, 12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen = self.trunk(x)
        return self.kind(seen), self.amount(seen).squeeze(1), self.again(torch.sigmoid(seen))


def branch_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Three losses, weighted and summed."""
    kind, amount, again = model(batch[0])
    return (
        F.cross_entropy(kind, batch[1])
        + 0.5 * F.smooth_l1_loss(amount, batch[2])
        + 0.1 * F.mse_loss(again, batch[0])
    )


class Adversaries(nn.Module):
    """A generator, and a discriminator with spectral norm: a step of its own, with a loss for each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU()),
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()),
            nn.Sequential(nn.Linear(32, 16), nn.Tanh()),
        )
        self.critic = nn.Sequential(
            nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.2)),
            nn.Sequential(nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Dropout(0.2)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(32, 1)),
        )

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.critic(self.generator(noise))


def adversarial_step(state: State, batch: torch.Tensor) -> torch.Tensor:
    """The critic's step, then the generator's; the optimizer leaves what has no gradient."""
    model: Any = state.model
    assert state.optimizer is not None
    noise = torch.randn(batch.shape[0], 8, dtype=batch.dtype)
    real, false = model.critic(batch), model.critic(model.generator(noise).detach())
    critic_loss = F.softplus(-real).mean() + F.softplus(false).mean()
    critic_loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    generator_loss = F.softplus(-model(noise)).mean()
    generator_loss.backward()
    for parameter in model.critic.parameters():
        parameter.grad = None
    state.optimizer.step()
    state.optimizer.zero_grad()
    return critic_loss.detach() + generator_loss.detach()


class Level(nn.Module):
    """Two convolutions of volumes."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(inside, outside, 3, padding=1),
            nn.InstanceNorm3d(outside, affine=True),
            nn.LeakyReLU(0.01),
            nn.Dropout3d(0.1),
            nn.Conv3d(outside, outside, 3, padding=1),
            nn.InstanceNorm3d(outside),
            nn.PReLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Volumes(nn.Module):
    """A U-Net in three dimensions with skip connections and an output at each level of its decoder."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Level(1, width), Level(width, 2 * width)])
        self.deepest = Level(2 * width, 2 * width)
        self.decoder = nn.ModuleList([Level(4 * width, width), Level(2 * width, width)])
        self.pool = nn.MaxPool3d(2)
        self.heads = nn.ModuleList(nn.Conv3d(width, 2, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        skips = []
        for level in self.encoder:
            x = level(x)
            skips.append(x)
            x = self.pool(x)
        x = self.deepest(x)
        found = []
        for level, head in zip(self.decoder, self.heads, strict=True):
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
            found.append(head(x))
        return found


def volume_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy and a Dice loss at each level, as in nnU-Net."""
    total = batch[0].new_zeros(())
    for weight, logits in zip((0.5, 1.0), model(batch[0]), strict=True):
        labels = batch[1][:, :: 8 // logits.shape[2], :: 8 // logits.shape[3], :: 8 // logits.shape[4]]
        chance = logits.softmax(1)[:, 1]
        overlap = 2 * (chance * labels).sum((1, 2, 3)) / (chance.sum((1, 2, 3)) + labels.sum((1, 2, 3)) + 1)
        total = total + weight * (F.cross_entropy(logits, labels) + (1 - overlap).mean())
    return total


class Recurrent(nn.Module):
    """LSTM layers with dropout between them, then GRU layers, over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 16, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.grus = nn.ModuleList(nn.GRU(32, 32, batch_first=True) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lstm(self.embed(x))[0]
        for gru in self.grus:
            x = self.drop(gru(x)[0])
        return self.head(x[:, -1])


class DropPath(nn.Module):
    """Leaves the branch out for some of the examples (Huang et al. 2016, arXiv:1603.09382)."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.drop = chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.drop:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype) >= self.drop
        return x * kept / (1 - self.drop)


class Vision(nn.Module):
    """A layer of a vision transformer whose attention weights nobody reads."""

    def __init__(self, width: int, chance: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, width))
        self.path = DropPath(chance)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm_1(x)
        attended, _ = self.attention(seen, seen, seen)
        x = x + self.path(attended)
        return x + self.path(self.mlp(self.norm_2(x)))


class Patches(nn.Module):
    """A vision transformer with a class token, embedded positions and stochastic depth."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(0.02 * torch.randn(1, 17, width)),
        )
        self.layers = nn.ModuleList(Vision(width, 0.1 * index) for index in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Masked(nn.Module):
    """A layer whose attention is written out, with dropout on its weights and a table of distances in a buffer."""

    distances: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down, self.drop = nn.Linear(width, 64), nn.Linear(64, width), nn.Dropout(0.1)
        places = torch.arange(128.0)
        self.register_buffer("distances", -0.01 * (places[:, None] - places).abs(), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // 4) ** 0.5 + self.distances[:length, :length]
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed = (self.drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.proj(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class Encoder(nn.Module):
    """Masked words are to be told; paddings are masked out; the head has a bias and a tied weight."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Masked(width) for _ in range(3))
        self.head = nn.Linear(width, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


def masked_batch(batch_size: int) -> dict[str, torch.Tensor]:
    """Words of unequal lengths, with labels at some of them."""
    words = tokens(batch_size)
    mask = torch.arange(words.shape[1]) < torch.arange(5, 5 + batch_size)[:, None]
    chosen = mask & (words % 3 != 0)
    return {"words": words, "mask": mask, "labels": words.masked_fill(~chosen, -100)}


def masked_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the words that have labels, smoothed."""
    logits = model(batch["words"], mask=batch["mask"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)


class Experts(nn.Module):
    """Each word goes to one of some networks, as many as there are: shapes depend on values."""

    def __init__(self, width: int, count: int = 3) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, width))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = self.norm(x).flatten(0, 1)
        chances = self.gate(flat).softmax(-1)
        chance, chosen = chances.max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            here = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, here, chance[here, None] * expert(flat[here]))
        used = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean(0)
        return x + out.view_as(x), len(self.experts) * (used * chances.mean(0)).sum()


class Mixture(nn.Module):
    """A decoder with layers of experts and a loss that balances them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.layers = nn.ModuleList(Experts(width) for _ in range(3))

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, balance = self.embed(words), torch.zeros((), dtype=self.head.weight.dtype)
        for layer in self.layers:
            x, more = layer(x)
            balance = balance + more
        return self.head(x), balance


def mixture_loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next word, and the balance of the experts."""
    logits, balance = model(words)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten()) + 0.01 * balance


class Denoiser(nn.Module):
    """A network of group norms that is told a time, as diffusion models have it; its first layers are shared."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, 2, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.shared = Noisy(width)
        self.blocks = nn.ModuleList([self.shared, Noisy(width), self.shared])

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        waves = time[:, None] * torch.arange(1, 5, dtype=x.dtype)
        told = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        x = self.first(x)
        for block in self.blocks:
            x = block(x, told)
        return self.last(x)


class Noisy(nn.Module):
    """A residual block that adds what the time says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv_1, self.conv_2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.drop = nn.Dropout2d(0.1)

    def forward(self, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        seen = self.conv_1(F.silu(self.norm_1(x))) + told[:, :, None, None]
        return x + self.conv_2(self.drop(F.silu(self.norm_2(seen))))


def noised(batch_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images with noise in them, the time that says how much, and the noise."""
    images, noise = numbers(batch_size, 4, 8, 8).split(2, 1)
    time = torch.linspace(0.1, 0.9, batch_size)
    level = time[:, None, None, None]
    return (1 - level).sqrt() * images + level.sqrt() * noise, time, noise


def noise_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The noise that was mixed in is to be told."""
    return F.mse_loss(model(batch[0], batch[1]), batch[2])


class Averaged(nn.Module):
    """A root mean square norm written by hand, as many models have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Repeated(nn.Module):
    """One transformer block used several times (Lan et al. 2019, arXiv:1909.11942), after norms written by hand."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.norms = nn.ModuleList(Averaged(width) for _ in range(3))
        self.layers = nn.ModuleList([Block(width)])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for norm in self.norms:
            x = self.layers[0](norm(x))
        return self.head(x)


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=WORDS, n_positions=32)
    found: nn.Module = transformers.GPT2LMHeadModel(config)
    return found.train()


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        attn_implementation="eager",
    )
    found: nn.Module = transformers.LlamaForCausalLM(config)
    return found.train()


def labelled(batch_size: int) -> dict[str, torch.Tensor]:
    """Words of unequal lengths, padded, as a tokenizer gives them."""
    words = tokens(batch_size)
    mask = torch.arange(words.shape[1]) < torch.arange(8, 8 + batch_size)[:, None]
    return {
        "input_ids": words,
        "attention_mask": mask.long(),
        "labels": words.masked_fill(~mask, -100),
    }


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that the model computes itself."""
    found: torch.Tensor = model(**batch).loss
    return found


@cache
def all_architectures() -> dict[str, Architecture]:
    """By name."""
    return {
        "decoder": Architecture(
            has="tied weights, dropout by function",
            model=Language,
            batch=tokens,
            loss=language_loss,
        ),
        "gpt2": Architecture(
            has="a model of transformers: tied weights, dropout, caches of keys and values, its own loss",
            model=_gpt2,
            batch=labelled,
            loss=own_loss,
            all_in_dtype=False,
        ),
        "llama": Architecture(
            has="a model of transformers: norms written by hand, grouped queries, rotary buffers, eager attention",
            model=_llama,
            batch=labelled,
            loss=own_loss,
            all_in_dtype=False,
        ),
        "resnet": Architecture(
            has="batch norm, activations in place, additions in place, max-pooling, SGD",
            model=lambda: ResNet((2, 2), 4, 10),
            batch=lambda n: (numbers(n, 3, 32, 32), classes(10, n)),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=sgd,
        ),
        "adapted": Architecture(
            has="weights that are frozen and tied, low-rank adapters, dropout",
            model=Adapted,
            batch=tokens,
            loss=language_loss,
        ),
        "branches": Architecture(
            has="three losses, batch norm, activations of many kinds",
            model=Branches,
            batch=lambda n: (numbers(n, 12), classes(5, n), numbers(n)),
            loss=branch_losses,
        ),
        "adversaries": Architecture(
            has="a step of its own with two losses, batch norm, spectral norm, noise drawn in the step",
            model=Adversaries,
            batch=lambda n: numbers(n, 16),
            step=adversarial_step,
        ),
        "unet-3d": Architecture(
            has="skip connections, instance norm, dropout of channels, losses at several levels, SGD",
            model=Volumes,
            batch=lambda n: (numbers(n, 1, 8, 8, 8), (numbers(n, 8, 8, 8) > 0.5).long()),
            loss=volume_losses,
            optimizer=sgd,
        ),
        "recurrent": Architecture(
            has="LSTM and GRU layers, dropout between them, a padding word",
            model=Recurrent,
            batch=lambda n: (tokens(n, 6), classes(7, n)),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        ),
        "vit": Architecture(
            has="nn.MultiheadAttention whose weights nobody reads, stochastic depth, parameters of its own",
            model=Patches,
            batch=lambda n: (numbers(n, 3, 16, 16), classes(10, n)),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
        ),
        "encoder": Architecture(
            has="masks by keyword, equal buffers, tied weights, labels that do not count, attention written out",
            model=Encoder,
            batch=masked_batch,
            loss=masked_loss,
        ),
        "mixture": Architecture(
            has="experts whose shapes depend on values, a second loss",
            model=Mixture,
            batch=tokens,
            loss=mixture_loss,
        ),
        "denoiser": Architecture(
            has="group norm, convolutions, a block used twice, two inputs",
            model=Denoiser,
            batch=noised,
            loss=noise_loss,
        ),
        "repeated": Architecture(
            has="one block used three times, norms written by hand",
            model=Repeated,
            batch=tokens,
            loss=language_loss,
        ),
    }
