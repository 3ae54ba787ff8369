"""Techniques reach a program that knows nothing of them; what it computes is what was promised."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.attaching.attached_script import AttachedScript, TrainedTarget
from vramfit.attaching.first_training import attach_at_first_training
from vramfit.capture.observing.training_finder import TrainingFinder
from vramfit.capture.observing.wrappers import kind_of
from vramfit.errors import UsageError
from vramfit.patching import PatchStack
from vramfit.planner.plan_file import PlanFigures, PlanTarget
from vramfit.planner.planned_program import PlannedProgram
from vramfit.planner.plans import plan_of
from vramfit.techniques import Choice, find_technique, setting_from_plain
from vramfit.with_plan import main

CHECKPOINTED = {"activation-checkpointing": {"mode": "every", "every": 1}}
SMALL = ("--batch-size", "4", "--width", "32", "--steps", "10")


def choices_of(settings: Mapping[str, Mapping[str, Any]]) -> tuple[Choice, ...]:
    return tuple(
        Choice(technique=find_technique(name), setting=setting_from_plain(find_technique(name), setting))
        for name, setting in settings.items()
    )


def write_plan(settings: Mapping[str, Mapping[str, Any]], **aim: Any) -> Path:
    figures = PlanFigures(peak_allocated_bytes=1 << 20, peak_reserved_bytes=2 << 20, total_bytes=3 << 20)
    target = PlanTarget(device="RTX 3090", budget_bytes=8 << 30, **aim)
    file = Path("plan.toml")
    plan_of(choices_of(settings), target, figures, figures).save(file)
    return file


def losses_of(text: str) -> list[str]:
    return re.findall(r"loss (.*)", text)


def run(
    script: str, capsys: pytest.CaptureFixture[str], settings: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    modules, arguments = dict(sys.modules), list(sys.argv)
    try:
        main([str(write_plan(settings)), script, *SMALL])
    finally:
        sys.argv = arguments
        sys.modules["__main__"] = modules["__main__"]
    return losses_of(capsys.readouterr().out)


@pytest.fixture
def plain(written: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    script = written("LOOP")
    return script, run(script, capsys, {})


def test_ten_losses_with_checkpointing_and_dropout_are_the_plain_ones(
    plain: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    script, losses = plain
    assert len(losses) == 10
    assert run(script, capsys, CHECKPOINTED) == losses


def test_an_exchanged_optimizer_steps_in_the_loop_and_follows_the_programs_schedule(
    plain: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    script, losses = plain
    found = run(script, capsys, {"low-bit-optimizer": {}})
    rates = [line.split()[1] for line in losses]
    assert [line.split()[1] for line in found] == rates
    values = [
        (float(one.split()[0]), float(other.split()[0])) for one, other in zip(losses, found, strict=True)
    ]
    assert all(
        abs(one - other) <= 0.006 * values[0][0] for one, other in values
    )  # as the technique's docstring says
    assert [one for one, _ in values] != [other for _, other in values]


def test_what_watched_for_the_model_is_gone_once_the_plan_is_attached() -> None:
    init, call = torch.optim.Optimizer.__init__, torch.nn.Module.__call__

    def refuse(error: Exception) -> Any:
        raise error

    watch = attach_at_first_training(
        lambda finder: AttachedScript(choices_of(CHECKPOINTED), None, finder), refuse
    )
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3))
    )
    optimizer = torch.optim.SGD(model.parameters())
    assert torch.nn.Module.__call__ is not call
    model(torch.zeros(2, 8))
    assert (torch.optim.Optimizer.__init__, torch.nn.Module.__call__) == (init, call)
    assert watch.script.live is not None and watch.script.live.optimizer is optimizer
    watch.script.live.undo()


def test_a_plan_for_another_model_is_refused_before_the_first_step(written: Callable[[str], str]) -> None:
    script = written("LOOP")
    plan = write_plan(CHECKPOINTED, model="Other", model_parameters=7, trained_parameters=7)
    found = subprocess.run(
        [sys.executable, "-m", "vramfit.with_plan", str(plan), script, *SMALL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert losses_of(found.stdout) == []
    assert found.stderr.startswith("error: the plan is for Other with 7 parameters")
    assert "Traceback" not in found.stderr


def test_a_program_that_trains_nothing_is_told_that_the_plan_was_not_attached(
    written: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = written("LOOP")
    Path(script).write_text("print('nothing')\n")
    run(script, capsys, CHECKPOINTED)
    main([str(write_plan(CHECKPOINTED)), script])
    assert "plan.toml was not attached: the program trained no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "setting", "hint"),
    [
        ("micro-batching", {"count": 2}, "Take a smaller batch"),
        ("step-in-backward", {}, "Leave it out"),
        ("low-precision-training", {}, "Take mixed-precision"),
        ("mixed-precision", {"dtype": "float16"}, "Take bfloat16, or torch.amp.GradScaler"),
        ("parameter-offload", {"gradients": "device"}, 'gradients = "host"'),
        ("optimizer-offload", {"offload_gradients": True}, "offload_gradients = false"),
    ],
)
def test_a_plan_that_changes_the_loop_is_refused_by_its_technique(
    written: Callable[[str], str], name: str, setting: Mapping[str, Any], hint: str
) -> None:
    plan = write_plan({**CHECKPOINTED, name: setting})
    with pytest.raises(UsageError, match=f"{name} changes the training loop, .*: it ") as caught:
        main([str(plan), written("LOOP")])
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("last", "code", "words"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('what was wrong')", 1, "what was wrong"),
        ("import atexit; atexit.register(print, 'at exit', flush=True)", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_program_ends_as_without_a_plan(
    written: Callable[[str], str], last: str, code: int, words: str
) -> None:
    script, plan = written("LOOP"), write_plan(CHECKPOINTED)
    Path(script).write_text(f"{Path(script).read_text()}\n{last}\n")
    found = subprocess.run(
        [sys.executable, "-m", "vramfit.with_plan", str(plan), script, *SMALL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == code, found.stderr
    assert words in found.stderr
    assert len(losses_of(found.stdout)) == 10
    assert ("at exit" in found.stdout) == ("atexit" in last)


@pytest.mark.parametrize("arguments", [[], ["plan.toml"], ["plan.toml", "-m"], ["nope.toml", "loop.py"]])
def test_bad_command_lines_are_refused(written: Callable[[str], str], arguments: list[str]) -> None:
    written("LOOP")
    write_plan(CHECKPOINTED)
    with pytest.raises(UsageError):
        main(arguments)


def test_techniques_that_change_parameters_are_refused_below_a_wrapper() -> None:
    class DistributedDataParallel(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model = torch.nn.Linear(8, 8)
    finder = TrainingFinder()
    optimizer = torch.optim.SGD(model.parameters())
    finder.meet(optimizer)
    script = AttachedScript(choices_of({"parameter-sharing": {"shared": {"bias": "weight"}}}), None, finder)
    with pytest.raises(UsageError, match="DistributedDataParallel is around them already"):
        script.meet(DistributedDataParallel(model))
    assert script.live is None


def test_a_model_below_fully_shard_is_known_by_the_programs_class() -> None:
    class FSDPModule:
        pass

    sharded = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})(4, 4)
    assert kind_of(sharded) == "Linear"
    assert kind_of(torch.nn.Linear(4, 4)) == "Linear"
    finder = TrainingFinder()
    optimizer = torch.optim.SGD(sharded.parameters())
    finder.meet(optimizer)
    other = AttachedScript((), TrainedTarget(kind="Conv2d", parameters=99, trained=99), finder)
    assert not other.meet(sharded)
    assert AttachedScript((), TrainedTarget(kind="Linear", parameters=99, trained=99), finder).meet(sharded)


def test_a_target_is_known_by_its_class_and_its_size() -> None:
    finder = TrainingFinder()
    small, large = torch.nn.Linear(4, 4), torch.nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(small.parameters()), torch.optim.SGD(large.parameters())]
    for optimizer in optimizers:
        finder.meet(optimizer)
    script = AttachedScript((), TrainedTarget(kind="Linear", parameters=72, trained=72), finder)
    assert not script.meet(small)
    script.before_step(optimizers[0])  # the right one may still come
    assert script.meet(large)
    assert json.dumps([target.parameters for target in script.seen]) == "[20, 72]"


class Training:
    """A small model with its optimizer, to which techniques are attached as to a program's."""

    def __init__(self, settings: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self._settings = settings

    def attach(self) -> AttachedScript:
        finder = TrainingFinder()
        finder.meet(self.optimizer)
        script = AttachedScript(choices_of(self._settings), None, finder)
        assert script.meet(self.model)
        return script

    def backward(self) -> None:
        self.model(torch.ones(4, 8)).square().mean().backward()


EXCHANGED = {"lean-optimizer": {"kind": "sgd"}}


def test_a_schedule_that_is_made_after_the_first_pass_drives_the_exchanged_optimizer() -> None:
    training = Training(EXCHANGED)
    script = training.attach()
    assert script.live is not None and script.live.optimizer is not training.optimizer
    plain = training.model[0].weight.detach().clone()
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.0)
    training.backward()
    training.optimizer.step()
    stepped = training.model[0].weight.detach().clone()
    assert not torch.equal(plain, stepped)
    schedule.step()
    training.backward()
    training.optimizer.step()
    assert training.optimizer.param_groups[0]["lr"] == 0.0
    assert torch.equal(training.model[0].weight, stepped)
    script.live.undo()
    training.optimizer.param_groups[0]["lr"] = 1e-2
    training.optimizer.step()
    assert training.optimizer.state[training.model[0].weight]["step"] == 1  # its own steps again


def test_a_scaler_divides_the_gradients_of_an_exchanged_fused_optimizer_itself() -> None:
    training = Training(EXCHANGED, fused=True)
    training.attach()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training.backward()
    plain = training.model[0].weight.grad.clone()
    training.optimizer.zero_grad()
    seen = []
    training.optimizer.register_step_pre_hook(lambda *_: seen.append(training.model[0].weight.grad.clone()))
    scaler.scale(training.model(torch.ones(4, 8)).square().mean()).backward()
    scaler.step(training.optimizer)
    assert torch.equal(seen[0], plain)


def test_hooks_that_a_program_registers_later_are_called_around_the_steps_of_an_exchanged_optimizer() -> None:
    training = Training(EXCHANGED)
    training.attach()
    seen: list[str] = []
    training.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    training.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    training.backward()
    training.optimizer.step()
    assert seen == ["before", "after"]


def test_a_step_past_the_exchanged_optimizer_is_refused() -> None:
    training = Training(EXCHANGED)
    kept = training.optimizer.step
    training.attach()
    training.backward()
    with pytest.raises(UsageError, match="AdamW is stepped by a method that was kept from before"):
        kept()


def test_a_plan_that_was_made_for_another_command_line_says_so(
    written: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = written("LOOP")
    made = write_plan(CHECKPOINTED, program=(script, "--batch-size", "24", "--token", "secret"))
    planned = PlannedProgram.load(made)
    assert planned.made_for([script, *SMALL]) == f"{script} --batch-size 24 --token '***'"
    assert planned.made_for([str(Path(script).resolve()), *planned.plan.aim.program[1:]]) == ""
    Path(script).write_text("print('nothing')\n")
    main([str(made), script])
    told = capsys.readouterr().err
    assert told.startswith(f"vramfit: plan.toml was made for another command line: {script} --batch-size 24")


def resumed(settings: Mapping[str, Mapping[str, Any]], checkpoint: dict[str, Any]) -> Training:
    """A fresh training with techniques that loads a checkpoint before its first pass, as programs do."""
    training = Training(settings)
    finder = TrainingFinder()
    finder.meet(training.optimizer)
    script = AttachedScript(choices_of(settings), None, finder)
    with PatchStack() as patches:
        script.watch_loading(patches)
        training.model.load_state_dict(checkpoint["model"])
        training.optimizer.load_state_dict(checkpoint["optimizer"])
        script.meet(training.model)
    return training


@pytest.mark.parametrize("settings", [{}, EXCHANGED, {"lean-optimizer": {"kind": "adafactor"}}])
def test_a_program_resumes_from_its_checkpoint_with_the_plan_it_was_saved_with(
    settings: Mapping[str, Mapping[str, Any]],
) -> None:
    whole = Training(settings)
    whole.attach()
    checkpoint: dict[str, Any] = {}
    for step in range(4):
        if step == 2:
            checkpoint = copy.deepcopy(
                {"model": whole.model.state_dict(), "optimizer": whole.optimizer.state_dict()}
            )
        whole.backward()
        whole.optimizer.step()
        whole.optimizer.zero_grad()
    halves = resumed(settings, checkpoint)
    for _ in range(2):
        halves.backward()
        halves.optimizer.step()
        halves.optimizer.zero_grad()
    for one, other in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("settings", [{}, {"lean-optimizer": {"kind": "adafactor"}}])
def test_a_checkpoint_of_another_plans_optimizer_is_refused_and_everything_undone(
    settings: Mapping[str, Mapping[str, Any]],
) -> None:
    saved = Training(EXCHANGED)
    saved.attach()
    saved.backward()
    saved.optimizer.step()
    checkpoint = {"model": saved.model.state_dict(), "optimizer": saved.optimizer.state_dict()}
    step = torch.optim.AdamW.step
    with pytest.raises(UsageError, match="the program loaded states of SGD, which a plan had put") as caught:
        resumed(settings, checkpoint)
    assert "the plan that it was saved with" in caught.value.hint
    assert torch.optim.AdamW.step is step


def test_parameters_that_come_later_are_refused_where_the_optimizer_was_exchanged() -> None:
    training = Training(EXCHANGED)
    script = training.attach()
    late = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(UsageError, match="the program adds parameters to AdamW while it trains, and SGD"):
        training.optimizer.add_param_group({"params": [late]})
    assert len(training.optimizer.param_groups) == 1
    assert script.live is not None
    script.live.undo()
    training.optimizer.add_param_group({"params": [late]})
    assert len(training.optimizer.param_groups) == 2


@pytest.mark.parametrize("settings", [EXCHANGED, CHECKPOINTED])
def test_an_optimizer_that_wants_a_closure_is_refused_by_name(
    settings: Mapping[str, Mapping[str, Any]],
) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.LBFGS(model.parameters())
    finder = TrainingFinder()
    finder.meet(optimizer)
    script = AttachedScript(choices_of(settings), None, finder)
    with pytest.raises(UsageError, match="LBFGS runs the model several times in a step"):
        script.meet(model)
    assert script.live is None


def test_a_plan_for_another_model_is_not_attached_to_a_part_of_the_programs(
    written: Callable[[str], str],
) -> None:
    script = written("LOOP")
    width = 32
    part = 2 * width + width * 4 * width + 4 * width + 4 * width * width + width
    plan = write_plan(
        {"optimizer-kernel": {"implementation": "fused"}},
        model="Block",
        model_parameters=part,
        trained_parameters=part,
    )
    found = subprocess.run(
        [sys.executable, "-m", "vramfit.with_plan", str(plan), script, *SMALL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert losses_of(found.stdout) == []
    assert "this program trains Net with" in found.stderr
    assert "and Block with" not in found.stderr
