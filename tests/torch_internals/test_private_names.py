"""No private name of torch stands outside the seam, but for those on a list with reasons."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import vramfit

ROOT = Path(vramfit.__file__).parent
SEAM = ROOT / "torch_internals"
NAMED_BY_TEXT = frozenset({"delattr", "getattr", "hasattr", "keep", "set", "setattr"})
"""Functions whose second argument is the name of an attribute."""

OPERATORS = "torch.ops"
"""Operators have public schemas, also those whose names begin with an underscore."""

WITHOUT_TORCH = {
    (
        "launch/stopping.py",
        "torch._library.simple_registry",
    ): "looks whether it is loaded",
    (
        "virtual/worlds/world_run.py",
        "torch._dynamo",
    ): "names what the process that ranks are forks of imports",
}
"""Paths on floors that work before torch is imported."""

OF_OBJECTS = {
    "what every module has, and libraries read (torch/nn/modules/module.py)": (
        "_backward_hooks _backward_pre_hooks _buffers _call_impl _flat_weights _forward_hooks _forward_pre_hooks"
        " _modules _parameters"
    ),
    "what every tensor and storage has (torch/_tensor.py, torch/storage.py)": (
        "_base _cdata _is_param _nnz _post_accumulate_grad_hooks _reduce_ex_internal _untyped_storage"
        " _use_count _version"
    ),
    "an operator's description (torch/_ops.py)": "_op_dk _opname _overloadname _overloadpacket _schema",
    "a node of the graph's saved values (torch/csrc/autograd/python_function.cpp)": "_raw_saved_result _sequence_nr",
    "an optimizer's hooks, and marks that others leave on it (torch/optim/optimizer.py, lr_scheduler.py)": (
        "_optimizer_load_state_dict_post_hooks"
        " _optimizer_step_post_hooks _optimizer_step_pre_hooks _per_optimizer_states _step_supports_amp_scaling"
        " _wrapped_by_lr_sched"
    ),
    "a mode's own state (torch/utils/_python_dispatch.py)": "_mode",
    "a custom operator's functions (torch/_library/custom_ops.py)": "_abstract_fn _backend_fns _init_fn",
    "the table of a library of operators (torch/library.py)": "_destroy",
    "a stage of a pipeline (torch/distributed/pipelining/stage.py)": "_user_meta",
    "torch's module in C++, given to the floor of files, which imports no torch": "_C",
    "a loader's iterator (torch/utils/data/dataloader.py)": "_shutdown_workers _workers",
    "a subclass's own name for its data (torchao)": "_new_buffer",
    "the method of modules by which a model moves (torch/nn/modules/module.py)": "_apply",
}
"""Attributes of objects that torch hands out, by why they are read where the object is at hand."""

OF_OTHERS = {
    "Python": (
        "_TemporaryFileCloser _USE_CP_COPY_FILE_RANGE _USE_CP_SENDFILE"
        " _actions _args _args_from_interpreter_flags _bootstrap_inner _close_pipe_fds _current_frames"
        " _exit _fastcopy_sendfile _fields _finalizer_registry _forkserver _forkserver_pid _getframe _initializing"
        " _is_gil_enabled _is_owned _kwargs _mmap _registry _run_exitfuncs _run_module_as_main _shutdown _start_method"
        " _stop _target _traces"
    ),
    "other libraries": (
        "_active _attn_implementation _attn_implementation_internal _choose_qparams_affine_tinygemm _cpu _default"
        " _dequantize_affine_tinygemm _experts_implementation _file_openers _instance"
        " _make_closure _make_tensor _quantize_affine_tinygemm _reset_state"
        " _set_data_type _set_dlhandle_cudnn _set_sync_gradients _supports_attention_backend _supports_logits_to_keep"
        " _supports_sdpa _validate_launch_command"
    ),
}
"""Private names that are not torch's."""


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def _of_torch(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Full paths of torch that a module imports or names, with their lines."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.partition(".")[0] == "torch":
                    bound[one.asname or "torch"] = one.name if one.asname else "torch"
                    yield one.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for one in node.names:
                bound[one.asname or one.name] = path = f"{node.module}.{one.name}"
                yield path, node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in bound:
                yield ".".join((bound[inner.id], *reversed(parts))), node.lineno


def _docstrings(tree: ast.Module) -> set[int]:
    """Numbers of nodes that are text about the code: docstrings, and those of variables."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def private_paths() -> Iterator[str]:
    """Private paths of torch outside the seam: imported, named, or written as text."""
    for path, tree in _trees().items():
        if SEAM in path.parents:
            continue
        where = path.relative_to(ROOT.parent)
        for name, line in _of_torch(tree):
            if name == "torch._C":  # listed for the floor of files alone
                if not (_in_facade(path) or "files" in path.relative_to(ROOT).parts):
                    yield f"{where}:{line}: {name}"
            elif (
                _is_private(name)
                and not name.startswith(f"{OPERATORS}.")
                and name.split(".")[-1] not in _allowed()
            ):
                yield f"{where}:{line}: {name}"
        about = _docstrings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in about:
                text = node.value
                if (path.relative_to(ROOT).as_posix(), text) in WITHOUT_TORCH:
                    continue
                if text.startswith("torch.") and text.replace(".", "_").isidentifier() and _is_private(text):
                    yield f"{where}:{node.lineno}: {text}"


@cache
def _allowed() -> frozenset[str]:
    return frozenset(name for names in (*OF_OBJECTS.values(), *OF_OTHERS.values()) for name in names.split())


def _own(tree: ast.Module) -> Iterator[str]:
    """Private names that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _attributes() -> dict[str, set[str]]:
    """Private attributes of other objects that vramfit reads or replaces and does not define, with where."""
    found: dict[str, set[str]] = defaultdict(set)
    outside = {path: tree for path, tree in _trees().items() if SEAM not in path.parents}
    own = {name for tree in outside.values() for name in _own(tree)}
    for path, tree in outside.items():
        for node in ast.walk(tree):
            name = None
            if isinstance(node, ast.Attribute):
                name = node.attr
            elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                function = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                name = node.args[1].value if function in NAMED_BY_TEXT else None
            if (
                isinstance(name, str)
                and name.isidentifier()
                and name != "_"
                and _is_private(name)
                and name not in own
            ):
                if hasattr(torch.ops.aten, name):
                    continue
                found[name].add(f"{path.relative_to(ROOT.parent)}:{node.lineno}")
    return found


FACADES = {
    "virtual/torch_cuda": "tables of the functions of torch._C that the virtual card answers, by their names there",
    "virtual/torch_patches/card_routes.py": "what torch.backends.cuda asks in torch._C, each beside its answer",
    "virtual/ranks/process_groups.py": "what torch asks of a backend, each beside its answer",
}
"""Files and folders that hold names of C++ as names of methods and as texts, and why."""


def _in_facade(path: Path) -> bool:
    inner = path.relative_to(ROOT).as_posix()
    return any(inner == one or inner.startswith(f"{one}/") for one in FACADES)


def _named_in_torch(name: str) -> bool:
    """Whether a private name is one of torch's C++ or of what vramfit meets most."""
    holders: tuple[Any, ...] = (
        *(torch._C, torch._C._distributed_c10d.Backend, torch._C._distributed_c10d.ProcessGroup),
        *(torch.cuda, torch.cuda.nvtx, torch.utils._python_dispatch, torch.optim.AdamW, torch.nn.Module),
    )
    # Of which a CPU build has few.
    return name.startswith(("_cuda_", "_accelerator_")) or any(hasattr(holder, name) for holder in holders)


def private_texts() -> Iterator[str]:
    """Private names of torch outside the seam as texts, or as methods that stand for functions of that name."""
    for path, tree in _trees().items():
        if SEAM in path.parents or _in_facade(path):
            continue
        about, own = _docstrings(tree), set(_own(tree))
        methods = {id(one) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for one in node.body}
        for node in ast.walk(tree):
            name: object = None
            if isinstance(node, ast.Constant) and id(node) not in about:
                name = node.value
            elif id(node) in methods and getattr(node, "name", "").startswith(("_cuda_", "_accelerator_")):
                name = getattr(node, "name", None)
            if (
                isinstance(name, str)
                and name.isidentifier()
                and name != "_"
                and _is_private(name)
                and _named_in_torch(name)
                and name not in _allowed()
                and not (isinstance(node, ast.Constant) and name in own)
            ):
                yield f"{path.relative_to(ROOT.parent)}:{node.lineno}: {name}"


def test_no_private_name_of_torch_is_written_as_text_outside_the_seam() -> None:
    assert list(private_texts()) == []


@pytest.mark.parametrize("place", FACADES)
def test_a_facade_has_such_names(place: str) -> None:
    sources = [ROOT / place] if place.endswith(".py") else list((ROOT / place).glob("*.py"))
    texts = {
        getattr(node, "value", getattr(node, "name", None))
        for path in sources
        for node in ast.walk(_trees()[path])
        if isinstance(node, ast.Constant | ast.FunctionDef)
    }
    private = {text for text in texts if isinstance(text, str) and text.isidentifier() and _is_private(text)}
    assert any(map(_named_in_torch, private))


def test_no_private_path_of_torch_stands_outside_the_seam() -> None:
    assert list(private_paths()) == []


def test_private_attributes_of_others_are_listed_with_a_reason() -> None:
    unlisted = {name: sorted(where) for name, where in _attributes().items() if name not in _allowed()}
    assert unlisted == {}


@pytest.mark.parametrize("name", sorted(_allowed()))
def test_nothing_is_listed_that_is_not_used(name: str) -> None:
    word = re.compile(rf"\b{name}\b")
    assert any(word.search(path.read_text("utf-8")) for path in _trees() if SEAM not in path.parents)
