"""The tables of docs/parallel.md are those that the study makes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "studies"))
import nccl_tables


def test_the_page_is_up_to_date() -> None:
    assert nccl_tables.PAGE.read_text(encoding="utf-8") == nccl_tables.page(), "run studies/nccl_tables.py"


def test_the_page_says_where_each_measurement_falls() -> None:
    out = {(row.source, row.case) for row in nccl_tables.published() if row.measured not in row.said}
    assert out == {
        ("sglang#35538", "the first of them"),
        ("nccl#864", "one communicator (2023; cards not named: 8 A100)"),
        ("nccl#864", "one communicator (8 H100)"),
    }
