"""Where copies of a step's tensors go: to their device while they are few, else to the host."""

from __future__ import annotations

import torch

from vramfit.runtime.oom_forms import recognised
from vramfit.training_state.tensor_values import on_the_host, where_it_is

ON_DEVICE = 1 << 20
"""Bytes of copies that stay on the device, where they take no time; more would be seen at the peak."""


class FirstOnDevice:
    """Copies the first `ON_DEVICE` bytes to the tensors' own device, and the others to the host."""

    def __init__(self) -> None:
        self._left = ON_DEVICE

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor's values."""
        self._left -= tensor.nbytes
        on_device = self._left >= 0 or tensor.device.type == "cpu"
        return copied(tensor) if on_device else on_the_host(tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the tensor's device, or on the host where there is no room.

    Raises:
        BaseException: the host has none either, or it is no shortage.
    """
    with torch.no_grad():
        try:
            return where_it_is(tensor)
        except BaseException as error:
            if tensor.device.type == "cpu" or recognised(error) is None:
                raise
        return tensor.detach().cpu()
