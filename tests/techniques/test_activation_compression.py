"""Saved tensors in fewer bytes: exact masks, bounded errors, loss curves, and the bytes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.peaks import kept_bytes
from tests.techniques.tiny_gpt2 import tiny_gpt2
from tests.techniques.toys import all_toys, gradients, losses, numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramfit.errors import UsageError
from vramfit.inference.host_lane import CopyLane
from vramfit.techniques import AttachedProgram, Numerics, Profile, activation_offload
from vramfit.techniques.activation_compression import (
    ActivationCompression,
    ActivationCompressionSetting,
    Bits,
    Compressing,
    Groups,
    LargestOfGroup,
    Method,
    Signs,
    pack_small,
    unpack_small,
)
from vramfit.techniques.activation_offload import ActivationOffload, ActivationOffloadSetting
from vramfit.techniques.core.model_profile import BlockOp, ModelBlock
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

TOYS = all_toys()
MASKS = ActivationCompressionSetting(min_bytes=0)


def _compressed(model: nn.Module, setting: ActivationCompressionSetting = MASKS) -> AttachedProgram:
    live = AttachedProgram(model, None)
    ActivationCompression().attach(live, setting)
    return live


class Masks(nn.Module):
    """ReLU before dropout and before a layer, a mask of booleans, and max-pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.pool, self.act = nn.MaxPool2d(2), nn.ReLU(inplace=True)
        self.volume, self.row = nn.AdaptiveMaxPool3d(2), nn.MaxPool1d(2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        x = torch.native_dropout(x, 0.3, True)[0]  # as on a card: its mask is of booleans
        x = self.pool(self.act(self.second(x)))
        x = x.masked_fill(x > 1.5, 0.5).relu() + 1
        x = self.row(self.volume(x.unsqueeze(2)).flatten(2))
        return self.head(x.mean(2))


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", sorted(TOYS))
def test_masks_leave_gradients_as_they_are(toy: str) -> None:
    expected = gradients(TOYS[toy], steps=2)
    found = gradients(ActivationCompression().apply(TOYS[toy], MASKS), steps=2)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_masks_leave_gradients_of_gpt2_as_they_are() -> None:
    plain = tiny_gpt2()
    expected, found = gradients(plain), gradients(ActivationCompression().apply(plain, MASKS))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_masks_of_every_kind_leave_gradients_as_they_are() -> None:
    torch.manual_seed(0)
    plain, x = Masks(), numbers(2, 3, 8, 8)
    treated = copy.deepcopy(plain)
    live = _compressed(treated)
    for _ in range(3):  # from the second step on, ReLU's result that another saves is not packed
        for ours, theirs in zip(_step(treated, x), _step(plain, x), strict=True):
            assert torch.equal(ours, theirs)
    live.undo()
    assert type(treated) is Masks and type(treated.pool) is nn.MaxPool2d


def _saved(output: torch.Tensor, kind: str) -> list[Any]:
    """What the nodes of a kind have saved as ``result`` or as their last tensor, packed."""
    found, seen, todo = [], set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == kind:
            found.append(getattr(node, "_raw_saved_result", None) or node._raw_saved_result1)
        todo += [after for after, _ in node.next_functions]
    return found


def test_the_result_of_relu_is_bits_where_it_alone_saves_it() -> None:
    model = nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Sigmoid(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)
    )
    _compressed(model)
    around: Compressing = vars(model)["_vramfit_surroundings"][0]
    for step in range(2):
        output = model(torch.randn(4, 16))
        kinds = [type(saved.data).__name__ for saved in _saved(output, "ReluBackward0")]
        assert kinds == (["Sign", "Sign"] if step == 0 else ["Kept", "Sign"])
        assert around._in_vain == {1}


def test_a_result_of_relu_that_another_saves_in_another_shape_keeps_its_own() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    treated, x = copy.deepcopy(plain), numbers(4, 3, 16)  # a linear layer saves rows: 12 x 32
    _compressed(treated)
    for _ in range(2):
        grads = []
        for model in (plain, treated):
            model.zero_grad()
            model(x).square().sum().backward()
            grads.append(model[0].weight.grad)
        assert torch.equal(*grads)


def test_indices_of_pooling_are_short() -> None:
    model = Masks()
    _compressed(model)
    output = model(numbers(2, 3, 8, 8))
    kept = [saved.data for saved in _saved(output, "MaxPool2DWithIndicesBackward0")]
    assert [type(packed).__name__ for packed in kept] == ["Narrow"] * 2
    assert {packed._indices.dtype for packed in kept} == {torch.int16}


def test_a_result_of_relu_from_outside_is_no_mask_inside() -> None:
    layer, x = nn.Linear(16, 16), numbers(4, 16)
    plain = copy.deepcopy(layer)
    _compressed(layer)
    for model in (layer, plain):
        model(F.relu(x.clone().requires_grad_())).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_gradients_pass_relu_as_they_did_at_zero_nan_and_infinity() -> None:
    edge = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-45])
    grads = []
    for treated in (False, True):
        model = nn.Sequential(nn.ReLU(), nn.Sigmoid())
        if treated:
            _compressed(model)
        x = edge.clone().requires_grad_()
        model(x * 1.0).backward(torch.ones(8))
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0, equal_nan=True)


def test_gradients_of_gradients_pass_relu() -> None:
    found = []
    for treated in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sigmoid(), nn.Linear(8, 1))
        if treated:
            _compressed(model)
        x = numbers(4, 8).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        found.append(model[0].weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("inside", [False, True])
def test_with_checkpointing(method: Method, inside: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 16))
    treated, x = copy.deepcopy(plain), numbers(4, 16)
    setting = ActivationCompressionSetting(method=method, min_bytes=0, keep=1.0, group=8, modules=("1",))
    _compressed(treated, setting if inside else MASKS)
    for _ in range(2):
        grads = []
        for model in (plain, treated):
            model.zero_grad()
            torch.manual_seed(1)
            checkpoint(model, x, use_reentrant=False).square().sum().backward()
            grads.append(model[0].weight.grad)
        assert torch.equal(*grads)


def test_offload_outside_takes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.dtype] = []

    class Noting(CopyLane):
        def out(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
            sent.append(flat.dtype)
            return super().out(flat)

    monkeypatch.setattr(activation_offload, "lane_of", lambda _device: Noting())
    plain = TOYS["batch-norm"]
    both = ActivationOffload().apply(
        ActivationCompression().apply(plain, MASKS), ActivationOffloadSetting(min_bytes=0, window=0)
    )
    expected, found = gradients(plain, steps=2), gradients(both, steps=2)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert set(sent) == {torch.float32}


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_bits_are_exact(count: int) -> None:
    flags = numbers(count) > 0
    assert torch.equal(Bits(flags).restore(), flags)
    for bits in (1, 2, 4):
        values = torch.arange(count, dtype=torch.uint8) % (1 << bits)
        assert torch.equal(unpack_small(*pack_small(values, bits), bits), values)
    values = numbers(count).relu()
    assert torch.equal(Signs(values).restore(), (values > 0).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantized_numbers_are_at_most_half_a_step_off(bits: int, dtype: torch.dtype) -> None:
    flat = torch.cat([numbers(10, 64).flatten() * 3 + 5, torch.full((64,), 7.0), numbers(13)]).to(dtype)
    back = Groups(flat, bits, 64).restore()
    assert back.dtype is dtype and back.shape == flat.shape
    rows, found = flat[: 11 * 64].view(11, 64).float(), back[: 11 * 64].view(11, 64).float()
    step = (rows.amax(1) - rows.amin(1)) / (2**bits - 1)
    room = step / 2 + 8 * torch.finfo(dtype).eps
    assert bool(((rows - found).abs().amax(1) <= room).all())
    assert torch.equal(back[10 * 64 :], flat[10 * 64 :])  # equal numbers, and the last few, are exact


@pytest.mark.parametrize("group", [64, 512])
def test_top_k_keeps_the_largest(group: int) -> None:
    flat = numbers(3 * group + 5)
    back = LargestOfGroup(flat, 0.25, group).restore()
    for row, kept in zip(flat[:-5].view(3, group), back[:-5].view(3, group), strict=True):
        chosen = row.abs().topk(group // 4).indices
        expected = torch.zeros(group).index_put((chosen,), row[chosen])
        assert torch.equal(kept, expected)
    assert torch.equal(back[-5:], flat[-5:])


def test_work_goes_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = numbers(1000)
    whole = Groups(flat, 4, 8).restore(), LargestOfGroup(flat, 0.5, 8).restore()
    monkeypatch.setattr("vramfit.techniques.activation_compression._PART", 40)
    assert torch.equal(Groups(flat, 4, 8).restore(), whole[0])
    assert torch.equal(LargestOfGroup(flat, 0.5, 8).restore(), whole[1])


# -- loss curves -------------------------------------------------------------------------------------------------------

_APPROXIMATE = {
    "8 bits": (ActivationCompressionSetting(method=Method.QUANTIZED, min_bytes=0, group=32), 0.001),
    "4 bits": (ActivationCompressionSetting(method=Method.QUANTIZED, min_bytes=0, group=32, bits=4), 0.01),
    "top-k": (ActivationCompressionSetting(method=Method.TOP_K, min_bytes=0, group=32, keep=0.5), 0.3),
}


@pytest.mark.parametrize("kind", list(_APPROXIMATE))
@pytest.mark.parametrize("toy", ["batch-norm", "language-tied", "mlp", "unet-3d"])
def test_the_loss_falls_as_it_does_without(toy: str, kind: str) -> None:
    setting, bound = _APPROXIMATE[kind]
    plain = losses(TOYS[toy], steps=50)
    found = losses(ActivationCompression().apply(TOYS[toy], setting), steps=50)
    assert plain[-1] < plain[0]
    apart = max(abs(ours - theirs) for ours, theirs in zip(found, plain, strict=True))
    assert 0 < apart <= bound * (plain[0] - plain[-1])


def test_the_forward_pass_is_not_changed() -> None:
    setting = _APPROXIMATE["top-k"][0]
    plain = TOYS["language-tied"]
    assert losses(plain, steps=1) == losses(ActivationCompression().apply(plain, setting), steps=1)


# -- the rest of the protocol ------------------------------------------------------------------------------------------


def test_in_evaluation_and_without_gradients_nothing_is_packed() -> None:
    torch.manual_seed(0)
    model, x = Masks(), numbers(2, 3, 8, 8)
    _compressed(model, _APPROXIMATE["8 bits"][0])
    with torch.no_grad():
        model(x)
    output = model.eval()(x)
    assert [type(saved.data).__name__ for saved in _saved(output, "ReluBackward0")] == ["Tensor"] * 3


def test_copies_and_saved_models_work_on_their_own() -> None:
    torch.manual_seed(0)
    model, x = Masks(), numbers(2, 3, 8, 8)
    names = list(model.state_dict())
    _compressed(model)
    expected = [gradient.clone() for gradient in _step(model, x)]
    pending = model(x)  # a step under way
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert list(model.state_dict()) == names
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(torch.equal(a, b) for a, b in zip(_step(other, x), expected, strict=True))
    pending.sum().backward()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (ActivationCompressionSetting(bits=3), "bits of activation-compression is 3. Give 8, 4 or 2"),
        (ActivationCompressionSetting(group=100), "group of activation-compression is 100. Give a multiple"),
        (ActivationCompressionSetting(keep=0.0), "keep of activation-compression is 0.0. Give a part of 1"),
        (ActivationCompressionSetting(modules=("x",)), "the model has no module 'x'"),
    ],
)
def test_bad_settings_are_refused(setting: ActivationCompressionSetting, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        _compressed(Masks(), setting)
    assert message in str(raised.value)


def test_promises_and_options() -> None:
    technique = ActivationCompression()
    assert technique.promise(MASKS).numerics is Numerics.BITWISE
    for setting, _ in _APPROXIMATE.values():
        assert technique.promise(setting).numerics is Numerics.APPROXIMATE
        assert technique.promise(setting).note
    op = BlockOp(name="native_dropout", bytes=0, seconds=0, flops=0, kept=True)
    block = ModelBlock(
        path="0",
        kind="Linear",
        index=0,
        like=0,
        ops=(op,),
        input_bytes=0,
        kept_bytes=0,
        forward_seconds=0,
        backward_seconds=0,
    )
    model = nn.Sequential(nn.Linear(3, 3))
    plain: dict[str, Any] = {"model": model, "optimizer": None, "sizes": {}}
    methods = [s.method for s in technique.options(Profile(**plain, trains=True, blocks=(block,)))]
    assert methods == [Method.MASKS, Method.QUANTIZED, Method.QUANTIZED, Method.TOP_K]
    assert next(iter(technique.options(Profile(**plain, trains=True)))).method is Method.QUANTIZED
    assert (
        next(iter(technique.options(Profile(**{**plain, "model": Masks()}, trains=True))))
        == ActivationCompressionSetting()
    )
    assert not list(technique.options(Profile(**plain, trains=False)))


# -- bytes on the virtual GPU ------------------------------------------------------------------------------------------


def _workload(*layers: Any) -> Workload:
    return Workload(
        model=lambda: nn.Sequential(*(layer() for layer in layers)),
        batch=lambda batch_size: torch.empty(batch_size, 1024),
        sizes={"batch_size": 4096},
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.SGD,
    )


def test_bytes_of_masks_and_numbers_on_the_virtual_gpu(gpu: VirtualGPU) -> None:
    technique, size = ActivationCompression(), 4096 * 1024
    linear = lambda: nn.Linear(1024, 1024)  # noqa: E731
    plain = _workload(linear, nn.ReLU, nn.Dropout, linear)
    kept = kept_bytes(plain)
    assert kept // size == 4 + 1 + 4  # the result of ReLU, the mask, the input of the last layer
    masks = kept_bytes(technique.apply(plain, ActivationCompressionSetting()))
    assert kept - masks == 4 * size - size // 8 + size - size // 8
    eight = ActivationCompressionSetting(method=Method.QUANTIZED)
    assert masks - kept_bytes(technique.apply(plain, eight)) == 4 * size - size - 8 * size // 256
    four = ActivationCompressionSetting(method=Method.QUANTIZED, bits=4)
    assert masks - kept_bytes(technique.apply(plain, four)) == 4 * size - size // 2 - 8 * size // 256
    quarter = ActivationCompressionSetting(method=Method.TOP_K)
    assert masks - kept_bytes(technique.apply(plain, quarter)) == 4 * size - (4 + 1) * size // 4
    assert not [warned for warned in gpu.run.warnings if warned.code == "op-without-rule"]


def test_bytes_of_indices_on_the_virtual_gpu(gpu: VirtualGPU) -> None:
    plain = Workload(
        model=lambda: nn.Sequential(nn.Conv2d(3, 64, 1), nn.MaxPool2d(2)),
        batch=lambda batch_size: torch.empty(batch_size, 3, 128, 128),
        sizes={"batch_size": 8},
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.SGD,
    )
    saved = kept_bytes(plain) - kept_bytes(
        ActivationCompression().apply(plain, ActivationCompressionSetting())
    )
    assert saved == 8 * 64 * 64 * 64 * (8 - 2)
