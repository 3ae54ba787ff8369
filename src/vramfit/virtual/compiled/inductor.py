"""Inductor on the virtual GPU: what it would ask of a card or of Triton is answered, and nothing is built."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from vramfit.patching import PatchStack
from vramfit.torch_internals import compiler
from vramfit.torch_internals.compiler import async_compile, graph, joint_graph, select_algorithm
from vramfit.torch_internals.compiler import inductor_config as config
from vramfit.torch_internals.dispatch import TorchDispatchMode
from vramfit.torch_internals.fake_tensors import FakeTensorMode
from vramfit.virtual.compiled import padding
from vramfit.virtual.compiled.outside import Outside
from vramfit.virtual.compiled.player import GraphPlayer, GraphPools
from vramfit.virtual.compiled.wrapper import CompiledGraph
from vramfit.virtual.op_runner import OpRunner

if TYPE_CHECKING:
    from vramfit.gpus import GpuSpec
    from vramfit.virtual.compiled.player import GraphPlayer

# -- graphs that are compiled once: a plan's search compiles the same graph for many virtual cards -----------

_KEPT = 256
"""Graphs that are remembered."""

Compile = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Known:
    """What Inductor made of a graph.

    Attributes:
        output: Inductor's result, as it was before anything was called.
        graph: the program that the output calls.
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

    The key of Inductor's own cache says what is the same. The cache itself is not used: it lies on the user's disk, and
    what it holds is bound to a card. Graphs with sizes that vary, with constants of their own, for CUDA graphs, and
    those that it would not keep are compiled each time.

    Args:
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
    """What distinguishes a graph from others, with the lines that it comes from; None where nothing does."""
    if kwargs.get("cudagraphs") or not all(
        isinstance(one, torch.Tensor) and _is_fixed(one) for one in inputs
    ):
        return None
    known = compiler.graph_key(gm, inputs, kwargs, to_check)
    return None if known is None else (known, tuple(node.stack_trace for node in gm.graph.nodes))


def _is_fixed(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))


ESTIMATE = (
    f"parts of the program were compiled by torch.compile (Inductor of torch {torch.__version__}): their memory is an "
    "estimate, that of the program which Inductor wrote, without what it finds by timing kernels on a card"
)
AUTOTUNED = (
    "torch.compile was asked to time candidates of kernels (max-autotune): the estimate takes those of the default "
    "mode; the chosen ones may need other workspaces, and timing them needs memory for a while"
)

# Timing needs a card, and nothing is built, kept on disk or handed to other processes.
_FORCED: dict[str, Any] = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_kernel": False,
    "benchmark_fusion": False,
    "triton.autotune_at_compile_time": False,
    "cpp_wrapper": False,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "compile_threads": 1,
}


class _OnHost(TorchDispatchMode):
    """Computes constants of one element on the host: Inductor folds them on the card."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def host(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        return func(*map(host, args), **{name: host(value) for name, value in (kwargs or {}).items()})


def install(mode: OpRunner, outside: Outside, patches: PatchStack) -> None:
    """Let Inductor compile for the virtual card, up to the program that it writes."""
    # Those of a virtual machine are gone with it.
    compiler.forget_cards()
    patches.call(compiler.forget_cards)
    # Otherwise fake tensors of constants would be computed on the card.
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda self: True))
    patches.set(compiler.scheduler, "has_triton", lambda *args, **kwargs: True)
    padding.install(mode, patches)
    patches.set(compiler.triton_facts, "triton_hash_with_backend", lambda *args, **kwargs: "virtual")
    patches.set(async_compile.AsyncCompile, "wakeup", classmethod(lambda cls, *args, **kwargs: None))
    patches.set(select_algorithm, "PyCodeCache", SimpleNamespace(load=_unloaded))
    _patch_folding(patches)
    _patch_compile(mode, outside, patches)
    pools = GraphPools(mode)
    patches.set(compiler.compile_fx, "cudagraphify", pools.wrap)
    patches.set(compiler.output_code, "maybe_handle_backward_generation", lambda *args, **kwargs: None)


def _unloaded(source: str, extra: str = "", **options: Any) -> SimpleNamespace:
    """Stands for the module of a kernel made from a template, which is never loaded."""
    del options
    return SimpleNamespace(__file__="<kernel>", key=extra, source=source)


def _patch_folding(patches: PatchStack) -> None:
    folder = joint_graph.UniformValueConstantFolder
    for name in ("__init__", "run"):
        patches.set(folder, name, _on_host(getattr(folder, name)))


def _on_host(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _OnHost():
            return method(*args, **kwargs)

    return call


def _patch_compile(mode: OpRunner, outside: Outside, patches: PatchStack) -> None:
    compile_fx = compiler.compile_fx
    whole, inner = compile_fx.compile_fx, compiler.compile_graph_inner.get()
    player = GraphPlayer(mode)

    def compile_whole(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, GraphModule) and not _on_card(model, inputs):
            return model.forward  # the host's part of the program computes for real
        return whole(model, inputs, *args, **kwargs)

    def cards() -> list[GpuSpec]:
        return [device.spec for device in mode.machine.devices]

    once_each = once(compile_fx.fx_codegen_and_compile, player, cards)

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        mode.machine.warn("compiled-estimate", ESTIMATE)
        return once_each(*args, **kwargs)

    def compile_inner(*args: Any, **kwargs: Any) -> Any:
        if config.max_autotune or config.max_autotune_gemm:
            mode.machine.warn("compiled-autotune", AUTOTUNED)
        with outside(), config.patch(_FORCED):
            return inner(*args, **kwargs)

    def to_module(lowering: graph.GraphLowering) -> Any:
        written, _ = lowering.codegen()
        compiled = CompiledGraph(written.value, lowering, player)
        return SimpleNamespace(call=compiled.call, runner=compiled.runner, __file__=compiled.filename)

    patches.set(compile_fx, "compile_fx", compile_whole)
    compiler.compile_graph_inner.replace(patches, compile_inner)
    patches.set(compile_fx, "fx_codegen_and_compile", compile_graph)
    patches.set(graph.GraphLowering, "compile_to_module", to_module)


def _on_card(model: GraphModule, inputs: Any) -> bool:
    values = [*inputs, *(node.meta.get("example_value") for node in model.graph.nodes)]
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)
