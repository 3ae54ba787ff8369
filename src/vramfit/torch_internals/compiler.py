"""``torch.compile``: Dynamo, AOTAutograd and Inductor. Importing it loads them, which takes seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch._dynamo as dynamo
import torch._inductor.compile_fx as compile_fx
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.output_code as output_code
import torch._inductor.scheduler as scheduler
import torch.utils._triton as triton_facts
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo import convert_frame, device_interface, eval_frame, trace_rules
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.exc import Unsupported as Unsupported
from torch._dynamo.guards import CheckFunctionManager as CheckFunctionManager
from torch._dynamo.types import ConvertFrameReturn as ConvertFrameReturn
from torch._dynamo.variables.optimizer import OptimizerVariable as OptimizerVariable
from torch._functorch import config as functorch_config
from torch._inductor import async_compile, graph, select_algorithm
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options as list_mode_options
from torch._inductor import utils as inductor_utils
from torch._inductor.codecache import CacheBase, FxGraphCache
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.fx_passes import pad_mm
from torch._inductor.graph import GraphLowering as GraphLowering
from torch._inductor.runtime.hints import DeviceProperties

from vramfit.patching import PatchStack
from vramfit.torch_internals.names import Feature

__all__ = [
    "MAKING_OPTIMIZER_STATES",
    "CheckFunctionManager",
    "ConvertFrameReturn",
    "CustomGraphPass",
    "FrameAction",
    "FrameExecStrategy",
    "GraphLowering",
    "OptimizerVariable",
    "Unsupported",
    "async_compile",
    "compile_fx",
    "compile_graph_inner",
    "compile_under_modes",
    "compute_no_constants",
    "convert_frame",
    "eval_frame",
    "flex_attention",
    "forget_cards",
    "functorch_config",
    "graph",
    "graph_key",
    "inductor_config",
    "inductor_utils",
    "joint_graph",
    "know_what_stands_in",
    "list_mode_options",
    "make_skip_list_anew",
    "output_code",
    "pad_mm",
    "reset",
    "scheduler",
    "select_algorithm",
    "skipped_folders",
    "triton_facts",
]

_FEATURE = Feature("compiled programs")

compile_graph_inner = _FEATURE.place("torch._inductor.compile_fx._compile_fx_inner")
MAKING_OPTIMIZER_STATES = "_init_group"
"""The method of optimizers that gathers what a group has, and makes the states that it lacks."""
skipped_folders: list[str] = trace_rules.SKIP_DIRS
"""Beginnings of paths whose frames Dynamo leaves alone."""


def make_skip_list_anew() -> None:
    """Let Dynamo see what was changed in `skipped_folders`."""
    trace_rules._recompile_re()


def compile_under_modes() -> None:
    """Let Dynamo compile frames even though a dispatch mode was entered before Dynamo learnt to ignore it.

    Whether one is active is kept when modes are entered, and put back by them when they are left
    (torch/utils/_python_dispatch.py); torch 2.10 goes by that alone.
    """
    flag = _FEATURE.place("torch.utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals")
    if flag.exists and flag.get():
        setattr(flag.holder, flag.name, False)
        _FEATURE.find("torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals")(False)


def know_what_stands_in(original_of: Callable[[Any], Any], patches: PatchStack) -> None:
    """Let Dynamo know torch's functions and classes as they are bound now, and as they were after the undo.

    It makes its table of functions once for the process, of what their names are bound to then
    (torch/_dynamo/trace_rules.py: get_torch_obj_rule_map), and its set of constants when it is imported.

    Args:
        original_of: gives torch's function for one that is it to a compiler, None for others.
    """
    constants, properties = dynamo_utils.common_constant_types, torch.cuda._CudaDeviceProperties
    if properties not in constants:
        constants.add(properties)
        patches.call(lambda: constants.discard(properties))
    trace_rules.get_torch_obj_rule_map.cache_clear()
    patches.call(trace_rules.get_torch_obj_rule_map.cache_clear)
    table = trace_rules.get_torch_obj_rule_map()
    for known in list(table):
        if (original := original_of(known)) is not None:
            table.setdefault(original, table.pop(known))


def compute_no_constants(patches: PatchStack) -> None:
    """Keep tracers from computing what follows from small constants, empty ones too: it may lie on a card."""
    limit = _FEATURE.place("torch.fx.experimental.proxy_tensor.CONSTANT_NUMEL_LIMIT")
    if limit.exists:
        limit.replace(patches, -1)  # the most elements that such a constant has


def reset() -> None:
    """Forget everything that was compiled."""
    dynamo.reset()


def graph_key(gm: Any, inputs: Any, kwargs: Any, to_check: Any) -> str | None:
    """The key by which Inductor's own cache would keep a graph; None for one that it would not."""
    key, _ = FxGraphCache.prepare_key(gm, inputs, kwargs, to_check, False)
    return None if key is None else key[0]


def flex_attention() -> ModuleType:
    """The module of the operator, by its path: the operator itself has the same name."""
    return importlib.import_module("torch._higher_order_ops.flex_attention")


def forget_cards() -> None:
    """Forget what Inductor remembers of cards."""
    device_interface.caching_worker_device_properties.clear()
    clears: list[Callable[[], None]] = [
        DeviceProperties.create.cache_clear,
        CacheBase.get_system.cache_clear,  # names programs on the user's disk
        CacheBase.get_local_cache_path.cache_clear,
    ]
    for module in (inductor_utils, pad_mm):
        own = [
            value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__
        ]
        clears += [clear for value in own if callable(clear := getattr(value, "cache_clear", None))]
    for clear in clears:
        clear()
