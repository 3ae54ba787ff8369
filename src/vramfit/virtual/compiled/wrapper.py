"""The program that Inductor writes for a graph, made to run on virtual tensors.

It is Python: ``buf0 = empty_strided_cuda(...)`` takes memory, ``triton_..._0.run(...)`` launches a kernel,
``buf1 = buf0; del buf0  # reuse`` works in place, ``del buf1`` gives memory back (torch/_inductor/codegen/wrapper.py).
Run as it stands, with memory and kernels of the virtual card, it makes the requests that the card would see.

Only this is changed: the kernels' definitions become stand-ins, the functions behind ``empty_strided_cuda`` and its
like are the player's, and before each of its steps the program says which one it is, for the trace.
"""

from __future__ import annotations

import ast
import copy
import itertools
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vramfit.torch_internals.compiler_parts import KERNEL_HELPERS
from vramfit.trace import Frame
from vramfit.virtual.compiled.player import GraphPlayer, Step

if TYPE_CHECKING:
    from vramfit.torch_internals.compiler import GraphLowering

# Below our own package, so that stacks leave its frames out.
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "graphs")
_ALLOCATIONS = re.compile(r"empty_strided_\w+")
_KERNEL_KIND = re.compile(r"^(triton|cpp)_((poi|per|red|tem|for|spl|unk|mix)_)?|_\d+$")
_WRITTEN_ARGUMENT = re.compile(r"^(in_out_ptr|out_ptr)")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (\S+)', re.MULTILINE)
_STEP = "_vramfit_step"
_counter = itertools.count()


class CompiledGraph:
    """One graph as Inductor compiled it.

    Args:
        source: the program that Inductor wrote.
        lowering: the graph from which it did.

    Attributes:
        filename: what its frames show.
        runner: the object with which CUDA graphs reach its partitions; None without one.
    """

    def __init__(self, source: str, lowering: GraphLowering, player: GraphPlayer) -> None:
        self.filename = os.path.join(_FOLDER, f"{next(_counter)}.py")
        self._backward = bool(lowering.is_backward)
        self._steps: dict[int, Step] = {}
        self._constants = {**lowering.constants, **lowering.torchbind_constants}
        self._kernels: dict[str, frozenset[int] | None] = {}
        tree = ast.parse(source)
        given = {*player.namespace(), *self._constants, _STEP}
        tree.body = list(self._kept(tree.body, given, _BufferOrigins(lowering)))
        self._code = compile(ast.fix_missing_locations(tree), self.filename, "exec")
        self._bind(player)

    def _bind(self, player: GraphPlayer) -> None:
        """Let a player run it."""
        self._player = player
        namespace = {**player.namespace(), **self._constants, _STEP: self._at}
        namespace |= {name: player.kernel(name, written) for name, written in self._kernels.items()}
        exec(self._code, namespace)
        self.runner = namespace.get("runner")
        self._call = namespace["call"]

    @property
    def repeatable(self) -> bool:
        """Whether other players may run it: it holds no tensors of its own."""
        return not self._constants

    def on(self, player: GraphPlayer) -> CompiledGraph:
        """The same program, run by another player."""
        other = copy.copy(self)
        other._bind(player)
        return other

    def call(self, inputs: list[Any]) -> Any:
        """Run it; takes the tensors out of `inputs`, as compiled programs do."""
        run = self._call if self.runner is None else self.runner.call
        return self._player.play(run, inputs, backward=self._backward)

    def _at(self, number: int) -> None:
        self._player.step = self._steps[number]

    def _kept(self, body: list[ast.stmt], given: set[str], origins: _BufferOrigins) -> Iterator[ast.stmt]:
        """The statements of the module that say what runs; names that the player provides stay the player's."""
        for statement in body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                if statement.name not in ("get_args", "benchmark_compiled_module"):
                    self._mark(statement, origins)
                    yield statement
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                yield from _import_kept(statement, given)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
                if (kernel := _kernel_source(statement.value)) is not None:
                    self._kernels[name] = _written(name, kernel)
                elif name not in given and name not in ("async_compile", "empty_strided_p2p"):
                    yield statement
            elif not isinstance(statement, (ast.If, ast.Delete, ast.Expr)):
                yield statement

    def _mark(self, scope: ast.FunctionDef | ast.ClassDef, origins: _BufferOrigins) -> None:
        """Put a note of its step before each statement of a function, or of a class's methods."""
        for node in [scope] if isinstance(scope, ast.FunctionDef) else ast.walk(scope):
            if isinstance(node, ast.FunctionDef):
                labels = _labels(node)
                node.body = self._marked(node.body, labels, origins)

    def _marked(
        self, body: list[ast.stmt], labels: dict[str, str], origins: _BufferOrigins
    ) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in body:
            for inner in ("body", "orelse"):
                if nested := getattr(statement, inner, None):
                    setattr(statement, inner, self._marked(nested, labels, origins))
            target, call = _target(statement), _call_of(statement)
            if call is not None and not isinstance(statement, ast.Return):
                buffer = target or _written_buffer(call)
                label = labels.get(target or "") if _is_allocation(call) else _label(call)
                if label:
                    number = len(self._steps)
                    self._steps[number] = origins.step(label, buffer)
                    out.append(ast.parse(f"{_STEP}({number})").body[0])
            out.append(statement)
        return out


class _BufferOrigins:
    """The lines of the program behind the buffers of a graph."""

    def __init__(self, lowering: GraphLowering) -> None:
        self._buffers = {} if lowering.is_backward else lowering.name_to_buffer
        self._order = {node: i for i, node in enumerate(lowering.graph.nodes)}
        self._parsed: dict[str, tuple[Frame, ...]] = {}

    def step(self, label: str, buffer: str | None) -> Step:
        """The step that fills a buffer."""
        return Step(label=label, frames=self._frames(buffer))

    def _frames(self, buffer: str | None) -> tuple[Frame, ...]:
        found = self._buffers.get(buffer or "")
        if found is None:
            return ()
        traced = [node for node in found.origins if node.stack_trace]
        if not traced:
            return ()
        text = max(traced, key=lambda node: self._order.get(node, -1)).stack_trace or ""
        frames = self._parsed.get(text)
        if frames is None:
            frames = tuple(
                Frame(file, int(line), name) for file, line, name in reversed(_FRAME.findall(text))
            )
            self._parsed[text] = frames
        return frames


def _import_kept(statement: ast.Import | ast.ImportFrom, given: set[str]) -> Iterator[ast.stmt]:
    """Imports without Triton, its helpers, and what the player provides."""
    module = statement.module or "" if isinstance(statement, ast.ImportFrom) else ""
    if module.startswith(("triton", *KERNEL_HELPERS)):
        return
    names = [
        alias
        for alias in statement.names
        if (alias.asname or alias.name) not in given and not alias.name.startswith("triton")
    ]
    if names:
        statement.names = names
        yield statement


def _kernel_source(value: ast.expr) -> str | None:
    """The source of a kernel where a value defines one, ``async_compile.triton(name, source)``; else None."""
    if not isinstance(value, ast.Call) or not ast.unparse(value.func).startswith("async_compile."):
        return None
    texts = [a.value for a in value.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return max(texts, key=len, default="")


def _written(name: str, source: str) -> frozenset[int] | None:
    """Positions of the arguments that a kernel writes, None where it does not say."""
    found = re.search(rf"^def {re.escape(name)}\((.*?)\):", source, re.MULTILINE | re.DOTALL)
    if found is None:
        return None
    names = [part.strip() for part in found.group(1).split(",")]
    written = {i for i, argument in enumerate(names) if _WRITTEN_ARGUMENT.match(argument)}
    return frozenset(written) or None


# -- statements of the program -----------------------------------------------------------------------------------


def _target(statement: ast.stmt) -> str | None:
    """The name that a statement binds, if it binds one."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _call_of(statement: ast.stmt) -> ast.Call | None:
    value = getattr(statement, "value", None)
    return value if isinstance(value, ast.Call) else None


def _is_allocation(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and _ALLOCATIONS.fullmatch(call.func.id) is not None


def _written_buffer(call: ast.Call) -> str | None:
    """The buffer that a call fills (``out=``), else its last one."""
    for keyword in call.keywords:
        if keyword.arg == "out" and isinstance(keyword.value, ast.Name):
            return keyword.value.id
    names = [a.id for a in call.args if isinstance(a, ast.Name) and a.id.startswith("buf")]
    return names[-1] if names else None


def _label(call: ast.Call) -> str | None:
    """The trace's label of what a call runs: ``inductor: fused_add_gelu``, ``inductor: addmm``; None for a helper."""
    path = ast.unparse(call.func).split(".")
    if path[-1] == "run":
        return "inductor: " + re.sub("__+", "_", _KERNEL_KIND.sub("", path[-2]))
    if path[0] == "extern_kernels":
        return f"inductor: {path[-1]}"
    if path[0] in ("aten", "prims", "quantized") or path[:2] == ["torch", "ops"]:
        names = [part for part in path if part not in ("torch", "ops", "default", "out")]
        return f"inductor: {names[min(1, len(names) - 1)]}"
    return "inductor: " + _KERNEL_KIND.sub("", path[0]) if path[0].startswith("cpp_") else None


def _labels(function: ast.FunctionDef) -> dict[str, str]:
    """For each buffer that a function allocates, the label of the kernel that is the first to use it."""
    labels: dict[str, str] = {}
    waiting: dict[str, str] = {}  # what a buffer is called now, and was at its allocation
    for statement in _flat(function.body):
        target, call = _target(statement), _call_of(statement)
        if target and call is not None and _is_allocation(call):
            waiting[target] = target
        elif (
            target and isinstance(statement, ast.Assign) and (source := _renamed(statement.value)) in waiting
        ):
            waiting[target] = waiting[source]
        elif call is not None and (label := _label(call)):
            for name in {n.id for n in ast.walk(call) if isinstance(n, ast.Name)} & waiting.keys():
                labels.setdefault(waiting.pop(name), label)
    return labels


def _renamed(value: ast.expr) -> str:
    """The buffer that a value is a new name or view of, else nothing."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "reinterpret_tensor":
        value = value.args[0]
    return value.id if isinstance(value, ast.Name) else ""


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for inner in ("body", "orelse"):
            yield from _flat(getattr(statement, inner, []))
