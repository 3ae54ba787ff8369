"""Lets any build of torch carry fake ``cuda`` tensors through autograd, without a card and without a compiler.

NOTE [What a CPU-only build lacks]
FakeTensorMode tensors on a ``cuda`` device go forward on any build, but the autograd engine of a CPU-only build
aborts on them, for two reasons:

1. It looks for a *device guard* of the device type in ``c10::impl::device_guard_impl_registry`` and finds none.
   torch brings a no-op guard of its own (``FakeGuardImpl``), which ``torch._C._ensureCUDADeviceGuardSet()`` puts
   there, but only in place of an existing guard whose ``deviceCount()`` is 0. So we register, for a moment, a dummy
   object whose every method returns 0, and let torch replace it.
2. It asks ``at::detail::getCUDAHooks()`` whether CUDA was built. The default object says no. We point that object
   at a copy of its virtual table in which a few answers are ours: CUDA is built, no context exists yet, and cuDNN is
   there (batch norm, channels_last and recurrent layers take their decision from it).

A CUDA build brings its own guard and hooks, which ask the driver: without a card they fail, and with one they would
select real devices for virtual tensors. So both steps are taken there too, except that the hooks keep all their own
answers but two (no context exists, the current device is 0), and `uninstall` puts the originals back.

The slots of the virtual table are those of ``ATen/detail/AcceleratorHooksInterface.h`` and
``ATen/detail/CUDAHooksInterface.h``, which every torch wheel ships; they are read from those headers, so that another
torch version finds its own order. ``self_check`` proves the result with a backward pass.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import sys
from pathlib import Path

import torch

from vramfit.errors import EnvironmentUnfitError
from vramfit.torch_internals import releases

_CUDA_DEVICE_TYPE = 1  # c10/core/DeviceType.h: DeviceType::CUDA
_REGISTRY_SYMBOL = "_ZN3c104impl26device_guard_impl_registryE"
_HOOKS_SYMBOL = "_ZN2at6detail12getCUDAHooksEv"
_DESTRUCTOR_SLOTS = 2  # the Itanium C++ ABI gives a virtual destructor two slots
_VTABLE_PREFIX = 2  # offset-to-top and type information stand before the first slot
_TESTED_PLATFORMS = {("Linux", "x86_64")}
_CPU_BUILD_ANSWERS: dict[str, int | float] = {
    "isBuilt": 1,
    # 9.1 and later take every route that the supported torch releases know (batchnorm, bf16, dilation).
    "hasCuDNN": 1,
    "compiledWithCuDNN": 1,
    "supportsDilatedConvolutionWithCuDNN": 1,
    "supportsDepthwiseConvolutionWithCuDNN": 1,
    "supportsBFloat16ConvolutionWithCuDNNv8": 1,
    "supportsBFloat16RNNWithCuDNN": 1,
    "versionCuDNN": 91900,
    "versionRuntimeCuDNN": 91900,
    "batchnormMinEpsilonCuDNN": 0.0,  # CUDNN_BN_MIN_EPSILON of cudnn.h since cuDNN 7.5
}

# Objects that C++ keeps pointers to: they must never be collected.
_keep_alive: list[object] = []
# What to write back on a CUDA build: (where, pointer). None while the shim is not in place.
_originals: list[tuple[ctypes.c_void_p, int | None]] | None = None
# The process in which the self-check passed: autograd's threads, once started, stay as they are, but not in a fork.
_passed_in: int | None = None


def install() -> None:
    """Make this process able to run autograd on fake ``cuda`` tensors. Idempotent; it lasts as long as the process.

    Raises:
        EnvironmentUnfitError: this torch does not export what is needed; the message names its version.
    """
    global _originals
    if _originals is not None:
        return
    answers: dict[str, int | float] = {"hasPrimaryContext": 0, "current_device": 0}
    if not _is_cuda_build():
        answers |= _CPU_BUILD_ANSWERS
    done: list[tuple[ctypes.c_void_p, int | None]] = []
    try:
        done.append(_register_guard())
        done.append(_patch_hooks(answers))
    except (OSError, AttributeError, ValueError, KeyError) as error:
        _put_back(done)
        raise EnvironmentUnfitError(
            f"torch {torch.__version__} on {sys.platform} does not export what the virtual GPU needs ({error})",
            releases.ADVICE,
        ) from error
    _originals = done


def uninstall() -> None:
    """Give a CUDA build its own guard and hooks back. On a CPU build the shim stays: there is nothing to go back to."""
    global _originals
    if _originals is not None and _is_cuda_build():
        _put_back(_originals)
        _originals = None


def _put_back(originals: list[tuple[ctypes.c_void_p, int | None]]) -> None:
    for where, pointer in reversed(originals):
        where.value = pointer


def set_current_device(index: int) -> None:
    """Tell torch's guard which device is this thread's current one: C++ asks it where ``x.cuda()`` should go.

    ``uncheckedSetDevice(Device)`` takes a ``c10::Device``, two bytes (type and index), in one register.
    """
    found = _guard_function("uncheckedSetDevice")
    if found is not None:
        guard, function = found
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint16)(function)(
            guard, _CUDA_DEVICE_TYPE | index << 8
        )


def current_device() -> int:
    """The number of this thread's current device as torch's guard knows it; 0 where there is none.

    ``getDevice()`` returns a ``c10::Device`` as `set_current_device` hands it over.
    """
    found = _guard_function("getDevice")
    if found is None:
        return 0
    guard, function = found
    return int(ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)(function)(guard)) >> 8


def _guard_function(name: str) -> tuple[int, int] | None:
    """The guard and the address of one of its methods; None where either is not known."""
    guard = None if _originals is None else _originals[0][0].value
    slot = _guard_slots().get(name)
    if not guard or slot is None:
        return None
    table = ctypes.c_void_p.from_address(guard).value
    assert table is not None
    function = ctypes.c_void_p.from_address(table + slot * ctypes.sizeof(ctypes.c_void_p)).value
    assert function is not None
    return guard, function


@functools.cache
def _guard_slots() -> dict[str, int]:
    """Slot of each virtual method of a device guard, from the header that this torch ships; the destructor is last."""
    text = _header("c10/core/impl/DeviceGuardImplInterface.h")
    body = text[text.index("struct C10_API DeviceGuardImplInterface") :]
    names = re.findall(r"\bvirtual\b[^;{(]*?(~?\w+)\s*\(", body)
    return {} if names[0].startswith("~") else {name: slot for slot, name in reversed([*enumerate(names)])}


def platform_note() -> str:
    """A sentence saying that the virtual GPU has not been run on this platform; empty where it is tested."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) in _TESTED_PLATFORMS:
        return ""
    return f"The virtual GPU has not been run on {system} {machine} by its developers; the self-check passed here."


def self_check() -> None:
    """Run one tiny forward and backward pass on fake ``cuda`` tensors; where it passed, it is not run again.

    Raises:
        EnvironmentUnfitError: it failed, so nothing else would work either.

    A build that is unfit may abort the process instead of raising, which is why a child process runs this.
    """
    global _passed_in
    if _passed_in == os.getpid():
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_fallback_kernels=False), torch.inference_mode(False), torch.enable_grad():
            weight = torch.empty(4, 4, device="cuda", requires_grad=True)
            inputs = torch.empty(2, 4, device="cuda")
            (inputs @ weight).relu().sum().backward()
            grad = weight.grad
        ok = grad is not None and grad.device.type == "cuda" and grad.shape == (4, 4)
    except Exception as error:
        raise EnvironmentUnfitError(
            f"autograd cannot run on virtual cuda tensors in this process ({str(error).splitlines()[0]})",
            "If a backward pass ran here before, use vramfit.run(...) or `vramfit run`, which start a fresh process; "
            f"otherwise report torch {torch.__version__} as unfit.",
        ) from error
    if not ok:
        raise EnvironmentUnfitError(f"torch {torch.__version__} lost a virtual gradient in the self-check")
    _passed_in = os.getpid()


def _is_cuda_build() -> bool:
    return bool(torch.backends.cuda.is_built())


def _library(stem: str) -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    for name in (f"lib{stem}.so", f"lib{stem}.dylib"):
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    raise OSError(f"no lib{stem} beside torch")


def _register_guard() -> tuple[ctypes.c_void_p, int | None]:
    registry = (ctypes.c_void_p * (_CUDA_DEVICE_TYPE + 1)).in_dll(_library("c10"), _REGISTRY_SYMBOL)
    entry = ctypes.c_void_p.from_buffer(registry, _CUDA_DEVICE_TYPE * ctypes.sizeof(ctypes.c_void_p))
    original = entry.value
    zero = ctypes.CFUNCTYPE(ctypes.c_longlong)(lambda: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    slots = (ctypes.c_void_p * 64)(*([address] * 64))
    dummy = (ctypes.c_void_p * 4)(ctypes.addressof(slots))
    _keep_alive.extend((zero, slots, dummy, registry))
    entry.value = ctypes.addressof(dummy)
    torch._C._ensureCUDADeviceGuardSet()
    if entry.value == ctypes.addressof(dummy):
        entry.value = original
        raise ValueError("torch did not replace the dummy device guard")
    return entry, original


def _patch_hooks(answers: dict[str, int | float]) -> tuple[ctypes.c_void_p, int | None]:
    get_hooks = getattr(_library("torch_cpu"), _HOOKS_SYMBOL)
    get_hooks.restype = ctypes.c_void_p
    table_pointer = ctypes.c_void_p.from_address(get_hooks())
    slots = _hook_slots()
    # Copy exactly the table that the headers describe: what lies behind it is not ours to read.
    length = _VTABLE_PREFIX + max(slots.values()) + 1
    assert table_pointer.value is not None
    original = (ctypes.c_void_p * length).from_address(
        table_pointer.value - _VTABLE_PREFIX * ctypes.sizeof(ctypes.c_void_p)
    )
    table = (ctypes.c_void_p * length)(*original)
    for name, answer in answers.items():
        if name not in slots:
            if name in ("isBuilt", "hasPrimaryContext"):
                raise KeyError(name)
            continue  # a question that this version does not ask
        result_type = ctypes.c_double if isinstance(answer, float) else ctypes.c_longlong
        function = ctypes.CFUNCTYPE(result_type)(lambda answer=answer: answer)
        _keep_alive.append(function)
        table[_VTABLE_PREFIX + slots[name]] = ctypes.cast(function, ctypes.c_void_p).value
    _keep_alive.append(table)
    before = table_pointer.value
    table_pointer.value = ctypes.addressof(table) + _VTABLE_PREFIX * ctypes.sizeof(ctypes.c_void_p)
    return table_pointer, before


def _hook_slots() -> dict[str, int]:
    """Slot of each virtual method of the CUDA hooks, from the headers that this torch ships."""
    slots: dict[str, int] = {}
    for header in ("AcceleratorHooksInterface.h", "CUDAHooksInterface.h"):
        text = _header(f"ATen/detail/{header}")
        for match in re.finditer(r"\bvirtual\b[^;{]*?(~?\w+)\s*\(([^;{]*)[;{]", text):
            name, rest = match.group(1), match.group(2)
            if name.startswith("~") or re.search(r"\boverride\b", rest) or name in slots:
                continue
            slots[name] = _DESTRUCTOR_SLOTS + len(slots)
    return slots


def _header(name: str) -> str:
    """A header that this torch ships, without its comments."""
    text = (Path(torch.__file__).parent / "include" / name).read_text()
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
