"""Shared tensors: what is equal, what must not be shared, and what is saved."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from tests.techniques.toys import classes, gradients, losses, numbers
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Numerics, Profile, live_of
from vramfit.techniques.parameter_sharing import ParameterSharing, SharingSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

SIDE = 256  # a mask of 256 KiB
ALL = SharingSetting()


class Masked(nn.Module):
    """A layer with a mask of its own, a running mean, and a counter as large."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("mask", torch.ones(SIDE, SIDE).tril())
        self.register_buffer("seen", torch.zeros(SIDE, SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.training:
            self.seen[0, 0] += 1
        return x + self.norm((self.mask[:length, :length] @ self.layer(x)).transpose(1, 2)).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(layers))
        self.teacher, self.critic = nn.Linear(8, 4096), nn.Linear(8, 4096)
        self.critic.load_state_dict(self.teacher.state_dict())
        self.teacher.requires_grad_(False)
        self.critic.requires_grad_(False)
        self.student = nn.Linear(8, 4096)
        self.student.load_state_dict(self.teacher.state_dict())
        self.head = nn.Linear(4096, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x.mean(1)
        return self.head(self.teacher(x) - self.critic(x) + self.student(x))


def workload() -> Workload:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Net()

    return Workload(
        model=model,
        batch=lambda batch_size: (numbers(batch_size, 6, 8), classes(4, batch_size)),
        sizes={"batch_size": 4},
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.AdamW,
    )


def attached(model: nn.Module, **shared: str) -> AttachedProgram:
    live = AttachedProgram(model, None)
    names = {name.replace("__", "."): first for name, first in shared.items()}
    ParameterSharing().attach(live, SharingSetting(shared=names))
    return live


def memory_of(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def test_steps_are_the_same_bit_for_bit() -> None:
    plain = workload()
    shared = ParameterSharing().apply(plain, ALL)
    expected, found = gradients(plain, steps=3), gradients(shared, steps=3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert losses(plain, steps=5) == losses(shared, steps=5)


def test_what_is_equal_and_stays_so_is_shared_and_nothing_else() -> None:
    live = attached(Net())
    where = memory_of(live.model)
    assert where["layers.0.mask"] == where["layers.1.mask"] == where["layers.2.mask"]
    assert where["teacher.weight"] == where["critic.weight"] != where["student.weight"]
    assert where["layers.0.seen"] != where["layers.1.seen"], "filled later"
    assert where["layers.0.norm.running_var"] != where["layers.1.norm.running_var"]
    assert where["teacher.bias"] != where["critic.bias"], "too small to matter"


def test_it_holds_after_the_model_was_placed() -> None:
    state = ParameterSharing().apply(workload(), ALL).start("cpu")
    where = memory_of(state.model)
    assert where["layers.0.mask"] == where["layers.2.mask"]
    live = live_of(state)
    assert live is not None
    live.undo()
    assert len(set(memory_of(state.model).values())) == len(state.model.state_dict())
    assert live.after_step == []


def test_names_copies_and_pickles_stay() -> None:
    model, x = Net().eval(), numbers(2, 6, 8)
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    plain = model(x)
    attached(model)
    assert list(model.state_dict()) == names
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), model):
        assert torch.equal(other(x), plain)
        assert memory_of(other)["layers.0.mask"] == memory_of(other)["layers.2.mask"]


def test_a_shared_buffer_that_is_written_to_is_an_error_after_the_step() -> None:
    live = attached(Net())
    with torch.no_grad():
        live.model.layers[1].mask.mul_(1.0)
    live.step()  # the same values are as good as none, as distributed data parallel writes them
    with torch.no_grad():
        live.model.layers[1].mask[0, 1] = 1.0
    with pytest.raises(UsageError, match=r"layers\.1\.mask was written to"):
        live.step()


def test_a_buffer_that_is_assigned_anew_is_its_own() -> None:
    live = attached(Net())
    first = live.model.layers[0].mask
    live.model.layers[1].mask = torch.zeros(SIDE, SIDE)
    live.step()
    assert first[SIDE - 1].sum() == SIDE


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ({"layers__1__mask": "layers.0.seen"}, r"layers\.1\.mask and layers\.0\.seen are not equal"),
        ({"student__weight": "teacher.weight"}, r"student\.weight is trained and cannot be shared"),
        ({"layers__9__mask": "layers.0.mask"}, r"no parameter or buffer 'layers\.9\.mask'"),
    ],
)
def test_what_cannot_be_shared_is_refused(shared: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attached(Net(), **shared)


def test_named_tensors_alone_are_shared() -> None:
    live = attached(Net(), layers__1__mask="layers.0.mask")
    where = memory_of(live.model)
    assert where["layers.0.mask"] == where["layers.1.mask"] != where["layers.2.mask"]
    assert where["teacher.weight"] != where["critic.weight"]


def test_equal_masks_are_found_and_stored_once_on_the_card(gpu: VirtualGPU) -> None:
    def held(workload: Workload) -> int:
        state = workload.start("cuda")
        workload.run_step(state, workload.sizes)
        before = torch.cuda.memory_allocated()
        del state
        gc.collect()  # a program and its undo refer to each other
        return before - torch.cuda.memory_allocated()

    plain = workload()
    mask, weight = SIDE * SIDE * 4, 8 * 4096 * 4
    assert held(plain) - held(ParameterSharing().apply(plain, ALL)) == 2 * mask
    named = SharingSetting(shared={"critic.weight": "teacher.weight"})
    assert held(plain) - held(ParameterSharing().apply(plain, named)) == weight, "without values, by name"


def test_options_are_where_something_is_equal(gpu: VirtualGPU) -> None:
    technique = ParameterSharing()

    def options(model: nn.Module) -> list[SharingSetting]:
        return list(technique.options(Profile(model=model, optimizer=None, sizes={}, trains=True)))

    assert options(Net(layers=2).cuda()) == [ALL]
    assert options(nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200)).cuda()) == []
    with pytest.raises(UsageError, match="no buffers or frozen parameters of the model are equal"):
        attached(nn.Linear(200, 200))
    assert technique.promise(ALL).numerics is Numerics.BITWISE
