"""Two revisions of vramfit run the same programs in turn, so that other load on the machine affects both."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console

from speed_parts.programs import PROGRAMS

ROOT = Path(__file__).parents[2]
_LINE = "{:<18} {:>12} {:>11} {:>9} {:>9} {:>7} {:>7} {:>8} {:>6}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round of a program on one revision: seconds of the processor, and ops."""

    seconds: float
    ops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Rounds of a program, run on this revision and the other in turn.

    Attributes:
        program: its name.
        first: the first round of both, for which nothing was run before.
        pairs: further rounds.
    """

    program: str
    first: tuple[Round, Round]
    pairs: tuple[tuple[Round, Round], ...]

    @property
    def ratios(self) -> list[float]:
        """How many times as fast this revision is, pair by pair."""
        return [other.seconds / own.seconds for own, other in self.pairs]

    def speed(self, side: int) -> float:
        """Ops a second of this revision (0) or the other (1), the median over the rounds."""
        return statistics.median(pair[side].ops / pair[side].seconds for pair in self.pairs)


class Worker:
    """A process that runs rounds of a program on one revision.

    Args:
        source: folder of the revision that holds the package.
        program: name of the program.
    """

    def __init__(self, source: Path, program: str) -> None:
        environ = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environ,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def run(self, number: int) -> Round:
        """Run a round.

        Raises:
            RuntimeError: the program failed; the message is its last line.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: its answer is missing too
            print(number, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError((self._log.read().strip().splitlines() or ["it ended without a word"])[-1])
        return Round(**json.loads(answer))


def in_turn(program: str, other: Path, count: int) -> Pairs:
    """Run a program on this revision and on the one in the folder ``other``: ABBA, so many pairs after the first."""
    with Worker(ROOT / "src", program) as one, Worker(other / "src", program) as two:
        rounds = []
        for number in range(count + 1):
            if number % 2:
                second, first = two.run(number), one.run(number)
            else:
                first, second = one.run(number), two.run(number)
            rounds.append((first, second))
    return Pairs(program=program, first=rounds[0], pairs=tuple(rounds[1:]))


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """The files of a revision, in a worktree of their own that is gone afterwards.

    Raises:
        RuntimeError: there is no such revision.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "revision"
        git = ["git", "-C", str(ROOT), "worktree"]
        done = subprocess.run(
            [*git, "add", "--detach", str(path), revision], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        ends = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            yield path
        finally:
            signal.signal(signal.SIGTERM, ends)
            subprocess.run([*git, "remove", "--force", str(path)], capture_output=True, check=False)


def compare(revision: str, programs: Sequence[str], count: int, console: Console) -> bool:
    """Print how fast programs run here and on another revision; whether each ran the same ops on both."""
    columns = (
        "program",
        "ops a round",
        "ops/s here",
        "there",
        "µs an op",
        "ratio",
        "lowest",
        "highest",
        "first",
    )
    console.print(f"here, and on {revision}, in turn; {count} pairs")
    console.print(_LINE.format(*columns))
    same = True
    with checkout(revision) as other:
        for program in programs or PROGRAMS:
            found = in_turn(program, other, count)
            ratios, (own, others) = found.ratios, found.first
            alike = all(a.ops == b.ops for a, b in (found.first, *found.pairs))
            same &= alike
            figures = (statistics.median(ratios), min(ratios), max(ratios), others.seconds / own.seconds)
            console.print(
                _LINE.format(
                    program,
                    f"{own.ops:,}" if alike else f"{own.ops:,} ≠ {others.ops:,}",
                    f"{found.speed(0):,.0f}",
                    f"{found.speed(1):,.0f}",
                    f"{1e6 / found.speed(0):.0f}",
                    *(f"{figure:.2f}" for figure in figures),
                )
            )
    console.print(
        "ratio: seconds of the processor there over those here, the median of the pairs; first: of the first round, "
        "before which nothing was run"
    )
    return same
