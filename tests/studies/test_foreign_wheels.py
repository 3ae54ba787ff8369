"""What the study reads from files is what a process finds in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))
import foreign_wheels


@pytest.mark.parametrize("wanted", foreign_wheels.TABLES, ids=lambda wanted: wanted.label)
def test_the_installed_torch_is_read_like_a_wheel(wanted: foreign_wheels.Wanted) -> None:
    folder = Path(torch.__file__).parents[1]
    label, found, entries, by_headers, agreed, others = foreign_wheels.read(folder, wanted)
    assert (label, found, others) == (wanted.label, "yes", "none")
    assert int(entries) == int(by_headers) == int(agreed) + 2, "a destructor has two entries"
