"""What is described without FakeTensorMode's preparations is what FakeTensorMode describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._library import simple_registry
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.virtual import describe
from vramfit.virtual.describe import recipe_of
from vramfit.virtual.gpu import VirtualGPU

aten = torch.ops.aten
Call = tuple[torch._ops.OpOverload, tuple[Any, ...]]


def calls() -> list[Call]:
    """Ops of programs on tensors of many shapes, strides and types."""
    found: list[Call] = []
    for shape in ((1, 3, 8), (2, 1, 5), (4, 6, 7), (1, 1, 1)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            x = torch.zeros(shape, dtype=dtype, device="cuda")
            turned = torch.zeros(shape[::-1], dtype=dtype, device="cuda").permute(2, 1, 0)
            for a in (x, turned, x.transpose(0, 1), x[:, :, ::2], x[:1].expand(3, -1, -1)):
                found += _views(a)
                found += [(aten.add.Tensor, (a, 2)), (aten.add.Tensor, (a, 2.5)), (aten.mul.Tensor, (a, a))]
                found += [
                    (aten.eq.Scalar, (a, 1)),
                    (aten.lt.Tensor, (a, a[:, :1])),
                    (aten.cat.default, ([a, a], -2)),
                ]
                found += [(aten.cat.default, ([a, a.half()], 0)), (aten.isin.Tensor_Tensor, (a, a[0, 0]))]
                found += [(aten.clone.default, (a,)), (aten.neg.default, (a,)), (aten.cos.default, (a,))]
                found += [
                    (aten.mean.dim, (a, [-1], True)),
                    (aten.sum.dim_IntList, (a, [0])),
                    (aten.any.dim, (a, -1)),
                ]
                found += [(aten._softmax.default, (a, -1, False)), (aten.bmm.default, (a, a.transpose(1, 2)))]
                found += [
                    (aten.mm.default, (a[0], a[0].t())),
                    (aten.addmm.default, (a[0, 0], a[0].t(), a[0])),
                ]
                found += [
                    (aten.topk.default, (a, 1)),
                    (aten.where.self, (a != 0, a, a[:1])),
                    (aten.rsqrt.default, (a,)),
                ]
                found += [
                    (aten.index_select.default, (a, 0, torch.zeros(4, dtype=torch.long, device="cuda")))
                ]
                found += [
                    (aten.embedding.default, (a[0], torch.zeros(2, 3, dtype=torch.long, device="cuda")))
                ]
    return found


def _views(a: torch.Tensor) -> list[Call]:
    found: list[Call] = [
        (aten.slice.Tensor, (a, axis, start, end, step))
        for axis in (0, -1)
        for start, end, step in ((0, 2, 1), (1, 1 << 62, 1), (-2, -1, 1), (0, 9, 3), (None, None, 1))
    ]
    found += [(aten.view.default, (a, sizes)) for sizes in ([a.numel()], [-1, a.shape[-1]], list(a.shape))]
    found += [(aten.select.int, (a, 0, 0)), (aten.select.int, (a, -1, -1)), (aten.unsqueeze.default, (a, 1))]
    found += [(aten.expand.default, (a[None], [2, -1, -1, -1])), (aten.transpose.int, (a, 0, -1))]
    found += [
        (aten.permute.default, (a, [2, 0, 1])),
        (aten.squeeze.dim, (a, 0)),
        (aten.squeeze.dims, (a, [0, 1])),
    ]
    found += [(aten.squeeze.default, (a,)), (aten.t.default, (a[0],)), (aten._unsafe_view.default, (a, [-1]))]
    return found


@pytest.fixture(scope="module")
def gpu() -> Iterator[VirtualGPU]:
    with VirtualGPU("RTX 4090", profile="none") as gpu:
        yield gpu


def test_the_same_as_by_fake_tensor_mode(gpu: VirtualGPU) -> None:
    mode, agreed, ops = gpu.mode.fake, 0, set()
    differ: list[Any] = []
    for func, args in calls():
        if not describe.is_plain(func):
            continue
        tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, FakeTensor)]
        with torch.utils._python_dispatch._disable_current_modes():
            found = describe.described(func, args, {}, tensors, mode)
            if found is None:
                continue
            expected = recipe_of(mode.dispatch(func, (), args, {}), tensors)
        if recipe_of(found[1], tensors, found[0]) != expected:
            differ.append((func, recipe_of(found[1], tensors, found[0]), expected))
        agreed += 1
        ops.add(func)
    assert not differ
    assert agreed > 2000 and len(ops) > 20, "most calls are described at once"
    assert {aten.cat.default, aten.add.Tensor, aten.slice.Tensor, aten.mm.default} <= ops


def test_what_is_not_plain_is_left_alone(gpu: VirtualGPU) -> None:
    for func in (aten.nonzero.default, aten._to_copy.default, aten.empty.memory_format, aten.add_.Tensor):
        assert not describe.is_plain(func)
    x, host = torch.zeros(4, device="cuda"), torch.zeros(())
    assert (x + host).device.type == "cuda", "a number on the host among its arguments"
    with pytest.raises(RuntimeError, match="broadcast"):
        x + torch.zeros(3, device="cuda")


def test_rules_of_other_classes_are_found(gpu: VirtualGPU) -> None:
    class Other(torch.Tensor):
        pass

    def rule() -> None: ...

    rules = simple_registry.singleton.find(aten.add.Tensor.__qualname__).torch_dispatch_rules
    handle = rules.register(Other, rule)
    try:
        assert simple_registry.find_torch_dispatch_rule(aten.add.Tensor, Other) is rule
        assert simple_registry.find_torch_dispatch_rule(aten.add.Tensor, type(gpu.mode)) is None
    finally:
        handle.destroy()
