"""Random generators of virtual devices.

NOTE [How a generator of a virtual device is told from others]
A CPU build cannot make a CUDA generator, and torch's argument parser takes nothing but a
`torch.Generator`. So a `VirtualGenerator` *is* a CPU generator underneath, with the state of a CUDA one (a
Philox seed and offset) kept in Python. On its way through the dispatcher torch wraps the same C++
generator into a fresh Python object, which says ``device='cpu'``: `virtual_generator` finds the original
by the address of the C++ generator. The CPU generator underneath serves the small values that are really
computed: `VirtualGenerator.draw` seeds it from (seed, offset), so that the same state always gives the
same values, as on a card.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import weakref
from typing import Any, cast

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals.dispatch import disable_current_modes
from vramfit.virtual.machine import DEFAULT_SEED, PhiloxState
from vramfit.virtual.torch_cuda.base import C, installed_machine, invalid_device

_CpuGenerator: Any = C.Generator
_STATE = struct.Struct("<Qq")  # ATen/cuda/CUDAGeneratorImpl.cpp, get_state: seed and offset, 8 bytes each
_SEED_ONLY_BYTES = 8
_UINT64 = (1 << 64) - 1


def _signed(number: int) -> int:
    """The bits of an unsigned number of 64 bits as a signed one's."""
    return number - (1 << 64) if number >> 63 else number


_by_address: weakref.WeakValueDictionary[int, VirtualGenerator] = weakref.WeakValueDictionary()


class VirtualGenerator(_CpuGenerator):  # type: ignore[misc]
    """A generator of a virtual device.

    Args:
        device: number of the device.
        state: the state it works on; a fresh one by default.
    """

    philox: PhiloxState

    def __new__(cls, device: int = 0, state: PhiloxState | None = None) -> VirtualGenerator:
        """Make the CPU generator underneath and register its address."""
        self: VirtualGenerator = _CpuGenerator.__new__(cls, "cpu")
        self._index = device
        self.philox = PhiloxState() if state is None else state
        _by_address[self._cdata] = self
        return self

    def __init__(self, device: int = 0, state: PhiloxState | None = None) -> None:
        pass  # the C base class would refuse our arguments

    @property
    def device(self) -> torch.device:
        """The device it belongs to."""
        return torch.device("cuda", self._index)

    def manual_seed(self, seed: int) -> VirtualGenerator:
        """Set the seed and go back to the start of its sequence."""
        self.philox.seed = int(seed) & _UINT64
        self.philox.offset = 0
        return self

    def seed(self) -> int:
        """Set a seed that nobody can foresee, and return it."""
        seed = secrets.randbits(53)  # c10/core/GeneratorImpl.cpp, getNonDeterministicRandom
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        """The seed."""
        return self.philox.seed

    def get_offset(self) -> int:
        """How much of the sequence has been consumed."""
        return self.philox.offset

    def set_offset(self, offset: int) -> None:
        """Go to a place of the sequence.

        Raises:
            RuntimeError: the offset is not a multiple of 4.
        """
        if offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        self.philox.offset = int(offset)

    def philox_state(self, increment: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Reserve numbers, and tell where they begin: seed, offset and offset within a graph (since 2.14).

        All of them on the CPU: a graph is captured by running it, so that its numbers are those of outside.

        Raises:
            ValueError: the increment is negative.
        """
        if increment < 0:
            raise ValueError("philox_state increment must be non-negative")
        seed, offset = (_signed(number) for number in (self.philox.seed, self.philox.offset))
        self.philox.offset += (increment + 3) // 4 * 4
        with disable_current_modes():
            begin, at, within = (torch.tensor([number]) for number in (seed, offset, 0))
        return begin, at, within

    def get_state(self) -> torch.Tensor:
        """Seed and offset as 16 bytes on the CPU."""
        packed = bytearray(_STATE.pack(self.philox.seed, self.philox.offset))
        with disable_current_modes():  # the state is a real tensor, whatever mode the program runs under
            return torch.frombuffer(packed, dtype=torch.uint8).clone()

    def set_state(self, new_state: torch.Tensor) -> VirtualGenerator:
        """Take over the bytes that `get_state` gave; without an offset the sequence starts anew.

        Raises:
            RuntimeError: the state has the wrong size.
            TypeError: it is not a tensor of bytes on the CPU.
        """
        if new_state.dtype is not torch.uint8 or new_state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        packed = bytes(new_state.tolist())
        if len(packed) == _SEED_ONLY_BYTES:
            packed += bytes(_SEED_ONLY_BYTES)
        if len(packed) != _STATE.size:
            raise RuntimeError("RNG state is wrong size")
        self.philox.seed, self.philox.offset = _STATE.unpack(packed)
        return self

    def clone_state(self) -> VirtualGenerator:
        """A separate generator with the same state."""
        return VirtualGenerator(self._index, PhiloxState(self.philox.seed, self.philox.offset))

    def graphsafe_get_state(self) -> VirtualGenerator:
        """A generator that shares this one's state."""
        return VirtualGenerator(self._index, self.philox)

    def graphsafe_set_state(self, state: VirtualGenerator) -> VirtualGenerator:
        """Share the state of another generator from now on."""
        self.philox = state.philox
        return self

    def cpu_state(self) -> torch.Tensor:
        """State of the CPU generator underneath."""
        state: torch.Tensor = super().get_state()
        return state

    def draw(self, numbers: int) -> VirtualGenerator:
        """Consume random numbers: returns the CPU generator to draw their true values from, and moves on.

        `numbers` are drawn per thread of the kernel; the offset moves on in steps of 4.
        """
        packed = _STATE.pack(self.philox.seed, self.philox.offset)
        _CpuGenerator.manual_seed(
            self, int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
        )
        self.philox.offset += (max(numbers, 1) + 3) // 4 * 4
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the C class does: device, seed, offset and state."""
        return torch.Generator, (self.device,), (self.initial_seed(), self.get_offset(), self.get_state())

    def __setstate__(self, state: tuple[int, int | None, torch.Tensor]) -> None:
        """Take over what `__reduce__` gave."""
        self.set_state(state[2])


def virtual_generator(generator: object) -> VirtualGenerator | None:
    """The generator of a virtual device behind an object; None for any other generator or object."""
    if isinstance(generator, VirtualGenerator):
        return generator
    return _by_address.get(getattr(generator, "_cdata", 0))


class _GeneratorMeta(type(_CpuGenerator)):  # type: ignore[misc]
    def __call__(cls, device: Any = "cpu") -> Any:
        where = torch.device(device)
        if where.type != "cuda":
            return _CpuGenerator(where)
        machine = installed_machine()
        index = machine.current_device if where.index is None else where.index
        if index >= len(machine.devices):
            raise invalid_device()
        return VirtualGenerator(index, PhiloxState(DEFAULT_SEED, 0))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _CpuGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _CpuGenerator)


class Generator(_CpuGenerator, metaclass=_GeneratorMeta):  # type: ignore[misc]
    """Stands for ``torch.Generator``: makes generators of virtual devices, and real ones for the CPU."""

    __module__ = "torch"


def patch_rng(patches: PatchStack) -> list[tuple[object, object]]:
    """Replace ``torch.Generator``, which cannot be made for ``cuda`` here; gives what to rebind elsewhere."""
    patches.set(C, "Generator", Generator)
    patches.set(torch, "Generator", Generator)
    return [(_CpuGenerator, Generator)]


def default_generator(device: int) -> VirtualGenerator:
    """The default generator of a virtual device; initialises ``torch.cuda``."""
    torch.cuda.init()
    return cast(VirtualGenerator, torch.cuda.default_generators[device])
