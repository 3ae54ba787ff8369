"""TF32: the switches are set, read by either name, and put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.techniques.toys import all_toys, gradients
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Profile
from vramfit.techniques.tf32 import Tf32, Tf32Setting, _Switches
from vramfit.virtual.gpu import VirtualGPU


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    before = _Switches.read()
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    before.restore()


def _profile(model: nn.Module, *, device: str = "cuda", capability: tuple[int, int] = (8, 6)) -> Profile:
    return Profile(
        model=model,
        optimizer=None,
        sizes={"batch_size": 1},
        trains=True,
        device_type=device,
        capability=capability,
    )


def test_both_names_of_the_switches_say_so_and_are_put_back() -> None:
    before = _Switches.read()
    live = AttachedProgram(nn.Linear(2, 2), None)
    Tf32().attach(live, Tf32Setting())
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.mkldnn.matmul.fp32_precision == before.mkldnn
    live.undo()
    assert _Switches.read() == before
    assert not torch.backends.cuda.matmul.allow_tf32


def test_switches_that_a_program_set_by_their_new_names_alone_are_put_back() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    before = _Switches.read()
    assert before.old_matmul is None and before.old_cudnn is None
    live = AttachedProgram(nn.Linear(2, 2), None)
    Tf32().attach(live, Tf32Setting())
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    live.undo()
    assert _Switches.read() == before


def test_convolutions_alone_leave_products_as_they_are() -> None:
    torch.backends.cudnn.allow_tf32 = False
    live = AttachedProgram(nn.Conv2d(3, 3, 3), None)
    Tf32().attach(live, Tf32Setting(matmul=False))
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cudnn.rnn.fp32_precision == "tf32"
    assert torch.get_float32_matmul_precision() == "highest"
    live.undo()
    assert not torch.backends.cudnn.allow_tf32


def test_nothing_at_all_is_refused() -> None:
    live = AttachedProgram(nn.Linear(2, 2), None)
    with pytest.raises(UsageError, match="allowed neither for products"):
        Tf32().attach(live, Tf32Setting(matmul=False, convolution=False))
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_cpu_computes_as_before() -> None:
    plain = all_toys()["mlp"]
    expected = gradients(plain)
    found = gradients(Tf32().apply(plain, Tf32Setting()))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_options_follow_the_card_and_the_model() -> None:
    linear, convolution = nn.Linear(2, 2), nn.Conv2d(3, 3, 3)
    both = nn.Sequential(convolution, linear)
    options = Tf32().options
    assert list(options(_profile(linear))) == [Tf32Setting(convolution=False)]
    assert list(options(_profile(convolution))) == []  # torch allows it already
    assert list(options(_profile(linear, capability=(7, 5)))) == []
    assert list(options(_profile(linear, device="cpu", capability=(0, 0)))) == []
    assert list(options(_profile(nn.Linear(2, 2, dtype=torch.bfloat16)))) == []
    torch.backends.cudnn.allow_tf32 = False
    assert list(options(_profile(both))) == [Tf32Setting(matmul=False), Tf32Setting()]
    assert list(options(_profile(convolution))) == [Tf32Setting(matmul=False)]


def test_products_take_less_time_on_the_virtual_gpu() -> None:
    def seconds() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        model(torch.empty(4096, 4096, device="cuda"))
        end.record()
        return float(start.elapsed_time(end))

    with VirtualGPU("A100 80GB", alloc_conf=""):  # a 4090's rate for TF32 is that for float32
        model = nn.Linear(4096, 4096).cuda()
        plain = seconds()
        live = AttachedProgram(model, None)
        Tf32().attach(live, Tf32Setting())
        fast = seconds()
        live.undo()
        assert fast < plain / 4
        assert seconds() == pytest.approx(plain)


def test_the_promise_names_what_is_rounded() -> None:
    note = Tf32().promise(Tf32Setting(matmul=False)).note
    assert note == "inputs of float32 convolutions are rounded to TF32, about 3 decimal digits"
