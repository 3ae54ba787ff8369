"""Triton on a virtual card: launches are noted and never run, and its driver describes the card.

NOTE [What a launch writes]
A kernel writes through pointers: ``tl.store(pointer, ...)``, ``tl.atomic_add(pointer, ...)``,
``descriptor.store(...)``. A pointer is a parameter, or comes from one by arithmetic and assignments, but not from what
was loaded from it. All this is read from the kernel's source, and from that of the kernels that it calls. A parameter
may be taken for written that is not: its values are unknown then. (Inline assembly is not followed, nor are pointers
that a kernel loads from memory.)

NOTE [Triton's autotuner]
The autotuner runs as it is: each configuration is called twice, to warm up and to be timed, no difference is noted, and
the first is taken. On a card that would be the quickest, of which nothing here knows; the buffer of 256 MB that clears
the card's cache between two runs (triton/testing.py, ``do_bench``) is allocated as there, and so are copies of tensors
that are restored.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from vramfit.patching import PatchStack, after_import
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.foreign.foreign_calls import note_launch, virtual_tensors
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.source_lines import has_source

_STORES = ("store", "async_store", "scatter", "store_tensor_descriptor")
_LOADS = ("load", "async_load", "gather", "load_tensor_descriptor", "arange", "program_id", "num_programs")
_CACHE_BYTES = 256 << 20  # triton/backends/nvidia/driver.py: get_empty_cache_for_benchmark
UNTUNED = (
    "Triton's autotuner cannot time configurations here, and takes the first: on a card it may take another, which "
    "matters where scratch memory depends on it"
)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Note launches instead of compiling them, give Triton a driver, and its benchmark no loop."""
    after_import(
        {
            "triton.runtime.jit": lambda module: _patch_launches(mode, module, patches),
            "triton.runtime.driver": lambda module: _give_driver(mode, module, patches),
            "triton.testing": lambda module: _give_benchmark(mode, module, patches),
        },
        patches,
    )


# -- launches --------------------------------------------------------------------------------------------------------


def _patch_launches(mode: OpRunner, module: ModuleType, patches: PatchStack) -> None:
    """Catch ``kernel[grid](...)`` where Triton would compile and launch it (triton/runtime/jit.py, JITFunction.run)."""
    known: dict[Any, frozenset[str]] = {}

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        if warmup:
            return
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        given = _bound(self, args, kwargs)
        _refuse_host(given)
        if callable(grid):
            grid(given)
        if self.fn not in known:
            known[self.fn] = written_parameters(self.fn)
        written = [given[name] for name in known[self.fn] if name in given]
        note_launch(mode, self.fn.__name__, virtual_tensors(given), virtual_tensors(written))

    patches.set(module.JITFunction, "run", run)


def _bound(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A launch's arguments by name, the defaults of the kernel among them, as a grid wants them.

    Raises:
        TypeError: an argument is missing or too many; options of the launch (num_warps and others) are none.
    """
    parameters = inspect.signature(kernel.fn).parameters
    named = {name: value for name, value in kwargs.items() if name in parameters}
    bound = inspect.signature(kernel.fn).bind(*args, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


def _refuse_host(given: dict[str, Any]) -> None:
    """A kernel cannot read the host's memory.

    Raises:
        ValueError: Triton's own, of the launcher in triton/backends/nvidia/driver.py.
    """
    for position, value in enumerate(given.values()):
        if isinstance(value, torch.Tensor) and (type(value) is not FakeTensor or value.device.type == "cpu"):
            raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")


# -- which parameters a kernel may write ----------------------------------------------------------------------------


def written_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters that a kernel may write; all of them where its source cannot be read.

    See NOTE [What a launch writes].

    Args:
        function: the Python function under ``@triton.jit``.
    """
    return _SourceReader().read(function)


class _SourceReader:
    def __init__(self) -> None:
        self._known: dict[Callable[..., Any], frozenset[str]] = {}

    def read(self, function: Callable[..., Any]) -> frozenset[str]:
        if function not in self._known:
            # A helper that calls itself adds nothing to its first reading.
            self._known[function] = frozenset()
            self._known[function] = self._read(function)
        return self._known[function]

    def _read(self, function: Callable[..., Any]) -> frozenset[str]:
        parameters = list(inspect.signature(function).parameters)
        if not has_source(function):
            return frozenset(parameters)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return frozenset(parameters)
        origins = _origins(tree, parameters)
        written: set[str] = set()
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            for pointer in self._pointers(call, function):
                written |= _sources(pointer, origins)
        return frozenset(written & set(parameters))

    def _pointers(self, call: ast.Call, function: Callable[..., Any]) -> Iterator[ast.expr]:
        """The expressions through which a call may write."""
        target = call.func
        if isinstance(target, ast.Attribute) and (
            target.attr in _STORES or target.attr.startswith("atomic_")
        ):
            if isinstance(_value(target.value, function), ModuleType):
                yield from call.args[:1]
                yield from (keyword.value for keyword in call.keywords if keyword.arg in ("pointer", "desc"))
            else:
                yield target.value  # descriptor.store(offsets, value)
            return
        helper = _value(target, function)
        inner = getattr(helper, "fn", None)
        if not inspect.isfunction(inner) or isinstance(helper, type):
            return
        names = list(inspect.signature(inner).parameters)
        writes = self.read(inner)
        yield from (value for name, value in zip(names, call.args, strict=False) if name in writes)
        yield from (keyword.value for keyword in call.keywords if keyword.arg in writes)
        yield from (value for value in call.args if isinstance(value, ast.Starred) and writes)


def _origins(tree: ast.AST, parameters: list[str]) -> dict[str, set[str]]:
    """By name in a kernel: from which parameters it may come."""
    origins = {name: {name} for name in parameters}
    assignments = list(_assignments(tree))
    changed = True
    while changed:
        changed = False
        for targets, value in assignments:
            sources = _sources(value, origins)
            for name in targets:
                if not sources <= origins.setdefault(name, set()):
                    origins[name] |= sources
                    changed = True
    return origins


def _assignments(tree: ast.AST) -> Iterator[tuple[list[str], ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield [name for target in node.targets for name in _names(target)], node.value
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield _names(node.target), node.value
        elif isinstance(node, ast.For):
            yield _names(node.target), node.iter


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _sources(value: ast.expr, origins: dict[str, set[str]]) -> set[str]:
    """Parameters from which an expression may come; what is loaded is data, no pointer."""
    found: set[str] = set()
    waiting: list[ast.AST] = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOADS:
            continue
        if isinstance(node, ast.Name):
            found |= origins.get(node.id, set())
        waiting += ast.iter_child_nodes(node)
    return found


def _value(node: ast.expr, function: Callable[..., Any]) -> Any:
    """What a name or a dotted name of a kernel's source stands for outside it; None for a local one."""
    if isinstance(node, ast.Name):
        local = inspect.getclosurevars(function).nonlocals
        return local.get(node.id, getattr(function, "__globals__", {}).get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, function), node.attr, None)
    return None


# -- the driver ------------------------------------------------------------------------------------------------------


def _give_driver(mode: OpRunner, module: ModuleType, patches: PatchStack) -> None:
    driver = _driver(mode)
    patches.set(module.driver, "_default", driver)
    patches.set(module.driver, "_active", driver)


def _give_benchmark(mode: OpRunner, module: ModuleType, patches: PatchStack) -> None:
    def do_bench(
        fn: Callable[[], object],
        warmup: float = 25,
        rep: float = 100,
        grad_to_none: Any = None,
        quantiles: Sequence[float] | None = None,
        return_mode: str = "mean",
    ) -> Any:
        return benchmark(mode, fn, quantiles, return_mode)

    original = module.do_bench
    patches.set(module, "do_bench", do_bench)
    patches.rebind([(original, do_bench)])


def benchmark(
    mode: OpRunner, fn: Callable[[], object], quantiles: Sequence[float] | None, return_mode: str = "mean"
) -> Any:
    """Call a function, then once more with the benchmark's buffer there; gives its simulated milliseconds.

    Returns:
        One figure, or a list of equal ones where quantiles or all are asked for.
    """
    mode.machine.warn("kernel-untuned", UNTUNED)
    fn()
    buffer = torch.empty(_CACHE_BYTES // 4, dtype=torch.int, device="cuda")
    before = mode.machine.clock_us
    fn()
    del buffer
    milliseconds = max((mode.machine.clock_us - before) / 1e3, 1e-3)
    if quantiles:
        return [milliseconds] * len(quantiles)
    return [milliseconds] if return_mode == "all" else milliseconds


def _driver(mode: OpRunner) -> Any:
    """An object of Triton's driver class; made here, where Triton is imported."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import GPUDriver

    def properties(device: int) -> dict[str, int]:
        found: Any = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": found.shared_memory_per_block_optin,
            "max_num_regs": found.regs_per_multiprocessor,
            "multiprocessor_count": found.multi_processor_count,
            "warpSize": found.warp_size,
            "max_threads_per_sm": found.max_threads_per_multi_processor,
        }

    class VirtualDriver(GPUDriver):  # type: ignore[misc]  # untyped where Triton is not installed
        utils = SimpleNamespace(get_device_properties=properties)

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            major, minor = torch.cuda.get_device_capability()
            return GPUTarget("cuda", major * 10 + minor, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", torch.cuda.current_device())

        def get_device_interface(self) -> Any:
            return torch.cuda

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> Callable[..., Any]:
            return lambda fn, quantiles=None, **options: benchmark(mode, fn, quantiles)

        def get_empty_cache_for_benchmark(self) -> torch.Tensor:
            return torch.empty(_CACHE_BYTES // 4, dtype=torch.int, device="cuda")

        def clear_cache(self, cache: torch.Tensor) -> None:
            cache.zero_()

    return VirtualDriver()
