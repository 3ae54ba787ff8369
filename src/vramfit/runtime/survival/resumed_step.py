"""Takes up an optimizer's step where it ran out of memory, without a copy of anything.

NOTE [Taking a step up again]: torch's optimizers change tensors in place, one op after the other, and an op that runs
out has not written yet: it allocates first. So how often each tensor was written says exactly where a step stopped, and
autograd counts that anyway (``Tensor._version``). The step is then called again under a dispatch mode that leaves out
the writes that are done, and computes temporaries anew. Ops on lists (``foreach``, ``fused``) are not counted by
autograd: there the step runs under `Counting` from the start, which on the host takes a list apart, as the kernel there
does it tensor by tensor. All that is exact unless a temporary reads a tensor which has been
written since: the mode follows such values, and refuses to write one (`StepLostError`). The optimizers in `RESUMABLE`
never do; tests stop each of them at every op.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vramfit.errors import VramfitError
from vramfit.torch_internals.dispatch import TorchDispatchMode
from vramfit.torch_internals.pytree import tree_leaves

RESUMABLE = frozenset(
    {"Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""torch's optimizers none of whose temporaries outlives a write to what it was computed from (torch/optim)."""


class StepLostError(VramfitError):
    """A step that stopped in the middle cannot be finished as it began."""


class WrittenSoFar:
    """How often a step has written each tensor.

    Args:
        tensors: that the step writes, each with memory of its own.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._versions = [tensor._version for tensor in self._tensors]
        self.counts: dict[int, int] = {}

    def note_stop(self) -> None:
        """Count the writes of an attempt without the mode, which has just stopped."""
        for tensor, before in zip(self._tensors, self._versions, strict=True):
            self.counts[memory_of(tensor)] = tensor._version - before

    def any_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of some tensors has been written."""
        return any(self.counts.get(memory_of(tensor)) for tensor in tensors)

    def moved(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """A copy takes a tensor's place in the rest of the step."""
        self.counts[memory_of(target)] = self.counts.get(memory_of(source), 0)


class Counting(TorchDispatchMode):
    """Counts what ops on lists write, as autograd counts what others write. See NOTE [Taking a step up again]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _writes_lists(func):
            return func(*args, **kwargs)
        for part in _singles(func, args, kwargs):
            written = _written_by(func, part, kwargs)
            before = written[0]._version if written else 0
            func(*part, **kwargs)
            if written and written[0]._version == before:
                torch.autograd.graph.increment_version(written)
        return None


class Resumed(TorchDispatchMode):
    """Leaves out what a step has written, and counts what it writes now. See NOTE [Taking a step up again].

    Args:
        written: so far; it is counted on.
        watched: what the step writes for good; None takes every tensor for that.
    """

    def __init__(self, written: WrittenSoFar, watched: Iterable[torch.Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written = written
        self._watched = None if watched is None else {memory_of(tensor) for tensor in watched}
        self._passed: dict[int, int] = {}
        self._stale: dict[int, weakref.ref[torch.Tensor]] = {}
        self._stale_number = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _writes_lists(func):
            for part in _singles(func, args, kwargs, on_device_too=True):
                self._done(func, part, kwargs)
            return None
        return self._done(func, args, kwargs)

    def _done(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op gives: done, or left out."""
        places = [memory_of(tensor) for tensor in _written_by(func, args, kwargs)]
        lasting = [place for place in places if self._watched is None or place in self._watched]
        counts = self._written.counts
        if lasting and all(self._passed.get(place, 0) < counts.get(place, 0) for place in lasting):
            for place in lasting:
                self._passed[place] = self._passed.get(place, 0) + 1
            return _result(func, args, kwargs)
        stale = self._reads_stale(args, kwargs)
        if lasting and counts and (stale or self._stale_number) and self._watched is not None:
            raise StepLostError(
                f"the optimizer's step stopped in the middle, and {func} needs a value from before",
                "Load the last checkpoint",
            )
        made = func(*args, **kwargs)
        for place in lasting:
            self._passed[place] = counts[place] = counts.get(place, 0) + 1
        if stale:
            for tensor in _tensors((made, args if places and not lasting else ())):
                self._stale[id(tensor)] = weakref.ref(tensor)
            self._stale_number |= not any(True for _ in _tensors(made))
        return made

    def _reads_stale(self, args: Any, kwargs: Any) -> bool:
        """Whether an op reads what has been written since, or what was computed from that."""
        counts, passed = self._written.counts, self._passed
        for tensor in _tensors((args, kwargs)):
            place = memory_of(tensor)
            if passed.get(place, 0) < counts.get(place, 0):
                return True
            known = self._stale.get(id(tensor))
            if known is not None and known() is tensor:
                return True
        return False


def memory_of(tensor: torch.Tensor) -> int:
    """What stands for a tensor's memory, which its views share."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op writes, by its schema."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            found += _tensors(given)
    return found


@functools.lru_cache(maxsize=1024)
def _writes_lists(func: Any) -> bool:
    """Whether an op writes lists of tensors in place; such ops give nothing back."""
    given = func._schema.arguments
    return not func._schema.returns and any(
        one.alias_info is not None and one.alias_info.is_write and isinstance(one.type, torch.ListType)
        for one in given
    )


def _singles(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_device_too: bool = False
) -> Iterator[tuple[Any, ...]]:
    """The arguments of an op on lists, tensor by tensor where it may stop between two of them.

    Args:
        on_device_too: take lists of a device's tensors apart too; its kernels begin when all memory is there.
    """
    name, overload = func._schema.name, func._schema.overload_name
    targets = args[0] if args and isinstance(args[0], list | tuple) else ()
    apart = name.startswith("aten::_foreach_") and len(targets) > 1
    apart = apart and not any(isinstance(one, list | tuple) for one in kwargs.values())
    apart = apart and (on_device_too or targets[0].device.type == "cpu")
    if (
        overload == "Tensor"
    ):  # counters and one tensor, where nothing is allocated; or a tensor of all scalars
        apart = apart and on_device_too and len(args) == 2
    if not apart:
        yield args
        return
    for number in range(len(targets)):
        yield tuple([one[number]] if isinstance(one, list | tuple) else one for one in args)


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op that is left out gives back: what it writes."""
    given = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given.append(args[number] if number < len(args) else kwargs.get(argument.name))
    wanted = len(func._schema.returns)
    if not wanted:
        return None
    return given[0] if wanted == 1 else tuple(given[:wanted])
