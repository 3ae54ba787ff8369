"""What an owner chain is: from something that keeps a tensor alive down to the tensor. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Root(Enum):
    """Where a chain of owners begins: why the tensor cannot be freed."""

    GLOBAL = "global"
    """A variable of a module."""
    LOCAL = "local"
    """A variable of a function that is running."""
    CONTEXT = "context variable"
    """A ``contextvars.ContextVar``, in the context of the thread that asks."""
    CLASS = "class attribute"
    """An attribute of a class."""
    THREAD_LOCAL = "thread-local"
    """The state of a thread: a ``threading.local``."""
    DEAD_CYCLE = "dead reference cycle"
    """Nothing: objects that refer to each other in a circle, until the garbage collector finds them."""
    GRAPH_CYCLE = "reference cycle through the autograd graph"
    """Nothing: a circle that leads through the autograd graph, where the garbage collector cannot follow.
    It is never freed."""
    HIDDEN = "held by C++"
    """C++ or a torch object that the garbage collector cannot see into."""
    UNFINISHED = "not followed to its end"
    """The search ended at its bound of time or objects."""


class Through(Enum):
    """What a chain passes through, where that explains a leak."""

    AUTOGRAD = "autograd graph"
    CLOSURE = "closure"
    CACHE = "functools cache"
    TRACEBACK = "exception traceback"
    GENERATOR = "suspended generator or coroutine"
    HOOK = "hook"
    MODULE = "module"
    OPTIMIZER = "optimizer state"
    THREAD_LOCAL = "thread-local"
    DEFAULT = "default argument"
    WEAKREF_CALLBACK = "callback of a weak reference"
    GRADIENT = "gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One object of a chain.

    Attributes:
        kind: its type, ``"list"`` or ``"train.Metrics"``.
        edge: how it holds the next one, as text that continues a path: ``".history"``, ``"[12]"``.
    """

    kind: str
    edge: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerChain:
    """The way from an owner to a tensor.

    Attributes:
        root: why the tensor cannot be freed.
        text: the whole chain for people: ``train.history[12] -> grad_fn AddmmBackward0 saved mat1``.
        links: the objects, from the owner to what holds the tensor; the tensor itself is not among them.
        through: what the chain passes through.
        cycle: the types of the objects of the circle, where ``root`` is a cycle.
    """

    root: Root
    text: str
    links: tuple[Link, ...]
    through: frozenset[Through] = frozenset()
    cycle: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The chain as text."""
        return self.text
