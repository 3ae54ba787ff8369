"""torch's optimizers, stopped before each of their ops in turn, go on where they stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from vramfit.runtime.survival.guarded_step import GuardedStep
from vramfit.runtime.survival.leftovers import Recovery
from vramfit.runtime.survival.resumed_step import RESUMABLE, Resumed, StepLostError, WrittenSoFar
from vramfit.torch_internals.dispatch import TorchDispatchMode

pytestmark = pytest.mark.torch_versions


class Stop(TorchDispatchMode):
    """Raises in place of the n-th op, which has written nothing then, and of those that follow so many ops later."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.seen, self.raised = set(at), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "profiler":  # marks in a trace, which allocate nothing
            return func(*args, **(kwargs or {}))
        number, self.seen = self.seen, self.seen + 1
        if number in self.at:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. (a test's)")
        return func(*args, **(kwargs or {}))


WAYS: list[tuple[Any, dict[str, Any]]] = [
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.AdamW, {"fused": True}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"weight_decay": 0.1}),
    (optim.Rprop, {}),
    (optim.Muon, {"weight_decay": 0.1}),
    (optim.ASGD, {"weight_decay": 0.1, "t0": 0}),
    (optim.Adadelta, {}),
    (optim.Adafactor, {"weight_decay": 0.1}),
    (optim.AdamW, {"foreach": True}),
    (optim.SGD, {"foreach": True, "momentum": 0.9}),
]


def _made(kind: Any, options: dict[str, Any]) -> tuple[list[nn.Parameter], optim.Optimizer]:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(5, 4), (3, 4)] + ([] if kind is optim.Muon else [(7,)])
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return parameters, kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.03}], **options)


def _trained(kind: Any, options: dict[str, Any], steps: int, *at: int) -> tuple[list[torch.Tensor], Stop]:
    """Parameters and states after some steps, the last of which is stopped."""
    parameters, optimizer = _made(kind, options)
    guard = GuardedStep(optimizer, Recovery(torch.device("cpu")))
    stop = Stop(*at)
    for step in range(steps + 1):
        draws = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        if step == steps - 1:
            with stop:
                guard.step()
        else:
            guard.step()
    values = [value for one in parameters for value in optimizer.state[one].values()]
    return [*(one.detach() for one in parameters), *(v for v in values if isinstance(v, torch.Tensor))], stop


@pytest.mark.parametrize(
    ("kind", "options"), WAYS, ids=lambda one: getattr(one, "__name__", None) or "-".join(one)
)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_that_stops_at_any_op_ends_as_it_would_have(
    kind: Any, options: dict[str, Any], steps: int
) -> None:
    """The first step, which makes states, and a later one; stopped once, and soon again."""
    plain, none = _trained(kind, options, steps)
    in_pairs = range(0, none.seen, 7)
    for at in [(one,) for one in range(none.seen)] + [(one, one + 1 + one // 2) for one in in_pairs]:
        found, stop = _trained(kind, options, steps, *at)
        assert stop.raised >= 1
        assert all(map(torch.equal, found, plain)), at


def test_no_step_of_these_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.runtime.survival.guarded_step.SliceCopy", None)
    for kind, options in WAYS:
        if kind.__name__ in RESUMABLE and not options.get("foreach"):
            _trained(kind, options, 2)


def test_a_value_from_before_a_write_is_not_made_up() -> None:
    """Of a step whose temporary outlives a write to what it was computed from."""
    value = torch.ones(3)

    def step() -> None:
        double = value * 2
        value.add_(1)
        value.add_(double)

    written = WrittenSoFar([value])
    with pytest.raises(torch.OutOfMemoryError), Stop(2):
        step()
    written.note_stop()
    with pytest.raises(StepLostError, match="stopped in the middle"), Resumed(written, [value]):
        step()
    assert torch.equal(value, torch.full((3,), 2.0))
