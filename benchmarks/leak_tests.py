"""How often the test for leaks errs: innocent series that are called growth, and leaks that are missed.

    python benchmarks/leak_tests.py [--times N]

Series are drawn from a seeded generator and put to exactly the rule of `vramfit.analysis._leaks` for one stack:
half of 1 % of significance against both innocent models, and growth that goes on to the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from vramfit.analysis._growth import ALPHA, goes_on, warmup_of
from vramfit.analysis.trend import growth_p_value, mann_kendall

Series = NDArray[np.int64]
Make = Callable[[Generator, int], Series]
LENGTHS = (7, 12, 20, 40, 100)
MIB = 1 << 20


def called(levels: Series) -> bool:
    """Whether the rule calls a series growth."""
    start = warmup_of(len(levels))
    return growth_p_value(levels[start:]) <= ALPHA / 2 and goes_on(levels, start)


def trend_alone(levels: Series) -> bool:
    """What a test of trend alone would say, without the maxima and without the look at the end."""
    return mann_kendall(levels[warmup_of(len(levels)) :]) <= ALPHA / 2


def _bytes(values: NDArray[np.float64]) -> Series:
    return (values * MIB).astype(np.int64)


def _correlated(rng: Generator, n: int, memory: float) -> Series:
    values = [0.0]
    for shock in rng.normal(size=n + 50):
        values.append(memory * values[-1] + shock)
    return _bytes(np.array(values[-n:]) + 100)


def _filling(rng: Generator, n: int, keys: int) -> Series:
    drawn = rng.integers(0, keys, size=n)
    return np.array([len(set(drawn[: k + 1].tolist())) for k in range(n)], dtype=np.int64) * MIB


def _sawtooth(rng: Generator, n: int, period: int) -> Series:
    return ((np.arange(n) + rng.integers(period)) % period).astype(np.int64) * MIB


def _leak(rng: Generator, n: int, rate: float) -> Series:
    """Growth of ``rate`` standard deviations of the noise per step."""
    return _bytes(rate * np.arange(n) + rng.normal(size=n) + 100)


def _varying(rng: Generator, n: int) -> Series:
    """A leak whose pieces vary in size by a factor of 32."""
    return np.cumsum((2.0 ** rng.uniform(0, 5, size=n) * MIB).astype(np.int64))


def _sometimes(rng: Generator, n: int, chance: float) -> Series:
    return np.cumsum(rng.random(n) < chance).astype(np.int64) * MIB


INNOCENT: Mapping[str, Make] = {
    "constant": lambda _, n: np.full(n, MIB),
    "independent noise": lambda rng, n: _bytes(rng.normal(size=n) + 100),
    "buffer that grows to the largest batch": lambda rng, n: np.maximum.accumulate(rng.integers(0, MIB, n)),
    "the same, in powers of two": lambda rng, n: np.maximum.accumulate(1 << rng.integers(0, 30, n)),
    "cache of 5 keys, drawn at random": lambda rng, n: _filling(rng, n, 5),
    "cache of 20 keys, drawn at random": lambda rng, n: _filling(rng, n, 20),
    "sawtooth of 4 steps": lambda rng, n: _sawtooth(rng, n, 4),
    "sawtooth of 10 steps": lambda rng, n: _sawtooth(rng, n, 10),
    "correlated noise (0.7 from step to step)": lambda rng, n: _correlated(rng, n, 0.7),
    "random walk": lambda rng, n: _bytes(np.cumsum(rng.normal(size=n)) + 1000),
}
LEAKS: Mapping[str, Make] = {
    "the same in every step": lambda _, n: np.arange(n) * MIB,
    "sizes that vary 32-fold": _varying,
    "in half of the steps, at random": lambda rng, n: _sometimes(rng, n, 0.5),
    "in a fifth of the steps, at random": lambda rng, n: _sometimes(rng, n, 0.2),
    "twice the noise per step": lambda rng, n: _leak(rng, n, 2.0),
    "as much as the noise per step": lambda rng, n: _leak(rng, n, 1.0),
    "half of the noise per step": lambda rng, n: _leak(rng, n, 0.5),
    "a quarter of the noise per step": lambda rng, n: _leak(rng, n, 0.25),
}


def rate(make: Make, n: int, times: int, decide: Callable[[Series], bool] = called) -> float:
    """How often series of ``n`` levels are called growth."""
    rng = np.random.default_rng(n)
    return float(np.mean([decide(make(rng, n)) for _ in range(times)]))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=2000, help="series of each kind and length")
    times = parser.parse_args().times
    console = Console(width=110)
    for title, kinds, decide in (
        ("Innocent series called growth (%)", INNOCENT, called),
        ("The same by a test of trend alone (%)", INNOCENT, trend_alone),
        ("Leaks found (%)", LEAKS, called),
    ):
        table = Table(title=title)
        table.add_column("series, by levels seen")
        for n in LENGTHS:
            table.add_column(str(n), justify="right")
        for name, make in kinds.items():
            table.add_row(name, *(f"{100 * rate(make, n, times, decide):.1f}" for n in LENGTHS))
        console.print(table)


if __name__ == "__main__":
    main()
