"""A program under treatment: order of attaching, undo, and the loop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from tests.techniques.toys import all_toys, gradients, numbers
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import (
    AttachedProgram,
    AttachStage,
    Choice,
    Numerics,
    Piece,
    Profile,
    Setting,
    Technique,
    find_technique,
    live_of,
    setting_from_plain,
    setting_to_plain,
    with_choices,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves(Setting):
    """How many, and for whom."""

    pieces: int = 2
    modules: tuple[str, ...] = ()


class Split(Technique[Halves]):
    """Cuts a batch along its first dimension; the mean of equal pieces is the mean of all."""

    name: ClassVar[str] = "split"
    summary: ClassVar[str] = "cuts batches"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.STEP
    setting_type = Halves

    def options(self, profile: Profile) -> Iterable[Halves]:
        yield Halves()

    def attach(self, live: AttachedProgram, setting: Halves) -> None:
        def cut(batch: object) -> list[Piece]:
            assert isinstance(batch, tuple)
            parts = list(zip(*(tensor.chunk(setting.pieces) for tensor in batch), strict=True))
            count = len(parts)
            return [Piece(batch=p, weight=1 / count, last=i == count - 1) for i, p in enumerate(parts)]

        live.set(live, "splitter", cut)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nothing(Setting):
    """No choice."""


class Refuses(Technique[Nothing]):
    """Cannot be attached to anything."""

    name: ClassVar[str] = "refuses"
    summary: ClassVar[str] = "never works"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    phase: ClassVar[AttachStage] = AttachStage.STEP
    setting_type = Nothing
    excludes: ClassVar[dict[str, str]] = {}

    def options(self, profile: Profile) -> Iterable[Nothing]:
        return ()

    def attach(self, live: AttachedProgram, setting: Nothing) -> None:
        raise UsageError("this does not work", "Leave it out")


def _frozen() -> nn.Module:
    return all_toys()["frozen-trunk"].model()


def test_pieces_give_the_gradients_of_the_whole_batch() -> None:
    plain = all_toys()["two-losses"]
    split = Split().apply(plain, Halves())
    expected, found = gradients(plain), gradients(split)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_without_techniques_a_step_is_the_plain_one() -> None:
    plain = all_toys()["language-tied"]
    state = plain.start("cpu")
    assert live_of(state) is None
    live = AttachedProgram(plain.model(), plain.optimizer, torch.device("cpu"))
    live.attach(())
    torch.manual_seed(5)
    loss = live.train_step(plain.loss, plain.batch(**plain.sizes), lambda batch: batch)  # type: ignore[arg-type]
    torch.manual_seed(5)
    assert torch.equal(loss, plain.run_step(state, plain.sizes))
    for ours, theirs in zip(live.model.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    live = AttachedProgram(_frozen(), None)
    with pytest.raises(UsageError, match=r"the loss is no scalar but \[4\]"):
        live.backward(torch.ones(4, requires_grad=True))


def test_what_one_cannot_attach_leaves_nothing_of_the_others() -> None:
    live = AttachedProgram(_frozen(), None)
    with pytest.raises(UsageError, match="does not work"):
        live.attach(
            (Choice(technique=Split(), setting=Halves()), Choice(technique=Refuses(), setting=Nothing()))
        )
    assert live.splitter is None


def test_the_same_technique_twice_is_refused() -> None:
    choice = Choice(technique=Split(), setting=Halves())
    with pytest.raises(UsageError, match="split appears twice"):
        with_choices(all_toys()["mlp"], (choice, choice))


def test_techniques_that_exclude_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Refuses, "excludes", {"split": "both cut"})
    choices = (Choice(technique=Split(), setting=Halves()), Choice(technique=Refuses(), setting=Nothing()))
    with pytest.raises(UsageError, match="refuses cannot be combined with split: both cut"):
        with_choices(all_toys()["mlp"], choices)


def test_a_batch_goes_after_its_forward_pass_when_it_may() -> None:
    live = AttachedProgram(nn.Linear(3, 1), None)
    live.frees_input = True
    gone: list[bool] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            gc.collect()
            gone.append(seen[0]() is None)
            return grads[0]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(batch))
        rows = torch.ones(2, 3)  # the batch itself is kept by no one
        return Look.apply(model(rows).sum() + batch.detach().sum())  # type: ignore[no-untyped-call,no-any-return]

    live.train_step(loss, torch.ones(2, 3), lambda batch: batch.clone())
    assert gone == [True]


def test_gradients_are_clipped_together() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    live = AttachedProgram(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    live.backward(100 * model(torch.ones(2, 3)).sum())
    assert float(live.step(clip_norm=1.0)) == pytest.approx(400.0)  # type: ignore[arg-type]
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)])
    assert float(moved.detach().norm()) == pytest.approx(1.0, rel=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as Accelerate's: it has nothing of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


@pytest.mark.parametrize("wrapped", [False, True])
def test_steps_of_the_optimizer_itself_lack_the_weights_of_pieces(wrapped: bool) -> None:
    model = nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Wrapper(plain) if wrapped else plain
    live = AttachedProgram(model, optimizer)
    technique = find_technique("micro-batching")
    live.attach((Choice(technique=technique, setting=setting_from_plain(technique, {"count": 2})),))
    batch = torch.ones(4, 4)
    for piece in live.split(batch):
        model(piece).square().mean().backward()  # as accelerator.backward does
    with pytest.raises(UsageError, match=r"by loss.backward\(\), without the share"):
        optimizer.step()
    model.zero_grad()
    for piece in live.split(batch):
        live.backward(model(piece).square().mean())
    optimizer.step()
    live.undo()
    model(batch).square().mean().backward()
    optimizer.step()


def test_settings_go_through_plain_values_and_back() -> None:
    setting = Halves(pieces=3, modules=("a", "b.c"))
    assert setting_to_plain(setting) == {"pieces": 3, "modules": ["a", "b.c"]}
    assert setting_from_plain(Split(), setting_to_plain(setting)) == setting
    assert setting_to_plain(Halves()) == {}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"piece": 2}, "split has no setting 'piece'. It has pieces, modules"),
        ({"pieces": "two"}, "pieces of split is 'two'. It has to be of type int"),
        ({"modules": [1]}, "modules of split is 1. It has to be of type str"),
    ],
)
def test_settings_that_do_not_exist_are_refused(plain: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        setting_from_plain(Split(), plain)
    assert str(raised.value) == message


class Early(Refuses):
    """Is attached to the model and comes back when the optimizer is there."""

    name: ClassVar[str] = "early"
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    found: ClassVar[list[object]] = []

    def attach(self, live: AttachedProgram, setting: Nothing) -> None:
        self.found.append(live.optimizer)
        live.after(AttachStage.OPTIMIZER, lambda: self.found.append(live.optimizer))
        live.after(AttachStage.MODEL, lambda: self.found.append("model"))


def test_an_early_technique_comes_back_after_later_phases() -> None:
    Early.found.clear()
    live = AttachedProgram(_frozen(), torch.optim.AdamW, torch.device("cpu"))
    live.attach((Choice(technique=Early(), setting=Nothing()),))
    assert live.optimizer is not None
    assert Early.found == [None, "model", live.optimizer]
    Early.found.clear()
    Early().attach(live, Nothing())  # nothing else is being attached: all phases are over
    assert Early.found == [live.optimizer, live.optimizer, "model"]


class Marks(Refuses):
    """Notes when something runs inside its surroundings."""

    name: ClassVar[str] = "marks"
    seen: ClassVar[list[str]] = []

    def attach(self, live: AttachedProgram, setting: Nothing) -> None:
        def around(compute: Callable[[], object]) -> object:
            self.seen.append("in")
            result = compute()
            self.seen.append("out")
            return result

        live.loss_surroundings.append(around)


def test_without_a_loss_the_forward_pass_is_surrounded() -> None:
    Marks.seen.clear()
    plain = replace(
        all_toys()["mlp"], loss=None, optimizer=None, batch=lambda batch_size: numbers(batch_size, 16)
    )
    applied = Marks().apply(plain, Nothing())
    state = applied.start("cpu")
    state.model.register_forward_hook(lambda *_: Marks.seen.append(f"forward {torch.is_grad_enabled()}"))
    assert applied.run_step(state, applied.sizes) is None
    assert Marks.seen == ["in", "forward False", "out"]


def test_all_is_undone_where_something_cannot_be() -> None:
    live, undone = AttachedProgram(nn.Linear(2, 2), None), []

    def fail() -> None:
        raise torch.OutOfMemoryError("no room to come back to")

    for action in (lambda: undone.append("first"), fail, lambda: undone.append("last")):
        live.on_undo(action)
    with pytest.raises(torch.OutOfMemoryError):
        live.undo()
    assert undone == ["last", "first"]
    live.undo()
    assert undone == ["last", "first"]
