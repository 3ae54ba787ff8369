"""Ranges of phases and modules: which are opened, in which order, and that nothing stays behind."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vramfit
from vramfit.errors import EnvironmentUnfitError, UsageError
from vramfit.record import annotating

pytestmark = pytest.mark.torch_versions


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)
        self.checkpointed = checkpointed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            inputs = checkpoint(self.first, inputs, use_reentrant=False)
        else:
            inputs = self.first(inputs)
        return self.second(inputs)


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What NVTX is told; a build without it would refuse."""
    told: list[str] = []
    depth = [0]

    def push(name: str) -> None:
        told.append("  " * depth[0] + name)
        depth[0] += 1

    def pop() -> None:
        depth[0] -= 1
        assert depth[0] >= 0, "a range is closed that was not opened"

    monkeypatch.setattr(annotating, "has_nvtx", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
    yield told
    assert depth == [0], "a range is still open"


STEP = ["step {}", "  forward", "    Net", "      Net.first", "      Net.second", "  backward", "  optimizer"]


def test_training_steps(calls: list[str]) -> None:
    model = Net()
    with vramfit.annotate(model):
        train(model, 2)
    assert calls == [line.format(step) for step in (1, 2) for line in STEP]


def test_ranges_nest_as_they_are_opened_also_when_modules_run_again_in_the_backward_pass(
    calls: list[str],
) -> None:
    model = Net(checkpointed=True)
    with vramfit.annotate(model):
        train(model, 1)
    assert calls == [*[line.format(1) for line in STEP[:6]], "    Net.first", "  optimizer"]


def test_without_gradients_each_call_is_a_forward_phase(calls: list[str]) -> None:
    model = Net()
    with vramfit.annotate(model), torch.no_grad():
        model(torch.ones(1, 4))
        model(torch.ones(1, 4))
    forward = ["  forward", "    Net", "      Net.first", "      Net.second"]
    assert calls == ["step 1", *forward, *forward]


def test_two_backward_passes_before_a_step_stay_in_one_step(calls: list[str]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with vramfit.annotate(model):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert [line for line in calls if line.startswith("step")] == ["step 1"]
    assert calls.count("  backward") == 2


def test_an_error_closes_its_ranges(calls: list[str]) -> None:
    model = Net()
    with pytest.raises(RuntimeError), vramfit.annotate(model):
        model(torch.ones(1, 3))
    assert calls == ["step 1", "  forward", "    Net", "      Net.first"]


def test_modules_of_no_model_have_their_class_and_a_prefix(calls: list[str]) -> None:
    with vramfit.annotate(prefix="mine: "), torch.no_grad():
        Net()(torch.ones(1, 4))
    assert calls[2:] == ["    mine: Net", "      mine: Linear", "      mine: Linear"]


def test_nothing_stays_patched(calls: list[str]) -> None:
    before = (nn.Module.__call__, torch.autograd.graph._engine_run_backward)
    model = Net()
    with vramfit.annotate(model):
        assert nn.Module.__call__ is not before[0]
    assert (nn.Module.__call__, torch.autograd.graph._engine_run_backward) == before
    train(model, 1)
    assert calls == []


def test_results_are_the_same_with_ranges(calls: list[str]) -> None:
    torch.manual_seed(0)
    plain = Net()
    annotated = Net()
    annotated.load_state_dict(plain.state_dict())
    train(plain, 3)
    with vramfit.annotate(annotated):
        train(annotated, 3)
    for one, two in zip(plain.parameters(), annotated.parameters(), strict=True):
        assert torch.equal(one, two)


def test_ranges_of_torch_profiler() -> None:
    model = Net()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile,
        vramfit.annotate(model, nvtx=False, profiler=True),
    ):
        train(model, 1)
    names = {event.name for event in profile.events()}
    assert names >= {"step 1", "forward", "backward", "optimizer", "Net", "Net.first", "Net.second"}


@pytest.mark.skipif(annotating.has_nvtx(), reason="this build has NVTX")
def test_a_build_without_nvtx_says_what_to_do() -> None:
    with pytest.raises(EnvironmentUnfitError, match="profiler=True"), vramfit.annotate(Net()):
        pytest.fail("it went on")


@pytest.mark.skipif(not annotating.has_nvtx(), reason="this build has no NVTX")
def test_a_build_with_nvtx_takes_the_ranges() -> None:
    model = Net()
    with vramfit.annotate(model):
        train(model, 1)


@pytest.mark.parametrize("arguments", [{"nvtx": False}, {"model": "Net"}])
def test_arguments_that_cannot_be_used(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError), vramfit.annotate(**arguments):  # type: ignore[arg-type]
        pytest.fail("it went on")
