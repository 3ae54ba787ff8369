"""The autograd engine: which node runs, how many hold a storage, what is saved, and what the profiler records of it."""

from __future__ import annotations

from typing import Any

from vramfit.torch_internals.names import Feature

_CHECKPOINTING = Feature("selective checkpointing")
_RECORDINGS = Feature("recording what a real device allocates")
_HOLDERS = Feature("telling who holds a tensor")
_PROFILES = Feature("profiles of a step, from which plans are made")
_TECHNIQUES = Feature("techniques that act while a backward pass runs")
_FEATURE = Feature("following backward passes")

CachedTorchDispatchMode: Any = _CHECKPOINTING.find("torch.utils.checkpoint._CachedTorchDispatchMode")
CachingTorchDispatchMode: Any = _CHECKPOINTING.find("torch.utils.checkpoint._CachingTorchDispatchMode")
current_autograd_node: Any = _FEATURE.find("torch._C._current_autograd_node")
current_graph_task_id: Any = _FEATURE.find("torch._C._current_graph_task_id")
EventType: Any = _RECORDINGS.find("torch._C._profiler._EventType")
execution_engine: Any = _TECHNIQUES.find("torch.autograd.Variable._execution_engine")
FunctionBase: Any = _HOLDERS.find("torch._C._FunctionBase")
RecordFunctionFast: Any = _RECORDINGS.find("torch._C._profiler._RecordFunctionFast")
SavedTensor: Any = _HOLDERS.find("torch._C._autograd.SavedTensor")
sequence_number: Any = _PROFILES.find("torch._C._autograd._get_sequence_nr")
storage_use_count: Any = _FEATURE.find("torch._C._storage_Use_Count")
TensorBase: Any = _FEATURE.find("torch._C.TensorBase")
top_saved_tensors_hooks: Any = _CHECKPOINTING.find("torch._C._autograd._top_saved_tensors_default_hooks")
will_engine_execute_node: Any = _TECHNIQUES.find("torch._C._will_engine_execute_node")
engine_runs = (
    _FEATURE.place("torch.autograd.graph._engine_run_backward"),
    _FEATURE.place("torch.autograd._engine_run_backward"),
)
"""The one function through which ``backward`` and ``grad`` enter the engine, under both names that are called."""


def save_past_hooks(caching: Any) -> None:
    """Let a selective checkpoint keep results where they are, whatever hooks of saved tensors surround it.

    So it does by itself until 2.13. Since 2.14 ``torch.utils.checkpoint.checkpoint(respect_saved_tensors_hooks=...)``
    decides, and where nobody does torch warns that a later release will send what is kept through the hooks
    (``_CachingTorchDispatchMode.__torch_dispatch__``).

    Args:
        caching: the first of ``create_selective_checkpoint_contexts``.
    """
    if hasattr(caching, "respect_saved_tensors_hooks"):
        caching.respect_saved_tensors_hooks = False


def leave_checkpoints_alone(pack: Any, outside: Any = None) -> None:
    """Let selective checkpoints inside of hooks of saved tensors see those around them instead.

    Since 2.14 a checkpoint of the program's that keeps results looks for hooks through which they might go, and warns
    its user of any (torch/utils/checkpoint.py, ``_current_user_saved_tensors_hooks``). It takes ours for the user's.

    Args:
        pack: the function that packs, of our pair.
        outside: the pair around ours, None without.
    """
    pack._checkpoint_internal, pack._user_hooks = True, outside
