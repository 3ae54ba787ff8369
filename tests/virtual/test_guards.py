"""A guess never makes a program fail: answers of an assert, of a raise, of a check, and of a distribution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal

from vramfit.virtual.assume import Assume
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.guards import guard

BOTH = pytest.mark.parametrize("assume", list(Assume))
SOURCE = """\
assert x.all()
assert not x.any(), "message"
if x.any(): raise ValueError
if not x.all(): raise ValueError
if x > 3 or bad(x):
    raise ValueError
if x.all():
    use(x)
else:
    raise ValueError
torch._assert(x.all(), "message")
torch._check(bool(x.all()))
self.assertFalse(x.any())
while x.any():
    use(x)
while x > 1:
    use(x)
if x.any():
    use(x)
if x is None: raise ValueError
def f(x):
    if x.all(): return
    raise ValueError
while True:
    if not x.any():
        break
while True:
    if (x == end).any():
        break
    if x.all(): break
"""
WANTED = {1: True, 2: False, 3: False, 4: True, 5: False, 7: True, 11: True, 12: True, 13: False, 14: False}
WANTED |= {20: False, 22: True, 25: False}


def run(program: Callable[[], object], assume: Assume = Assume.UPPER) -> VirtualGPU:
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0, assume=assume) as gpu:
        program()
    return gpu


def test_the_answer_that_lets_a_program_go_on_is_read_from_its_source(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(SOURCE)
    found = {n: guard(str(path), n) for n in range(1, SOURCE.count("\n") + 1)}
    assert {n: g.wanted for n, g in found.items() if g is not None} == WANTED
    assert [n for n, g in found.items() if g is not None and not g.raises] == [14, 25]
    path = tmp_path / "broken.py"
    path.write_text("assert (")
    assert guard(str(path), 1) is None and guard("<string>", 1) is None


@BOTH
def test_weights_are_drawn_from_truncated_distributions_at_once(assume: Assume) -> None:
    def program() -> None:
        for std in (0.02, 100.0):  # nn.init draws again what is out of bounds: by either of its two loops
            weights = nn.Parameter(torch.empty(197, 768))
            nn.init.trunc_normal_(weights, std=std)
            nn.init.trunc_normal_(weights.data.cuda(), std=std)

    assert run(program, assume).run.ops < 100


@BOTH
def test_checks_of_unknown_values_hold_however_often_they_are_made(assume: Assume) -> None:
    def program() -> None:
        x = torch.randn(200, 100, device="cuda")
        steps = 0
        while True:  # a loop that waits, for all that the source says
            steps += 1
            assert (x > 0).all()
            if not (x > 0).all() or (x < -9).any():
                raise ValueError("of two questions")
            if (x > 100).any():
                raise ValueError("too large")
            if not torch.all(x > -100):
                raise ValueError("too small")
            torch._assert((x < 50).all(), "large")
            torch._check(bool((x < 50).all()))
            torch.testing.assert_close(x, x + 1e-9)
            if loss(x) < 0.1:
                break

    def loss(x: torch.Tensor) -> float:
        return float(x.square().mean())

    run(program, assume)


@BOTH
def test_distributions_take_unknown_arguments_without_end(
    assume: Assume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.distributions` asks for its constraints on lines of torch: more often than a loop of ours has patience."""
    for name in ("PATIENCE", "INDIRECT_PATIENCE", "COUNTED_PATIENCE"):
        monkeypatch.setattr(f"vramfit.virtual.guesses.{name}", 20)
    model = nn.Linear(64, 4)
    draws = 0

    def program() -> None:
        nonlocal draws
        model.cuda()
        while draws < 30:
            logits = model(torch.randn(512, 64, device="cuda"))
            for made in (
                Categorical(logits.softmax(-1)),
                Bernoulli(logits.sigmoid()),
                Normal(logits, logits.exp()),
            ):
                made.log_prob(made.sample())
            draws += 1
        for _ in range(60):
            Categorical(probs)

    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0, assume=assume):
        probs = torch.randn(5000, 8, device="cuda").softmax(-1)
        program()
    assert draws == 30


class Pole:
    """Stands in for gymnasium's CartPole: four numbers, two actions, an end after ten steps."""

    def reset(self) -> torch.Tensor:
        self.steps = 0
        return torch.zeros(4)

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        assert action in (0, 1)
        self.steps += 1
        return torch.full((4,), 0.1 * self.steps), 1.0, self.steps == 10


class ActorCritic(nn.Module):
    """The model of pytorch/examples reinforcement_learning/actor_critic.py."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.affine = nn.Linear(4, width)
        self.dropout = nn.Dropout(0.6)
        self.action, self.value = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.dropout(self.affine(x)).relu()
        return self.action(x).softmax(-1), self.value(x)


def episodes(device: str, width: int, count: int) -> int:
    """Both examples in one: an actor and a critic, returns normalised over the episode, on a card or not."""
    policy, pole, eps = ActorCritic(width).to(device), Pole(), 1e-7
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(count):
        state, rewards, saved = pole.reset(), [], []
        for _ in range(1, 10_000):
            probs, value = policy(state.to(device))
            chosen = Categorical(probs)
            action = chosen.sample()
            saved.append((chosen.log_prob(action), value))
            state, reward, done = pole.step(action.item())
            rewards.append(reward)
            if done:
                break
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0).to(device)
        returns = (returns - returns.mean()) / (returns.std() + eps)
        losses = [-log * (r - value.item()) for (log, value), r in zip(saved, returns, strict=True)]
        losses += [nn.functional.smooth_l1_loss(v, r[None]) for (_, v), r in zip(saved, returns, strict=True)]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return pole.steps


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_small_policies_learn_from_true_values(device: str) -> None:
    """Gradients that the engine sums in place keep the values of both."""
    seen: list[int] = []
    gpu = run(lambda: seen.append(episodes(device, 128, 3)))
    assert seen == [10] and not [w for w in gpu.run.warnings if w.code != "tf32"]


def test_large_policies_run_through_their_episodes() -> None:
    seen: list[int] = []
    gpu = run(lambda: seen.append(episodes("cuda", 8192, 22)))
    assert seen == [10]
    assert "guessed-value" in {w.code for w in gpu.run.warnings}
