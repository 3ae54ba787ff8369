"""The state of random generators, taken and set."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


class RandomState:
    """The state of the generators: the CPU's, and those of the devices that some tensors are on."""

    def __init__(self, cpu: torch.Tensor, devices: list[int], states: list[torch.Tensor], kind: str) -> None:
        self.cpu = cpu
        self.devices = devices
        self.states = states
        self.kind = kind

    @classmethod
    def now(cls, tensors: Iterable[torch.Tensor]) -> RandomState:
        """The present one."""
        tensors = list(tensors)
        kind = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")
        devices, states = get_device_states(*tensors)
        return cls(torch.get_rng_state(), devices, states, kind)

    def set(self) -> None:
        """Make it the present one."""
        torch.set_rng_state(self.cpu)
        if self.kind != "cpu":
            set_device_states(self.devices, self.states, device_type=self.kind)

    def __eq__(self, other: object) -> bool:
        """Whether nothing was drawn between the two."""
        return (
            isinstance(other, RandomState)
            and self.devices == other.devices
            and torch.equal(self.cpu, other.cpu)
            and all(torch.equal(mine, its) for mine, its in zip(self.states, other.states, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]  # states are compared, never looked up
