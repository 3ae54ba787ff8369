"""Lets a program import `torch._dynamo` by itself, as on a card: what that import keeps alive is part of its memory.

NOTE [What an import keeps alive]
`import torch` leaves Dynamo out. The first call of a function that Dynamo is to leave alone imports it
(torch/_compile.py: _disable_dynamo): the first `fully_shard`, an optimizer's constructor, `checkpoint`. A module of
Dynamo calls `torch.fx.wrap` while it is executed, which keeps its own frame in a variable of that frame
(torch/fx/_symbolic_trace.py). Such a circle ends when Python's garbage collector comes by. Until then it holds the
frames of all who called, with their variables as they were last: those of the first `fully_shard` name the parameters
that it has just replaced by shards.

The virtual GPU has loaded Dynamo before the program starts, for torch's fake tensors ask for it. Here Python forgets
that: the program's first import finds the same modules, and leaves the same circle. `torch.manual_seed`, which Dynamo
replaces by a function of that kind when it is imported (torch/_dynamo/__init__.py), is torch's own until then.

What describes ops for the virtual GPU, and runs on no card, does not count: fake tensors read Dynamo's settings
(``torch._dynamo.config``), and functions of torch/_refs are among those that import it.

When the circle ends is up to the collector, to `gc.collect()` and `gc.disable()`, as on a card. Its own rhythm follows
the number of objects that Python has made, which are others here, so without those two it may come by sooner or later.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals.compiler_parts import DYNAMO, FAKE_TENSORS

_ATTRIBUTE = DYNAMO.rpartition(".")[2]
_DESCRIBES = "vramfit.virtual.describe"

borrowed: list[_Finder] = []
"""Who brought Dynamo back while an op was being described: `give_back` is to be called once that is done."""


def forget_dynamo(patches: PatchStack) -> None:
    """Take Dynamo's modules out of Python's table until the program imports one of them; the undo brings them back."""
    modules = {
        name: module
        for name, module in sys.modules.items()
        if name == DYNAMO or name.startswith(f"{DYNAMO}.")
    }
    if DYNAMO in modules:
        finder = _Finder(modules)
        finder.forget()
        patches.call(finder.bring_back)


def give_back() -> None:
    """Forget Dynamo again, which was imported to describe an op."""
    borrowed.pop().forget()


class _Finder(MetaPathFinder, Loader):
    """Finds Dynamo where it was put aside."""

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self._modules = modules
        self._spec = modules[DYNAMO].__spec__
        self._replaced: dict[str, Any] = {}

    def forget(self) -> None:
        """Put the modules aside."""
        sys.meta_path.insert(0, self)
        for name in self._modules:
            del sys.modules[name]
        of_torch = vars(torch)
        del of_torch[_ATTRIBUTE]
        self._replaced = {name: of_torch[name] for name in ("manual_seed", "__getattr__")}
        of_torch.update(manual_seed=torch.random.manual_seed, __getattr__=self._attribute)

    def bring_back(self) -> None:
        """Put the modules back where Python looks for them."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        for name, module in self._modules.items():
            sys.modules.setdefault(name, module)
        vars(torch).update(self._replaced)
        setattr(torch, _ATTRIBUTE, self._modules[DYNAMO])

    def _attribute(self, name: str) -> Any:
        """What torch has no attribute for: Dynamo for fake tensors, else what torch says, which may import it."""
        if name == _ATTRIBUTE and sys._getframe(1).f_globals.get("__name__") == FAKE_TENSORS:
            return self._modules[DYNAMO]
        return self._replaced["__getattr__"](name)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  # as Python calls it
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The spec of Dynamo's package, which is imported before any module of it; None for all others."""
        return ModuleSpec(fullname, self, is_package=True) if fullname == DYNAMO else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002  # as Python calls it
        """The package as it was loaded."""
        return self._modules[DYNAMO]

    def exec_module(self, module: ModuleType) -> None:
        """Bring back all that was loaded, and leave what executing it would have left."""
        module.__spec__, module.__loader__ = self._spec, None if self._spec is None else self._spec.loader
        self.bring_back()
        if _is_describing():
            borrowed.append(self)
        else:
            _stay()


def _is_describing() -> bool:
    """Whether an op is being described for the virtual GPU."""
    frame = inspect.currentframe()
    try:
        while frame is not None and frame.f_globals.get("__name__") != _DESCRIBES:
            frame = frame.f_back
        return frame is not None
    finally:
        del frame


def _stay() -> None:
    """Leave this frame, and with it those of all who called, to the garbage collector."""
    frame = inspect.currentframe()  # noqa: F841  # the circle
