"""What all parts of the facade share: the installed machine, the card's errors, tables of C functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vramfit.torch_internals.cuda_device import AcceleratorError as AcceleratorError
from vramfit.torch_internals.cuda_device import C as C
from vramfit.virtual.machine import InvalidDevice, Machine, VirtualDevice

CUDA_DEVICE_TYPE = 1  # c10/core/DeviceType.h: DeviceType::CUDA

_INVALID_DEVICE = 101  # cudaErrorInvalidDevice
# c10/cuda/CUDAException.cpp, CUDAMiscFunctions.cpp and CUDADeviceAssertionHost.cpp compose the text.
_INVALID_DEVICE_TEXT = (
    "CUDA error: invalid device ordinal\n"
    "GPU device may be out of range, do you have enough GPUs?\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, "
    "so the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)

# Classes cannot be closed over: a program subclasses and pickles them. They find their machine here.
_installed: list[Machine] = []


def installed_machine() -> Machine:
    """The machine behind ``torch.cuda``.

    Raises:
        RuntimeError: none is installed (an object of the virtual GPU outlived it).
    """
    if not _installed:
        raise RuntimeError("the virtual GPU that this object belongs to is gone")
    return _installed[-1]


def set_machine(machine: Machine) -> Callable[[], None]:
    """Make a machine the installed one; gives the undo."""
    _installed.append(machine)

    def undo() -> None:
        _installed.remove(machine)

    return undo


def invalid_device() -> RuntimeError:
    """The card's error for a device that does not exist: ``torch.AcceleratorError``."""
    error: RuntimeError = AcceleratorError(_INVALID_DEVICE_TEXT)
    error.error_code = _INVALID_DEVICE  # type: ignore[attr-defined]
    return error


class CFunctions:
    """A table of functions of ``torch._C``: a method with a leading underscore stands for the function of its name."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions by their name in ``torch._C``."""
        names = [
            name
            for cls in type(self).__mro__
            for name in vars(cls)
            if name.startswith("_") and not name.startswith("__")
        ]
        return {name: getattr(self, name) for name in names}

    def device(self, index: int | None = None) -> VirtualDevice:
        """A device, or the card's error.

        Raises:
            torch.AcceleratorError: there is no such device.
        """
        try:
            return self.machine.device(index)
        except InvalidDevice:
            raise invalid_device() from None
