"""``vramfit plan``, ``fit`` and ``verify``, from a workload's file to a plan that holds."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vramfit.cli import app
from vramfit.errors import UnknownGpuError, UsageError, VramfitError, WriteError

WORKLOADS = """
import torch
import torch.nn.functional as F
from torch import nn

from vramfit import Workload


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def model():
    return nn.Sequential(*(Layer() for _ in range(6)), nn.Linear(256, 10))


def batch(batch_size):
    return torch.ones(batch_size, 256), torch.zeros(batch_size, dtype=torch.long)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def adam(parameters):
    return torch.optim.AdamW(parameters)


parts = {"model": model, "batch": batch, "sizes": {"batch_size": 4096}, "loss": loss, "optimizer": adam}
training = Workload(**parts)
vector = Workload(**(parts | {"loss": lambda model, batch: model(batch[0])}))
failing = Workload(**(parts | {"loss": lambda model, batch: model(batch[0].double()).sum()}))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "work loads.py"
    path.write_text(WORKLOADS)
    return path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_plan_is_found_written_applied_and_verified(file: Path, tmp_path: Path) -> None:
    plan, out, picture = tmp_path / "plan.toml", tmp_path / "plan.json", tmp_path / "frontier.svg"
    chosen = ["--allow", "activation-checkpointing", "--gpu", "RTX 4090", "--budget", "600MiB"]
    result = invoke(
        "plan", f"{file}:training", *chosen, "-o", str(plan), "--json", str(out), "--frontier", str(picture)
    )
    assert result.exit_code == 0, result.output
    assert "✓ fits RTX 4090 at batch_size 4,096" in result.output
    value = json.loads(out.read_text())
    assert value["schema"] == "vramfit.plan/2"
    assert value["before"]["total_bytes"] > 600 << 20 >= value["after"]["total_bytes"]
    assert [one["name"] for one in value["techniques"]] == ["activation-checkpointing"]
    assert value["numerics"] == "bitwise"
    assert len(value["frontier"]) > 2
    assert picture.read_text().startswith("<svg")
    assert tomllib.loads(plan.read_text())["aim"]["target"] == f"{file.name}:training"

    held = invoke("verify", str(plan), "--size", "batch_size=8", "--steps", "3", "--json", "-")
    assert held.exit_code == 0, held.output
    found = json.loads(held.stdout)
    assert found["schema"] == "vramfit.verify/1"
    assert found["simulated"]["after"]["total_bytes"] == value["after"]["total_bytes"]
    assert found["gradients"]["equal"] == found["gradients"]["parameters"] == 26
    assert found["losses"]["plain"] == found["losses"]["planned"]

    plan.write_text(plan.read_text().replace("budget_bytes = 629145600", "budget_bytes = 524288000"))
    broken = invoke("verify", str(plan), "--no-values")
    assert broken.exit_code == 3
    assert "✗ memory" in broken.output


def test_what_cannot_fit_ends_with_3_and_shows_the_closest(file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    result = invoke(
        "plan",
        f"{file}:training",
        "--allow",
        "activation-checkpointing",
        "--gpu",
        "RTX 4090",
        "--budget",
        "440MiB",
        "-o",
        str(plan),
    )
    assert "✗ does not fit RTX 4090" in result.output
    assert isinstance(result.exception, VramfitError)
    assert result.exception.exit_code == 3
    assert "nothing fits 440.00 MiB: the lowest that was found is" in result.exception.message
    assert not plan.exists()


def test_the_largest_batch_is_the_last_that_fits(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "fit.json"
    result = invoke(
        "fit",
        f"{file}:training",
        "--gpu",
        "RTX 4090",
        "--budget",
        "480MiB",
        "--size",
        "batch_size=512",
        "--json",
        str(out),
    )
    assert result.exit_code == 0, result.output
    value = json.loads(out.read_text())
    assert value["failing"] == value["value"] + 1
    fitting = {one["value"]: one["fits"] for one in value["tries"]}
    assert fitting[value["value"]]
    assert not fitting[value["failing"]]
    assert value["total_bytes"] <= value["limit_bytes"] == 480 << 20
    assert f"✓ largest batch_size {value['value']:,} on RTX 4090" in result.output


def test_a_workload_that_cannot_be_planned_for_is_told_by_the_parent(file: Path) -> None:
    result = invoke("plan", f"{file}:vector", "--gpu", "8GiB")
    with pytest.raises(UsageError, match=r"the loss is no scalar but \[4096, 10\]"):
        raise result.exception  # type: ignore[misc]


def test_a_workload_that_fails_names_the_line(file: Path) -> None:
    result = invoke("plan", f"{file}:failing", "--gpu", "8GiB")
    with pytest.raises(VramfitError, match=r"work loads\.py:\d+: RuntimeError"):
        raise result.exception  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["plan", "missing.py:x", "--gpu", "8GiB"], UsageError, r"there is no file missing\.py"),
        (["plan", "{file}:training"], UsageError, "no device is given"),
        (["plan", "{file}:training", "--gpu", "RTX 9999"], UnknownGpuError, "RTX 9999"),
        (["plan", "{file}:training", "--device", "cpu"], UsageError, "the CPU needs a budget"),
        (
            ["plan", "{file}:training", "--device", "tpu", "--budget", "1GiB"],
            UsageError,
            "cannot plan for the device",
        ),
        (
            ["plan", "{file}:training", "--gpu", "8GiB", "--budget", "much"],
            UsageError,
            "--budget: 'much' is not a size",
        ),
        (["plan", "{file}:training", "--gpu", "8GiB", "--budget", "0"], UsageError, "must be more than 0"),
        (["plan", "{file}:training", "--gpu", "8GiB", "--margin", "9GiB"], UsageError, "nothing is left"),
        (
            ["plan", "{file}:training", "--gpu", "8GiB", "--numerics", "exact"],
            UsageError,
            "not a level of numerics",
        ),
        (["plan", "{file}:training", "--gpu", "8GiB", "--objective", "fun"], UsageError, "no objective"),
        (
            ["plan", "{file}:training", "--gpu", "8GiB", "--allow", "magic"],
            UsageError,
            "no technique 'magic'",
        ),
        (
            ["plan", "{file}:training", "--gpu", "8GiB", "--size", "batch_size"],
            UsageError,
            "is not of the form NAME=N",
        ),
        (["plan", "{file}:training", "--gpu", "8GiB", "-o", "/none/plan.toml"], WriteError, "none"),
        (
            ["fit", "{file}:training", "--device", "cpu", "--budget", "1GiB", "--card"],
            UsageError,
            "a card was asked for, but this is for the CPU",
        ),
        (
            ["fit", "{file}:training", "--gpu", "8GiB", "--plan", "none.toml"],
            UsageError,
            r"there is no plan .*none\.toml",
        ),
        (["verify", "none.toml"], UsageError, r"there is no plan none\.toml"),
        (["verify", "{file}"], UsageError, "is a program, not a plan"),
    ],
)
def test_bad_input_is_told_in_one_line(
    file: Path, arguments: list[str], error: type[Exception], message: str
) -> None:
    result = invoke(*(argument.format(file=file) for argument in arguments))
    with pytest.raises(error, match=message):
        raise result.exception  # type: ignore[misc]
