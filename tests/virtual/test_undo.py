"""On leaving, torch is what it was; and entering is refused where it could not work."""

from __future__ import annotations

import copy
import ctypes
import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import warm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from vramfit.errors import EnvironmentUnfitError, UnknownGpuError
from vramfit.torch_internals import build_check, build_shim, cuda_hooks, device_guards
from vramfit.torch_internals.torch_libraries import put
from vramfit.trace.journal import TraceJournal
from vramfit.virtual import gpu as gpu_module
from vramfit.virtual import ranks, torch_cuda
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.mode import VirtualMode

# Submodules of these are all looked at.
PACKAGES = ("torch", "safetensors")
CLASSES = (
    torch.Tensor,
    torch.UntypedStorage,
    torch.TypedStorage,
    torch.Generator,
    nn.Module,
    nn.Parameter,
    nn.Sequential,
    nn.MultiheadAttention,
    nn.LSTM,
    nn.RNNBase,
    FakeTensor,
    torch.optim.Optimizer,
    torch.optim.AdamW,
    torch.autocast,
    torch.amp.GradScaler,
    torch.autograd.Function,
    torch.utils.data.DataLoader,
    threading.Thread,
)
# Loaded with the compiler.
LATE = (
    ("torch._dynamo.convert_frame", "CatchErrorsWrapper"),
    ("torch._dynamo.guards", "CheckFunctionManager"),
    ("torch._dynamo.variables.optimizer", "OptimizerVariable"),
    ("torch._inductor.graph", "GraphLowering"),
    ("torch._inductor.async_compile", "AsyncCompile"),
    ("torch._inductor.fx_passes.joint_graph", "UniformValueConstantFolder"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
)
CONTAINERS: tuple[tuple[str, str], ...] = (
    ("torch.utils._foreach_utils", "_foreach_supported_types"),
    ("torch.optim.optimizer", "_foreach_supported_types"),
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
    ("torch.serialization", "_package_registry"),
    ("torch.cuda", "_queued_calls"),
    ("torch.nn.modules.module", "_global_forward_hooks"),
    ("torch.nn.modules.module", "_global_forward_pre_hooks"),
)
# Counters that torch itself advances; they hold no patch.
EXPECTED = {
    ("torch._subclasses.meta_utils", "DESCRIBER_NEXT_ID"),
    ("torch._subclasses.fake_tensor.FakeTensorMode", "cache_hits"),
    ("torch._subclasses.fake_tensor.FakeTensorMode", "cache_misses"),
}
# The compiler keeps records of what it did; patches of it are functions and classes.
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._higher_order_ops", "torch.fx")


def fingerprint() -> dict[tuple[str, str], Any]:
    """Every attribute of every torch module and watched class, and the contents of its registries."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and path.partition(".")[0] in PACKAGES:
            found.update({(path, name): value for name, value in vars(module).items()})
    for cls in (*CLASSES, *(getattr(sys.modules[path], name) for path, name in LATE if path in sys.modules)):
        found.update({(f"{cls.__module__}.{cls.__qualname__}", n): v for n, v in vars(cls).items()})
    for path, name in CONTAINERS:
        found[path, f"{name}[:]"] = [*vars(sys.modules[path])[name]]
    return found


def differences(
    before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]
) -> set[tuple[str, str]]:
    def same(one: Any, other: Any) -> bool:
        if one is other:
            return True
        plain = (bool, int, float, str, tuple, list, type(None))
        return type(one) is type(other) and isinstance(one, plain) and bool(one == other)

    def record(path: str, name: str, *values: Any) -> bool:
        # Dynamo puts each compiled function among the globals of its frame, and takes it away when collected.
        made = name.startswith("__compiled_fn_")
        return path.startswith(COMPILER) and (made or not any(map(callable, values)))

    missing = object()
    return {
        key
        for key in before.keys() | after.keys()
        if not same(before.get(key, missing), after.get(key, missing))
        and not record(*key, before.get(key), after.get(key))
    }


def use_much() -> None:
    """Touch what the patches stand for."""
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(4, 8, device="cuda")).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    copy.deepcopy(model)
    torch.compile(model)(torch.ones(1, 8, device="cuda"))
    query = torch.randn(1, 2, 4, 8, device="cuda", requires_grad=True)
    F.scaled_dot_product_attention(query, query, query).sum().backward()
    nn.LSTM(4, 4).cuda()(torch.randn(2, 1, 4, device="cuda"))[0].sum().backward()
    torch.cuda.Stream(), torch.cuda.Event(), torch.Generator("cuda"), torch.cuda.memory_summary()
    thread = threading.Thread(target=lambda: torch.ones(1, device="cuda").item())
    thread.start()
    thread.join()


def registered(op: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA"))


OPS = ("aten::silu_backward", "aten::mish_backward", "aten::_fused_rms_norm", "aten::add.Tensor", "aten::mm")


def test_leaving_undoes_every_patch() -> None:
    for module in ("torch.cuda.comm", "torch.distributed", "torch.nn.attention", "safetensors.torch"):
        importlib.import_module(module)
    with VirtualGPU("RTX 4090"):  # what torch imports or caches lazily is there from now on
        use_much()
    kernels = [registered(op) for op in OPS]
    before = fingerprint()
    with VirtualGPU("RTX 4090"):
        inside = differences(before, fingerprint())
        assert len(inside) > 100, "the fingerprint sees the patches"
        for known in (
            ("torch", "save"),
            ("torch.cuda", "is_available"),
            ("torch.nn.modules.module.Module", "_apply"),
        ):
            assert known in inside or known == ("torch.cuda", "is_available")
        use_much()
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.get_default_dtype() is torch.float32
    assert differences(before, fingerprint()) - EXPECTED == set()
    assert [registered(op) for op in OPS] == kernels


def test_placeholder_kernels_are_registered_only_inside() -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("a CUDA build has kernels of its own")
    assert not registered("aten::silu_backward")
    with VirtualGPU("RTX 4090"):
        assert registered("aten::silu_backward")
    assert not registered("aten::silu_backward")


def test_leaving_by_an_error_undoes_too() -> None:
    save, call = torch.save, nn.Module.__call__
    with pytest.raises(ZeroDivisionError), VirtualGPU("RTX 4090"):
        assert torch.save is not save
        raise ZeroDivisionError
    assert torch.save is save and nn.Module.__call__ is call
    assert not torch.cuda.is_available() or torch.backends.cuda.is_built()


def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError("it fails here")


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (build_check, "self_check"),
        (gpu_module, "exclusive_counts"),
        (torch_cuda, "install"),
        (ranks, "install"),
        (VirtualMode, "__enter__"),
        (TraceJournal, "facts"),
    ],
)
def test_a_failed_start_leaves_nothing(
    where: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with VirtualGPU("RTX 4090"):
        pass
    before, taken_back = fingerprint(), []
    uninstall = build_shim.uninstall
    with monkeypatch.context() as broken:
        broken.setattr(build_shim, "uninstall", lambda: taken_back.append(uninstall()))
        broken.setattr(where, name, fail)
        with (
            pytest.raises(ZeroDivisionError, match="it fails here"),
            VirtualGPU("RTX 4090", journal=tmp_path / "j"),
        ):
            pass
    assert len(taken_back) == 1, "a CUDA build has its own guard and hooks again"
    assert differences(before, fingerprint()) - EXPECTED == set()
    assert not _get_current_dispatch_mode_stack()
    with VirtualGPU("RTX 4090") as gpu:
        torch.zeros(1000, device="cuda")
    assert gpu.peak_allocated_bytes == 4096, "and the next start is none the worse"


def test_leaving_undoes_even_where_the_results_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with VirtualGPU("RTX 4090"):
        pass
    before, taken_back = fingerprint(), []
    uninstall = build_shim.uninstall
    monkeypatch.setattr(build_shim, "uninstall", lambda: taken_back.append(uninstall()))
    monkeypatch.setattr(VirtualGPU, "_outcome", fail)
    with pytest.raises(ZeroDivisionError, match="it fails here"), VirtualGPU("RTX 4090"):
        torch.zeros(1000, device="cuda")
    assert len(taken_back) == 1
    assert differences(before, fingerprint()) - EXPECTED == set()
    assert not _get_current_dispatch_mode_stack()


def test_half_a_shim_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pointer = ctypes.c_void_p(7)

    def no_hooks() -> None:
        raise ValueError("undefined symbol")

    monkeypatch.setattr(build_shim, "_undo", None)
    monkeypatch.setattr(device_guards, "install", lambda: put(pointer, 8))
    monkeypatch.setattr(cuda_hooks, "install", no_hooks)
    with pytest.raises(EnvironmentUnfitError, match="does not export"):
        build_shim.install()
    assert pointer.value == 7 and build_shim._undo is None


def test_the_host_works_as_ever_afterwards() -> None:
    with VirtualGPU("RTX 4090"):
        use_much()
    layer = nn.Linear(3, 2)
    assert type(layer.weight.data) is torch.Tensor and layer.weight.device.type == "cpu"
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[1.0] * 3] * 2
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1).cuda()
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(torch.ones(2).sum().item()))
    thread.start()
    thread.join()
    assert results == [2.0]


def test_entering_twice_is_refused_and_again_is_not() -> None:
    gpu = VirtualGPU("RTX 4090")
    with gpu:
        first = torch.zeros(1000, device="cuda").data_ptr()
        with pytest.raises(EnvironmentUnfitError, match="active already"), VirtualGPU("RTX 4090"):
            pass
        assert torch.cuda.is_available(), "the outer one is untouched"
    with VirtualGPU("RTX 3090"):
        assert torch.cuda.get_device_name() == "NVIDIA GeForce RTX 3090"
        assert torch.cuda.memory_allocated() == 0
        assert torch.zeros(1000, device="cuda").data_ptr() == first, (
            "a card of its own, with the same addresses"
        )
    assert gpu.peak_allocated_bytes == 4096, "the results of the first stay"


def test_an_unknown_card_changes_nothing() -> None:
    before = torch.save
    with pytest.raises(UnknownGpuError, match="RTX 4090"):
        VirtualGPU("RTX 4091")
    assert torch.save is before


def test_an_interpreter_that_ran_a_backward_is_refused_and_points_to_the_child() -> None:
    program = """
import torch
weight = torch.ones(2, requires_grad=True)
(weight * 2).sum().backward()
import vramfit
from vramfit.errors import EnvironmentUnfitError
try:
    with vramfit.VirtualGPU("RTX 4090"):
        print("entered")
except EnvironmentUnfitError as error:
    print("refused:", error, "| code", error.exit_code)
    print(torch.cuda.is_available(), (weight * 3).sum().backward(), weight.grad.tolist())
import os, sys
sys.stdout.flush()
os._exit(0)
"""
    done = warm.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "entered" not in done.stdout
    assert "vramfit.run(...)" in done.stdout and "`vramfit run`" in done.stdout and "| code 2" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("[5.0, 5.0]"), "the host's autograd still works"
