"""Results that are computed again one at a time: each by its own op, when the backward pass reads it.

NOTE [One at a time]: ``torch.utils.checkpoint`` runs a whole block again when the backward pass gets to it, and then
holds all of its activations at once. Here nothing runs as a whole. During the forward pass each op is noted with its
arguments, as it reaches the kernels: below autograd and autocast, views resolved to the memory that they are in. What
autograd saves is then kept as a recipe: the op, and for each argument the tensor itself, where it is kept anyway, or
the recipe of another. The backward pass reads a saved tensor, its recipe is followed back to what is kept, and what
has been computed on the way stays if it is to be read too. The same kernels with the same arguments give the same bits.

1. An op that changes a result in place (``relu_``) becomes a part of its recipe, if nobody had read the result. If
   somebody had, the result is kept from then on.
2. An op that draws random numbers is preceded by the state that its generator had.
3. Batch norm updates its running statistics. The second time it is given copies, which its results do not depend on.
4. What is neither an op of torch's own nor gives plain tensors (collectives, kernels of others, subclasses) is kept,
   and what draws from a generator of the program's own.
5. A tensor that is kept and that a recipe reads may change in the forward pass: what the recipe makes is computed just
   before, and kept. After the forward pass it must not: its version is compared, as autograd does for what it saves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from vramfit.techniques.activation_checkpointing.op_facts import (
    Matcher,
    RandomState,
    alias_of,
    changed_arguments,
    op_facts,
    repeats,
    tensors_in,
)
from vramfit.torch_internals.dispatch import (
    AutoDispatchBelowAutograd,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)

_STATISTICS = frozenset({"running_mean", "running_var"})
"""Arguments that batch norm updates in place, whatever its schema says."""

_L = TypeVar("_L")

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation since the forward "
    "pass"
)
"""What autograd itself says, which compares no versions where hooks are."""

_SWEEP = 32
"""Ops from one look at what is gone to the next."""

_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


class Rematerialized:
    """Runs a block so that its results are computed again one at a time, in training and where gradients are wanted."""

    def __init__(self, path: str, *, keep: tuple[str, ...] = ()) -> None:
        self.path = path
        self.keep = keep

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The block's forward pass."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        recording = _Recording(self.keep, self.path)
        recordings = _recordings()
        recordings.append(recording)
        try:
            with torch.autograd.graph.saved_tensors_hooks(recording.pack, _unpack), recording:
                out = forward(*args, **kwargs)
        finally:
            recordings.pop()
        recording.close()
        return out


class Apart:
    """Counts the ops of a part of a block apart from those around it, so that these may be more or fewer."""

    def __init__(self, path: str, *, keep: tuple[str, ...] = ()) -> None:
        self.path = path
        self.keep = keep

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The part's forward pass."""
        del module
        recordings = _recordings()
        if not recordings:
            return forward(*args, **kwargs)
        with recordings[-1].apart(self.path, self.keep):
            return forward(*args, **kwargs)


_OF_THREAD = threading.local()


def _recordings() -> list[_Recording]:
    """The recordings of this thread, the innermost last."""
    known: list[_Recording] | None = getattr(_OF_THREAD, "recordings", None)
    if known is None:
        known = _OF_THREAD.recordings = []
    return known


class _Result:
    """A result of an op, with what changed it in place since.

    Attributes:
        pending: saved tensors that it stands for, and that were not read so far.
        value: the tensor while it is there.
        stays: whether it could not be computed again later, and is kept.
    """

    __slots__ = ("__weakref__", "dtype", "operation", "pending", "saved", "stays", "used", "value")

    def __init__(self, operation: _Operation, dtype: torch.dtype) -> None:
        self.operation = operation
        self.dtype = dtype
        self.pending = 0
        self.value: torch.Tensor | None = None
        self.used = self.saved = self.stays = False


class _View:
    """A tensor in the memory of a result; of that which a step changes itself, where it names none."""

    __slots__ = ("offset", "result", "size", "stride")

    def __init__(self, result: _Result | None, tensor: torch.Tensor) -> None:
        self.result = result
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor, once the result is there."""
        if (value.size(), value.stride(), value.storage_offset()) == (self.size, self.stride, self.offset):
            return value
        return value.as_strided(self.size, self.stride, self.offset)


class _Held:
    """A tensor that stays, and how often it was changed in place."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A parameter may be moved to another device and back while it waits: then its own data is what counts. What has
        # a graph must not be held with it: the node that saves its own result would hold itself.
        self.tensor = tensor if tensor.grad_fn is None else alias_of(tensor)
        self.version = None if tensor.is_inference() else tensor._version

    @property
    def changed(self) -> bool:
        """Whether it was changed since."""
        return self.version is not None and self.tensor._version != self.version


class _Step:
    """One call of an op, with recipes for arguments.

    Args:
        args: its arguments: tensors as `_View` or `_Held`.
        state: of the generators before it; None if it draws nothing.
        changes: the result that it changes in place, which holds it.
    """

    __slots__ = ("args", "changes", "func", "grad", "kwargs", "state")

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        state: RandomState | None,
        changes: weakref.ref[_Result] | None = None,
    ) -> None:
        # Kernels may ask: oneDNN's recurrent layers keep what their gradients need only where they are enabled.
        self.grad = torch.is_grad_enabled()
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.state = state
        self.changes = changes

    def run(self, values: dict[_Result, torch.Tensor], path: str) -> Any:
        """Call the op again."""
        args, kwargs = self._filled(self.args, values, path), self._filled(self.kwargs, values, path)
        with torch.set_grad_enabled(self.grad), AutoDispatchBelowAutograd():
            return self._called(args, kwargs)

    def _called(self, args: Any, kwargs: Any) -> Any:
        if self.state is None:
            return self.func(*args, **kwargs)
        before = RandomState.now(tensors_in((args, kwargs)))
        self.state.set()
        try:
            return self.func(*args, **kwargs)
        finally:
            before.set()

    def _filled(self, tree: Any, values: dict[_Result, torch.Tensor], path: str) -> Any:
        if isinstance(tree, _View):
            result = tree.result if tree.result is not None or self.changes is None else self.changes()
            assert result is not None
            value = values.get(result, result.value)
            assert value is not None  # it was computed before
            return tree.of(value)
        if isinstance(tree, _Held):
            if tree.changed:
                raise RuntimeError(
                    f"a tensor that {self.func} of {path} read was changed in place since its forward pass: leave "
                    f"{path} out of the modules to recompute"
                )
            return tree.tensor
        if isinstance(tree, _Statistics):
            return tree.tensor.clone()
        if isinstance(tree, tuple | list):
            return [self._filled(item, values, path) for item in tree]
        if isinstance(tree, dict):
            return {name: self._filled(item, values, path) for name, item in tree.items()}
        return tree


class _Statistics:
    """Running statistics: a copy is given to the second call."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Operation:
    """An op that makes results, and what changes them in place.

    Attributes:
        number: when it ran, in the block; of the last op that changed its result.
        results: with the place of each among those of the first call. They hold it, and it does not hold them: all
            goes with the graph, and nothing waits for the garbage collector.
    """

    __slots__ = ("__weakref__", "number", "path", "results", "steps")

    def __init__(self, path: str, number: int, step: _Step) -> None:
        self.path = path
        self.number = number
        self.steps = [step]
        self.results: list[tuple[int, weakref.ref[_Result]]] = []

    @property
    def used(self) -> bool:
        """Whether an op has read any of its results."""
        return any(result.used for _, known in self.results if (result := known()) is not None)

    def reads(self) -> Iterator[_Result]:
        """The results of others that it needs."""
        for step in self.steps:
            for view in _leaves((step.args, step.kwargs), _View):
                if view.result is not None:
                    yield view.result

    def run(self, values: dict[_Result, torch.Tensor]) -> None:
        """Compute the results of the op, with all changes in place."""
        made = self.steps[0].run(values, self.path)
        for place, known in self.results:
            if (result := known()) is not None:
                values[result] = made[place] if isinstance(made, tuple | list) else made
        for step in self.steps[1:]:
            if step.changes is not None and step.changes() is not None:
                step.run(values, self.path)


class _Saved:
    """What autograd holds in place of a tensor."""

    __slots__ = ("result", "view")

    def __init__(self, result: _Result, view: _View) -> None:
        self.result = result
        self.view = view
        result.pending += 1


def _unpack(saved: _Held | _Saved) -> torch.Tensor:
    """The tensor that autograd had saved."""
    if isinstance(saved, _Held):
        if saved.changed:
            raise RuntimeError(_CHANGED)
        return saved.tensor
    result = saved.result
    with torch.no_grad(), ExcludeDispatchKeyGuard(_AUTOCAST):
        value = result.value
        if value is None:
            value = _computed(result)
        result.pending -= 1
        result.value = value if result.stays or result.pending > 0 else None
        return saved.view.of(value)


def _computed(wanted: _Result) -> torch.Tensor:
    """A result, computed again with all that it takes; of these, what is to be read too stays."""
    needed: dict[int, _Operation] = {}
    ahead = [wanted.operation]
    while ahead:
        operation = ahead.pop()
        if operation.number not in needed:
            needed[operation.number] = operation
            ahead += [result.operation for result in operation.reads() if result.value is None]
    order = sorted(needed)
    last = {result: number for number in order for result in needed[number].reads()}
    values: dict[_Result, torch.Tensor] = {}
    for number in order:
        operation = needed[number]
        operation.run(values)
        for _, known in operation.results:
            if (result := known()) is not None and result.pending > 0:
                result.value = values[result]
        for result in list(values):
            if result is not wanted and last.get(result, number) <= number:
                del values[result]
    return values[wanted]


class _Recording(TorchDispatchMode):
    """Notes the ops of one call of a block."""

    def __init__(self, keep: tuple[str, ...], path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._matcher = Matcher(keep)
        self._matchers: dict[str, Matcher] = {}
        self._path = path
        self._results: dict[int, _Result] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # their addresses are no others' while these are held
        self._readers: dict[int, list[weakref.ref[_Operation]]] = {}  # of tensors that are kept, by storage
        self._number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) == "prim":
            return func(*args, **kwargs)  # a question for the device of a fake tensor
        facts = op_facts(func)
        self._number += 1
        if self._number % _SWEEP == 0:
            self._forget()
        wanted = self._matcher.wants(facts.name)
        state = RandomState.now(tensors_in((args, kwargs))) if facts.draws and not wanted else None
        changes = facts.changes and not _STATISTICS.issuperset(name for _, name in facts.changes)
        changed = _storages(changed_arguments(facts, args, kwargs)) if changes else set()
        for storage in changed & self._readers.keys():
            self._compute_before(storage)
        out = func(*args, **kwargs)
        if facts.is_view:
            return out
        if changes:
            self._note_change(func, args, kwargs, state, changed, wanted=wanted)
        elif not wanted and _repeats(func, args, kwargs, out):
            self._note_results(func, args, kwargs, state, out)
        return out

    @contextmanager
    def apart(self, path: str, keep: tuple[str, ...]) -> Iterator[None]:
        """While this is entered, ops are those of a part, counted on from its last call."""
        around = self._matcher
        self._matcher = self._matchers.setdefault(path, Matcher(keep))
        try:
            yield
        finally:
            self._matcher = around

    def _forget(self) -> None:
        """Let go of results whose memory is gone: no op can read them, and their arguments are held for nothing."""
        for storage in [known for known, held in self._storages.items() if held.expired()]:
            del self._storages[storage]
            self._results.pop(storage, None)

    def _note_results(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: RandomState | None, out: Any
    ) -> None:
        given = _storages((args, kwargs))
        made = out if isinstance(out, tuple | list) else (out,)
        fresh = [
            (place, tensor)
            for place, tensor in enumerate(made)
            if isinstance(tensor, torch.Tensor)
            and tensor.untyped_storage()._cdata not in given
            and tensor.untyped_storage()._cdata not in self._results
        ]
        if not fresh:
            return
        operation = _Operation(self._path, self._number, self._step(func, args, kwargs, state))
        self._note_reader(operation, operation.steps[0])
        for place, tensor in fresh:
            storage = tensor.untyped_storage()
            result = _Result(operation, tensor.dtype)
            operation.results.append((place, weakref.ref(result)))
            self._results[storage._cdata] = result
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def _note_change(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: RandomState | None,
        changed: set[int],
        *,
        wanted: bool,
    ) -> None:
        for storage in changed:
            result = self._results.get(storage)
            if result is None:
                continue
            operation = result.operation
            followed = wanted or len(changed) > 1 or result.saved or operation.used
            if followed or not _repeats(func, args, kwargs, None):
                del self._results[storage]
                continue
            step = self._step(func, args, kwargs, state, changes=result)
            operation.steps.append(step)
            operation.number = self._number
            self._note_reader(operation, step)

    def _note_reader(self, operation: _Operation, step: _Step) -> None:
        for held in _leaves((step.args, step.kwargs), _Held):
            if _is_plain(held.tensor):
                storage = held.tensor.untyped_storage()._cdata
                self._readers.setdefault(storage, []).append(weakref.ref(operation))

    def _compute_before(self, storage: int) -> None:
        """A kept tensor is about to change: what was read of its readers is computed now, and from now on they stay."""
        for known in self._readers.pop(storage):
            operation = known()
            for _, of in operation.results if operation is not None else ():
                result = of()
                if result is None:
                    continue
                if (result.saved or result.used) and not result.stays:
                    with torch.no_grad():
                        result.value = _computed(result) if result.value is None else result.value
                    result.stays = True
                self._results = {
                    place: other for place, other in self._results.items() if other is not result
                }

    def _step(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: RandomState | None,
        changes: _Result | None = None,
    ) -> _Step:
        declared = [argument.name for argument in func._schema.arguments]
        making = _Making(self, changes)
        given = [making.recipe(value, of) for value, of in zip(args, declared, strict=False)]
        named = {of: making.recipe(value, of) for of, value in kwargs.items()}
        return _Step(func, given, named, state, None if changes is None else weakref.ref(changes))

    def result_of(self, tensor: torch.Tensor) -> _Result | None:
        """The result in whose memory a tensor is, and that is computed again; None where it is in none."""
        if not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()._cdata
        result = self._results.get(storage)
        if result is None:
            return None
        if tensor.dtype != result.dtype or tensor.is_conj() or tensor.is_neg():
            del self._results[storage]  # seen as something else: kept from now on
            return None
        return result

    def pack(self, tensor: torch.Tensor) -> _Held | _Saved:
        """What autograd holds in place of a tensor."""
        result = self.result_of(tensor)
        if result is None:
            return _Held(tensor)
        result.saved = True
        return _Saved(result, _View(result, tensor))

    def close(self) -> None:
        """The forward pass is over: what is packed holds all that it needs."""
        self._results.clear()
        self._storages.clear()
        self._readers.clear()


class _Making:
    """Makes recipes of the arguments of a call."""

    def __init__(self, recording: _Recording, changes: _Result | None) -> None:
        self._recording = recording
        self._changes = changes

    def recipe(self, value: Any, of: str = "") -> Any:
        """A value with recipes in place of tensors; `of` is the argument's name."""
        if isinstance(value, torch.Tensor):
            return _Statistics(value) if of in _STATISTICS else self._tensor(value)
        if isinstance(value, tuple | list):
            return [self.recipe(item) for item in value]
        if isinstance(value, dict):
            return {name: self.recipe(item) for name, item in value.items()}
        return value

    def _tensor(self, tensor: torch.Tensor) -> _View | _Held:
        result = self._recording.result_of(tensor)
        if result is None:
            return _Held(tensor)
        if result is self._changes:
            return _View(None, tensor)
        result.used = True
        return _View(result, tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is its storage, and all of it."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _repeats(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Whether a second call does the same and nothing else, as far as plain tensors go."""
    return repeats(func, args, kwargs) and all(map(_is_plain, tensors_in((args, kwargs, out))))


def _leaves(tree: Any, kind: type[_L]) -> Iterator[_L]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _leaves(item, kind)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _leaves(item, kind)


def _storages(values: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(values) if _is_plain(tensor)}
