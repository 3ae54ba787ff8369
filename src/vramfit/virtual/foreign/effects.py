"""What a kernel that did not run leaves behind: time has passed, and what it wrote has no known values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.roofline import traffic_seconds

NOT_RUN = (
    "kernels that are not torch's were not run: what they write has no values, and what they may take of the card "
    "themselves (Triton's global scratch memory) is not counted"
)


def note_launch(
    mode: OpRunner, name: str, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
) -> None:
    """Note that a kernel would have run.

    Args:
        mode: the virtual GPU.
        name: the kernel's.
        tensors: what it reads and writes.
        written: those that it writes.
    """
    mode.machine.warn("kernel-not-run", NOT_RUN, location=name)
    mode.meter.ops += 1
    seen = list(tensors)
    on_card = [tensor for tensor in seen if tensor.device.type == "cuda"]
    if on_card:
        device = on_card[0].device.index or 0
        moved = sum(tensor.numel() * tensor.element_size() for tensor in on_card)
        seconds = traffic_seconds(moved, mode.machine.devices[device].spec, mode.machine.rates)
        mode.machine.advance(1e6 * seconds, device)
    for tensor in written:
        mode.shadows.forget(tensor)
        mode.meter.expect(tensor, None)


def virtual_tensors(tree: Any) -> list[torch.Tensor]:
    """Fake tensors among nested arguments; those that a descriptor or a view of Triton's wraps, too."""
    if isinstance(tree, FakeTensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in virtual_tensors(item)]
    if isinstance(tree, dict):
        return [tensor for item in tree.values() for tensor in virtual_tensors(item)]
    base = getattr(tree, "base", None)  # triton.runtime.jit.TensorWrapper, triton.tools.tensor_descriptor
    return [base] if isinstance(base, FakeTensor) else []
