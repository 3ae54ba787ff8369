import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.virtual.conftest import fit_interpreter
from torch import nn

from vramfit.errors import UsageError, VramfitError
from vramfit.techniques import Choice, find_technique, live_of, setting_from_plain, with_choices
from vramfit.workload import State, Workload, load_workload, split_target, to_device

__all__ = ["fit_interpreter"]  # backward passes on the CPU before tests of the virtual GPU

FILE = """
import torch
from torch import nn
from vramfit.workload import Workload

tiny = Workload(
    model=lambda: nn.Linear(4, 4),
    batch=lambda batch_size: torch.ones(batch_size, 4),
    sizes={"batch_size": 2},
    loss=lambda model, batch: model(batch).sum(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
)

def made():
    return tiny

def failing():
    raise ValueError("no weights here")

number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "small workloads.py"
    path.write_text(FILE)
    return path


def test_a_workload_is_read_from_a_file(file: Path) -> None:
    workload = load_workload(f"{file}:tiny")
    assert dict(workload.sizes) == {"batch_size": 2}
    assert workload.trains
    assert dict(load_workload(f"{file}:made").sizes) == {"batch_size": 2}


def test_a_step_trains(file: Path) -> None:
    workload = load_workload(f"{file}:tiny")
    state = workload.start("cpu")
    assert isinstance(state.model, nn.Linear)
    before = state.model.weight.detach().clone()
    workload.run_step(state, {"batch_size": 3})
    assert torch.equal(state.model.weight.detach(), before - 3)  # the gradient of each weight is 3
    assert state.model.weight.grad is None


@pytest.mark.parametrize(
    ("batch", "seen"),
    [
        (torch.ones(2), "positional"),
        ((torch.ones(2), torch.ones(3)), "positional"),
        ({"left": torch.ones(2), "right": torch.ones(3)}, "named"),
    ],
)
def test_without_a_loss_the_model_runs_without_gradients(batch: object, seen: str) -> None:
    calls = []

    class Model(nn.Module):
        def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> None:
            calls.append((len(args), sorted(kwargs), torch.is_grad_enabled()))

    workload = Workload(model=Model, batch=lambda n: batch, sizes={"n": 1})
    assert not workload.trains
    workload.run_step(workload.start("cpu"), workload.sizes)
    ((count, names, gradients),) = calls
    assert not gradients
    assert (names == ["left", "right"]) == (seen == "named")
    assert count == (0 if seen == "named" else 2 if isinstance(batch, tuple) else 1)


def test_a_step_of_its_own_has_the_state() -> None:
    seen: list[State] = []

    def step(state: State, batch: torch.Tensor) -> None:
        state.extra["steps"] = state.extra.get("steps", 0) + len(batch)
        seen.append(state)

    workload = Workload(
        model=lambda: nn.Linear(1, 1), batch=lambda n: torch.ones(n), sizes={"n": 4}, step=step
    )
    state = workload.start("cpu")
    workload.run_step(state, {"n": 4})
    workload.run_step(state, {"n": 2})
    assert seen == [state, state]
    assert state.extra == {"steps": 6}


def test_containers_of_a_batch_keep_their_kind() -> None:
    batch = {"a": [torch.ones(1), 3], "b": (torch.ones(1), "text")}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"][0].device.type == "meta"
    assert moved["a"][1:] == [3]
    assert moved["b"][1:] == ("text",)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train.py", "names no workload"),
        (":name", "names no workload"),
        ("train.py:", "names no workload"),
        ("train.py:not a name", "names no workload"),
        ("missing.py:tiny", "there is no file missing.py"),
    ],
)
def test_a_target_that_cannot_be_read(target: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_target(target)


def test_names_that_are_not_there_or_are_something_else(file: Path) -> None:
    with pytest.raises(UsageError, match=r"has no small\. It has tiny"):
        load_workload(f"{file}:small")
    with pytest.raises(UsageError, match="is of type int, not a Workload"):
        load_workload(f"{file}:number")
    with pytest.raises(VramfitError, match=r"workloads\.py:18: ValueError: no weights here") as caught:
        load_workload(f"{file}:failing")
    assert caught.value.exit_code == 1


def test_a_file_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for text, message in (
        ("import missing_package\n", r"wrong\.py:1: ModuleNotFoundError"),
        ("x = 1\ny = 1 +\n", r"wrong\.py:2: SyntaxError"),
    ):
        path = tmp_path / "wrong.py"
        path.write_text(text)
        with pytest.raises(VramfitError, match=message) as caught:
            load_workload(f"{path}:x")
        assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 3}, "model of a Workload is no function"),
        ({"loss": "mse"}, "loss of a Workload is no function"),
        ({"sizes": {}}, "has no sizes"),
        ({"sizes": {"n": 0}}, "the size n of a Workload is 0"),
        ({"sizes": {"n": 1.5}}, "the size n of a Workload is 1.5"),
    ],
)
def test_parts_that_are_something_else(change: dict[str, object], message: str) -> None:
    parts: dict[str, object] = {"model": nn.Identity, "batch": torch.ones, "sizes": {"n": 1}}
    with pytest.raises(UsageError, match=message):
        Workload(**(parts | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": lambda model, batch: model(batch)}, r"the loss is no scalar but \[2, 4\]"),
        ({"loss": lambda model, batch: 3.0}, "the loss is no scalar but float"),
        ({"loss": lambda model, batch: model(batch).detach().sum()}, "depends on no parameter"),
        ({"model": lambda: torch.ones(3)}, "gives a Tensor, not an nn.Module"),
    ],
)
def test_a_step_that_cannot_be_taken(change: dict[str, object], message: str) -> None:
    parts: dict[str, object] = {
        "model": lambda: nn.Linear(4, 4),
        "batch": lambda batch_size: torch.ones(batch_size, 4),
        "sizes": {"batch_size": 2},
        "loss": lambda model, batch: model(batch).sum(),
    }
    workload = Workload(**(parts | change))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        workload.run_step(workload.start("cpu"), workload.sizes)


def _grouped(groups: object, model: Callable[[], nn.Module] | None = None) -> Workload:
    return Workload(
        model=model or (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))),
        batch=lambda batch_size: torch.ones(batch_size, 4),
        sizes={"batch_size": 2},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5),
        groups=groups,  # type: ignore[arg-type]
    )


def test_an_optimizer_has_groups_by_the_names_of_parameters() -> None:
    asked = _grouped({"*.bias": {"weight_decay": 0.0}, "1.*": {"lr": 0.01}})
    plan = Choice(technique=find_technique("tf32"), setting=setting_from_plain(find_technique("tf32"), {}))
    for workload in (asked, with_choices(asked, (plan,))):
        state = workload.start("cpu")
        try:
            assert state.optimizer is not None
            names = {id(parameter): name for name, parameter in state.model.named_parameters()}
            found = [
                ([names[id(one)] for one in group["params"]], group["lr"], group["weight_decay"])
                for group in state.optimizer.param_groups
            ]
        finally:
            if (live := live_of(state)) is not None:
                live.undo()
        assert found == [
            (["0.weight", "2.weight"], 0.1, 0.5),
            (["0.bias", "1.bias", "2.bias"], 0.1, 0.0),
            (["1.weight"], 0.01, 0.5),
        ]
    asked.run_step(asked.start("cpu"), {"batch_size": 2})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"*.gain": {"lr": 1.0}}, r"no parameter has a name like '\*\.gain' of the workload's groups"),
        ({"*.bias": 0.0}, "groups of a Workload are no options by names"),
        ([("*.bias", {})], "groups of a Workload are no options by names"),
    ],
)
def test_groups_that_are_none_are_refused(groups: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _grouped(groups).start("cpu")
    with pytest.raises(UsageError, match="groups but no optimizer"):
        Workload(model=nn.Identity, batch=torch.ones, sizes={"n": 1}, groups={"*": {}})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def made(lr):\n    return lr\n", "made in .* is a function that wants lr"),
        (
            "import argparse\ndef made():\n    p = argparse.ArgumentParser()\n"
            "    p.add_argument('--lr', required=True)\n    p.parse_args()\n",
            r"made\(\) in .* ends the program \(w.py: error: the following arguments are required: --lr\)",
        ),
        ("def made():\n    print('trained')\n", "made in .* is of type NoneType, not a Workload"),
        ("import sys\nmade = None\nsys.exit(3)\n", "the code in .* ends the program with exit code 3"),
    ],
    ids=["arguments", "parser", "nothing", "file"],
)
def test_a_function_that_makes_no_workload_is_one_line(
    code: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.py"
    file.write_text(code, encoding="utf-8")
    before = list(sys.argv)
    with pytest.raises(UsageError, match=message):
        load_workload(f"{file}:made")
    assert sys.argv == before
    assert capsys.readouterr().err == ""
