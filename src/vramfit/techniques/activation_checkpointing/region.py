"""What surrounds a block that is recomputed, and links it to the other blocks of its segment.

NOTE [Segments without their parent]: in a model whose forward pass calls its blocks in a loop of its own, nothing can
be put around several blocks. Instead each block of a segment is checkpointed by itself, but only the first keeps
its input. The others keep a `Recipe`: where their input came from.

A block that gives its output on ends with a `_SavedMark`, an autograd function that does nothing but save the output
for the backward pass. Saved inside the checkpoint it costs no memory; to read it is to run the block again, up to its
end. When the backward pass reaches the last block of a segment, that block asks its recipe for its input, which runs
the block before it again, which asks its own recipe, and so on up to the first. Each block runs once, and what each
kept for its backward pass is there afterwards: the same work and memory as for a checkpoint around the whole segment.

That a block's input is what the block before it gave is not assumed but seen in each forward pass: the same tensor
object, not changed in place since. Where the parent does something in between, the block keeps its input.

NOTE [Caches of keys and values]: in training a block of transformers fills the cache that it is given, by default in
each step. A second run would fill it again and attend to everything twice. So each run gets a cache of its own, as it
was before the block, and the common one stays as it is: what the block would have put there is gone with its other
activations. transformers itself gives its checkpointed blocks no cache (``GradientCheckpointingLayer`` in
modeling_layers.py), but through a cache keys and values are laid out differently in memory, so that attention rounds
differently.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramfit.errors import UsageError
from vramfit.techniques.activation_checkpointing.op_facts import Keeping
from vramfit.torch_internals.layers import NormBase
from vramfit.torch_internals.pytree import tree_flatten, tree_map_only, tree_unflatten
from vramfit.training_state.forward_state import ForwardState
from vramfit.training_state.tensor_values import buffer_writes

_LOOKS = 2
"""Calls in which a block writes nothing, until it is taken to write nothing ever."""


class Recomputed:
    """Runs a block under ``torch.utils.checkpoint.checkpoint``, in training and where gradients are wanted.

    Args:
        segment: name of its segment; empty for a block on its own.
        first: whether it is the first of its segment, which keeps its input.
        last: whether it is the last of its segment, whose output is not needed again.
    """

    def __init__(
        self,
        path: str,
        *,
        keep: tuple[str, ...] = (),
        segment: str = "",
        first: bool = True,
        last: bool = True,
    ) -> None:
        self.path = path
        self.keep = keep
        self.segment = segment
        self.first = first
        self.last = last
        self._looked_at_buffers = False
        self._looks = _LOOKS

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The block's forward pass."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        looks = not torch.compiler.is_compiling() and self._looks
        state = ForwardState(module, values=False) if looks else None
        call = _BlockCall(self, module, forward, state)
        inputs = call.prepare(args, kwargs)
        del args, kwargs
        watched = [tensor for tensor in inputs if not tensor.is_inference()]
        versions = [tensor._version for tensor in watched]
        buffers = None if self._looked_at_buffers else buffer_writes(module, NormBase)
        out = checkpoint(call, *inputs, use_reentrant=False, context_fn=call.contexts)
        call.close()
        if versions != [tensor._version for tensor in watched]:
            raise UsageError(
                f"{self.path} cannot be recomputed: its forward pass changes its input in place",
                "Leave it out of the modules to recompute, or set inplace=False in its first layer",
            )
        if buffers is not None:
            refuse_changed_buffers(self.path, buffers, buffer_writes(module, NormBase))
            self._looked_at_buffers = True
        if state is not None and not self._writes(module, state):
            call.forget()
        return out

    def _writes(self, module: nn.Module, state: ForwardState) -> bool:
        """Whether the forward pass wrote anything; a block that writes nothing is not looked at for ever."""
        norms = {path for path, inner in module.named_modules() if isinstance(inner, NormBase)}
        written = {name: one for name, one in state.written().items() if name.rpartition(".")[0] not in norms}
        for name, one in written.items():
            if one.in_place:
                raise UsageError(
                    f"{self.path} cannot be recomputed: its forward pass changes {name} in place",
                    "Leave it out of the modules to recompute",
                )
        if not written:
            self._looks -= 1
        return bool(written)


class _BlockCall:
    """One call of a block: the function that runs twice, and what surrounds its runs.

    It holds no tensors between the runs but what `checkpoint` keeps of them: that way a checkpoint around this one, or
    hooks that move saved tensors to the host, have a hold of all inputs, in nested containers and keywords too.
    """

    def __init__(
        self,
        around: Recomputed,
        module: nn.Module,
        forward: Callable[..., Any],
        state: ForwardState | None,
    ) -> None:
        self._around = around
        self._module = module
        self._forward = forward
        self._state = state
        self._keeping = Keeping(around.keep, around.path) if around.keep else None
        self._recipes: dict[int, Recipe] = {}
        self._found: dict[int, torch.Tensor] = {}
        self._places: list[int] = []
        self._same: dict[int, int] = {}
        self._others: list[Any] = []

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Take the arguments apart; the tensors to give to `checkpoint`.

        One that is given in several places is one in the second run too: ``nn.MultiheadAttention`` goes another way
        where its query is its key.
        """
        args, kwargs = own_caches(args), own_caches(kwargs)
        self._given = [(args, kwargs)]
        leaves, self._spec = tree_flatten((args, kwargs))
        inputs: list[torch.Tensor] = []
        devices: set[torch.device] = set()
        firsts: dict[int, int] = {}
        for index, leaf in enumerate(leaves):
            self._others.append(None if isinstance(leaf, torch.Tensor) else leaf)
            if not isinstance(leaf, torch.Tensor):
                continue
            if (first := firsts.setdefault(id(leaf), index)) != index:
                self._same[index] = first
                continue
            recipe = None if self._around.first else take(leaf, self._around.segment)
            if recipe is None:
                self._places.append(index)
                inputs.append(leaf)
            else:
                self._recipes[index] = recipe
                devices.add(leaf.device)
        # From its tensors `checkpoint` knows which device's random state to keep, beside the CPU's: where an input has
        # a recipe, an empty tensor tells it.
        devices -= {torch.device("cpu"), *(tensor.device for tensor in inputs)}
        return inputs + [torch.empty(0, device=device) for device in devices]

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """One run: the first with the arguments as they were given, the second with what was kept of them."""
        args, kwargs = self._given.pop() if self._given else self._rebuilt(inputs)
        out = self._forward(*with_own_caches(args), **with_own_caches(kwargs))
        return out if self._around.last else give(out, self._around.segment)

    def _rebuilt(self, inputs: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self._others)
        for index, value in zip(self._places, inputs, strict=False):
            leaves[index] = value
        for index in self._recipes:
            leaves[index] = self._found.pop(index)
        for index, first in self._same.items():
            leaves[index] = leaves[first]
        rebuilt: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, self._spec)
        return rebuilt

    def contexts(
        self,
    ) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        """What surrounds the first run, and the second."""
        first = self._keeping.forward if self._keeping is not None else contextlib.nullcontext()
        return first, _Again(self)

    def forget(self) -> None:
        """The block writes nothing that its second run would miss."""
        self._state = None

    def close(self) -> None:
        """The first run is over."""
        if self._keeping is not None:
            self._keeping.close()

    @contextlib.contextmanager
    def second_run(self) -> Any:
        """Surround the second run. Blocks before this one run first, then what was kept for this one is given out."""
        for index, recipe in self._recipes.items():
            self._found[index] = recipe.tensor()
        with contextlib.ExitStack() as stack:
            if self._state is not None:
                stack.enter_context(_found_again(self._state, self._module))
            stack.enter_context(untouched_statistics(self._module))
            if self._keeping is not None:
                self._keeping.check()
                stack.enter_context(self._keeping.again)
            try:
                yield
            finally:
                self._found.clear()


class _Again:
    """The surroundings of second runs: there is one for each backward pass through a graph that is retained."""

    def __init__(self, call: _BlockCall) -> None:
        self._call = call
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._call.second_run()
        self._entered.append(context)
        context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._entered.pop().__exit__(*error)


# -- links between the blocks of a segment -------------------------------------------------------------------------

_RECIPE = "_vramfit_recipe"


class Recipe:
    """How to find a block's output again.

    Args:
        segment: name of the segment that the block belongs to.
        version: how often the output was changed in place when it was given.
    """

    def __init__(self, node: Any, segment: str, version: int) -> None:
        self._node = node
        self.segment = segment
        self.version = version
        self.taken = False

    def tensor(self) -> torch.Tensor:
        """The output; the block runs again for it. Once in a backward pass."""
        found: torch.Tensor = self._node.saved_tensors[0]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """A saved or copied tensor loses its recipe: the graph does not go with it."""
        return (_none, ())


def _none() -> None:
    return None


def give(outputs: Any, segment: str) -> Any:
    """A block's outputs, those that need gradients with a recipe."""
    return tree_map_only(torch.Tensor, lambda output: _marked(output, segment), outputs)


def take(value: torch.Tensor, segment: str) -> Recipe | None:
    """The recipe of a block's input, for one block of the same segment; None if it has to be kept."""
    recipe: Recipe | None = getattr(value, _RECIPE, None)
    if recipe is None or recipe.taken or recipe.segment != segment or recipe.version != value._version:
        return None
    recipe.taken = True
    return recipe


def _marked(output: torch.Tensor, segment: str) -> torch.Tensor:
    if not output.requires_grad:
        return output
    marked: torch.Tensor = _SavedMark.apply(output)  # type: ignore[no-untyped-call]
    setattr(marked, _RECIPE, Recipe(marked.grad_fn, segment, marked._version))
    return marked


class _SavedMark(torch.autograd.Function):
    """Hands a tensor on and saves it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output)
        return output.detach()  # as it is, it would become a view that the parent could not change in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0]


# -- what the second run has to find as it was: running statistics, buffers and caches ----------------------------


@contextlib.contextmanager
def untouched_statistics(module: nn.Module) -> Iterator[None]:
    """While this is entered, norm layers in training update copies of their running statistics.

    Their outputs come from the batch alone. The statistics themselves are never written to, so that other calls whose
    backward pass is still to come find them as they saved them.
    """
    kept: list[tuple[nn.Module, str, torch.Tensor]] = []
    try:
        for norm in _norms_in_training(module):
            for name, buffer in norm.named_buffers(recurse=False):
                kept.append((norm, name, buffer))
                norm._buffers[name] = buffer.clone()
        yield
    finally:
        for norm, name, buffer in kept:
            norm._buffers[name] = buffer


@contextlib.contextmanager
def _found_again(state: ForwardState, module: nn.Module) -> Iterator[None]:
    """While this is entered, a block finds the attributes that its first run began with; what they are now comes back.

    Counters, tensors that are replaced and generators of the block's own are so as if it had run once.
    """
    now = ForwardState(module, values=False)
    state.restore()
    try:
        yield
    finally:
        now.restore()


def refuse_changed_buffers(
    path: str, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
) -> None:
    """Compare how often buffers were written; another tensor in the place of one is no write.

    Raises:
        UsageError: one has been changed.
    """
    for name, (_, writes) in after.items():
        if before.get(name, (0, writes))[1] != writes:
            raise UsageError(
                f"{path} cannot be recomputed: its forward pass changes its buffer {name}",
                "Leave it out of the modules to recompute",
            )


def _norms_in_training(module: nn.Module) -> Iterator[nn.Module]:
    for inner in module.modules():
        if isinstance(inner, NormBase) and inner.training and inner.track_running_stats:
            yield inner


# -- caches of keys and values -------------------------------------------------------------------------------------

Arguments = TypeVar("Arguments", tuple[Any, ...], dict[str, Any])


class _Cache:
    """A cache as it was before the block."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache


def own_caches(arguments: Arguments) -> Arguments:
    """A block's arguments with its caches set aside."""
    return _changed(arguments, lambda value: _Cache(_copied(value)) if _is_cache(value) else value)


def with_own_caches(arguments: Arguments) -> Arguments:
    """A block's arguments for one run."""
    return _changed(arguments, lambda value: _copied(value.cache) if isinstance(value, _Cache) else value)


def _changed(arguments: Arguments, change: Callable[[Any], Any]) -> Arguments:
    if isinstance(arguments, dict):
        return {name: change(value) for name, value in arguments.items()}
    return tuple(change(value) for value in arguments)


def _is_cache(value: Any) -> bool:
    """Whether it is a cache, or the part of one that belongs to a layer."""
    return hasattr(value, "get_seq_length") and hasattr(value, "__dict__")


def _copied(value: Any) -> Any:
    """A copy of a cache with the same tensors; blocks put others in their place, and do not write into them."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if not _is_cache(value):
        return value
    made = copy.copy(value)
    vars(made).update({name: _copied(item) for name, item in vars(value).items()})
    return made
