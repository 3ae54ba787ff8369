"""Libraries that meet the virtual GPU: questions meant for something else, and native code that computes nothing.

NOTE [Asked whether a graph is traced]
transformers asks whether a tensor is fake to learn that a graph is being traced, and then looks at no values: it makes
masks that a card would skip, which turns fused attention with ``is_causal`` into attention with a mask. On the virtual
GPU a fake tensor stands for a real one (``transformers/utils/import_utils.py``: ``is_tracing``).

NOTE [bitsandbytes]
Its CUDA kernels are Python functions (bitsandbytes/backends/cuda/ops.py) that allocate results and temporaries with
torch and hand addresses to a library of C functions, none of which allocates. So that Python runs as it is, on virtual
tensors (fake_impls/custom.py): which kernel a shape takes on a card, and what it needs on the way, is decided by
the release that is installed. Only the library is replaced, since virtual addresses hold nothing. What bitsandbytes
keeps per process (tables on the card, which kernel a shape takes, a cuBLAS handle) starts afresh for each run.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from vramfit.patching import Change, PatchStack, after_import
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_patches import tracing

_PACKAGE = "bitsandbytes"
_LOADER, _FUNCTIONAL = f"{_PACKAGE}.cextension", f"{_PACKAGE}.functional"
_CUDA, _CPU = f"{_PACKAGE}.backends.cuda.ops", f"{_PACKAGE}.backends.cpu.ops"


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Change the libraries that are imported already, and the others when they are."""

    def no_tracing(module: ModuleType) -> None:
        original = vars(module).get("is_fake_tensor")
        if original is None:
            return

        def is_fake_tensor(value: Any) -> bool:
            ours = isinstance(value, FakeTensor) and value.fake_mode is mode.fake
            return not ours and bool(original(value))

        patches.set(module, "is_fake_tensor", is_fake_tensor)

    changes: dict[str, Change] = {
        "transformers.utils.import_utils": no_tracing,
        **_bitsandbytes_changes(mode, patches),
        **tracing.writers(mode, patches),
    }
    after_import(changes, patches)
    _prepare_bitsandbytes(patches)


class _Function:
    """A function of the native library: it takes what it is given, and reports success."""

    def __call__(self, *_: Any) -> int:
        return 0


class NativeLibrary:
    """Stands for bitsandbytes' native library: functions for the host are real, those for a card do nothing."""

    compiled_with_cuda = True

    def __init__(self, mode: OpRunner) -> None:
        self._mode = mode
        self._functions: dict[str, Any] = {"cget_managed_ptr": self._managed, "get_context": lambda: 1}
        self._managed_memory: list[tuple[mmap.mmap, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._functions:
            self._functions[name] = getattr(_host_library(), name) if "_cpu" in name else _Function()
        return self._functions[name]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def _managed(self, size: ctypes.c_size_t) -> int:
        """Managed memory (``cudaMallocManaged``) for paged optimizers: it moves between card and host as needed."""
        self._mode.machine.warn(
            "managed-memory",
            "paged states of bitsandbytes lie in managed memory, outside PyTorch's allocator: they take room on the "
            "card while there is some, and move to the host when there is none; they are not counted",
            location=self._mode.guesses.location(),
        )
        memory = mmap.mmap(-1, size.value)
        start = (ctypes.c_char * 1).from_buffer(memory)
        self._managed_memory.append((memory, start))
        return ctypes.addressof(start)


def _host_library() -> Any:
    folder = Path(str(sys.modules[_LOADER].__file__)).parent
    suffix = str(getattr(sys.modules[_LOADER], "DYNAMIC_LIBRARY_SUFFIX", ".so"))
    return ctypes.cdll.LoadLibrary(str(folder / f"libbitsandbytes_cpu{suffix}"))


def _bitsandbytes_changes(mode: OpRunner, patches: PatchStack) -> dict[str, Change]:
    """The changes of bitsandbytes' modules once they are imported. See NOTE [bitsandbytes]."""
    library = NativeLibrary(mode)
    found: list[Any] = []

    def replace(module: ModuleType) -> None:
        """Put ours in the place of the library; the undo restores the one that was found first."""
        names = vars(module)
        if "lib" in names:
            if not found and names["lib"] is not library:
                found.append(names["lib"])
            names["lib"] = found[0] if found else names["lib"]
            patches.set(module, "lib", library)

    def functional(module: ModuleType) -> None:
        replace(module)
        patches.set(module, "name2qmap", {})
        for name in ("CUBLAS_Context", "GlobalPageManager"):
            if (cls := vars(module).get(name)) is not None:
                patches.set(cls, "_instance", None)

    def cuda(module: ModuleType) -> None:
        replace(module)
        for name, value in list(vars(module).items()):
            if name.startswith("str2optimizer"):
                ours = {kind: tuple(_Function() for _ in functions) for kind, functions in value.items()}
                patches.set(module, name, ours)
            elif callable(clear := getattr(value, "cache_clear", None)):
                clear()
                patches.call(clear)

    return {_LOADER: replace, _FUNCTIONAL: functional, _CUDA: cuda, _CPU: replace}


def _prepare_bitsandbytes(patches: PatchStack) -> None:
    """Silence the search for the native library, and import its CUDA part if the rest was imported before."""
    patches.set(logging.getLogger(_LOADER), "disabled", True)
    if _PACKAGE in sys.modules and _CUDA not in sys.modules:
        importlib.import_module(_CUDA)
