"""Weights on the host while a model is used: the plain outputs, planned, fitted and verified as the others."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.techniques.tiny_gpt2 import tiny_gpt2
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import find_gpu
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.techniques import AttachedProgram, Choice, Numerics, with_choices
from vramfit.techniques.parameter_offload import ParameterOffload, ParameterOffloadSetting
from vramfit.techniques.weight_streaming import WeightStreaming, WeightStreamingSetting, layer_bytes
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

CARD = find_gpu("RTX 4090")
STREAMING = WeightStreaming()


def choice(**options: object) -> Choice:
    return Choice(technique=STREAMING, setting=WeightStreamingSetting(**options))  # type: ignore[arg-type]


def mlp(width: int = 2048, count: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count))).eval()


def workload(width: int = 2048, count: int = 8) -> Workload:
    return Workload(
        model=lambda: mlp(width, count),
        batch=lambda batch_size: torch.rand(batch_size, width),
        sizes={"batch_size": 4},
    )


def test_a_tied_gpt2_gives_its_plain_outputs() -> None:
    torch.manual_seed(0)
    model = tiny_gpt2().make_model().eval()
    ids = torch.randint(0, 50, (2, 8))
    with torch.no_grad():
        wanted = model(ids).logits
        live = AttachedProgram(model, None, torch.device("cpu"))
        live.attach([choice()])
        assert torch.equal(model(ids).logits, wanted)
        live.undo()
        assert torch.equal(model(ids).logits, wanted)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_card_holds_slots_in_place_of_the_layers(slots: int) -> None:
    plain, names = workload(), tuple(str(number) for number in range(8))
    layer = 2048 * 2048 * 4 + 2048 * 4
    device = VirtualBackend(CARD)
    before = device.step_cost(plain, {"batch_size": 4})
    after = device.step_cost(with_choices(plain, (choice(modules=names, slots=slots),)), {"batch_size": 4})
    assert before.peak_allocated_bytes - after.peak_allocated_bytes == (8 - slots) * layer
    assert after.host_bytes == 144 << 20  # a block of 128 MiB, and one of 16


def test_copies_run_beside_the_computation() -> None:
    with VirtualGPU(CARD) as gpu:
        model = mlp(4096, 6)
        live = AttachedProgram(model, None, torch.device("cuda"))
        live.attach([choice(modules=tuple("012345"))])
        x = torch.rand(8, 4096, device="cuda")
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        with torch.no_grad():
            model(x)
            torch.cuda.synchronize()
            began = gpu.run.seconds_simulated
            for _ in range(4):
                model(x)
            torch.cuda.synchronize()
        seconds = gpu.run.seconds_simulated - began
        live.undo()
        del model, live
        gc.collect()
    assert 4 * nbytes / CARD.host_link * 0.5 < seconds < 1.02 * 4 * nbytes / CARD.host_link


def test_a_model_that_was_on_the_card_is_there_again_after_the_undo() -> None:
    with VirtualGPU(CARD):
        model = mlp(256, 4).cuda()
        identities = [id(parameter) for parameter in model.parameters()]
        live = AttachedProgram(model, None, torch.device("cuda"))
        live.attach([choice(modules=("1", "2"))])
        assert {parameter.device.type for parameter in model[1].parameters()} == {"cpu"}
        assert all(parameter.is_pinned() for parameter in model[1].parameters())
        model(torch.rand(2, 256, device="cuda"))
        live.undo()
        assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
        assert [id(parameter) for parameter in model.parameters()] == identities


def test_options_are_for_inference_on_a_card() -> None:
    plain = workload(256, 8)
    profile, _ = VirtualBackend(CARD, host_bytes=1 << 30).profile_step(
        plain, {"batch_size": 4}, lambda model: [str(number) for number in range(8)]
    )
    settings = list(STREAMING.options(profile))
    assert [len(setting.modules) for setting in settings] == [2, 4, 6, 8]
    assert settings[1].modules == ("0", "2", "4", "6")
    assert not list(ParameterOffload().options(profile))
    assert STREAMING.promise(settings[0]).numerics is Numerics.BITWISE


def test_what_cannot_wait_stays_on_the_card() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    assert layer_bytes(model, ("0", "1", "2")) == {"0": 32, "1": 0, "2": 32}


def test_what_contradicts_is_refused() -> None:
    trained = mlp(8, 3)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    cases = [
        (AttachedProgram(trained, optimizer), choice(modules=("0",)), "is for inference"),
        (AttachedProgram(mlp(8, 3), None), choice(modules=("0", "0.0")), "is a part of"),
        (AttachedProgram(mlp(8, 3), None), choice(modules=("9",)), "no module"),
        (AttachedProgram(mlp(8, 3), None), choice(modules=("0.1",)), "no weights of their own"),
        (AttachedProgram(mlp(8, 3), None), choice(modules=("0",), slots=0), "slots of weight-streaming is 0"),
    ]
    for live, given, words in cases:
        with pytest.raises(UsageError, match=words):
            live.attach([given])
    other = Choice(technique=ParameterOffload(), setting=ParameterOffloadSetting())
    with pytest.raises(UsageError, match="cannot be combined"):
        with_choices(workload(), (choice(), other))
