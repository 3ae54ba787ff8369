"""Measured calls go before the rules, and only for what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vramfit.gpus import find_gpu
from vramfit.gpus.measured_profile import MeasuredCall, MeasuredOp, MeasuredProfile, Rates
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.kernels.measured import MeasuredTable, Switches, library_of, signature
from vramfit.virtual.op_call import Extras

from .support import FAKE, ask, aten, call_of, context, cuda

USUAL = Switches.of(context())


def profile(**more: Any) -> MeasuredProfile:
    card = find_gpu("H200")
    plain = MeasuredProfile(
        gpu_name=card.vendor_name,
        total_bytes=card.total_bytes,
        torch_version=torch.__version__,
        date="2026-01-02",
    )
    return replace(plain, **more)


def measured(op: str, key: str, usual: MeasuredOp, first: MeasuredOp | None = None) -> MeasuredProfile:
    return profile(ops={op: {key: MeasuredCall(usual=usual, first=first)}})


def test_signature_tells_shapes_types_layouts_and_numbers() -> None:
    with FAKE:
        images = cuda(2, 3, 4, 4, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        arguments = (images, cuda(5, 3).t(), None, [1, 2], True, 0.0, 0.5, torch.float32)
    text = signature(aten.convolution.default, arguments, {"device": "cuda", "groups": 1}, USUAL)
    assert text == "float16[2,3,4,4]cl, float32[3,5]s1,3, -, [1, 2], T, 0., f, float32, groups=1"


def test_random_states_and_raw_bytes_are_not_told() -> None:
    kept = [
        signature(aten._cudnn_rnn.default, (cuda(3), cuda(n, dtype=torch.uint8)), {}, USUAL) for n in (7, 8)
    ]
    assert kept == ["float32[3], raw"] * 2
    state = {"philox_seed": cuda(2), "dim": 1}
    assert signature(aten.sort.default, (cuda(7, dtype=torch.uint8),), state, USUAL) == "uint8[7], dim=1"


def test_switches_show_only_where_they_matter() -> None:
    changed = USUAL._replace(cudnn_benchmark=True, matmul_tf32=True, deterministic=True)
    for func, words in (
        (aten.convolution.default, " | benchmark"),
        (aten.mm.default, " | tf32"),
        (aten.sort.default, " | deterministic"),
    ):
        assert signature(func, (1,), {}, changed) == f"1{words}"
        assert signature(func, (1,), {}, USUAL) == "1"


def test_long_lists_are_told_by_their_digest() -> None:
    one, other = ([cuda(n, 7) for n in range(1, count)] for count in (60, 61))
    texts = {signature(aten._foreach_add.Scalar, (tensors, 1), {}, USUAL) for tensors in (one, one, other)}
    assert len(texts) == 2
    assert all(text.startswith("#") and len(text) < 40 for text in texts)


def test_measured_call_takes_the_place_of_the_rule_without_error_bar() -> None:
    source = cuda(8, 20_000)
    table = MeasuredTable(
        measured("aten.sort.default", "float32[8,20000]", MeasuredOp(before=(1,), after=(2, 3)))
    )
    assert ask(aten.sort.default, source, ctx=context(profile=table)) == Extras(before=(1,), after=(2, 3))
    assert table.used == 1
    other = cuda(8, 20_001)
    assert ask(aten.sort.default, other, ctx=context(profile=table)) == ask(aten.sort.default, other)
    assert table.used == 1


def test_first_call_of_a_process_is_told_once() -> None:
    table = MeasuredTable(
        measured("aten.mm.default", "1", MeasuredOp(after=(2,)), first=MeasuredOp(after=(200,)))
    )
    ctx = context(profile=table)
    found = [table.extras(call_of(aten.mm.default, (1,), {}, None, ctx)) for _ in range(3)]
    assert [extras.after for extras in found if extras is not None] == [(200,), (2,), (2,)]


def test_ops_that_this_torch_lacks_are_passed_over() -> None:
    table = MeasuredTable(measured("aten.no_such_op.default", "1", MeasuredOp()))
    assert table.extras(call_of(aten.mm.default, (1,), {}, None, context())) is None


@pytest.mark.parametrize(
    ("func", "library"),
    [
        (aten.convolution_backward.default, "cudnn"),
        (aten._fft_r2c.default, "cufft"),
        (aten.linalg_cholesky_ex.default, "cusolver"),
        (aten.linalg_vector_norm.default, None),
        (aten.add.Tensor, None),
    ],
)
def test_libraries_are_told_by_their_ops(func: Any, library: str | None) -> None:
    assert library_of(func) == library


# -- a run with a profile ----------------------------------------------------------------------------------


def test_context_grows_with_the_first_use_of_a_library() -> None:
    known = profile(context_bytes=100 << 20, library_bytes={"cublas": 7 << 20, "cudnn": 50 << 20})
    with VirtualGPU("H200", alloc_conf="", profile=known) as gpu:
        torch.empty(1, device="cuda")
        free = torch.cuda.mem_get_info()[0]
        left = torch.empty(4, 4, device="cuda")
        _ = left @ left, left @ left
        assert gpu.run.devices[0].context_bytes == 107 << 20
        grown = torch.cuda.memory_reserved() - (2 << 20)
        assert free - torch.cuda.mem_get_info()[0] == (7 << 20) + grown
        torch.nn.functional.conv2d(
            torch.empty(1, 1, 4, 4, device="cuda"), torch.empty(1, 1, 3, 3, device="cuda")
        )
    assert gpu.run.devices[0].context_bytes == 157 << 20
    assert gpu.run.profile is not None
    assert gpu.run.profile.date == "2026-01-02"


def test_workspaces_and_dropout_states_are_as_measured() -> None:
    kept = 5 << 20 if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15) else 0  # 2.15 gives it back
    known = profile(workspace_bytes={"cublas": 5 << 20, "cudnn_dropout": 3 << 20})
    with VirtualGPU("H200", alloc_conf="", profile=known) as gpu:
        left = torch.empty(4, 4, device="cuda")
        _ = left @ left
        del left, _
        assert torch.cuda.memory_allocated() == kept
        assert torch.cuda.max_memory_allocated() >= 5 << 20
        layer = torch.nn.LSTM(4, 4, 2, dropout=0.5, device="cuda")
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            layer(torch.empty(2, 2, 4, device="cuda"))
        assert torch.cuda.memory_allocated() - before == 3 << 20
    assert gpu.run.profile is not None


@pytest.mark.usefixtures("kept_workspaces")
def test_variables_that_set_a_workspace_go_before_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with VirtualGPU("H200", alloc_conf="", profile=profile(workspace_bytes={"cublas": 5 << 20})):
        left = torch.empty(4, 4, device="cuda")
        _ = left @ left
        del left, _
        assert torch.cuda.memory_allocated() == 16 * 8 << 10


def test_reserve_of_a_recurrent_layer_is_as_measured() -> None:
    def peak(known: MeasuredProfile | str) -> tuple[int, int]:
        with VirtualGPU("H200", alloc_conf="", profile=known) as gpu:
            layer = torch.nn.GRU(8, 8, device="cuda")
            kept = layer(torch.empty(5, 3, 8, device="cuda"))
            del kept
        outcome = gpu.run.devices[0]
        sizes = [
            int(size)
            for size, op, tensor in zip(gpu.trace.size, gpu.trace.op, gpu.trace.tensor, strict=True)
            if op >= 0 and gpu.trace.ops[op] == "aten._cudnn_rnn" and tensor >= 0
            if gpu.trace.tensors[tensor].startswith("uint8")
        ]
        return sizes[0], outcome.error_above_bytes

    key = (
        "float32[5,3,8], [float32[24,8], float32[24,8], float32[24], float32[24]], 4, float32[432], "
        "float32[1,3,8], -, 3, 8, 0, 1, F, 0., T, F, [], -"
    )
    usual = MeasuredOp(after=(4096,), reserve=7777)
    estimated, doubt = peak("none")
    assert estimated != 7777
    assert doubt > 0
    assert peak(measured("aten._cudnn_rnn.default", key, usual)) == (7777, 0)


def test_speeds_are_as_measured() -> None:
    def seconds(known: MeasuredProfile | str) -> float:
        with VirtualGPU("H200", alloc_conf="", profile=known) as gpu:
            half = torch.empty(2048, 2048, device="cuda", dtype=torch.bfloat16)
            before = gpu.run.seconds_simulated
            _ = half @ half
            return gpu.run.seconds_simulated - before

    rates = Rates(flops={"bfloat16": 2 * 2048**3 / 1e-3}, bandwidth=1e15, launch_seconds=5e-4)
    assert seconds(profile(rates=rates)) == pytest.approx(1.5e-3)
    assert seconds("none") < 1e-4


def test_a_profile_of_another_torch_is_used_with_a_warning() -> None:
    with VirtualGPU("H200", alloc_conf="", profile=profile()) as usual:
        torch.zeros(4, device="cuda")
    with VirtualGPU("H200", alloc_conf="", profile=profile(torch_version="2.7.1+cu128")) as gpu:
        torch.zeros(4, device="cuda")
    assert "profile-differs" not in [warning.code for warning in usual.run.warnings]
    (warning,) = [warning for warning in gpu.run.warnings if warning.code == "profile-differs"]
    assert "with torch 2.7.1" in warning.message
    assert gpu.run.profile is not None
