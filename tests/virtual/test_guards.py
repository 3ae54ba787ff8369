"""A guess never makes a program fail: answers of an assert, of a raise, of a check, and of a distribution."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal

from vramfit.options.assume_choice import Assume
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.guards import guard

BOTH = pytest.mark.parametrize("assume", list(Assume))
# What a program asks, and for each of its questions in turn what is wanted: None where that is not known.
TESTS: list[tuple[str, list[bool | None]]] = [
    ("assert x.all()", [True]),
    ("assert not x.any(), 'message'", [False]),
    ("if x.any(): raise ValueError", [False]),
    ("if not x.all(): raise ValueError", [True]),
    ("if x > 3 or not x:\n    raise ValueError", [False, True]),
    ("if x and not x and y: raise ValueError", [False]),
    ("if x.all():\n    use(x)\nelse:\n    raise ValueError", [True]),
    ("def f(x):\n    if x.all(): return\n    raise ValueError\nf(x)", [True]),
    ("_assert(x.all(), 'message')", [True]),
    ("_check(bool(x.all()))", [True, True]),
    ("_check(not x.any())", [False, True]),
    ("assertFalse(x.any())", [False]),
    # Around the question
    ("assert any(not x for _ in '1') or y", [False]),
    ("if any(not x for _ in '12'): raise ValueError", [True, True]),
    ("assert all([not x, x])", [False, True]),
    ("if any((x, not x)): raise ValueError", [True, False]),
    ("assert (not x) == True", [False]),
    ("assert x.any().item() == 0 and y", [False]),
    ("assert bool(x) is False", [False]),
    ("assert int(x) != 0", [True]),
    ("if int(x) < 1: raise ValueError", [True]),
    ("assert (z := x)", [True]),
    ("assert x if y else True", [True]),
    ("assert x or (y and not x)", [True]),
    ("assert 1 < x < 5", [True, True]),
    # Nobody knows what becomes of the answer
    ("assert (lambda: not x)() or y", [None]),
    ("assert [not x] and y", [None]),
    ("assert y, 'message'\nbool(x)", []),
    # Work would be left out, unless that is all that there is
    ("if x.any():\n    use(x)\n    if not y: raise ValueError", []),
    ("if x.any():\n    use(x)\n    if y: raise ValueError\n    else: raise KeyError", [False]),
    ("if x.any():\n    if not y: raise ValueError", [False]),
    ("if x.all():\n    use(x)\nelif y: raise ValueError", [True]),
    ("try: pass\nfinally:\n    assert x and not x", [True, False]),
    ("if x is None: raise ValueError", []),
    ("if x.any():\n    use(x)", []),
]
# Loops: what ends them is asked where the reduction is made.
ENDS: list[tuple[str, list[bool | None]]] = [
    ("while x.any(): use(x)", [False]),
    ("while not x.all(): use(x)", [True]),
    ("while bool(x.any()) and y: use(x)", [False]),
    ("while x > 1: break", []),
    ("while True:\n    if not x.any(): break", [False]),
    ("while True:\n    if (x == 3).any(): break\n    if x.all(): break\n    break", []),
]


class Asked:
    """Stands in for a tensor: asks what is wanted where a program asks for its truth, or for any or all of it."""

    def __init__(self, answers: list[bool | None], *, of_loops: bool) -> None:
        self.answers = answers
        self.of_loops = of_loops

    def ask(self, depth: int = 2) -> bool:
        found = guard(sys._getframe(depth))
        if found is not None and found.raises != self.of_loops:
            self.answers.append(found.wanted)
        return bool(found is not None and found.wanted)

    def called(self, *given: object) -> None:
        self.ask()

    def __bool__(self) -> bool:
        return self.ask()

    def __int__(self) -> int:
        return int(self.ask())

    def item(self) -> bool:
        return self.ask()

    def any(self) -> Any:
        return self.ask() if self.of_loops else self

    all = any

    def __gt__(self, other: object) -> Any:
        return self

    __lt__ = __gt__

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment]


def run(program: Callable[[], object], assume: Assume = Assume.UPPER) -> VirtualGPU:
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0, assume=assume) as gpu:
        program()
    return gpu


@pytest.mark.parametrize("of_loops", [False, True])
def test_the_answer_that_lets_a_program_go_on_is_read_from_its_source(tmp_path: Path, of_loops: bool) -> None:
    failed = []
    for number, (source, wanted) in enumerate(ENDS if of_loops else TESTS):
        path = tmp_path / f"program{number}.py"
        path.write_text(source)
        answers: list[bool | None] = []
        x = Asked(answers, of_loops=of_loops)
        names: dict[str, Any] = {"x": x, "y": True, "use": lambda x: None}
        names |= dict.fromkeys(("_assert", "_check", "assertFalse"), x.called)
        exec(compile(source, str(path), "exec"), names)
        if answers != wanted:
            failed.append((source, answers, wanted))
    assert not failed


def test_what_has_no_source_asks_for_nothing(tmp_path: Path) -> None:
    for name in (tmp_path / "broken.py", "<string>"):
        if isinstance(name, Path):
            name.write_text("assert (")
        answers: list[bool | None] = []
        exec(compile("bool(x)", str(name), "exec"), {"x": Asked(answers, of_loops=False)})
        assert not answers


@BOTH
def test_a_question_in_an_expression_is_answered_for_the_whole(assume: Assume) -> None:
    def program() -> None:
        parts = [torch.randn(300, 5000, device="cuda") for _ in range(2)]
        if any(not torch.isfinite(x).all() for x in parts):
            raise ValueError("no number")
        assert all(not (x > 9).any() for x in parts)
        assert (parts[0] > 9).any().item() == 0
        assert (bool((parts[0] > 9).any()) if parts else True) is False
        worked = 0
        if (parts[0] > 0).any():
            worked += 1
            if (parts[0] > 100).any():
                raise ValueError("too large")
        assert worked == (1 if assume is Assume.UPPER else worked)

    run(program, assume)


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
        monkeypatch.setattr(f"vramfit.virtual.data_dependent.guesses.{name}", 20)
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
