"""Loops that wait for data: where they are, and that they end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vramfit.virtual.assume import Assume
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.guesses import PATIENCE
from vramfit.virtual.loops import guards, in_loop

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
    assert [n for n in lines if in_loop(str(path), n)] == [*range(3, 9), 11, 12]
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
    assert in_loop(str(path), 2) is endless


def test_a_source_that_cannot_be_read_may_loop_anywhere(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("while (")
    for name in ("<string>", str(tmp_path / "missing.py"), str(broken)):
        assert in_loop(name, 1)
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
    monkeypatch.setattr("vramfit.virtual.guesses.SIZE_PATIENCE", PATIENCE)
    rounds, codes = run(loop, assume)
    assert rounds < PATIENCE + 100
    assert ("guess-flipped" in codes) is (rounds >= PATIENCE - 1)


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
