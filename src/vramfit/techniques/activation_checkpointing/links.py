"""Links between blocks of a segment: the input of one is found again from the block before it.

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
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

_RECIPE = "_vramfit_recipe"


class Recipe:
    """How to find a block's output again.

    Args:
        node: the `_SavedMark` at the block's end.
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
    return pytree.tree_map_only(torch.Tensor, lambda output: _marked(output, segment), outputs)


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
