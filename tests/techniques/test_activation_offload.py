"""Saved tensors on the host: the same gradients, nothing used too early or dropped too early, and the bytes."""

from __future__ import annotations

import copy
import io
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.techniques.peaks import kept_bytes, peak_bytes
from tests.techniques.tiny_gpt2 import tiny_gpt2
from tests.techniques.toys import all_toys, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramfit.errors import UsageError
from vramfit.inference.host_lane import CopyLane
from vramfit.techniques import AttachedProgram, Numerics, Profile, activation_offload
from vramfit.techniques.activation_offload import ActivationOffload, ActivationOffloadSetting
from vramfit.techniques.core.model_profile import ModelBlock
from vramfit.techniques.core.surround import plain_class, surroundings_of
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

pytestmark = pytest.mark.torch_versions

ALL = ActivationOffloadSetting(min_bytes=0, window=0)
TOYS = all_toys()


@dataclass(eq=False)
class Copy:
    """A copy that has been asked for."""

    source: weakref.ref[torch.Tensor]
    target: weakref.ref[torch.Tensor]
    keep: torch.Tensor  # the side on the host
    done: bool = False


class LateLane:
    """Copies as late as a card may: only when they are waited for. Until then the target holds no numbers."""

    def __init__(self) -> None:
        self.left: dict[int, Copy] = {}
        self.outwards = self.inwards = 0
        self.wrong: list[str] = []

    def out(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
        host = _nothing(flat)
        made = Copy(weakref.ref(flat), weakref.ref(host), host)
        self.left[host.data_ptr()] = made
        self.outwards += 1
        return host, made

    def copy_out(self, source: torch.Tensor, host: torch.Tensor) -> Any:
        raise NotImplementedError  # not for saved tensors

    def back(self, hosts: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        (host,) = hosts
        if not self.left[host.data_ptr()].done:
            self.wrong.append("back before it was out")
        flat, wrong = _nothing(host), self.wrong
        self.inwards += 1
        made = Copy(weakref.ref(host), weakref.ref(flat), host)

        def gone(_: object) -> None:
            if not made.done:
                wrong.append("gone while it was written to")

        made.target = weakref.ref(flat, gone)
        return [flat], made

    def wait(self, end: Copy) -> None:
        source, target = end.source(), end.target()
        if source is None or target is None:
            self.wrong.append("gone while it was read from")
        else:
            target.copy_(source)
        end.done = True

    def finish(self, end: Copy) -> None:
        self.wait(end)

    def ended(self, end: Copy) -> bool:
        return end.done


def _nothing(like: torch.Tensor) -> torch.Tensor:
    nothing = torch.empty_like(like)
    nothing.view(torch.uint8).fill_(255)  # NaN in floating dtypes
    return nothing


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    late = LateLane()
    monkeypatch.setattr(activation_offload, "lane_of", lambda _device: late)
    return late


def _offloaded(model: nn.Module, setting: ActivationOffloadSetting = ALL) -> AttachedProgram:
    live = AttachedProgram(model, None)
    ActivationOffload().attach(live, setting)
    return live


def _chain(blocks: int = 4, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks)))


@pytest.mark.parametrize("window", [0, 600, 1 << 30])
@pytest.mark.parametrize("toy", sorted(TOYS))
def test_gradients_are_the_same(toy: str, window: int, lane: LateLane) -> None:
    expected = gradients(TOYS[toy], steps=2)
    setting = ActivationOffloadSetting(min_bytes=0, window=window)
    found = gradients(ActivationOffload().apply(TOYS[toy], setting), steps=2)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert lane.outwards > 0 and not lane.wrong
    assert bool(lane.inwards) == (window < 1 << 30)  # with room for all, nothing leaves before it is needed


def test_gradients_of_gpt2_are_the_same(lane: LateLane) -> None:
    workload = tiny_gpt2()
    setting = ActivationOffloadSetting(
        modules=tuple(f"transformer.h.{index}" for index in range(3)), min_bytes=64, window=8192
    )
    expected = gradients(workload)
    found = gradients(ActivationOffload().apply(workload, setting))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert lane.inwards > 10 and not lane.wrong


def test_on_the_cpu_tensors_stay() -> None:
    model, x = _chain(), torch.randn(3, 16)
    live = _offloaded(model)
    kept = model(x).grad_fn
    assert kept._saved_self.device.type == "cpu"
    live.undo()


def test_a_storage_crosses_once(lane: LateLane) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x * 1.0).chunk(3, -1)
            return (q * k).sum() + (k * v).sum() + (v * q).sum()

    model = Mixed()
    _offloaded(model)
    x = torch.randn(5, 16, requires_grad=True)
    model(x).backward()
    assert lane.outwards == 2  # the product's input, and all three parts of its result
    assert not lane.wrong


def test_what_lives_on_anyway_stays(lane: LateLane) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))
            self.register_buffer("scale", torch.randn(16))
            self.outer: list[nn.Parameter] = []

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return ((x @ self.weight.t()) * self.scale * mask) @ self.outer[0].t()

    model = Scaled()
    model.outer.append(nn.Parameter(torch.randn(16, 16)))
    _offloaded(model)
    model(torch.randn(4, 16), torch.ones(4, 16)).sum().backward()
    assert lane.outwards == 1  # what the last product reads


def test_a_small_part_of_a_large_storage_goes_alone(lane: LateLane) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((x + 1)[-1])

    model = Last()
    _offloaded(model)
    model(torch.randn(64, 16, requires_grad=True)).sum().backward()
    assert [made.keep.numel() for made in lane.left.values()] == [16]


def test_values_that_changed_before_a_second_save_are_another_copy(lane: LateLane) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.0
            unused = y.sin()  # keeps y as it is here; its backward pass never runs
            y.mul_(2.0)
            return y.cos() + 0.0 * unused.detach()

    model = Twice()
    _offloaded(model)
    x = torch.randn(8, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, -(2 * x.detach()).sin() * 2)


def test_parts_of_a_storage_with_a_version_of_their_own_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cells(nn.Module):
        """What a recurrent cell does without a card's library: it writes into one part after another."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = (x * 2).unsafe_chunk(2, 1)
            return first.sigmoid_() * second.tanh_()

    class AtOnce(CopyLane):
        """What is written after it was sent does not arrive."""

        sent = 0

        def out(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
            self.sent += 1
            return super().out(flat)

    lane = AtOnce()
    monkeypatch.setattr(activation_offload, "lane_of", lambda _device: lane)
    torch.manual_seed(0)
    x = torch.randn(3, 8, requires_grad=True)
    model = Cells()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    _offloaded(model)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, expected)
    assert lane.sent == 2


def test_a_module_may_be_told_by_any_of_its_names() -> None:
    model = _chain(2)
    model.add_module("again", model[0])
    _offloaded(model, ActivationOffloadSetting(modules=("again", "0")))
    assert len(surroundings_of(model[0])) == 1


def test_a_write_in_place_is_told_as_torch_tells_it(lane: LateLane) -> None:
    class Spoils(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.0
            z = y.sin()
            y.mul_(2.0)
            return z

    for window in (0, 1 << 30):
        model = Spoils()
        _offloaded(model, ActivationOffloadSetting(min_bytes=0, window=window))
        out = model(torch.randn(8, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
    small = Spoils()
    _offloaded(small, ActivationOffloadSetting())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        small(torch.randn(8, requires_grad=True)).sum().backward()


def test_a_second_backward_pass_fails_as_in_torch_or_works_when_the_graph_stays(lane: LateLane) -> None:
    model, x = _chain(), torch.randn(3, 16)
    _offloaded(model)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    crossed = lane.inwards
    loss.backward()
    assert lane.inwards > crossed  # between the two nothing stayed
    for parameter, once in zip(model.parameters(), first, strict=True):
        assert torch.equal(parameter.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert not lane.wrong


def test_gradients_of_gradients_are_the_same(lane: LateLane) -> None:
    def penalty(model: nn.Module) -> torch.Tensor:
        x = torch.linspace(-1, 1, 48).view(3, 16).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        return next(model.parameters()).grad

    plain, treated = _chain(), _chain()
    _offloaded(treated)
    assert torch.equal(penalty(plain), penalty(treated))


def test_a_graph_that_is_dropped_leaves_nothing(lane: LateLane) -> None:
    model = _chain()
    _offloaded(model, ActivationOffloadSetting(min_bytes=0, window=1 << 20))
    for _ in range(200):
        model(torch.randn(3, 16))
    ledger = vars(model)["_vramfit_surroundings"][0]._ledger
    assert len(ledger._order) < 600
    assert sum(ref() is not None for ref in ledger._order) == 0
    model(torch.randn(3, 16)).sum().backward()
    assert not lane.wrong


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointing_the_inputs_of_blocks_go(lane: LateLane, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = _chain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    plain, treated = Checkpointed(), Checkpointed()
    _offloaded(treated)
    x = torch.randn(3, 16)
    for model in (plain, treated):
        model(x.clone().requires_grad_() * 1.0).sum().backward()
    for ours, theirs in zip(treated.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert lane.outwards == 4 and not lane.wrong


def test_inside_of_a_checkpoint_it_agrees_with_the_recomputation(lane: LateLane) -> None:
    plain, treated, x = _chain(), _chain(), torch.randn(3, 16)
    live = AttachedProgram(treated, None)
    ActivationOffload().attach(live, ActivationOffloadSetting(modules=("1.1",), min_bytes=0, window=0))
    for model in (plain, treated):
        y = checkpoint(model[1], model[0](x), use_reentrant=False)
        model[3](model[2](y)).sum().backward()
    for ours, theirs in zip(treated.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert lane.outwards == 1 and not lane.wrong


def test_under_autocast_gradients_are_the_same(lane: LateLane) -> None:
    plain, treated, x = _chain(), _chain(), torch.randn(3, 16)
    _offloaded(treated)
    for model in (plain, treated):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()
    for ours, theirs in zip(treated.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert not lane.wrong


def test_without_gradients_and_in_evaluation_nothing_goes(lane: LateLane) -> None:
    model = _chain()
    _offloaded(model)
    with torch.no_grad():
        model(torch.randn(3, 16))
    model.eval()
    model(torch.randn(3, 16)).sum().backward()
    assert lane.outwards == 0


def test_copies_and_saved_models_work_on_their_own() -> None:
    model, x = _chain(), torch.randn(3, 16)
    live = _offloaded(model)
    plain = _chain()
    plain(x).sum().backward()
    model(x).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert list(model.state_dict()) == list(plain.state_dict())
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.zero_grad()
        other(x).sum().backward()
        for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    live.undo()
    assert type(model) is plain_class(model) is nn.Sequential


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the model has no module 'blocks\.9'"):
        _offloaded(_chain(), ActivationOffloadSetting(modules=("blocks.9",)))
    with pytest.raises(UsageError, match="window and min_bytes of activation-offload are bytes"):
        _offloaded(_chain(), ActivationOffloadSetting(window=-1))


def _profile(seconds: list[float], kept: int, **others: Any) -> Profile:
    blocks = tuple(
        ModelBlock(
            path=f"layers.{index}",
            kind="ModelBlock",
            index=index,
            like=seconds.index(time),
            ops=(),
            input_bytes=0,
            kept_bytes=kept,
            forward_seconds=time,
            backward_seconds=2 * time,
        )
        for index, time in enumerate(seconds)
    )
    values: dict[str, Any] = {
        "model": nn.Identity(),
        "optimizer": None,
        "sizes": {},
        "trains": True,
        "blocks": blocks,
        "host_bytes": 64 << 30,
        "link_bytes_per_second": 20e9,
    }
    return Profile(**(values | others))


def test_options_take_blocks_that_hide_their_copies_first() -> None:
    technique, kept = ActivationOffload(), 200 << 20  # 10 ms over the link
    found = [s.modules for s in technique.options(_profile([1e-3, 1e-3, 20e-3, 20e-3, 20e-3], kept))]
    assert found == [
        ("layers.2",),
        ("layers.2", "layers.3"),
        ("layers.0", "layers.2", "layers.3"),
        ("layers.0", "layers.1", "layers.2", "layers.3"),
    ]  # never the last one
    alike = [s.modules for s in technique.options(_profile([1e-3] * 9, kept))]
    assert alike[1] == ("layers.0", "layers.2", "layers.4", "layers.6")
    assert all(setting.window == kept for setting in technique.options(_profile([1e-3] * 9, kept)))


def test_options_want_a_card_a_link_and_room_on_the_host() -> None:
    technique, kept = ActivationOffload(), 200 << 20
    for missing in (
        {"device_type": "cpu"},
        {"trains": False},
        {"host_bytes": 0},
        {"link_bytes_per_second": 0.0},
    ):
        assert not list(technique.options(_profile([1e-3] * 5, kept, **missing)))
    half = list(technique.options(_profile([1e-3] * 5, kept, host_bytes=4 * kept)))
    assert [len(setting.modules) for setting in half] == [1, 2]
    assert technique.promise(ALL).numerics is Numerics.BITWISE


# -- bytes and seconds on the virtual GPU ------------------------------------------------------------------------------


def _layers(width: int, rows: int, blocks: int = 4) -> Workload:
    return Workload(
        model=lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks))
        ),
        batch=lambda batch_size: torch.empty(batch_size, width),
        sizes={"batch_size": rows},
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.SGD,
    )


def test_the_card_keeps_what_is_under_way_and_the_host_holds_the_rest(gpu: VirtualGPU) -> None:
    plain, size = _layers(1024, 4096), 4096 * 1024 * 4
    kept = kept_bytes(plain)
    assert kept // size == 7  # all but the batch, and the output of which the sum keeps nothing
    assert gpu.run.host_pinned_peak_bytes == 0
    for window, left in ((0, 1), (size, 2), (3 * size, 4)):
        setting = ActivationOffloadSetting(window=window)
        assert kept - kept_bytes(ActivationOffload().apply(plain, setting)) == (7 - left) * size
    assert gpu.run.host_pinned_peak_bytes == 7 * size
    assert not [warned for warned in gpu.run.warnings if warned.code == "op-without-rule"]


def test_the_peak_falls_by_what_is_away(gpu: VirtualGPU) -> None:
    plain, size = _layers(1024, 4096, blocks=8), 4096 * 1024 * 4
    before = peak_bytes(plain)
    after = peak_bytes(ActivationOffload().apply(plain, ActivationOffloadSetting(window=size)))
    assert before - after > 10 * size  # of 15: the peak is at the end now, where all gradients are there
    chosen = ActivationOffloadSetting(modules=("2", "3"), window=0)
    assert kept_bytes(plain) - kept_bytes(ActivationOffload().apply(plain, chosen)) == 3 * size


def _step_seconds(workload: Workload, gpu: VirtualGPU) -> float:
    state = workload.start("cuda")
    workload.run_step(state, workload.sizes)
    torch.cuda.synchronize()
    before = gpu.run.seconds_simulated
    workload.run_step(state, workload.sizes)
    torch.cuda.synchronize()
    return gpu.run.seconds_simulated - before


def test_copies_hide_behind_large_products_and_cost_time_behind_small_ones(gpu: VirtualGPU) -> None:
    technique, link = ActivationOffload(), gpu.spec.host_link
    for width, blocks in ((16384, 3), (2048, 8)):
        plain, size = _layers(width, 4096, blocks), 4096 * width * 4
        saved, window = 2 * blocks - 1, 2
        alone = _step_seconds(plain, gpu)
        waiting = _step_seconds(technique.apply(plain, ActivationOffloadSetting(window=0)), gpu)
        ahead = _step_seconds(technique.apply(plain, ActivationOffloadSetting(window=window * size)), gpu)
        assert alone < ahead < waiting
        if blocks == 3:
            assert ahead - alone < 0.02 * 2 * saved * size / link
        else:  # the link alone takes longer: what is in the window, and the newest, need not come back
            assert ahead > 2 * (saved - window - 1) * size / link


def test_autocast_and_checkpointing_on_the_virtual_gpu(gpu: VirtualGPU) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Dropout()) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).sum()

    plain = Workload(
        model=Checkpointed,
        batch=lambda batch_size: torch.empty(batch_size, 1024),
        sizes={"batch_size": 4096},
        loss=loss,
        optimizer=torch.optim.SGD,
    )
    size = 4096 * 1024 * 2
    setting = ActivationOffloadSetting(window=0)
    assert kept_bytes(plain) - kept_bytes(ActivationOffload().apply(plain, setting)) == 2 * size
