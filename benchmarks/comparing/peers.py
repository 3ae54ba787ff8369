"""Asks the other tools about one program, in a process of its own; run by `predictions`, one JSON line per tool.

    python peers.py configuration NAME
    python peers.py published NAME

The program is built and run under `FakeTensorMode`, as MemTracker's documentation has it, on a torch that takes itself
to have a card, so that autocast and the like act as there. GradScaler is switched off: its questions about values have
no answer on fake tensors. accelerate's own calculation, which its command applies to models of the Hub, is applied to
the model at hand.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configurations import ALL
from configurations.catalogue import Precision
from configurations.training import Program, parameters_of

from comparing import formula
from comparing.published import REPRODUCED
from comparing.rows import Tool

ACCELERATE_NAMES = {
    Precision.FP32: "float32",
    Precision.TF32: "float32",
    Precision.BF16: "bfloat16",
    Precision.FP16: "float16",
    Precision.BF16_WEIGHTS: "bfloat16",
    Precision.FP16_WEIGHTS: "float16",
}


def pretend_card() -> None:
    """Let torch take itself to have a CUDA card that is never touched. For a process that ends soon."""
    if not torch.cuda.is_available():
        from vramfit.torch_internals import build_shim

        build_shim.install()  # without it a CPU build aborts in the backward pass of fake cuda tensors
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda._lazy_init = lambda: None
    fake_tensor.init_gpu_context = lambda *_: None
    nn.Module._apply = convert  # torch swaps tensors there, which fake ones do not allow
    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = lambda device, **_: scaler(device, enabled=False)


def convert(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``Module._apply`` with new parameters in the place of the old ones; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules() if recurse else (module,):
        for name, old in part._parameters.items():
            if old is not None:
                part._parameters[name] = made.setdefault(
                    id(old), nn.Parameter(change(old.detach()), requires_grad=old.requires_grad)
                )
        for name, buffer in part._buffers.items():
            if buffer is not None:
                buffer.constant = None  # a known value is moved for real, which needs a card
                part._buffers[name] = change(buffer)
        if part is not module and isinstance(part, nn.RNNBase):
            part._init_flat_weights()
    return module


def by_formula(program: Program, row: Any) -> int:
    """Bytes per parameter."""
    parameters = parameters_of(program.models)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return formula.predicted_bytes(sum(p.numel() for p in parameters), trained, row.precision, row.optimizer)


def by_accelerate(program: Program, row: Any) -> int:
    """What ``accelerate estimate-memory`` shows: "Training using Adam", or "Total Size" for inference."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    dtype = ACCELERATE_NAMES[row.precision]
    # The command builds models in float32.
    total = sum(calculate_maximum_sizes(model.float())[0] for model in program.models)
    if row.optimizer is None:
        return int(total / (1 if dtype == "float32" else 2))
    return max(estimate_training_usage(total, dtype).values())


def by_mem_tracker(program: Program, steps: int) -> int:
    """Peak of torch's MemTracker over some steps."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(*program.models, *program.optimizers)
    with tracker:
        for _ in range(steps):
            program.step()
            tracker.reset_mod_stats()
    snapshot = tracker.get_tracker_snapshot("peak")
    return next(int(figures["Total"]) for device, figures in snapshot.items() if device.type == "cuda")


def tell(tool: Tool, ask: Callable[[], int]) -> None:
    """Print what a tool says, or why it says nothing."""
    began = time.perf_counter()
    try:
        told: dict[str, Any] = {"bytes": ask()}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        told = {"reason": f"{type(error).__name__}: {lines[0]}"[:160]}
    print(json.dumps({"tool": tool.value, "seconds": time.perf_counter() - began, **told}), flush=True)


def main(kind: str, name: str) -> None:
    """Ask every tool about one program, the quick ones first."""
    row = REPRODUCED[name] if kind == "published" else ALL[name]
    pretend_card()
    with FakeTensorMode(allow_non_fake_inputs=True):
        program = row.load()
        tell(Tool.FORMULA, lambda: by_formula(program, row))
    # MemTracker wants a model that nobody has converted since.
    with FakeTensorMode(allow_non_fake_inputs=True):
        tell(Tool.MEM_TRACKER, lambda: by_mem_tracker(row.load(), getattr(row, "steps", 1)))
        tell(Tool.ACCELERATE, lambda: by_accelerate(program, row))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    import os

    os._exit(0)  # autograd's threads outlive the interpreter
