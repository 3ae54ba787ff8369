"""Models with a technique: copies, files, averages and evaluation are as before, and so is all after the undo."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from tests.techniques.gradients.architectures import all_architectures
from tests.techniques.gradients.settings import choices
from torch import nn
from torch.optim.swa_utils import AveragedModel

from vramfit.techniques import AttachedProgram, Choice, Numerics, live_of, with_choices
from vramfit.workload import State, Workload

NAMES = ("gpt2", "resnet", "adversaries", "recurrent", "encoder", "repeated")


def one_of_each(name: str) -> Iterator[Choice]:
    """Each technique that could be chosen, in its last setting, which does most; compiled models are copied plain."""
    last = {choice.name: choice for choice in choices(name)}
    if name == "recurrent":
        del last["mixed-precision"]  # torch has no LSTM under autocast for CPUs without AVX-512
    yield from (choice for choice in last.values() if choice.name != "compile")


def value(workload: Workload, model: nn.Module) -> torch.Tensor:
    """What a model gives for the workload's batch, without gradients: its loss, or its output where it has none."""
    batch = workload.batch(**workload.sizes)
    torch.manual_seed(3)
    with torch.no_grad():
        if workload.loss is not None:
            return workload.loss(model, batch)
        found: torch.Tensor = model(torch.ones(4, 8))
        return found


def started(name: str, choice: Choice | None) -> tuple[Workload, State]:
    """A workload after a step."""
    workload = all_architectures()[name].workload()
    applied = workload if choice is None else with_choices(workload, (choice,))
    torch.manual_seed(0)
    state = applied.start("cpu")
    torch.manual_seed(1)
    applied.run_step(state, applied.sizes)
    return workload, state


def loaded(model: nn.Module) -> nn.Module:
    """A model that went through a file as a whole."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_copies_files_averages_and_evaluation_work_as_before(name: str) -> None:
    workload, plain = started(name, None)
    names = list(plain.model.state_dict())
    for choice in one_of_each(name):
        told = choice.words
        _, state = started(name, choice)
        model, live = state.model, live_of(state)
        assert live is not None
        if list(model.state_dict()) != names:
            raise AssertionError(f"{told}: other names in state_dict")
        average = AveragedModel(model, use_buffers=True)
        average.update_parameters(model)
        others = [copy.deepcopy(model), average.module]
        if name != "adversaries":  # torch saves no parametrized modules, as those of spectral norm
            others.append(loaded(model))
        model.eval()
        expected = value(workload, model)
        for other in others:
            other.eval()
            assert torch.equal(value(workload, other), expected), told
            assert next(other.parameters()).data_ptr() != next(model.parameters()).data_ptr(), told
        fresh = workload.model()
        fresh.load_state_dict(model.state_dict())
        loose = {} if choice.promise.numerics <= Numerics.ROUNDING else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(value(workload, fresh.eval()), expected, **loose)
        model.train()
        live.undo()


@pytest.mark.parametrize("name", NAMES)
def test_the_undo_leaves_a_plain_program_that_trains_on(name: str) -> None:
    workload, plain = started(name, None)
    torch.manual_seed(2)
    workload.run_step(plain, workload.sizes)
    expected = {key: tensor.clone() for key, tensor in plain.model.state_dict().items()}
    for choice in one_of_each(name):
        _, state = started(name, choice)
        live = live_of(state)
        assert live is not None
        live.undo()
        check_plain(choice, live, workload.model())
        torch.manual_seed(2)
        bare = State(model=state.model, optimizer=live.optimizer, device=state.device)
        workload.run_step(bare, workload.sizes)
        if choice.promise.numerics is Numerics.BITWISE:
            for key, tensor in state.model.state_dict().items():
                assert torch.equal(tensor, expected[key]), f"{choice.words}: {key}"
        assert all(p.grad is None for p in state.model.parameters()), choice.words


def check_plain(choice: Choice, live: AttachedProgram, like: nn.Module) -> None:
    """Nothing of a technique is left on a model or its optimizer."""
    for (path, module), other in zip(live.model.named_modules(), like.modules(), strict=True):
        assert type(module) is type(other), f"{choice.words}: {path}"
        assert vars(module).keys() == vars(other).keys(), f"{choice.words}: {path}"
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        assert not any(hooks), f"{choice.words}: {path}"
    for (name, parameter), other in zip(live.model.named_parameters(), like.parameters(), strict=True):
        assert (parameter.dtype, parameter.shape) == (other.dtype, other.shape), f"{choice.words}: {name}"
        assert parameter.stride() == other.stride(), f"{choice.words}: {name}"
        assert not parameter._backward_hooks, f"{choice.words}: {name}"
        assert not parameter._post_accumulate_grad_hooks, f"{choice.words}: {name}"
    optimizer = live.optimizer
    assert optimizer is None or type(optimizer).__module__.startswith("torch.optim."), choice.words
    assert optimizer is None or not optimizer._optimizer_step_post_hooks, choice.words
    lists = (live.gathering, live.before_step, live.after_step, live.loss_surroundings)
    assert not any(lists), choice.words
    assert live.splitter is None and live.scaler is None and live.clip is None, choice.words
    assert not live.steps_in_backward and not live.frees_input, choice.words
