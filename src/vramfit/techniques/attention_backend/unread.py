"""Finds ``nn.MultiheadAttention`` whose weights are asked for by default and thrown away."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn

from vramfit.techniques.core.surround import plain_class

BEFORE_NEED_WEIGHTS = 4  # query, key, value, key_padding_mask


def unread_weights(model: nn.Module) -> list[str]:
    """Names of the modules of ``nn.MultiheadAttention`` whose caller takes the first of their two results alone.

    Read from the source of the class that holds each: ``self.attention(...)[0]``, or ``out, _ = self.attention(...)``
    where that second name is not read in the function. Where the source is not to be had, or the class uses the module
    in any other way, it is left out. Code outside of that class is not read.
    """
    found = []
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            attends = plain_class(child) is nn.MultiheadAttention and not child._forward_hooks
            if attends and _only_first(plain_class(parent), name):
                found.append(f"{path}.{name}" if path else name)
    return found


def _only_first(kind: type[nn.Module], name: str) -> bool:
    """Whether all uses of ``self.<name>`` in a class and its bases throw the weights away, and there is one."""
    uses = 0
    for base in kind.__mro__:
        if base is nn.Module:
            break
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            return False
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for good in _uses(function, name):
                    if not good:
                        return False
                    uses += 1
    return uses > 0


def _uses(function: ast.FunctionDef, name: str) -> Iterator[bool]:
    """For each use of ``self.<name>`` in a function, whether it throws the weights away."""
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            continue
        parent = parents[node]
        if isinstance(parent, ast.Attribute):
            continue  # its own attributes: self.attention.in_proj_weight
        yield isinstance(parent, ast.Call) and parent.func is node and _unread(parent, parents, read)


def _unread(call: ast.Call, parents: dict[ast.AST, ast.AST], read: set[str]) -> bool:
    """Whether a call asks for weights and throws them away."""
    if len(call.args) > BEFORE_NEED_WEIGHTS or any(isinstance(item, ast.Starred) for item in call.args):
        return False
    if any(keyword.arg in (None, "need_weights") for keyword in call.keywords):
        return False
    outer = parents[call]
    if isinstance(outer, ast.Subscript):
        return isinstance(outer.slice, ast.Constant) and outer.slice.value == 0
    if not isinstance(outer, ast.Assign) or len(outer.targets) != 1:
        return False
    target = outer.targets[0]
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return False
    second = target.elts[1]
    return isinstance(second, ast.Name) and second.id not in read
