"""Steps that outlive running out of memory: what they leave is what they leave without it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.faults import Faults
from tests.runtime.subjects import SUBJECTS, Subject, train
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.runtime.survival import guarded_step
from vramfit.runtime.survival.guarded_step import GuardedStep
from vramfit.runtime.survival.ladder import Ladder, Rung, RungLevel
from vramfit.runtime.survival.leftovers import MemoryNow, Recovery, requested_bytes

pytestmark = pytest.mark.torch_versions

STEPS = 3


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda one: one.name)
def test_running_out_anywhere_changes_nothing(subject: Subject) -> None:
    """One allocation of each dozen; the benchmark takes all of them."""
    none = Faults()
    plain = train(subject, STEPS, none)
    assert plain.survivor is not None
    assert not plain.survivor.events
    assert none.seen > 80
    for at in range(len(subject.name) % 12, none.seen, 12):
        faults = Faults(at)
        found = train(subject, STEPS, faults)
        assert faults.raised == 1
        assert found.equals(plain), f"allocation {at}"


def test_a_second_failure_in_the_optimizer_steps_parameter_by_parameter() -> None:
    subject = SUBJECTS[0]
    whole = Faults()
    plain = train(subject, 1, whole)
    faults = Faults(*range(whole.seen - 20, whole.seen - 18))
    found = train(subject, 1, faults)
    assert faults.raised == 2
    assert found.equals(plain)


def test_a_scaler_of_whose_two_tensors_one_came_before_the_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of a scaler makes its scale, and then what counts steps; with one alone torch refuses to go on."""
    (subject,) = [one for one in SUBJECTS if "scaler" in one.name]
    plain = train(subject, STEPS)
    full, refused = torch.full, []

    def short(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") is torch.int32 and not refused:
            refused.append(args)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
        return full(*args, **kwargs)

    monkeypatch.setattr(torch, "full", short)
    found = train(subject, STEPS)
    assert len(refused) == 1
    assert found.equals(plain)


def _mean() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


class TooLarge(nn.Module):
    """Runs out for batches of more rows than there is room for; says how often."""

    def __init__(self, model: nn.Module, room: int) -> None:
        super().__init__()
        self.model, self.room, self.failed, self.seen = model, room, 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.room:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        self.seen.append(len(x))
        return self.model(x)  # type: ignore[no-any-return]


def _square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def test_micro_batches_have_the_gradients_of_the_whole_and_are_left_again() -> None:
    x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, optimizer = _mean()
    for _ in range(40):
        _square(plain, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    inner, optimizer = _mean()
    model = TooLarge(inner, room=3)
    with vramfit.survive(model, optimizer, loss=_square, patience=4, numerics="approximate") as survivor:
        for number in range(40):
            if number == 10:
                model.room = 12
            survivor.step(x)
    for mine, theirs in zip(inner.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    told = [(event.kind, event.rung) for event in survivor.events]
    assert told[0] == ("retry", Rung.AGAIN) and ("compared", Rung.OFFLOAD) in told
    assert ("up", Rung.MICRO_BATCHES) in told and told[-1] == ("down", Rung.PLAIN)
    assert model.seen[-1] == 12  # whole again
    assert survivor.steps == 40


def test_a_lasting_shortage_is_tried_ever_more_rarely() -> None:
    model, optimizer = _mean()
    short = TooLarge(model, room=6)
    with vramfit.survive(short, optimizer, loss=_square, patience=4, numerics="approximate") as survivor:
        for _ in range(120):
            survivor.step(torch.ones(12, 6, dtype=torch.float64))
    tries = [event.step for event in survivor.events if event.kind == "down"]
    waits = [later - sooner for sooner, later in itertools.pairwise(tries)]
    assert waits == sorted(waits)
    assert waits[-1] >= 3 * waits[0]


def test_batch_norm_takes_no_micro_batches_unless_that_is_allowed() -> None:
    def make() -> tuple[TooLarge, torch.optim.Optimizer]:
        model = TooLarge(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), room=4)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make()
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(torch.OutOfMemoryError, match=r"nothing that vramfit\.survive may do"):
        vramfit.survive(model, optimizer, loss=_square).step(torch.randn(8, 6))
    assert all(map(torch.equal, before, model.state_dict().values()))
    with pytest.raises(torch.OutOfMemoryError, match='numerics="approximate" allows pieces'):
        vramfit.survive(model, optimizer, loss=_square, numerics="rounding").step(torch.randn(8, 6))
    model, optimizer = make()
    with vramfit.survive(model, optimizer, loss=_square, numerics="approximate") as survivor:
        survivor.step(torch.randn(8, 6))
    assert model.seen == [4, 4]


@pytest.mark.parametrize("numerics", ["bitwise", "rounding"])
def test_what_does_not_fit_is_given_up_with_everything_as_before(numerics: str) -> None:
    model, optimizer = _mean()
    short = TooLarge(model, room=0)
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB"):
        vramfit.survive(short, optimizer, loss=_square, numerics=numerics).step(
            torch.ones(4, 6, dtype=torch.float64)
        )
    assert model[0].weight.grad is None and model[2].weight.grad is None  # cleared, as a plain loop begins
    fresh, _ = _mean()
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))


def test_other_errors_pass_untouched() -> None:
    model, optimizer = _mean()
    survivor = vramfit.survive(model, optimizer)

    @survivor
    def step(batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("index out of memory bounds")

    with pytest.raises(RuntimeError, match="index out of memory bounds"):
        step(torch.ones(2))
    assert not survivor.events


class Witness:
    """Notes what attempts leave behind, on a class of a library as it seems: what a step reaches is put back."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []


Witness.__module__ = "vramfit.witness"  # objects of ours are passed by


def test_nothing_of_a_failed_attempt_is_alive_at_the_next() -> None:
    model, optimizer = _mean()
    witness = Witness()

    def loss(_model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        witness.alive.append(sum(one() is not None for one in witness.held))
        local = model(batch)
        witness.held.append(weakref.ref(local))
        cycle: list[Any] = [local]
        cycle.append(cycle)
        if len(witness.held) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0")
        return local.square().mean()  # type: ignore[no-any-return]

    vramfit.survive(model, optimizer, loss=loss).step(torch.ones(4, 6, dtype=torch.float64))
    assert witness.alive == [0, 0, 0]


def test_gradients_that_were_accumulated_are_part_of_the_step_and_others_are_not() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    plain, optimizer = _mean()
    _square(plain, x).backward()
    _square(plain, 2 * x).backward()
    optimizer.step()
    model, optimizer = _mean()
    _square(model, 5 * x).backward()  # as another loss leaves it: a plain loop clears it
    survivor = vramfit.survive(model, optimizer, loss=_square)
    survivor.accumulate(x)
    assert survivor.steps == 0
    with Faults(3) as faults:
        survivor.step(2 * x)
    assert faults.raised == 1
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)
        assert mine.grad is None


def test_hooks_of_the_optimizer_run_once() -> None:
    subject = SUBJECTS[0]
    torch.manual_seed(0)
    model, optimizer, more = subject.make()
    told: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    survivor = vramfit.survive(model, optimizer, loss=subject.loss, **more)
    with Faults() as none:
        survivor.step(subject.batch(0))
    told.clear()
    with Faults(none.seen - 30, none.seen - 20) as faults:
        survivor.step(subject.batch(1))
    assert faults.raised == 2
    assert told == ["before", "after"]


class Averaging(nn.Module):
    """Writes a new tensor in the place of its buffer with each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.5 * self.average + x.detach().mean(0)
        return self.inner(x)  # type: ignore[no-any-return]


def test_a_buffer_that_an_attempt_replaced_is_put_back() -> None:
    model = Averaging()
    survivor = vramfit.survive(model, torch.optim.SGD(model.parameters(), lr=1.0), loss=_square)
    with Faults(6) as faults:
        survivor.step(torch.ones(2, 6))
    assert faults.raised == 1
    assert torch.equal(model.average, torch.ones(6))


def test_a_scaled_step_that_ends_in_a_shortage_is_not_begun_again() -> None:
    """A hook of the optimizer runs out when all parameters have stepped."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stepped: list[torch.Tensor] = []

    def after(*_: Any) -> None:
        stepped.append(model.weight.detach().clone())
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0")

    optimizer.register_step_post_hook(after)
    scaler = torch.amp.GradScaler("cpu")
    survivor = vramfit.survive(model, optimizer, loss=_square, scaler=scaler)
    with pytest.raises(torch.OutOfMemoryError):
        survivor.step(torch.ones(2, 6))
    assert len(stepped) == 1
    assert torch.equal(model.weight, stepped[0])
    assert "step" not in vars(optimizer)


def test_states_that_find_no_way_back_to_the_device_step_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    survivor = vramfit.survive(model, optimizer, loss=_square)
    survivor.step(torch.ones(2, 6))

    def short(_action: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0")

    room = MemoryNow(allocated=0, reserved=0, free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(survivor._recovery, "insist", short)
        assert survivor._climber._defragmented(500, room)
    assert survivor._guard.hosted == set(model.parameters())
    survivor.step(torch.ones(2, 6))
    survivor.close()
    assert not survivor._guard.hosted
    assert [int(state["step"]) for state in optimizer.state.values()] == [2, 2]
    assert survivor._climber._defragmented(500, room)
    assert not survivor._guard.hosted


def test_inference_goes_on_in_parts() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).eval()
    short = TooLarge(model, room=5)
    x = torch.randn(17, 6)
    survivor = vramfit.survive(short)
    torch.testing.assert_close(survivor.run(x), model(x).detach())
    assert [event.kind for event in survivor.events] == ["retry", "up", "up"]
    short.room = 0
    with pytest.raises(torch.OutOfMemoryError, match="single entries do not fit"):
        survivor.run(x)

    @survivor
    def answer(rows: torch.Tensor) -> torch.Tensor:
        return short(rows) + 1  # type: ignore[no-any-return]

    short.room = 17
    torch.testing.assert_close(answer(x), model(x).detach() + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": 3}, "is no optimizer of torch"),
        ({"loss": len}, "belong to an optimizer"),
        ({"patience": 0}, "patience=0"),
        ({"reduction": "middle"}, "reduction='middle'"),
        ({"numerics": "vague"}, "not a level of numerics"),
        ({"vote_seconds": 0}, "vote_seconds=0"),
    ],
)
def test_bad_input_is_one_line(arguments: dict[str, Any], message: str) -> None:
    model, optimizer = _mean()
    given = arguments if {"loss", "optimizer"} & set(arguments) else {"optimizer": optimizer, **arguments}
    with pytest.raises(UsageError, match=message) as caught:
        vramfit.survive(model, **given)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="LBFGS"):
        vramfit.survive(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="survive has no loss"):
        vramfit.survive(model, optimizer).step(torch.ones(1))


def test_a_rung_is_left_only_where_there_is_room() -> None:
    ladder = Ladder((RungLevel(rung=Rung.PLAIN), RungLevel(rung=Rung.MICRO_BATCHES, pieces=2)), patience=2)
    ladder.shortage(0, needed=1000)
    ladder.climb(1)
    for _ in range(2):
        ladder.after_good_step()
    assert not ladder.may_go_down(0, MemoryNow(allocated=100, reserved=300, free=500))
    assert ladder.may_go_down(0, MemoryNow(allocated=100, reserved=300, free=700))
    assert ladder.may_go_down(0, None)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0", 20 << 20),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1178729664 bytes.", 1178729664),
        ("CUDA error: out of memory", 0),
    ],
)
def test_what_was_asked_for_is_read_from_the_message(message: str, expected: int) -> None:
    assert requested_bytes(message) == expected


def test_torchs_optimizers_step_in_slices_and_others_as_a_whole() -> None:
    class Own(torch.optim.SGD):
        pass

    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    for kind in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon):
        assert GuardedStep(kind(parameters), Recovery(torch.device("cpu"))).by_parameter
    assert not GuardedStep(Own(parameters), Recovery(torch.device("cpu"))).by_parameter


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adafactor])
def test_a_step_on_the_host_is_the_optimizers_own(
    make: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parameters of the CPU in the place of a card's: the way there and back, states made there included."""
    monkeypatch.setattr(guarded_step, "_is_on_host", lambda _parameter: False)
    models = [nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, hosted = (make(model.parameters(), lr=0.01) for model in models)
    guard = GuardedStep(hosted, Recovery(torch.device("cpu")))
    for step in range(3):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for model in models:
            model(batch).square().mean().backward()
        plain.step()
        guard.leave()
        guard.step()
        for model in models:
            model.zero_grad()
        assert guard.hosted == set(models[1].parameters())
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
        for name, value in plain.state[one].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(hosted.state[other][name]))
    guard.bring_back()
    assert not guard.hosted and len(hosted.state) == 4
