"""CUDA_VISIBLE_DEVICES is read as torch reads it."""

import os
import sys
from dataclasses import replace

import pytest
from tests import warm
from tests.doctor.machines import CARD

from vramfit.doctor.checks.visibility import Trouble, read_visible
from vramfit.doctor.facts import MigInstance

CARDS = tuple(replace(CARD, index=index, uuid=f"GPU-{index}0000000-abcd") for index in range(3))
VALUES = [
    "0",
    "2,0",
    "0,1,2",
    " 1 , 2",
    "1gpu2,2ampere",
    "0,0",
    "1,-1,2",
    "-1",
    "+1",
    "none",
    "0,none,1",
    "0,,1",
    "0,GPU-1",
    "",
]


def test_numbers_as_torch_reads_them() -> None:
    """torch's own reader, in a process of its own; it does not know how many cards there are."""
    code = (
        "import json, os, sys, torch\nfor text in json.loads(sys.argv[1]):\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = text\n    print(torch.cuda._parse_visible_devices())"
    )
    import json

    done = warm.run(
        [sys.executable, "-c", code, json.dumps(VALUES)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    expected = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(read_visible(text, CARDS).cards) for text in VALUES] == expected


@pytest.mark.parametrize(
    ("text", "cards", "troubles"),
    [
        ("GPU-1,GPU-0", (1, 0), []),
        ("GPU-10000000-abcd", (1,), []),
        ("GPU-", (), [Trouble.AMBIGUOUS]),
        ("GPU-1,GPU-1", (), [Trouble.DUPLICATE]),
        ("GPU-1,GPU-10", (), [Trouble.DUPLICATE]),
        ("GPU-1,2", (1,), [Trouble.MIXED]),
        ("GPU-7,GPU-1", (), [Trouble.UNKNOWN_NAME]),
        ("0,3,1", (0,), [Trouble.OUT_OF_RANGE]),
        ("1x", (1,), [Trouble.TRAILING]),
        ("  ", (), [Trouble.EMPTY]),
    ],
)
def test_names_and_troubles(text: str, cards: tuple[int, ...], troubles: list[Trouble]) -> None:
    visible = read_visible(text, CARDS)
    assert visible.cards == cards
    assert [trouble for trouble, _ in visible.troubles] == troubles


def test_slices() -> None:
    card = replace(CARD, mig_enabled=True, mig=(MigInstance(uuid="MIG-1"), MigInstance(uuid="MIG-2")))
    assert read_visible("MIG-2", (card,)).slices == ("MIG-2",)
    assert read_visible("MIG-3", (card,)).troubles == ((Trouble.UNKNOWN_NAME, "MIG-3"),)
