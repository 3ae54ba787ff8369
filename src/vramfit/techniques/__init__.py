"""Techniques that lower the memory of a program, one file each, all with one protocol.

A module or package of this folder that holds a `Technique` is one; nothing lists them. Each says where it could be
applied to a workload, what it promises of the results (`Numerics`), and attaches itself to a live model and optimizer,
in place, with its undo. Applied to a `Workload` it gives a new one.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
from collections import defaultdict
from functools import cache
from importlib import import_module
from typing import Any

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram as AttachedProgram
from vramfit.techniques.core.attached_program import AttachStage as AttachStage
from vramfit.techniques.core.attached_program import Piece as Piece
from vramfit.techniques.core.model_profile import BlockOp as BlockOp
from vramfit.techniques.core.model_profile import ModelBlock as ModelBlock
from vramfit.techniques.core.model_profile import Profile as Profile
from vramfit.techniques.core.technique import AppliedWorkload as AppliedWorkload
from vramfit.techniques.core.technique import Choice as Choice
from vramfit.techniques.core.technique import LoopChange as LoopChange
from vramfit.techniques.core.technique import Numerics as Numerics
from vramfit.techniques.core.technique import Promise as Promise
from vramfit.techniques.core.technique import Setting as Setting
from vramfit.techniques.core.technique import Technique as Technique
from vramfit.techniques.core.technique import check_together as check_together
from vramfit.techniques.core.technique import live_of as live_of
from vramfit.techniques.core.technique import setting_from_plain as setting_from_plain
from vramfit.techniques.core.technique import setting_to_plain as setting_to_plain
from vramfit.techniques.core.technique import with_choices as with_choices


@cache
def all_techniques() -> tuple[Technique[Any], ...]:
    """One technique of each kind, in the order of a plan's search and of tables (see `Technique.follows`).

    Raises:
        ValueError: a technique follows none that there is.
    """
    following: defaultdict[str | None, list[Technique[Any]]] = defaultdict(list)
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for kind in vars(import_module(module.name)).values():
            if _is_technique_of(kind, module.name):
                following[kind.follows].append(kind())
    ordered: list[Technique[Any]] = []
    waiting = [*_by_name(following.pop("", [])), *_by_name(following.pop(None, []))]
    while waiting:
        ordered.append(waiting.pop())
        waiting += _by_name(following.pop(ordered[-1].name, []))
    if following:
        raise ValueError(f"no technique is named {', '.join(map(repr, following))}, which others follow")
    return tuple(ordered)


def find_technique(name: str) -> Technique[Any]:
    """The technique of that name.

    Raises:
        UsageError: there is no such one.
    """
    known = {technique.name: technique for technique in all_techniques()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}"
    raise UsageError(f"there is no technique {name!r}", hint)


def _is_technique_of(value: object, module: str) -> bool:
    """Whether a value of a module is a technique that was defined there, or inside of the package that it is."""
    return (
        inspect.isclass(value)
        and issubclass(value, Technique)
        and not inspect.isabstract(value)
        and f"{value.__module__}.".startswith(f"{module}.")
    )


def _by_name(techniques: list[Technique[Any]]) -> list[Technique[Any]]:
    """The first by name last, where a stack takes it first."""
    return sorted(techniques, key=lambda technique: technique.name, reverse=True)
