"""What Inductor made of a graph, for the next virtual card of the process: a plan's search compiles one many times."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.codecache import FxGraphCache
from torch.fx import GraphModule

from vramfit.virtual.compiled.wrapper import CompiledGraph

if TYPE_CHECKING:
    from vramfit.gpus import GpuSpec
    from vramfit.virtual.compiled.player import GraphPlayer

_KEPT = 256
"""Graphs that are remembered."""

Compile = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Known:
    """What came of a graph.

    Attributes:
        output: of Inductor, as it was before anything was called.
        graph: the program that it calls.
    """

    output: Any
    graph: CompiledGraph

    def on(self, player: GraphPlayer) -> Any:
        """The same, run by another player."""
        graph, output = self.graph.on(player), copy.copy(self.output)
        output.current_callable, output.compiled_fn_runner = graph.call, graph.runner
        output.recursively_apply_fns = getattr(graph.runner, "recursively_apply_fns", None)
        return output


_known: OrderedDict[Hashable, _Known] = OrderedDict()


def once(compile_graph: Compile, player: GraphPlayer, cards: Callable[[], Sequence[GpuSpec]]) -> Compile:
    """Inductor's ``fx_codegen_and_compile``, that does not write the same program twice.

    What is the same is told by the key of Inductor's own cache, which is not used itself: it lies on the user's disk,
    and what it holds is bound to a card. Graphs with sizes that vary, with constants of their own, for CUDA graphs, and
    those that it would not keep are compiled each time.

    Args:
        compile_graph: the original.
        player: runs programs on the virtual card.
        cards: the virtual cards: Inductor asks them for what it decides by.
    """

    def compiled(gm: GraphModule, inputs: Sequence[Any], to_check: Sequence[int], **kwargs: Any) -> Any:
        key = _key(gm, inputs, to_check, kwargs)
        if key is None:
            return compile_graph(gm, inputs, to_check, **kwargs)
        whole = (key, tuple(repr(replace(card, total_bytes=1, context_bytes=None)) for card in cards()))
        known = _known.get(whole)
        if known is not None:
            _known.move_to_end(whole)
            return known.on(player)
        output = compile_graph(gm, inputs, to_check, **kwargs)
        graph = getattr(getattr(output, "current_callable", None), "__self__", None)
        if isinstance(graph, CompiledGraph) and graph.repeatable:
            _known[whole] = _Known(_without_runner(output), graph)
            while len(_known) > _KEPT:
                _known.popitem(last=False)
        return output

    return compiled


def _without_runner(output: Any) -> Any:
    """A copy that holds nothing which the original takes apart at its end."""
    found = copy.copy(output)
    found.current_callable = found.compiled_fn_runner = found.recursively_apply_fns = None
    return found


def _key(gm: GraphModule, inputs: Sequence[Any], to_check: Sequence[int], kwargs: Any) -> Hashable | None:
    """What tells a graph from others, with the lines of the program that it comes from; None where nothing does."""
    if kwargs.get("cudagraphs") or not all(
        isinstance(one, torch.Tensor) and _is_fixed(one) for one in inputs
    ):
        return None
    known, _ = FxGraphCache.prepare_key(gm, inputs, kwargs, to_check, False)
    if known is None:
        return None
    return known[0], tuple(node.stack_trace for node in gm.graph.nodes)


def _is_fixed(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))
