"""The source as a newcomer finds it: one word per idea, one place per task, and documents that say what is there."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))
import house_pages

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vramfit"

SAME_CLASS = {
    "AutoFit": "Lightning's and transformers' callback, as `PlanCallback`",
    "OutOfMemory": "the allocator's adds the figures to the one of the exception tree, which is what programs catch",
    "PlanCallback": "Lightning's and transformers' callback: each is what its framework's users look for",
    "VirtualGPU": "the public one adds the report, which stands on a higher floor, to that of virtual/",
}
"""Class names that may stand twice, with the reason."""

FAMILIES = (
    {"virtual/kernels", "virtual/fake_impls", "virtual/torch_patches", "calibrate/cases"},
    {"cli", "report", "planner/reports"},
)
"""Folders that are parallel: one file per kind of operation, one per verb."""

SAME_NAME = {
    "trace/__init__.py: replay": "the package's one verb; its modules are imported by their own names"
}
"""Functions that may be called as the module or package beside them, with the reason."""

MANY_PARAMETERS = {"api", "cli"}
"""Packages whose functions may take more than eight parameters: options of the public API and of the command line."""

_PUBLIC = "public, by keywords"
_TORCH = "the parameters of torch's own function or operator"
_TORCH_AND_OURS = "the parameters of torch's own function or operator, and what we know of the call"
_COLUMNS = "one parameter a column; it is called for every event, and a value made for it would cost more than the rest"
LONG_SIGNATURES = {
    "calibrate/cases/attention.py:_sdpa": _TORCH,
    "calibrate/cases/rnn.py:_layer": _TORCH,
    "launch/tasks/task_pool.py:run_all": _PUBLIC,
    "planner/api.py:fit": _PUBLIC,
    "inference/kv_cache/block_cache.py:__init__": _PUBLIC,
    "inference/kv_cache/capacity.py:sequences_that_fit": _PUBLIC,
    "planner/api.py:plan": _PUBLIC,
    "planner/tile_choice.py:choose_tile": _PUBLIC,
    "planner/api.py:verify": _PUBLIC,
    "techniques/gradient_projection.py:__init__": _TORCH,
    "trace/builder.py:add": _COLUMNS,
    "trace/builder.py:append": _COLUMNS,
    "trace/journal.py:row": _COLUMNS,
    "virtual/fake_impls/attention.py:_attend": _TORCH_AND_OURS,
    "virtual/kernels/attention.py:_flash_forward": "each extent that the kernel's requests depend on",
    "virtual/kernels/sdpa.py:_math": _TORCH_AND_OURS,
    "virtual/kernels/sdpa.py:can_use": _TORCH,
    "virtual/kernels/sdpa.py:scaled_dot_product_attention": _TORCH,
    "virtual/torch_cuda/memory.py:_cuda_record_memory_history": _TORCH,
    "virtual/torch_cuda/memory.py:_cuda_record_memory_history_legacy": _TORCH,
}
"""Functions elsewhere that may as well, with the reason."""

LONG_FUNCTIONS = {
    "allocator/caching.py:malloc": "the short path, in one piece: every call of it costs a tenth of the whole",
    "trace/pickles.py:_load": "one branch an opcode",
}
"""Functions that may be longer than a screen, with the reason."""

CIRCLES = (
    {"trace.fileformat", "trace.model"},  # MemoryTrace.load and save
)
"""Modules that import one another, each with a reason."""


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def local(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All that a tree holds: to walk one takes several times as long as to look at what it holds."""
    return tuple(ast.walk(tree))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_a_class_name_stands_once() -> None:
    assert len(SAME_CLASS) <= 10
    homes = defaultdict(set)
    for path, tree in modules().items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(local(path))
    repeated = {name: found for name, found in homes.items() if len(found) > 1}
    assert repeated.keys() == SAME_CLASS.keys(), {
        name: repeated.get(name) for name in repeated.keys() ^ SAME_CLASS.keys()
    }


def test_no_function_hides_its_module() -> None:
    hidden = []
    for path, tree in modules().items():
        if path.name == "__init__.py":
            names = {
                one.asname or one.name
                for node in tree.body
                if isinstance(node, ast.ImportFrom)
                for one in node.names
                if node.module != _dotted(path)
            }
            names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            hidden += [f"{local(path)}: {name}" for name in names if _beside(path, name)]
    assert set(hidden) == SAME_NAME.keys()


def _dotted(init: Path) -> str:
    return ".".join(init.parent.relative_to(SOURCE.parent).parts)


def _beside(init: Path, name: str) -> bool:
    return (init.parent / f"{name}.py").exists() or (init.parent / name / "__init__.py").exists()


def test_a_file_name_repeats_only_in_parallel_families() -> None:
    homes = defaultdict(set)
    for path in modules():
        if path.name != "__init__.py":
            homes[path.name].add(path.parent.relative_to(SOURCE).as_posix())
    wrong = {
        name: found
        for name, found in homes.items()
        if len(found) > 1 and not any(found <= family for family in FAMILIES)
    }
    assert not wrong


def test_at_most_eight_parameters_outside_the_public_interface() -> None:
    wrong = []
    for path, tree in modules().items():
        if local(path).split("/")[0] in MANY_PARAMETERS:
            continue
        for function in functions(tree):
            given = function.args
            names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > 8:
                wrong.append(f"{local(path)}:{function.name}")
    assert sorted({*wrong}) == sorted(LONG_SIGNATURES)


def test_functions_fit_a_screen_and_modules_a_sitting() -> None:
    long = [
        f"{local(path)}:{function.name}"
        for path, tree in modules().items()
        for function in functions(tree)
        if (function.end_lineno or 0) - function.lineno + 1 > 80 and not _mostly_words(function)
    ]
    assert set(long) == LONG_FUNCTIONS.keys()
    assert not [local(path) for path in modules() if path.read_text(encoding="utf-8").count("\n") > 600]


def _mostly_words(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is long by its docstring and its parameters, as the public ones are."""
    first = function.body[0]
    body = (
        function.body[1:]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        else function.body
    )
    return (function.end_lineno or 0) - body[0].lineno + 1 <= 60


@pytest.mark.parametrize(
    ("page", "made"),
    [
        (house_pages.GLOSSARY, house_pages.glossary),
        (house_pages.CONTRIBUTING, house_pages.contributing),
    ],
    ids=["every module stands in the glossary", "the floors are those of the contracts"],
)
def test_pages_say_what_is_there(page: Path, made: Callable[[], str]) -> None:
    assert page.read_text(encoding="utf-8") == made(), "run python studies/house_pages.py"


def test_a_page_tells_newcomers_of_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", page) if not name.startswith("tests/")}
    named |= {name for name in re.findall(r"`([a-z_]+/[a-z_]+)`", page) if not name.startswith("tests/")}
    assert len(named) > 20
    assert not [name for name in named if not (SOURCE / name).exists()]


def _imports(tree: ast.AST) -> Iterator[str]:
    """Modules of vramfit that a module imports anywhere: at its top, in functions, for checkers."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from (
                f"{base}.{one.name}" if _is_module(f"{base}.{one.name}") else base for one in node.names
            )


@cache
def _is_module(dotted: str) -> bool:
    at = SOURCE.parent.joinpath(*dotted.split("."))
    return at.with_suffix(".py").exists() or (at / "__init__.py").exists()


def test_no_import_goes_in_a_circle() -> None:
    """Neither at import nor later: a module that is imported in a function is above or below all the same."""
    graph = {}
    for path, tree in modules().items():
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        graph[name] = {one for one in _imports(tree) if one.startswith("vramfit") and one != name}
    found = [{name.removeprefix("vramfit.") for name in circle} for circle in _circles(graph)]
    assert [circle for circle in found if circle not in CIRCLES] == []


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected parts of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            part = []
            while not part or part[-1] != name:
                part.append(stack.pop())
            if len(part) > 1:
                found.append(sorted(part))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_circles_are_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert not _circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def _heights() -> dict[str, int]:
    """How high each package and module at the top of ours stands: 3 for the doors, 0 for what measures."""
    upwards = list(reversed(house_pages.layers()))
    heights = {name: height for height, layer in enumerate(upwards) for name in layer}
    return {**heights, "__init__": len(upwards)}  # it exports names of all layers


def test_no_string_names_a_module_of_a_layer_above() -> None:
    """What is imported by its name later, or run with -m, is an import that the contracts do not see."""
    heights = _heights()
    wrong = [
        f"{local(path)}: {node.value}"
        for path, tree in modules().items()
        for node in nodes(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"vramfit(\.\w+)+", node.value)
        and heights.get(node.value.split(".")[1], 0) > heights[local(path).split("/")[0].removesuffix(".py")]
    ]
    assert not wrong


def test_processes_are_started_in_one_place() -> None:
    starts = {
        local(path)
        for path, tree in modules().items()
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr)
        in {("subprocess", one) for one in ("Popen", "run", "call", "check_call", "check_output")}
        | {("os", "system")}
    }
    assert {one.split("/")[0] for one in starts} == {"launch"}, starts


def test_sizes_are_parsed_in_one_place() -> None:
    """No other module has factors of the units of sizes by their names."""
    unit = re.compile(r"[kmgt]i?b", re.IGNORECASE)
    tables = [
        f"{local(path)}:{node.lineno}"
        for path, tree in modules().items()
        if path.name != "units.py"
        for node in nodes(tree)
        if isinstance(node, ast.Dict)
        and sum(isinstance(key, ast.Constant) and bool(unit.fullmatch(str(key.value))) for key in node.keys)
        > 1
    ]
    assert not tables


def test_what_benchmarks_and_studies_import_is_there() -> None:
    """Type checkers do not look there, and most of these files run for hours or on a card."""
    names = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): tree
        for path, tree in modules().items()
    }
    names |= {name.removesuffix(".__init__"): tree for name, tree in names.items()}
    missing = []
    for path in (*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("studies/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vramfit."):
                found = names.get(node.module or "")
                known = set() if found is None else _top_names(found)
                missing += [
                    f"{path.name}: {node.module}.{one.name}"
                    for one in node.names
                    if one.name not in known and f"{node.module}.{one.name}" not in names
                ]
    assert not missing


def _top_names(tree: ast.Module) -> set[str]:
    """The names that a module defines or imports, in blocks of conditions too."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {one.asname or one.name for one in node.names}
    return found
