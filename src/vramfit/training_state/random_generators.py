"""Random generators: their states, read and set again."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorState:
    """The state of a generator at one moment: of torch, Python or NumPy."""

    value: Any

    @classmethod
    def of(cls, generator: Any) -> GeneratorState:
        """The state now."""
        return cls(state_of(generator))

    def restore(self, generator: Any) -> None:
        """Set it again."""
        set_state(generator, self.value)

    def same(self, other: GeneratorState) -> bool:
        """Whether another moment had it too."""
        return same_states(self.value, other.value)


@dataclass(frozen=True, kw_only=True)
class GeneratorStates:
    """States of the generators that a step draws from: torch's, Python's, NumPy's, and some of the step's own."""

    cpu: torch.Tensor
    device: tuple[torch.device, torch.Tensor] | None
    python: Any
    numpy: Any
    own: tuple[tuple[Any, GeneratorState], ...] = ()

    @classmethod
    def of(cls, device: torch.device, own: Sequence[Any] = ()) -> GeneratorStates:
        """The states now.

        Args:
            device: where the step computes.
            own: generators beside the global ones, see `is_generator`.
        """
        numpy = sys.modules.get("numpy")
        module = None if device.type == "cpu" else torch.get_device_module(device)
        return cls(
            cpu=torch.get_rng_state(),
            device=None if module is None else (device, module.get_rng_state(device)),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
            own=tuple((generator, GeneratorState.of(generator)) for generator in own),
        )

    def restore(self) -> None:
        """Set them again."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            device, state = self.device
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for generator, own in self.own:
            own.restore(generator)

    def host_moved(self) -> bool:
        """Whether Python's or NumPy's generator or one of the step's own has drawn since."""
        if random.getstate() != self.python:
            return True
        if self.numpy is not None:
            now = sys.modules["numpy"].random.get_state()
            if any(not same_states(one, other) for one, other in zip(self.numpy, now, strict=True)):
                return True
        return any(not state.same(GeneratorState.of(generator)) for generator, state in self.own)


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator whose state can be read and set."""
    if isinstance(value, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def state_of(generator: Any) -> Any:
    """A generator's state."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def set_state(generator: Any, state: Any) -> None:
    """Give a generator a state that it had."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def same_states(one: Any, other: Any) -> bool:
    """Whether two states of a generator are equal; some hold tensors or arrays."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same_states, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same_states(value, other[name]) for name, value in one.items()
        )
    if hasattr(one, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)
