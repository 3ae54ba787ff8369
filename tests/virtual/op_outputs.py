"""A program: runs torch's own sample inputs of every op on the CPU and on the virtual GPU, and prints what differs.

Forward and, where an op has a derivative, backward; for real, integer and complex numbers. torch's test
helpers freeze global settings when they are imported, and a backward pass on the CPU must not come before the virtual
GPU's, so the CPU's results are computed in a fork, before there is a virtual GPU.

    python op_outputs.py            prints one JSON object
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import traceback
import types
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES_PER_OP = {"float32": 2, "int64": 1, "complex64": 1}


def import_op_db() -> list[Any]:
    """torch's table of ops; its helpers want a package that only their own tests use."""
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def cases() -> list[tuple[str, Any, Any, bool]]:
    """Name, op, sample and whether to differentiate, in an order that every process repeats."""
    import torch

    found = []
    for op in import_op_db():
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        for type_name, count in SAMPLES_PER_OP.items():
            dtype = getattr(torch, type_name)
            if dtype not in op.dtypes:
                continue
            differentiable = op.supports_autograd and dtype in op.backward_dtypes
            grad = differentiable and (dtype.is_floating_point or dtype.is_complex)
            torch.manual_seed(0)
            try:
                samples = op.sample_inputs("cpu", dtype, requires_grad=grad)
                for _, sample in zip(range(count), samples, strict=False):
                    found.append((f"{name}/{type_name}", op, sample, grad))
            except (RuntimeError, ValueError):
                continue  # this build cannot make its samples (LAPACK, MKL)
    return found


def facts(out: Any) -> list[list[Any]]:
    """Shape, type, strides and bytes of each dense tensor among some results."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [
        [list(t.shape), str(t.dtype), list(t.stride()), t.untyped_storage().nbytes()]
        for t in tree_leaves(out)
        if isinstance(t, torch.Tensor) and t.layout is torch.strided
    ]


def run(op: Any, sample: Any, device: str, grad: bool) -> tuple[Any, Any]:
    """What an op's results, and the gradients of its inputs, look like on a device."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        copy = x.detach().clone() if device == "cpu" else x.detach().to(device)
        return copy.requires_grad_(x.requires_grad)

    args, kwargs = tree_map(moved, (sample.input, *sample.args)), tree_map(moved, sample.kwargs)
    out = op.op(*args, **kwargs)
    results = facts(out)
    outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not (grad and outputs and inputs):
        return results, None
    total = sum((t.abs() if t.is_complex() else t).sum() for t in outputs)
    return results, facts(torch.autograd.grad(total, inputs, allow_unused=True))  # type: ignore[arg-type]


def on_the_cpu(samples: list[tuple[str, Any, Any, bool]], path: Path) -> None:
    """Write the results of every case, None where the CPU has no such op."""
    import torch

    found: list[Any] = []
    for _, op, sample, grad in samples:
        torch.manual_seed(0)
        try:
            found.append(run(op, sample, "cpu", grad))
        except (RuntimeError, AssertionError, TypeError, ValueError):
            found.append(None)
    path.write_bytes(pickle.dumps(found))


def in_a_fork(work: Callable[[], None]) -> None:
    """Do it in a fork of this process, which goes on untouched; raises if it fails."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the results of the CPU ended with status {status}")


def main() -> None:
    """Print one JSON object."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    samples = cases()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cpu.pickle"
        in_a_fork(lambda: on_the_cpu(samples, file))
        real = pickle.loads(file.read_bytes())  # our own, written a moment ago

    from vramfit.virtual.gpu import VirtualGPU

    compared, gradients = 0, 0
    errors: dict[str, str] = {}
    different: dict[str, Any] = {}
    with VirtualGPU("RTX 4090", alloc_conf=""):
        for (name, op, sample, grad), expected in zip(samples, real, strict=True):
            if expected is None:
                continue
            try:
                virtual = run(op, sample, "cuda", grad)
            except Exception as error:
                errors.setdefault(name, f"{type(error).__name__}: {error}"[:300])
                continue
            compared += 1
            gradients += expected[1] is not None
            for which, part in enumerate(("", " backward")):
                if virtual[which] != expected[which]:
                    different.setdefault(name + part, [expected[which], virtual[which]])
    print(
        json.dumps({"compared": compared, "gradients": gradients, "errors": errors, "different": different})
    )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
