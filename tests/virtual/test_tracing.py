"""Tracing runs a module once for its memory, and what comes back runs the module."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from vramfit.virtual.gpu import VirtualGPU


class Shaped(nn.Module):
    """Asks for sizes, which a tracer would make tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8 * 6 * 6, 4)
        self.runs = 0
        self.trained: list[bool] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.runs += 1
        self.trained.append(self.training)
        out: torch.Tensor = self.head(self.conv(x).relu().view(x.size(0), -1)) * scale
        return out


def codes(gpu: VirtualGPU) -> list[str]:
    return [warning.code for warning in gpu.run.warnings]


def test_a_traced_module_runs_the_module_with_its_own_parameters(gpu: VirtualGPU) -> None:
    model, x = Shaped().cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    model(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x)
    needed = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    traced = torch.jit.trace(model, x)
    assert model.runs == 3 and torch.cuda.max_memory_allocated() - before == needed
    assert torch.cuda.memory_allocated() == before

    assert [name for name, _ in traced.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(traced.parameters(), model.parameters(), strict=True))
    traced.eval()(x).sum().backward()
    assert model.trained == [True, True, True, False] and model.head.weight.grad is not None
    assert traced.state_dict().keys() == model.state_dict().keys()

    file = io.BytesIO()
    torch.jit.freeze(traced).save(file)
    assert not file.getvalue() and codes(gpu).count("no-graph") == 2


def test_functions_keywords_and_methods_are_traced(gpu: VirtualGPU) -> None:
    x = torch.ones(4, device="cuda")
    double = torch.jit.trace(lambda a: a.view(a.size(0), 1) * 2, (x,))
    assert double(torch.ones(3, device="cuda")).shape == (3, 1)
    model, image = Shaped().cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    assert torch.jit.trace(model, example_kwarg_inputs={"x": image, "scale": 2.0})(image).shape == (2, 4)
    assert torch.jit.trace_module(model, {"forward": (image,)})(image).shape == (2, 4)
    with pytest.raises(RuntimeError, match="example_inputs"):
        torch.jit.trace(model)


def test_tensorboard_s_graph_is_the_model_run_once(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # TensorBoard is not a dependency: its module's name counts, and that its own method is not called.
    package = tmp_path / "tensorboardX"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "writer.py").write_text("class SummaryWriter:\n    add_graph = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        writer = importlib.import_module("tensorboardX.writer").SummaryWriter()
        model = Shaped().cuda()
        writer.add_graph(model, torch.randn(2, 3, 8, 8, device="cuda"))
        assert model.trained == [False] and model.training
        writer.add_graph(model)
        assert model.runs == 1 and codes(gpu) == ["no-graph"] * 2
    finally:
        for name in ("tensorboardX.writer", "tensorboardX"):
            sys.modules.pop(name, None)


def test_onnx_is_said_not_to_be_written(gpu: VirtualGPU) -> None:
    model, image = Shaped().cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    file = io.BytesIO()
    torch.onnx.export(model, (image, {"scale": 2.0}), file, dynamo=False)
    assert model.trained == [False] and not file.getvalue() and codes(gpu) == ["no-graph"]
    with pytest.raises(NotImplementedError, match="no ONNX program"):
        torch.onnx.export(model, (image,))


def test_tracing_is_torch_s_own_afterwards() -> None:
    before = (torch.jit.trace, torch.jit.trace_module, torch.jit.freeze, torch.onnx.export)
    with VirtualGPU("RTX 4090"):
        assert torch.jit.trace is not before[0]
    assert (torch.jit.trace, torch.jit.trace_module, torch.jit.freeze, torch.onnx.export) == before
