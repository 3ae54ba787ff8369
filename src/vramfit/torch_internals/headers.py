"""Reads from the C++ headers that torch ships in which order a class declares its virtual methods."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_DESTRUCTOR = "~"
_DESTRUCTOR_SLOTS = 2  # the Itanium C++ ABI gives a virtual destructor two slots
_VIRTUAL = re.compile(r"\bvirtual\b[^;{]*?(~?\w+)\s*\(([^;{]*)[;{]")
_DIRECTIVE = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What headers say of a class' virtual table.

    Attributes:
        slots: the slot of each method, without those that are declared twice.
        several: the methods that are.
        length: how many slots there are; None where that is not certain.
    """

    slots: dict[str, int]
    length: int | None
    several: frozenset[str] = frozenset()


def declared(*places: tuple[str, str], include: Path | None = None) -> Declared:
    """The virtual methods of a class, from the headers of its bases and its own, the uppermost base first.

    A method that is declared twice in one class (overloaded) takes two slots, and neither is its name's. One that is
    declared again below, without ``override``, may or may not replace the first: from there on nothing is certain.

    Args:
        places: for each class its header, below the folder of headers, and its name.
        include: that folder; of the installed torch by default.
    """
    folder = Path(torch.__file__).parent / "include" if include is None else include
    order: list[str] = []
    try:
        for header, name in places:
            above = set(order)
            for method in _methods(_body(_header(folder / header), name)):
                if method in above and method != _DESTRUCTOR:
                    return Declared(slots=_single(order), length=None, several=_several(order))
                if method != _DESTRUCTOR or _DESTRUCTOR not in above:
                    order += [method] * (_DESTRUCTOR_SLOTS if method == _DESTRUCTOR else 1)
    except (OSError, LookupError):
        return Declared(slots={}, length=None)
    return Declared(slots=_single(order), length=len(order) or None, several=_several(order))


def _single(order: list[str]) -> dict[str, int]:
    return {name: slot for slot, name in enumerate(order) if order.count(name) == 1}


def _several(order: list[str]) -> frozenset[str]:
    return frozenset(name for name in order if name != _DESTRUCTOR and order.count(name) > 1)


def _header(path: Path) -> str:
    """A header without its comments, and without what this build leaves out."""
    text = path.read_text(encoding="utf-8")
    return active(re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL), _defined())


def _defined() -> set[str]:
    """Macros that are set where torch itself was compiled, and that its headers ask for."""
    found = {"__cplusplus"}
    if torch.version.hip is not None:
        found.add("USE_ROCM")
    if sys.platform == "darwin":
        found.add("__APPLE__")
    return found


def active(text: str, defined: set[str]) -> str:
    """C++ without the lines behind conditions that do not hold; of macros only `defined` are set.

    Raises:
        LookupError: a condition cannot be evaluated.
    """
    kept: list[str] = []
    open_ifs: list[tuple[bool, bool]] = []  # whether this branch holds, whether one before it did
    for line in text.replace("\\\n", " ").splitlines():
        directive = _DIRECTIVE.match(line)
        if directive is None:
            if all(holds for holds, _ in open_ifs):
                kept.append(line)
            continue
        word, condition = directive.groups()
        if word.startswith("if"):
            open_ifs.append((holds := _holds(word, condition, defined), holds))
        elif word == "endif":
            open_ifs.pop()
        else:
            taken = open_ifs.pop()[1]
            holds = not taken and (word == "else" or _holds("if", condition, defined))
            open_ifs.append((holds, taken or holds))
    return "\n".join(kept)


def _holds(word: str, condition: str, defined: set[str]) -> bool:
    if word != "if":
        return (condition.strip() in defined) == (word == "ifdef")
    text = re.sub(
        r"\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))",
        lambda match: str(int((match[1] or match[2]) in defined)),
        condition,
    )
    text = re.sub(r"\b[A-Za-z_]\w*(\s*\([^()]*\))?", "0", text)  # what C makes of a name that is no macro
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    try:
        return bool(eval(text, {"__builtins__": {}}))  # numbers and operators are all that is left
    except (SyntaxError, TypeError, ArithmeticError) as error:
        raise LookupError(condition) from error


def _body(text: str, name: str) -> str:
    """What stands between the braces of a class."""
    head = re.search(rf"\b(?:struct|class)\b[^;{{()]*\b{name}\b[^;{{()]*{{", text)
    if head is None:
        raise LookupError(name)
    depth = 1
    for brace in re.finditer(r"[{}]", text[head.end() :]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[head.end() : head.end() + brace.start()]
    raise LookupError(name)


def _methods(body: str) -> list[str]:
    return [
        _DESTRUCTOR if match[1].startswith(_DESTRUCTOR) else match[1]
        for match in _VIRTUAL.finditer(body)
        if not re.search(r"\boverride\b", match[2])
    ]
