"""Our own model of a recorded program, on the virtual GPU, against the recording of a real card.

The errors measured are 0: peaks to the byte, and every request in its order; of the convolutional network, recorded
with torch 2.2, the peaks and what does not depend on the release.
`benchmarks/recordings.py` prints the tables.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests import warm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Figures of training steps and forward passes of a transformer, and of a convolutional network."""
    file = tmp_path_factory.mktemp("recordings") / "figures.json"
    command = [sys.executable, BENCHMARKS / "recordings.py", "--json", file]
    done = warm.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["name"]: row for row in json.loads(file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    ("name", "allocated", "reserved", "requests"),
    [
        ("gpt-2.7b-ctx128-train", 55_079_000_576, 61_111_009_280, 12_665),
        ("gpt-2.7b-ctx128-forward-bf16", 24_024_505_344, 24_245_174_272, 4_117),
        ("gpt-2.7b-ctx128-forward", 19_498_420_224, 19_667_091_456, 3_213),
        ("gpt-2.7b-ctx256-forward", 26_388_097_024, 26_545_750_016, 3_212),
        ("gpt-2.7b-ctx128-train-after-forward", 55_079_000_576, 61_111_009_280, 12_664),
        ("gpt-2.7b-ctx256-train", 54_961_465_856, 61_111_009_280, 12_663),
    ],
)
def test_a_recorded_program_is_predicted_to_the_byte(
    comparisons: dict[str, dict[str, Any]], name: str, allocated: int, reserved: int, requests: int
) -> None:
    row = comparisons[name]
    if sys.version_info < (3, 14):
        assert row["differences"] == []
    else:  # a function's variables go in another order when it returns, and so do their blocks
        assert all("block given back" in difference for difference in row["differences"])
    assert row["requests"] == [requests, requests]
    assert row["peak_allocated"] == [allocated, allocated]
    assert row["peak_reserved"] == [reserved, reserved]
    for figure in (
        "start_allocated",
        "start_reserved",
        "segments_taken",
        "segments_released",
        "slack",
        "inactive_split",
        "workspaces",
    ):
        recorded, predicted = row[figure]
        assert recorded == predicted, figure


def test_a_recorded_convolutional_network_is_predicted(comparisons: dict[str, dict[str, Any]]) -> None:
    row = comparisons["eor-nn"]
    assert row["peak_reserved"] == [134_217_728, 134_217_728]
    assert row["peak_allocated"] == [110_110_720, 110_110_720]
    for figure in ("start_allocated", "start_reserved", "segments_taken", "slack", "inactive_split"):
        assert row[figure][0] == row[figure][1], figure
    # What differs is 1 MiB of cuBLASLt for each linear layer, which newer releases keep: 30 blocks, taken and returned.
    assert row["requests_differing"] == 60


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("recordings_models.streams")


def stream(sizes: str) -> SimpleNamespace:
    """Requests of so many bytes as the characters' numbers; each is labelled with its place."""
    return SimpleNamespace(
        requests=[(True, ord(size)) for size in sizes], labels=[f"#{place}" for place in range(len(sizes))]
    )


@pytest.mark.parametrize(
    ("recorded", "predicted", "expected"),
    [
        ("abcabba", "abcabba", []),
        ("abc", "abxc", ["extra x1: block taken, 120 B #2"]),
        ("abxc", "abc", ["missing x1: block taken, 120 B #2"]),
        (
            "aaaa",
            "bbab",
            ["extra x3: block taken, 98 B (not aligned)", "missing x3: block taken, 97 B (not aligned)"],
        ),
    ],
)
def test_differences_of_streams(
    streams: ModuleType, recorded: str, predicted: str, expected: list[str]
) -> None:
    found = [str(difference) for difference in streams.differences(stream(recorded), stream(predicted))]
    assert sorted(found) == expected
