"""Logits that are computed only when somebody looks at them: a tensor that knows how it would come about.

NOTE [Deferred logits]: a head gives a `DeferredLogits` in place of its product. It has the shape, dtype and device of
the logits and holds what they are made of. What only selects or arranges rows, casts or scales gives another one; a
cross-entropy of it takes the product in chunks (`chunked_cross_entropy`). Anything else gets the logits themselves,
computed by the very call that the head would have made. From then on they exist, and everything that follows is the
plain program: the ones derived before are computed with them, so that writing in place reaches views and spares
copies, as it would.

What torch calls past ``__torch_function__`` (a custom autograd function of another library) finds a tensor with an
autograd node of its own, whose backward pass is that of the plain operations.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from vramfit.errors import VramfitError
from vramfit.techniques.chunked_loss.chunks import Step
from vramfit.torch_internals.pytree import tree_map_only
from vramfit.torch_internals.tensor_objects import make_wrapper_subclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunking:
    """How losses of deferred logits are computed.

    Attributes:
        rows: rows of logits that exist at once; 0 chooses by `default_rows`.
        recompute: whether the backward pass computes logits again; else gradients are computed with the loss.
        into_grad: whether the head's gradient is added to the weight's ``grad`` without a detour.
    """

    rows: int = 0
    recompute: bool = False
    into_grad: bool = False


@dataclass(frozen=True, slots=True)
class Casting:
    """What autocast was when an operation was called."""

    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Casting:
        """The present state of autocast."""
        return cls(torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def again(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """A context in which autocast is as it was then."""
        return torch.autocast(device_type, dtype=self.dtype, enabled=self.enabled)

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of another takes part in a product."""
        return self.dtype if self.enabled and dtype != torch.float64 else dtype


@dataclass(slots=True, eq=False)
class LogitsFamily:
    """The logits that one call of a head would have given, and all that was derived from them.

    Attributes:
        hidden: what the head was called with.
        casting: autocast at the call.
        run: runs an operation that has such logits among its arguments.
        versions: of the three tensors at the call.
        real: whether the logits exist by now.
        members: all that are alive, parents before children.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    casting: Casting
    chunking: Chunking
    run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    versions: tuple[int, ...] = ()
    real: bool = False
    members: list[weakref.ref[DeferredLogits]] = field(default_factory=list)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The head's tensors."""
        return (self.hidden, self.weight) + (() if self.bias is None else (self.bias,))

    def product(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What the head's own call gives for these."""
        with self.casting.again(hidden.device.type):
            return F.linear(hidden, weight, bias)

    def check(self) -> None:
        """Make sure that the product would still be the same.

        Raises:
            VramfitError: hidden states or weights were written to since.
        """
        if tuple(tensor._version for tensor in self.inputs) != self.versions:
            raise VramfitError(
                "logits are asked for that chunked-loss never made, and the weights have changed since",
                "Use them before the optimizer's step, or run the model again under torch.no_grad()",
            )

    def make_real(self) -> None:
        """Compute the logits, and all that was derived from them and is alive."""
        if self.real:
            return
        self.check()
        self.real = True
        for reference in self.members:
            member = reference()
            if member is not None:
                member.full = member.recipe.value(self, *self.inputs, parent=member.parent)
        self.members.clear()


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """An operation that derived one tensor from another, to be called again."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    casting: Casting

    def __call__(self, on: torch.Tensor) -> torch.Tensor:
        """What it makes of another tensor."""
        with self.casting.again(on.device.type):
            found: torch.Tensor = self.func(on, *self.args, **self.kwargs)
        return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogitsRecipe:
    """How a tensor comes about: which rows of hidden states, and what happens to their logits.

    Attributes:
        rows: hidden states of the rows, (..., width), in the order of the tensor's dimensions without the classes.
        class_dim: which dimension the classes are.
        steps: what happens to the logits.
        normalised: whether a log-softmax over the classes comes last.
        attached: whether gradients pass.
        calls: all operations since the head.
    """

    rows: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    class_dim: int
    steps: tuple[Step, ...] = ()
    normalised: bool = False
    attached: bool = True
    calls: tuple[DeferredCall, ...] = ()

    @property
    def plain_rows(self) -> bool:
        """Whether classes are the last dimension."""
        return self.class_dim == len(self.shape) - 1

    def value(
        self, family: LogitsFamily, *inputs: torch.Tensor, parent: DeferredLogits | None = None
    ) -> torch.Tensor:
        """The tensor itself: from its parent where that exists, else from the head on."""
        with torch.set_grad_enabled(True):
            if parent is not None and parent.full is not None:
                return self.calls[-1](parent.full)
            hidden, weight, *rest = inputs
            found = family.product(hidden, weight, rest[0] if rest else None)
            for call in self.calls:
                found = call(found)
        return found


class DeferredLogits(torch.Tensor):
    """Logits to be. See NOTE [Deferred logits]."""

    family: LogitsFamily
    recipe: LogitsRecipe
    parent: DeferredLogits | None
    full: torch.Tensor | None

    @staticmethod
    def make(family: LogitsFamily, recipe: LogitsRecipe, parent: DeferredLogits | None) -> DeferredLogits:
        """A tensor that stands for what `recipe` says."""
        if recipe.attached:
            made: DeferredLogits = _Node.apply(family, recipe, *family.inputs)  # type: ignore[no-untyped-call]
        else:
            made = _empty(family, recipe)
        made.family, made.recipe, made.parent, made.full = family, recipe, parent, None
        family.members.append(weakref.ref(made))
        return made

    def derive(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **changes: Any
    ) -> DeferredLogits:
        """What an operation makes of it, deferred too."""
        call = DeferredCall(func, args, kwargs, Casting.now(self.family.hidden.device.type))
        recipe = replace(self.recipe, calls=(*self.recipe.calls, call), **changes)
        return DeferredLogits.make(self.family, recipe, self)

    def look(self) -> torch.Tensor:
        """Its values for someone who neither writes nor needs gradients; nothing is kept."""
        if self.full is not None:
            return self.full
        self.family.check()
        with torch.no_grad():
            return self.recipe.value(
                self.family, *(tensor.detach() for tensor in self.family.inputs)
            ).detach()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = next(deferred_in((args, kwargs)))
        return first.family.run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the function
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Torch came past ``__torch_function__``: autograd has its node, so the values are enough."""
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.look, (args, kwargs or {}))
        return func(*args, **kwargs)


def default_rows(rows: int, width: int, classes: int) -> int:
    """Rows of logits at once: as many as take the memory of all hidden states, but enough for a product to be quick.

    A chunk reads the whole weight and adds to a gradient of its size. With an eighth of the width that traffic is
    small beside the arithmetic, and the chunk an eighth of the weight's gradient in size.
    """
    return max(1, min(rows, max(rows * width // classes, width // 8, 16)))


def real(args: Any) -> Any:
    """Arguments with the logits themselves."""
    return tree_map_only(DeferredLogits, _real, args)


def looked_at(args: Any) -> Any:
    """Arguments with values of the logits for someone who does not write."""
    return tree_map_only(DeferredLogits, DeferredLogits.look, args)


def deferred_in(args: Any) -> Iterator[DeferredLogits]:
    """The deferred logits among arguments."""
    if isinstance(args, DeferredLogits):
        yield args
    elif isinstance(args, tuple | list):
        for item in args:
            yield from deferred_in(item)
    elif isinstance(args, dict):
        yield from deferred_in(tuple(args.values()))


def _real(deferred: DeferredLogits) -> torch.Tensor:
    if deferred.full is None:
        deferred.family.make_real()
    if deferred.full is None:
        raise RuntimeError("a deferred tensor is missing among its family")
    return deferred.full


def _empty(family: LogitsFamily, recipe: LogitsRecipe) -> DeferredLogits:
    made: DeferredLogits = make_wrapper_subclass(
        DeferredLogits, recipe.shape, dtype=recipe.dtype, device=family.hidden.device
    )
    return made


class _Node(torch.autograd.Function):
    """The autograd node of deferred logits, for those who need one: computes them and goes back through that."""

    @staticmethod
    def forward(ctx: Any, family: LogitsFamily, recipe: LogitsRecipe, *_: torch.Tensor) -> torch.Tensor:
        # Not by save_for_backward: whoever packs saved tensors, to offload them, would pack these once more.
        ctx.made_of = (family, replace(recipe, rows=family.hidden))
        return _empty(family, recipe)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        family, recipe = ctx.made_of
        family.check()
        needs = ctx.needs_input_grad[2:]
        leaves = [
            tensor.detach().requires_grad_(need) for tensor, need in zip(family.inputs, needs, strict=True)
        ]
        value = recipe.value(family, *leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, grads[0], allow_unused=True))
        return (None, None, *(next(found) if leaf.requires_grad else None for leaf in leaves))
