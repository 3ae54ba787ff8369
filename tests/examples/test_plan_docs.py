"""What docs/plan.md shows: its Python runs, its commands are understood, and its options are there."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.planner.test_plan_objects import _layers, _plan
from tests.virtual.conftest import fit_interpreter
from torch import nn
from typer.testing import CliRunner

import vramfit
from vramfit.cli import app
from vramfit.techniques import all_techniques

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(WORKLOAD,) = (snippet for snippet in SNIPPETS if "training = Workload(" in snippet)
LOOP, ACCELERATED = (snippet for snippet in SNIPPETS if "plan.split(batch)" in snippet)
(PYTHON,) = (snippet for snippet in SNIPPETS if "vramfit.plan(" in snippet)
OTHERS = [snippet for snippet in SNIPPETS if snippet not in (WORKLOAD, LOOP, ACCELERATED, PYTHON)]
__all__ = ["fit_interpreter"]  # the loop goes backward on the CPU, other tests on the virtual GPU
COMMANDS = re.findall(r"^ {4}(vramfit .+)$", TEXT, re.MULTILINE)


class MyModel(nn.Module):
    """A model as the page has it: called with labels it gives an object with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.embed(tokens % 97)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).flatten(0, 1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels.flatten() % 97))


def shown_workload() -> vramfit.Workload:
    """The workload of the page."""
    names: dict[str, Any] = {"MyModel": MyModel}
    exec(WORKLOAD, names)
    found = names["training"]
    assert isinstance(found, vramfit.Workload)
    return found


@pytest.mark.usefixtures("fit_interpreter")
def test_the_workload_takes_a_step() -> None:
    workload = shown_workload()
    state = workload.start("cpu")
    loss = workload.run_step(state, {"batch_size": 2, "sequence_length": 8})
    assert 0 < float(loss) < 20
    assert isinstance(state.optimizer, torch.optim.AdamW)


@pytest.mark.usefixtures("fit_interpreter")
@pytest.mark.parametrize("loop", [LOOP, ACCELERATED], ids=["plain", "accelerate"])
def test_the_loop_trains(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = _plan(activation_checkpointing=_layers(), micro_batching={"count": 2})
    plan.save("plan.toml")
    workload = shown_workload()
    model = MyModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names: dict[str, Any] = {
        "vramfit": vramfit,
        "plan": plan,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [workload.batch(batch_size=4, sequence_length=8) for _ in range(2)],
        "loss_of": workload.loss,
    }
    if loop is ACCELERATED:
        accelerate = pytest.importorskip("accelerate")
        names["accelerator"] = accelerate.Accelerator(cpu=True)
    exec(loop, names)
    assert names["model"] is model
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_calls_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself is tested elsewhere: here each call has to fit its function."""
    called = []

    def stand_in(name: str, result: Any) -> Any:
        signature = inspect.signature(getattr(vramfit, name))

        def call(*given: Any, **named: Any) -> Any:
            signature.bind(*given, **named)
            called.append(name)
            return result

        return call

    module = ModuleType("vramfit")
    plan = SimpleNamespace(save=lambda path: inspect.signature(vramfit.Plan.save).bind(None, path))
    for name, result in (
        ("plan", plan),
        ("fit", SimpleNamespace(value=32)),
        ("verify", SimpleNamespace(passes=True)),
    ):
        setattr(module, name, stand_in(name, result))
    monkeypatch.setitem(sys.modules, "vramfit", module)
    exec(PYTHON, {"vramfit": module})
    assert called == ["plan", "fit", "verify"]
    from vramfit.planner.largest_size import LargestSize
    from vramfit.planner.verification import Verification

    assert "value" in {field.name for field in LargestSize.__dataclass_fields__.values()}
    assert isinstance(inspect.getattr_static(Verification, "passes"), property)


@pytest.mark.parametrize("snippet", OTHERS)
def test_the_other_snippets_import_what_is_there(snippet: str) -> None:
    """What they make, a trainer of a framework, is tested with the framework."""
    imports = [line for line in snippet.splitlines() if line.startswith(("import ", "from "))]
    for framework in re.findall(r"lightning|transformers", snippet):
        pytest.importorskip(framework)
    names: dict[str, Any] = {}
    exec("\n".join(imports), names)
    compile(snippet, "docs/plan.md", "exec")
    assert imports


class Reached(Exception):
    """The command line was understood."""


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*given: object, **named: object) -> None:
        raise Reached

    for name in ("plan_in_child", "fit_in_child", "verify_in_child"):
        monkeypatch.setattr(f"vramfit.planner.planner_run.{name}", reached)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert isinstance(result.exception, Reached), result.output


def test_there_are_commands_for_each_verb() -> None:
    assert {shlex.split(command)[1] for command in COMMANDS} >= {"plan", "fit", "verify"}


def test_every_technique_is_listed_with_its_promise() -> None:
    rows = [line.split("|")[1:4] for line in TEXT.splitlines() if line.startswith("| `")]
    listed = {name for names, *_ in rows for name in re.findall(r"`([a-z0-9-]+)`", names)}
    assert {technique.name for technique in all_techniques()} <= listed


def test_every_option_of_the_page_is_one_of_the_verbs() -> None:
    known = set()
    for verb in ("plan", "fit", "verify"):
        shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
        known |= set(re.findall(r"--[a-z-]+", shown))
    told = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert told
    assert told <= known
