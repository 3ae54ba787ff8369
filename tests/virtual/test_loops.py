"""Loops that wait for data: where they are, and that they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vramfit.options.assume_choice import Assume
from vramfit.virtual.data_dependent.guesses import PATIENCE
from vramfit.virtual.data_dependent.loops import Stake, guards, stake
from vramfit.virtual.gpu import VirtualGPU

PROGRAM = """\
import itertools
x = 1
while x:
    if x > 3:
        raise ValueError
    if x > 2:
        break
    assert x
for i in range(3):
    x = 2
for i in itertools.count():
    x = 2
"""


def test_lines_in_loops_and_guards_are_told(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    lines = range(1, PROGRAM.count("\n") + 1)
    assert [n for n in lines if stake(str(path), n)] == [*range(3, 9), 11, 12]
    assert [n for n in lines if stake(str(path), n) is Stake.ENDS] == [3, 6]
    assert [n for n in lines if guards(str(path), n)] == [4, 8]


@pytest.mark.parametrize(
    ("iterator", "endless"),
    [
        ("itertools.count()", True),
        ("count(3, 2)", True),
        ("itertools.cycle(loader)", True),
        ("repeat(None)", True),
        ("iter(queue.get, None)", True),
        ("itertools.repeat(None, 5)", False),
        ("itertools.repeat(None, times=5)", False),
        ("iter(loader)", False),
        ("x.repeat(4)", False),
        ("self.count()", False),
        ("range(5)", False),
        ("loader", False),
    ],
)
def test_only_iterators_without_an_end_may_wait(tmp_path: Path, iterator: str, endless: bool) -> None:
    path = tmp_path / "program.py"
    path.write_text(f"for i in {iterator}:\n    use(i)\n")
    assert stake(str(path), 2) is (Stake.WITHIN if endless else Stake.NONE)


WAITING = {
    "its test": "while x.sum() > 1:\n    ask(x)\n",
    "a break": "while True:\n    ask(x)\n    if loss < 1: break\n",
    "a return": "def f():\n  while True:\n    ask(x)\n    if loss < 1: return 3\n",
    "a flag": "while not done:\n    ask(x)\n    if loss < 1: done = True\n",
    "what shrinks": "while True:\n    x = ask(x)\n    if x.numel() == 0: break\n",
    "what shrinks, in the test": "while len(x) > 1:\n    x = ask(x)\n",
    "a generator": "def g():\n    while True: yield 1\nfor x in g():\n    ask(x)\n    if loss < 1: break\n",
}
COUNTING = {
    "up": "while n < 9:\n    ask(x)\n    n += 1\n    if loss < 1: break\n",
    "down": "while n:\n    ask(x)\n    n = n - 1\n    if n < 1: break\n",
    "in a break": "while True:\n    ask(x)\n    n += len(x)\n    if t == 2 or n >= 9: break\n",
    "in a flag": "while not done:\n    ask(x)\n    self.n += 1\n    if self.n == 9: done = True\n",
    "by growth": "while out.shape[1] < 9:\n    ask(x)\n    if t == 2: break\n",
    "by growth, in a break": "while True:\n    ask(x)\n    if len(out) >= 9: break\n",
    "by time": "while time.time() < end:\n    ask(x)\n",
    "its own rounds": "for i, x in enumerate(cycle(data)):\n    ask(x)\n    if i > 9: break\n",
    "what data there are": "while True:\n    try: ask(next(data))\n    except StopIteration: break\n",
    "what data there are, or None": "while True:\n    ask(x)\n    if batch is None: break\n",
}


@pytest.mark.parametrize("source", [*WAITING.values(), *COUNTING.values()], ids=[*WAITING, *COUNTING])
def test_loops_that_count_are_told_from_those_that_wait(tmp_path: Path, source: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(source)
    asking = next(n for n, line in enumerate(source.splitlines(), 1) if "ask" in line)
    found = stake(str(path), asking)
    if source in WAITING.values():
        assert found in (Stake.WITHIN, Stake.SETS)
    else:
        assert found in (Stake.WITHIN_COUNTED, Stake.ENDS_COUNTED)


def test_lines_that_set_what_ends_a_loop_are_told(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "while True:\n"
        "    total = step(x)\n"
        "    mean = total / 4\n"
        "    seen = other(x)\n"
        "    for token in seen:\n"
        "        if token == 2:\n"
        "            break\n"
        "    if mean < 1:\n"
        "        break\n"
    )
    found = [stake(str(path), n) for n in range(1, 10)]
    inner = Stake.WITHIN  # a break of the inner loop does not end the outer one
    assert found == [inner, Stake.SETS, Stake.SETS, inner, inner, inner, inner, Stake.ENDS, inner]


def test_a_source_that_cannot_be_read_may_loop_anywhere(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("while (")
    for name in ("<string>", str(tmp_path / "missing.py"), str(broken)):
        assert stake(name, 1) is Stake.WITHIN
        assert not guards(name, 1)


def run(program: Callable[[], int], assume: Assume) -> tuple[int, list[str]]:
    with VirtualGPU("RTX 4090", assume=assume) as gpu:
        rounds = program()
    return rounds, [w.code for w in gpu.run.warnings]


def any_left() -> int:
    x, rounds = torch.rand(500, 500, device="cuda"), 0
    while (x > 0).any():
        x -= 0.1
        rounds += 1
    return rounds


def sum_falls() -> int:
    x, rounds = torch.rand(500, 500, device="cuda"), 0
    while x.sum().item() > 1e-3:
        x, rounds = x * 0.5, rounds + 1
    return rounds


def sum_grows() -> int:
    x, rounds = torch.rand(500, 500, device="cuda"), 0
    while x.sum().item() < 1e6:
        x, rounds = x * 2, rounds + 1
    return rounds


def positions_left() -> int:
    x, rounds = torch.rand(500, 500, device="cuda"), 0
    held = x > 0
    while torch.nonzero(held).numel():
        held, rounds = held & (torch.rand_like(x) > 0.5), rounds + 1
    return rounds


def elements_left() -> int:
    x, rounds = torch.rand(500, 500, device="cuda"), 0
    held = x > 0
    while len(x[held]):
        held, rounds = held & (torch.rand_like(x) > 0.5), rounds + 1
    return rounds


def suppressed() -> int:
    scores, rounds = torch.rand(20_000, device="cuda"), 0
    order = scores.argsort(descending=True)
    while order.numel() > 1:
        overlap = (scores[order[1:]] - scores[order[0]]).abs()
        order, rounds = order[1:][overlap > 0.5], rounds + 1
    return rounds


def token_awaited() -> int:
    logits, rounds = torch.rand(50_000, device="cuda"), 0
    while logits.argmax().item() != 2:
        rounds += 1
    return rounds


def told_from_a_helper() -> int:
    x, rounds = torch.rand(500, 500, device="cuda"), 0

    def positive(value: torch.Tensor) -> torch.Tensor:
        return value.sum() > 3

    while not positive(x):
        x, rounds = x + 1, rounds + 1
    return rounds


@pytest.mark.parametrize("assume", Assume)
@pytest.mark.parametrize(
    "loop",
    [
        any_left,
        sum_falls,
        sum_grows,
        positions_left,
        elements_left,
        suppressed,
        token_awaited,
        told_from_a_helper,
    ],
)
def test_a_loop_that_waits_for_data_ends(
    loop: Callable[[], int], assume: Assume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vramfit.virtual.data_dependent.guesses.SIZE_PATIENCE", PATIENCE)
    rounds, codes = run(loop, assume)
    assert rounds < PATIENCE + 100
    assert ("guess-flipped" in codes) is (rounds >= PATIENCE - 1)


LIMIT = PATIENCE + 50


class Trained:
    """A model whose training is a phase of its own in each round."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(400, 300).cuda()
        self.optimizer = torch.optim.SGD(self.layer.parameters())

    def step(self) -> torch.Tensor:
        loss = self.layer(torch.randn(300, 400, device="cuda")).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def until_small() -> int:
    model, rounds = Trained(), 0
    loss = model.step()
    while loss.item() > 1e-3:
        loss, rounds = model.step(), rounds + 1
    return rounds


def until_good() -> int:
    model, rounds = Trained(), 0
    while True:
        score = -model.step().item()
        rounds += len([score])
        if score > 5:
            return rounds


def until_done() -> int:
    model, rounds, done = Trained(), 0, False
    while not done:
        done = bool(model.step() < -1)
        rounds = max(rounds + 1, 0)
    return rounds


def until_either() -> int:
    model, rounds = Trained(), 0
    while (model.step() > 0).any() or (model.step() > 1).any():
        rounds = max(rounds + 1, 0)
    return rounds


@pytest.mark.parametrize("loop", [until_small, until_good, until_done, until_either])
def test_training_until_a_value_is_reached_ends(loop: Callable[[], int]) -> None:
    rounds, codes = run(loop, Assume.UPPER)
    assert PATIENCE // 2 - 1 <= rounds < PATIENCE + 100
    assert "guess-flipped" in codes


def decoded_up_to_a_length() -> int:
    head = torch.nn.Linear(64, 50_000).cuda()
    made = torch.zeros(1, 0, dtype=torch.int64, device="cuda")
    while made.shape[1] < LIMIT:
        token = head(torch.randn(1, 64, device="cuda")).argmax(-1)
        made = torch.cat([made, token[None]], 1)
        if token.item() == 2:
            break
    return made.shape[1]


def decoded_until_a_hidden_limit() -> int:
    head, tokens = torch.nn.Linear(64, 50_000).cuda(), []

    def stop() -> bool:
        return tokens[-1].item() == 2 or len(tokens) >= LIMIT

    while not tokens or not stop():
        tokens.append(head(torch.randn(1, 64, device="cuda")).argmax(-1))
    return len(tokens)


def decoded_by_count() -> int:
    head, n = torch.nn.Linear(64, 50_000).cuda(), 0
    while True:
        token = head(torch.randn(1, 64, device="cuda")).argmax(-1).item()
        n += 1
        if token == 2 or n >= LIMIT:
            return n


@pytest.mark.parametrize("loop", [decoded_up_to_a_length, decoded_until_a_hidden_limit, decoded_by_count])
def test_text_is_made_up_to_its_limit(loop: Callable[[], int]) -> None:
    rounds, codes = run(loop, Assume.UPPER)
    assert rounds == LIMIT
    assert "guess-flipped" not in codes


def test_a_for_without_an_end_that_shows_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(lambda: torch.ones(2), None)

    def stream() -> int:
        model, rounds = Trained(), 0
        for _ in torch.utils.data.DataLoader(Stream()):
            rounds += 1
            if model.step() < -1:
                break
        return rounds

    monkeypatch.setattr("vramfit.virtual.data_dependent.guesses.COUNTED_PATIENCE", LIMIT)
    rounds, codes = run(stream, Assume.UPPER)
    assert LIMIT - 1 <= rounds < LIMIT + 10
    assert "guess-flipped" in codes


def test_a_loop_that_no_answer_ends_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.virtual.data_dependent.guesses.LAST", 50)
    x = torch.rand(500, 500)

    def forever() -> int:
        y = x.cuda()
        while True:
            if (y.sum() > 3).item() and False:
                break

    with pytest.raises(RuntimeError, match=r"test_loops\.py:\d+ got 50 other answers .* Bound the loop"):
        run(forever, Assume.UPPER)


def test_a_loop_of_known_length_gets_the_same_answer_all_along() -> None:
    def evaluate() -> int:
        kept = 0
        for _ in range(PATIENCE + 50):
            x = torch.rand(100, 100, device="cuda")
            kept += len(x[x > 0])
            if x.sum().isnan():
                kept = -1
        return kept

    rounds, codes = run(evaluate, Assume.UPPER)
    assert rounds == (PATIENCE + 50) * 10_000
    assert "guess-flipped" not in codes


def test_a_guard_in_a_loop_is_not_what_it_waits_for() -> None:
    def train() -> int:
        rounds = 0
        while rounds < PATIENCE + 50:
            x = torch.rand(100, 100, device="cuda")
            if not torch.isfinite(x.sum() * 2).item():
                raise FloatingPointError
            rounds += 1
        return rounds

    assert run(train, Assume.UPPER)[0] == PATIENCE + 50
