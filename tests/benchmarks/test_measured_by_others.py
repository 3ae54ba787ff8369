"""Trainings that others measured: which of them count, and how a figure without its first sample is judged."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from comparing import trainings
from comparing.results import Results
from comparing.trainings import DATA, NETWORKS, TOTALS, MeasuredTraining, card_of, chosen, predicted
from measured_by_others import table, told

from vramfit.gpus import GpuSpec
from vramfit.units import MIB


def row(measured: int, before: int, predicted: int, below: int = 50, above: int = 50) -> MeasuredTraining:
    return MeasuredTraining(
        run="run",
        card="RTX 3060",
        measured=measured * MIB,
        before=before * MIB,
        predicted=predicted * MIB,
        below=below * MIB,
        above=above * MIB,
    )


def test_measurements_are_chosen_and_failures_are_not() -> None:
    lines = list(chosen(None, None))
    assert len(lines) == 110
    assert {line["model"] for line in lines} <= set(NETWORKS)
    assert {line["real_oom"] for line in lines} == {"false"}
    assert len(list(chosen(["RTX 4060"], None))) == 29
    assert [line["measured_bytes"] for line in chosen(None, ["VGG16_Adagrad_480*"])] == ["9730785280"]
    assert len(DATA.read_text().splitlines()) == 118


def test_what_stood_before_the_first_sample_counts() -> None:
    small = row(1000, 100, 1100)
    assert small.whole == 1100 * MIB
    assert small.error == 0
    assert small.inside
    assert not small.plainly_inside
    off = row(1000, 100, 1000)
    assert round(off.error, 4) == -0.0909
    assert not off.inside
    assert off.plainly_inside


def test_of_a_large_model_a_part_may_have_stood() -> None:
    assert row(1000, 300, 1200).error == 0
    assert round(row(1000, 300, 900).error, 4) == -0.1
    assert round(row(1000, 300, 1430).error, 4) == 0.1
    assert row(1000, 300, 960).inside
    assert not row(1000, 300, 940).inside


def test_the_table_counts_per_card_and_in_all() -> None:
    lines = list(table([row(1000, 100, 1100), row(1000, 100, 1000, 100, 100)]))
    assert lines[2:] == [
        "| RTX 3060 | 2 | 4.55% | 9.1% | 0 | 0 | 1 | 14.5% | 20.0% |",
        "| all | 2 | 4.55% | 9.1% | 0 | 0 | 1 | 14.5% | 20.0% |",
    ]


def test_what_runs_out_of_memory_is_outside_its_bar() -> None:
    full = replace(row(1000, 100, 1100), ran_out=True)
    assert full.error == 0
    assert not full.inside and not full.plainly_inside
    assert told(full).endswith("+0.0% ran out")
    assert next(line for line in table([full]) if "all" in line).startswith(
        "| all | 1 | 0.00% | 0.0% | 1 | 1 | 1 |"
    )


class _Net(torch.nn.Module):
    """A convolution and classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.classes = torch.nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classes(self.convolution(images).mean((2, 3)))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A line of the data whose network is a small one of ours."""
    models = ModuleType("torchvision.models")
    models.vgg16 = lambda weights, num_classes: _Net(num_classes)  # type: ignore[attr-defined]
    package = ModuleType("torchvision")
    package.models = models  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return next(iter(chosen(["RTX 3060"], ["VGG16*"])))


def test_a_training_is_predicted_once(small: dict[str, str], tmp_path: Path) -> None:
    kept = Results(folder=tmp_path)
    found = predicted(small, kept)
    assert not found.ran_out
    assert found.before == 2 * MIB
    assert found.measured == int(small["measured_bytes"])
    batch = int(small["batch"])
    assert found.allocated > batch * 4 * (3 * 86 * 86 + 2 * 8 * 84 * 84)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace(f'"before": {2 * MIB}', '"before": 7'))
    assert predicted(small, kept).before == 7
    assert predicted(small, Results(folder=tmp_path, fresh=True)).before == 2 * MIB


def test_a_training_without_room_is_predicted_without_a_limit(
    small: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = predicted(small, Results(folder=tmp_path / "roomy"))

    def cramped(line: dict[str, str]) -> GpuSpec:
        return replace(card_of(line), total_bytes=350 * MIB)

    monkeypatch.setattr(trainings, "card_of", cramped)
    full = predicted(small, Results(folder=tmp_path / "cramped"))
    assert full.ran_out
    assert full.predicted == roomy.predicted > 200 * MIB


def test_cards_have_the_memory_that_was_seen_on_them() -> None:
    for line in chosen(None, None):
        assert card_of(line).total_bytes == TOTALS[line["card"]]
