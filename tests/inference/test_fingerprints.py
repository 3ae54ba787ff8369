"""What tells functions and models apart, in this process and in the next."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vramfit.inference.fingerprints import described, model_fingerprint, values_fingerprint

_LEVEL = 0.5

_SCRIPT = """
import hashlib, torch
from vramfit.inference.fingerprints import described, model_fingerprint

class Odd(torch.nn.Module):
    def extra_repr(self):
        return repr(object())

def reduce(block):
    inner = lambda part: part.amax(1)
    return inner(block) if "a" in {"a", "b", "c", "d", "e"} else block

print(hashlib.sha1((described(reduce) + model_fingerprint(Odd())).encode()).hexdigest())
"""


def over(level: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda block: block > level


def by_default(level: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def found(block: torch.Tensor, level: float = level) -> torch.Tensor:
        return block > level

    return found


class Over:
    def __init__(self, level: float) -> None:
        self.level = level

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        return block > self.level


def test_what_a_function_holds_counts() -> None:
    for kind in (over, by_default, Over):
        assert described(kind(0.1)) == described(kind(0.1)) != described(kind(0.2))
    assert described(lambda block: block.amax(1)) != described(lambda block: block.amin(1))
    one, other = nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3)
    assert described(lambda tiles: one(tiles)) != described(lambda tiles: other(tiles))
    assert described(one.forward) != described(other.forward)
    assert model_fingerprint(lambda tiles: one(tiles)) != model_fingerprint(lambda tiles: other(tiles))


def test_what_a_function_takes_from_its_file_counts() -> None:
    def reduce(block: torch.Tensor) -> torch.Tensor:
        return block > _LEVEL

    before = described(reduce)
    globals()["_LEVEL"] = 0.75
    try:
        assert described(reduce) != before
    finally:
        globals()["_LEVEL"] = 0.5
    assert described(reduce) == before


def test_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    found = {
        subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_functions_that_call_themselves_end() -> None:
    def again(count: int) -> int:
        return again(count - 1) if count else 0

    assert described(again) == described(again)


def test_values_count_whatever_their_layout() -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    turned = np.asfortranarray(values)
    assert (
        values_fingerprint(values)
        == values_fingerprint(turned)
        == values_fingerprint(torch.from_numpy(values))
    )
    turned[1, 1, 1] += 1
    assert values_fingerprint(values) != values_fingerprint(turned)
