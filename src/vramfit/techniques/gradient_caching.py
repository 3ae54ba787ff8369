"""Gradient caching: encoders run in pieces of the batch, the loss sees the embeddings of all, exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.techniques.micro_batching import batch_norms, batch_size_name, spans_of
from vramfit.techniques.support.blocks import checked_module, find_blocks, reason_against_rerun
from vramfit.torch_internals.pytree import tree_flatten, tree_unflatten
from vramfit.training_state.forward_state import ForwardState, Written

_MOST = 16
"""Pieces, at most: each is run twice, and smaller ones fill no card."""

_PART = 0.1
"""Of the model's parameters that a part of it has to hold to be an encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCachingSetting(Setting):
    """Which parts of the model run in pieces.

    Attributes:
        count: pieces of a batch.
        modules: names of the encoders; an empty name is the model itself. None: the model itself.
    """

    count: int = 2
    modules: tuple[str, ...] = ()


class GradientCaching(Technique[GradientCachingSetting]):
    """Runs encoders in pieces of the batch without keeping their activations, and again for their gradients.

    The embeddings of all examples are there when the loss is computed: one that compares examples with each other, as
    contrastive losses do, is that of the whole batch. In the backward pass each piece runs again with the random
    numbers that it had, and goes backward from the gradients of its embeddings (Gao et al. 2021, arXiv:2101.06983).
    Activations are those of a piece, and those of the loss itself.

    It pays where activations of encoders are most of the peak and the loss has no pieces; micro-batching is cheaper
    where it has. It costs a forward pass. The encoders must treat each example by itself, but for the loss: batch norm
    does not, and neither does a router that is kept balanced over the batch. Dropout and other random layers draw in
    each piece, and so other numbers than for the whole batch, of the same distribution.
    """

    name: ClassVar[str] = "gradient-caching"
    summary: ClassVar[str] = "runs encoders in pieces of the batch, twice, under a loss of the whole"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.FORWARD
    setting_type = GradientCachingSetting
    follows: ClassVar[str | None] = "micro-batching"
    redraws: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "micro-batching": "a loss that compares examples has no pieces; one that has needs no cached gradients"
        }
    )

    def options(self, profile: Profile) -> Iterable[GradientCachingSetting]:
        """Two pieces, four and so on; which modules are encoders is found out by trying, see `try_encoders`."""
        if not profile.trains or profile.own_step or batch_norms(profile.model):
            return
        count, most = 2, min(_MOST, profile.sizes[batch_size_name(profile.sizes)])
        while count <= most:
            yield GradientCachingSetting(count=count)
            count *= 2

    def attach(self, live: AttachedProgram, setting: GradientCachingSetting) -> None:
        """Surround the encoders."""
        if setting.count < 1:
            raise UsageError(
                f"count of gradient-caching is {setting.count}", "Give the number of pieces, 1 or more"
            )
        for path in setting.modules or ("",):
            module = checked_module(live.model, path) if path else live.model
            if not path and (reason := reason_against_rerun(module)) is not None:
                raise UsageError(
                    f"the model cannot run a second time: {reason}", "Name its encoders in modules"
                )
            if batch_norms(module):
                raise UsageError(
                    f"{path or 'the model'} has batch norm, whose statistics would be those of a piece",
                    "Freeze or replace the batch norm, or leave gradient-caching out",
                )
            live.surround(module, InPieces(path or "the model", setting.count))

    def promise(self, setting: GradientCachingSetting) -> Promise:  # noqa: ARG002  # all settings promise the same
        """Sums in another order."""
        return Promise(
            Numerics.ROUNDING,
            "gradients are summed piece by piece, and random layers draw other numbers of the same distribution",
        )


def encoder_candidates(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Names of modules that may be a model's encoders, the outermost first: the model itself, then its large parts.

    None of them is one that must not run a second time.
    """
    if reason_against_rerun(model) is None:
        yield ("",)
    whole = sum(parameter.numel() for parameter in model.parameters())
    found = [
        name
        for name, child in model.named_children()
        if type(child) not in (nn.ModuleList, nn.ModuleDict)
        and reason_against_rerun(child) is None
        and (sum(parameter.numel() for parameter in child.parameters()) > _PART * whole or find_blocks(child))
    ]
    if found:
        yield tuple(found)


_LOOKS = 2
"""Calls in which what a module writes is looked for."""


class InPieces:
    """Runs a module in pieces of its batch, each under a checkpoint, and puts their results together."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self._looks = _LOOKS

    def __call__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The module's forward pass."""
        leaves, spec = tree_flatten((args, kwargs))
        size = _batch_size(leaves)
        if not torch.is_grad_enabled() or size < 2 or self.count < 2:
            return forward(*args, **kwargs)
        del args, kwargs
        call = _Call(self.name, forward, spec)
        looks = not torch.compiler.is_compiling() and self._looks
        state = ForwardState(module, values=False) if looks else None
        found = [self._piece(call, leaves, size, span) for span in spans_of(size, self.count)]
        if state is not None:
            self._looks -= 1
            self._check(state.written())
        joined: list[Any] = [torch.cat(parts) for parts in zip(*found, strict=True)]
        return call.output(joined)

    def _check(self, written: Mapping[str, Written]) -> None:
        """Refuse what pieces would write again, and their second runs once more.

        Raises:
            UsageError: buffers, counters or generators of the module were written.
        """
        for name, one in written.items():
            if one.in_place or not one.replaced:
                raise UsageError(
                    f"{self.name} writes {name} in its forward pass, and pieces of a batch would write it again",
                    "Leave gradient-caching out, or name encoders that write nothing in modules",
                )

    def _piece(
        self, call: _Call, leaves: list[Any], size: int, span: tuple[int, int]
    ) -> tuple[torch.Tensor, ...]:
        cut = [
            leaf[slice(*span)]
            if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == size
            else leaf
            for leaf in leaves
        ]
        found: tuple[torch.Tensor, ...] = checkpoint(
            partial(call, span[1] - span[0]), *cut, use_reentrant=False
        )
        return found


class _Call:
    """One call of a module: its forward pass from and to tensors in a row."""

    def __init__(self, name: str, forward: Callable[..., Any], spec: Any) -> None:
        self._name, self._forward, self._spec = name, forward, spec
        self._others: list[Any] = []
        self._places: list[int] = []
        self._result: Any = None

    def __call__(self, examples: int, *leaves: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of a piece's result.

        Raises:
            UsageError: one of them has no row for each example.
        """
        args, kwargs = tree_unflatten(list(leaves), self._spec)
        found, self._result = tree_flatten(self._forward(*args, **kwargs))
        self._others = [None if isinstance(one, torch.Tensor) else one for one in found]
        tensors = tuple(one for one in found if isinstance(one, torch.Tensor))
        for one in tensors:
            if not one.dim() or len(one) != examples:
                raise UsageError(
                    f"{self._name} gives a tensor of shape {list(one.shape)} for {examples} examples, which cannot be "
                    "put together from pieces",
                    "Name the encoders, whose results have a row for each example, in modules of gradient-caching",
                )
        for other in self._others:
            if other is not None and not isinstance(other, int | float | str):
                raise UsageError(
                    f"{self._name} gives a {type(other).__name__}, which cannot be put together from pieces",
                    "Name the encoders, which give tensors, in modules of gradient-caching",
                )
        self._places = [number for number, one in enumerate(found) if isinstance(one, torch.Tensor)]
        return tensors

    def output(self, tensors: list[torch.Tensor]) -> Any:
        """The result with these tensors, in the module's own containers."""
        leaves = list(self._others)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._result)


def _batch_size(leaves: list[Any]) -> int:
    """The leading size that most tensors share, the first that was met of equally frequent ones; 0 without any."""
    sizes = Counter(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
    shared = [size for size in sizes if size != 1]
    return max(shared, key=lambda size: sizes[size], default=0)
