"""The measuring code on the virtual GPU: it must find what the rules say, block by block."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vramfit.calibrate.cases import Case, Flag, OpFamily, grid
from vramfit.calibrate.measure import CaseMeter
from vramfit.calibrate.predict import PredictingGPU
from vramfit.calibrate.records import BlockKind, Take
from vramfit.gpus.measured_profile import MeasuredOp
from vramfit.virtual import kernels
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.op_call import OpCall

pytestmark = [pytest.mark.torch_versions, pytest.mark.usefixtures("kept_workspaces")]

aten = torch.ops.aten


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


# Ops with temporaries of each kind: before and after results, given back early, one result after the other.
CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "topk": (aten.topk.default, lambda: (_rand(4, 50_257), 5000)),
    "sort": (aten.sort.default, lambda: (_rand(8, 20_000),)),
    "embedding backward": (
        aten.embedding_dense_backward.default,
        lambda: (_rand(5000, 64), torch.arange(5000, device="cuda") % 100, 100, -1, False),
    ),
    "softmax backward": (
        aten._softmax_backward_data.default,
        lambda: (_rand(64, 100), _rand(64, 100), -1, torch.float32),
    ),
    "sum": (aten.sum.default, lambda: (_rand(3_000_000),)),
    "convolution backward": (
        aten.convolution_backward.default,
        lambda: (
            *(_rand(2, 8, 16, 16), _rand(2, 8, 16, 16).contiguous(memory_format=torch.channels_last)),
            *(_rand(8, 8, 3, 3), [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]),
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_measured_temporaries_are_those_of_the_rule(name: str) -> None:
    func, inputs = CALLS[name]
    with VirtualGPU("H200", alloc_conf="", profile="none") as gpu:
        arguments = inputs()
        context = gpu.mode.workspaces.context(0)
        results = func(*arguments)
        rule = kernels.extras(OpCall(func, gpu.mode.ops[func], arguments, {}, results, 0, context))
        records = CaseMeter(0).watch(lambda: func(*arguments))
    assert rule is not None
    assert [record.op for record in records] == [str(func)]
    found = records[0].measured
    assert found.before == _kept(rule.before)
    assert found.after == _kept(rule.after)
    assert found.between == tuple(_kept(sizes) for sizes in rule.between) or not any(rule.between)


def _kept(entries: tuple[int, ...]) -> tuple[int, ...]:
    """Entries without what nobody can see: the order of blocks given back together, and those given back last."""
    found: list[int] = []
    given: list[int] = []
    for entry in entries:
        if entry < 0:
            given.append(int(entry))
        else:
            found += sorted(given, reverse=True)
            given.clear()
            found.append(int(entry))
    return tuple(found)


def _sample(cases: tuple[Case, ...], one_in: int) -> list[Case]:
    return [case for case in cases if zlib.crc32(case.name.encode()) % one_in == 0]


def test_sample_of_the_grid_agrees_with_the_predictions_in_every_block() -> None:
    """Each case is run twice: seen through torch's memory history, and by the virtual GPU's own meter."""
    cases = _sample(grid(), 36)
    with PredictingGPU("H200", alloc_conf="", profile="none") as gpu:
        predicted = [gpu.predict(case) for case in cases]
    with VirtualGPU("H200", alloc_conf="", profile="none"):
        meter = CaseMeter(0)
        measured = [meter.measure(case, timed=False) for case in cases]
    assert len(cases) > 20
    for found, told in zip(measured, predicted, strict=True):
        assert [(op.op, op.signature, op.steps, op.results, op.first) for op in found.ops] == [
            (op.op, op.signature, op.steps, op.results, op.first) for op in told.ops
        ], found.case
        assert found.ops, found.case


def test_time_is_that_of_the_roofline_and_two_events() -> None:
    case = next(case for case in grid([OpFamily.MATMUL]) if case.name == "matmul/mm/4096x4096x4096/fp32")
    with PredictingGPU("H200", alloc_conf="", profile="none") as gpu:
        told = gpu.predict(case).seconds
    with VirtualGPU("H200", alloc_conf="", profile="none"):
        found = CaseMeter(0).measure(case).seconds
    assert found == pytest.approx(told, abs=2.1e-6)


def test_first_run_is_recorded_where_a_library_searches() -> None:
    case = next(
        case for case in grid([OpFamily.CONVOLUTION]) if Flag.SEARCHES in case.flags and "bf16" in case.name
    )
    with VirtualGPU("RTX 4090", alloc_conf="", profile="none"):
        record = CaseMeter(0).measure(case, timed=False)
    convolution = record.ops[0]
    assert convolution.op == "aten.convolution.default"
    assert convolution.first is not None
    assert convolution.first != convolution.steps


def test_workspace_of_the_first_product_is_kept_and_no_temporary() -> None:
    with VirtualGPU("H200", alloc_conf="", profile="none"):
        left = _rand(64, 64)
        (record,) = CaseMeter(0).watch(lambda: left @ left)
    takes = [step for step in record.steps if isinstance(step, Take)]
    assert [take.kind for take in takes] == [BlockKind.RESULT, BlockKind.KEPT]
    assert takes[0].nbytes == 64 * 64 * 4
    assert record.measured == MeasuredOp()


def test_ops_of_the_backward_thread_are_seen_in_order() -> None:
    with VirtualGPU("H200", alloc_conf="", profile="none"):
        source = _rand(64, 100).requires_grad_()

        def run() -> object:
            return torch.autograd.grad(F.log_softmax(source, 1).sum(), source)

        run()
        ops = [record.op for record in CaseMeter(0).watch(run)]
    assert ops == [
        "aten._log_softmax.default",
        "aten.sum.default",
        "aten.ones_like.default",
        "aten._log_softmax_backward_data.default",
    ]
