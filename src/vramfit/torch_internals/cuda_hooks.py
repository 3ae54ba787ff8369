"""The CUDA hooks: what torch's CPU library asks of CUDA, answered for virtual cards.

``at::detail::getCUDAHooks()`` (ATen/detail/CUDAHooksInterface.h) gives one object. On a CPU build its answers are those
of a machine that has no CUDA; on a CUDA build they come from the driver. We point the object at a copy of its virtual
table in which answers are ours, entry by entry and by name (`virtual_tables`).

NOTE [Whose answer an entry gives]
* *Ours*: which device is current and how many there are, that none has a context yet, and what cuDNN can do on the card
  (aten/src/ATen/cuda/detail/CUDAHooks.cpp asks the card's properties, and says no where the driver finds no card).
* On a CUDA build, *its own* where it was settled at compile time: what it was built with, and the versions.
* Everything else is that of the interface itself, as on a CPU build: it says no, or refuses. So nothing reaches
  the CUDA runtime through the hooks, on a build of any kind, nor through one that a later release adds.
* On a CPU build, that CUDA was built and cuDNN is there (batch norm, channels_last and recurrent layers take their
  decision from it).

``init`` must refuse, not do nothing: ``Context::lazyInitDevice`` calls it once in a process and would never
initialize the real CUDA that a program may use after the virtual GPU was left.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vramfit.torch_internals import device_guards
from vramfit.torch_internals.headers import declared
from vramfit.torch_internals.torch_libraries import Undo, library, put
from vramfit.torch_internals.virtual_tables import PREFIX, WORD, TableNames, entries_of, table_names

Capabilities = Sequence[tuple[int, int]]

_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_INTERFACE_TABLE = "_ZTVN2at18CUDAHooksInterfaceE"
_ENCODINGS = ("2at18CUDAHooksInterface", "2at25AcceleratorHooksInterface")
_DESTRUCTORS = 2
"""Entries of the destructor, the first ones (ATen/detail/AcceleratorHooksInterface.h)."""

_ASSUMED_CUDNN = 91900
"""What a CPU build says: from 9.13 on cuDNN takes every route that the supported releases of torch know."""
_BFLOAT16_RNN_CUDNN = (9, 13)

_SETTLED_AT_COMPILE_TIME = (
    "isBuilt",
    "hasCUDART",
    "hasMAGMA",
    "hasCuDNN",
    "hasCuSOLVER",
    "hasCuBLASLt",
    "hasROCM",
    "hasCKSDPA",
    "hasCKGEMM",
    "compiledWithCuDNN",
    "compiledWithMIOpen",
    "versionCuDNN",
    "versionRuntimeCuDNN",
    "versionCuDNNFrontend",
    "versionMIOpen",
    "versionHipBLASLt",
    "versionCUDART",
    "batchnormMinEpsilonCuDNN",
)
"""Hooks that a CUDA build answers without its runtime (aten/src/ATen/cuda/detail/CUDAHooks.cpp)."""

_NEEDED = ("isBuilt", "hasPrimaryContext")
"""Hooks that every supported release asks; one that asks another no more has no entry for it."""


def _before_any() -> Capabilities:
    """One card that can do all, for the self-check."""
    return ((9, 0),)


_cards: Callable[[], Capabilities] = _before_any


def describe_cards(cards: Callable[[], Capabilities]) -> Undo:
    """Answer for these cards, given by their compute capabilities whenever a hook is asked."""
    global _cards
    before = _cards
    _cards = cards

    def undo() -> None:
        global _cards
        _cards = before

    return undo


def install() -> Undo:
    """Have the hooks answer for virtual cards; the device guard must be in place.

    Raises:
        OSError, ValueError, AttributeError: this torch does not export its hooks.
        EnvironmentUnfitError: nothing says which entry of their virtual table is a hook that we answer.
    """
    place = _place()
    own = place.value or 0
    interface = interface_table() if torch.backends.cuda.is_built() else own
    return put(place, ctypes.addressof(_table(own, interface)[0]) + PREFIX * WORD)


def _place() -> ctypes.c_void_p:
    """Where the hooks' object has the pointer to its table."""
    get = getattr(library("torch_cpu"), _HOOKS)
    get.restype = ctypes.c_void_p
    return ctypes.c_void_p.from_address(get())


def interface_table() -> int:
    """The table of the interface itself, which a CPU build's object has.

    Raises:
        ValueError: it is not exported, as on macOS.
    """
    symbol = ctypes.c_char.in_dll(library("torch_cpu"), _INTERFACE_TABLE)
    return ctypes.addressof(symbol) + PREFIX * WORD


@functools.cache
def hook_names(interface: int) -> TableNames:
    """The entries of the interface's virtual table by name; those of an implementation are the same."""
    return table_names(
        "CUDAHooksInterface",
        interface,
        _ENCODINGS,
        declared(
            ("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface"),
            ("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface"),
        ),
    )


@functools.cache
def _table(own: int, interface: int) -> tuple[Any, ...]:
    """The copy with our answers, as long as the interface's table and no longer, and the functions that it points to.

    It is made once for an object's own table: C++ may keep pointers to any of it, so nothing of it is ever collected.
    """
    names = hook_names(interface)
    length = PREFIX + names.length
    table = (ctypes.c_void_p * length)(*entries_of(own - PREFIX * WORD, length))
    if torch.backends.cuda.is_built():
        kept = {names.slot(name) for name in _SETTLED_AT_COMPILE_TIME if names.has(name)}
        refusing = entries_of(interface, names.length)
        for slot in range(_DESTRUCTORS, names.length):
            if slot not in kept:
                table[PREFIX + slot] = refusing[slot]
    answers = {name: ask for name, ask in _answers().items() if names.has(name) or name in _NEEDED}
    for name, function in answers.items():
        table[PREFIX + names.slot(name)] = ctypes.cast(function, ctypes.c_void_p).value
    return table, *answers.values()


def _answers() -> dict[str, Any]:
    """What each hook that we answer calls."""
    whole = ctypes.CFUNCTYPE(ctypes.c_longlong)

    def sure(answer: int) -> Any:
        return whole(lambda: answer)

    def from_capability(lowest: int) -> Any:
        return whole(lambda: int(_capability()[0] >= lowest))

    answers = {
        "hasPrimaryContext": sure(0),
        "deviceCount": whole(lambda: len(_cards())),
        "getCurrentDevice": whole(device_guards.current_device),
        "current_device": whole(device_guards.current_device),
        "supportsDilatedConvolutionWithCuDNN": sure(1),
        "supportsDepthwiseConvolutionWithCuDNN": from_capability(7),
        "supportsBFloat16ConvolutionWithCuDNNv8": from_capability(8),
        "supportsBFloat16RNNWithCuDNN": from_capability(8) if _knows_bfloat16_rnn() else sure(0),
    }
    if not torch.backends.cuda.is_built():
        answers |= {name: sure(1) for name in ("isBuilt", "hasCuDNN", "compiledWithCuDNN")}
        answers |= {name: sure(_ASSUMED_CUDNN) for name in ("versionCuDNN", "versionRuntimeCuDNN")}
        # CUDNN_BN_MIN_EPSILON of cudnn.h since cuDNN 7.5
        answers["batchnormMinEpsilonCuDNN"] = ctypes.CFUNCTYPE(ctypes.c_double)(lambda: 0.0)
    return answers


def _knows_bfloat16_rnn() -> bool:
    """Whether recurrent layers in bfloat16 were compiled in (``CUDAHooks::supportsBFloat16RNNWithCuDNN``)."""
    cudnn: Any = getattr(
        torch._C, "_cudnn", None
    )  # a CPU build has none, and is taken for one with a recent cuDNN
    return cudnn is None or bool(tuple(cudnn.getCompileVersion()) >= _BFLOAT16_RNN_CUDNN)


def _capability() -> tuple[int, int]:
    """Of the current device."""
    cards = _cards()
    current = device_guards.current_device()
    return cards[current] if current < len(cards) else (0, 0)
