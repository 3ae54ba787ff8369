"""Tensor classes of other people, and parameters that are rebuilt by their type."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.trace import Category, EventKind
from vramfit.virtual.gpu import VirtualGPU


class Scan(Tensor):
    """A plain tensor with notes that follow it, as medical images have."""

    note: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        source = next((arg for arg in args if isinstance(arg, Scan)), None)
        if isinstance(out, Scan) and source is not None and func is not Tensor.__repr__:
            out.__dict__.update(source.__dict__)  # everything: also what is not its own
        return out


class Halved(Tensor):
    """A wrapper that keeps a float32 tensor as two bytes an element, as quantised tensors do."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Any:
        return cls(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (
            torch.ops.aten._to_copy.default,
            torch.ops.aten.detach.default,
            torch.ops.aten.alias.default,
        ):
            device = (kwargs or {}).get("device")
            codes = args[0].codes
            return cls(codes if device is None else codes.to(device))
        plain = [arg.codes.float() if isinstance(arg, Halved) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def held(gpu: VirtualGPU, category: Category) -> int:
    """Requested bytes of a category that are alive now."""
    trace, live = gpu.trace, {}
    for row in range(len(trace)):
        if trace.kind[row] == EventKind.ALLOC:
            live[int(trace.address[row])] = row
        elif trace.kind[row] == EventKind.FREE_REQUESTED:
            live.pop(int(trace.address[row]), None)
    return sum(int(trace.size[row]) for row in live.values() if trace.category[row] == category)


def scan(note: str = "left knee") -> Scan:
    image = torch.rand(2, 1, 8, 8, 8).as_subclass(Scan)
    image.note = note
    return image


class TestAnnotated:
    def test_the_class_and_its_notes_follow_to_the_card_and_back(self, gpu: VirtualGPU) -> None:
        on_card = scan().to("cuda")
        assert isinstance(on_card, Scan) and type(on_card).__name__ == "Scan"
        assert on_card.note == "left knee" and on_card.device == torch.device("cuda", 0)
        assert torch.cuda.memory_allocated() == 4096
        back = on_card.cpu()
        assert type(back) is Scan and back.note == "left knee"
        assert type(on_card.as_subclass(Tensor)) is not type(on_card)
        assert torch.cuda.memory_allocated() == 4096, "a class is a view"

    def test_ops_with_plain_tensors_keep_the_class_and_the_graph(self, gpu: VirtualGPU) -> None:
        image, layer = scan().cuda(), nn.Conv3d(1, 4, 3).cuda()
        out = layer(image)
        assert isinstance(out, Scan) and out.note == "left knee" and out.requires_grad
        out.sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.is_cuda

    def test_an_op_in_place_gives_the_same_object(self, gpu: VirtualGPU) -> None:
        image = scan().cuda()
        assert image.add_(1) is image and isinstance(image, Scan)

    def test_notes_copied_between_devices_do_not_move_the_tensor(self) -> None:
        with VirtualGPU("RTX 4090", gpus=2, alloc_conf=""):
            first = scan().to("cuda:0")
            second = first.to("cuda:1")
            assert second.device.index == 1 and (second * 2).device.index == 1

    def test_a_deep_copy_is_a_tensor_of_its_own(self, gpu: VirtualGPU) -> None:
        image = scan().cuda()
        twin = copy.deepcopy(image)
        assert isinstance(twin, Scan) and twin.note == "left knee" and twin.data_ptr() != image.data_ptr()
        assert torch.cuda.memory_allocated() == 2 * 4096

    def test_small_values_are_known(self, gpu: VirtualGPU) -> None:
        image = torch.arange(3.0).as_subclass(Scan).cuda()
        assert image.tolist() == [0, 1, 2] and (image + 1).sum().item() == 6

    def test_one_is_saved_with_its_size(self, gpu: VirtualGPU, tmp_path: Path) -> None:
        image = scan().cuda()
        torch.save({"image": image}, tmp_path / "scan.pt")
        del image
        assert (tmp_path / "scan.pt").stat().st_size > 4096 and torch.cuda.memory_allocated() == 0
        assert torch.load(tmp_path / "scan.pt")["image"].shape == (2, 1, 8, 8, 8)


class TestWrappers:
    def model(self) -> nn.Linear:
        layer = nn.Linear(64, 64)
        layer.weight = nn.Parameter(Halved(layer.weight.detach().half()), requires_grad=False)
        return layer

    def test_a_module_moves_with_them(self, gpu: VirtualGPU) -> None:
        layer = self.model()
        weight = layer.weight
        layer.cuda()
        assert layer.weight is weight and isinstance(weight, Halved) and weight.codes.is_cuda
        assert torch.cuda.memory_allocated() == 64 * 64 * 2 + 512
        assert held(gpu, Category.PARAMETERS) == 64 * 64 * 2 + 64 * 4

    def test_states_inside_them_are_named(self, gpu: VirtualGPU) -> None:
        layer = nn.Linear(64, 64, bias=False).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.ones(1, 64, device="cuda")).sum().backward()
        optimizer.state[layer.weight]["average"] = Halved(torch.zeros(64, 64, dtype=torch.half).cuda())
        optimizer.step()
        assert held(gpu, Category.OPTIMIZER_STATE) == 64 * 64 * 2

    def test_a_checkpoint_gives_them_back(self, gpu: VirtualGPU, tmp_path: Path) -> None:
        layer = self.model().cuda()
        torch.save(layer.state_dict(), tmp_path / "model.pt")
        assert (tmp_path / "model.pt").stat().st_size > 64 * 64 * 2
        before = torch.cuda.memory_allocated()
        loaded = torch.load(tmp_path / "model.pt")
        assert isinstance(loaded["weight"], Halved) and loaded["weight"].codes.is_cuda
        assert torch.cuda.memory_allocated() == 2 * before


def test_a_checkpoint_survives_buffers_and_other_files(gpu: VirtualGPU, tmp_path: Path) -> None:
    layer = nn.Linear(8, 8).cuda()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    (tmp_path / "atomic.ckpt").write_bytes(buffer.getvalue())  # as Lightning writes
    with open(tmp_path / "atomic.ckpt", "rb") as file:
        loaded = torch.load(file, map_location="cuda")
    assert loaded["weight"].shape == (8, 8) and loaded["weight"].is_cuda


def test_a_checkpoint_of_another_virtual_run_is_refused(tmp_path: Path) -> None:
    with (
        VirtualGPU("RTX 4090", alloc_conf="", writes="real"),
        open(tmp_path / "model.pt", "wb") as file,
    ):
        torch.save(nn.Linear(8, 8).cuda().state_dict(), file)
    with (
        VirtualGPU("RTX 4090", alloc_conf=""),
        pytest.raises(RuntimeError, match="another virtual run, and holds no values"),
    ):
        torch.load(tmp_path / "model.pt")


def test_a_parameter_is_rebuilt_by_its_type(gpu: VirtualGPU) -> None:
    layer = nn.Linear(256, 256, bias=False)
    kind = type(layer.weight)
    layer._parameters["weight"] = kind(layer.weight.to("cuda"), requires_grad=False)
    assert isinstance(layer.weight, nn.Parameter) and layer.weight.is_cuda and not layer.weight.requires_grad
    assert torch.cuda.memory_allocated() == 256 * 256 * 4
    layer._parameters["weight"] = kind(
        layer.weight.to("meta"), **{**vars(layer.weight), "requires_grad": True}
    )
    assert layer.weight.is_meta and layer.weight.requires_grad
    assert torch.cuda.memory_allocated() == 0


class Scaled(nn.Parameter):
    """A class of parameters as programs write them, with a note of its own."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, scale: float = 1.0) -> Scaled:
        self = super().__new__(cls, data, requires_grad)
        self.scale = scale
        return self


class Made(nn.Parameter):
    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Made:
        return torch.Tensor._make_subclass(cls, data, requires_grad)


@pytest.mark.parametrize("cls", [Scaled, Made])
def test_classes_of_parameters_keep_their_class(gpu: VirtualGPU, cls: type) -> None:
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = weight = cls(torch.ones(64, 64), True)
    assert isinstance(weight, cls) and isinstance(weight, nn.Parameter) and weight.requires_grad
    assert type(weight.data) is FakeTensor and weight.device.type == "cpu", "virtual from birth"
    layer.cuda()
    assert layer.weight is weight and weight.is_cuda and torch.cuda.memory_allocated() == 64 * 64 * 4
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    assert weight.grad is not None and weight.grad.is_cuda
    weight.data = weight.data.cpu()
    assert weight.device.type == "cpu" and isinstance(weight, cls)
    assert getattr(weight, "scale", 1.0) == 1.0
