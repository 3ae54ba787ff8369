"""Keeps what compiled forward passes drew at random, so that backward passes do not draw it anew."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from vramfit.allocator.versions import parse_torch_version

_MARKS_SINCE = (2, 13)  # where this was tried
# At 0 the partitioner keeps the inputs alone, whatever is marked (torch/_functorch/partitioners.py,
# choose_saved_values_set). This is no byte more for anything else.
_LEAST_BUDGET = 1e-9
_VERSION = "vramfit-kept-draws-1"  # inductor's caches tell compilations with and without it apart by this


@cache
def kept_draws(before: Any = None) -> Any:
    """A pass over joint graphs that has all random operations saved.

    Args:
        before: another such pass, which runs first; None without.

    Below a budget of 1 torch's partitioner may recompute random operations in the backward pass, which draw anew there:
    dropout then has another mask than in the forward pass, and gradients are wrong without a word
    (github.com/pytorch/pytorch/issues/190758; so in 2.13). Operations that are marked as `CheckpointPolicy.MUST_SAVE`
    are left out of that choice. Dropout's result and mask are kept then, 5 bytes an element in float32; of what
    inductor draws itself, the seeds alone. Before 2.13, where that was not tried, such a graph gets a budget of 1.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch.utils.checkpoint import CheckpointPolicy

    class KeptDraws(CustomGraphPass):  # type: ignore[misc,unused-ignore]  # loaded late: importing inductor takes seconds
        """Runs after inductor's passes over a joint graph, before it is parted."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            import torch._functorch.config as functorch

            if before is not None:
                before(graph)
            drawing = [node for node in graph.nodes if _draws(node)]
            for node in drawing:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if drawing:
                least = _LEAST_BUDGET if marks_hold() else 1.0
                functorch.activation_memory_budget = max(functorch.activation_memory_budget, least)

        def uuid(self) -> Any:
            if before is None:
                return _VERSION
            known = before.uuid() if hasattr(before, "uuid") else None
            return known and (_VERSION, known)  # without its name nothing may be cached

    return KeptDraws()


def marks_hold() -> bool:
    """Whether this torch's partitioner is known to save what is marked, at any budget above 0."""
    return parse_torch_version(torch.__version__) >= _MARKS_SINCE


def _draws(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(
        node.target, "tags", ()
    ):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    names = [argument.name for argument in arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")  # attention, which draws for its dropout alone
    default = arguments[place].default_value
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", default)
    return bool(given != 0.0)
