"""The dispatcher: ops, keys, dispatch modes and ``__torch_function__``."""

from __future__ import annotations

from typing import Any

from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C import DispatchKey as DispatchKey
from torch._C import DispatchKeySet as DispatchKeySet
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from vramfit.torch_internals.names import Feature

_CHECKPOINTING = Feature("selective checkpointing and rematerialization")
_INFERENCE = Feature("tiled and chunked inference")
_LOSSES = Feature("losses in chunks")
_SCRIPTS = Feature("torch.jit.script")
_EXCHANGE = Feature("DLPack")
_RECURRENT = Feature("recurrent layers as on a card")
_FEATURE = Feature("following operations")

all_op_names: Any = _FEATURE.find("torch._C._dispatch_get_all_op_names")
AutoDispatchBelowAutograd: Any = _CHECKPOINTING.find("torch._C._AutoDispatchBelowAutograd")
current_dispatch_modes: Any = _CHECKPOINTING.find(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
disable_current_modes: Any = _FEATURE.find("torch.utils._python_dispatch._disable_current_modes")
ExcludeDispatchKeyGuard: Any = _CHECKPOINTING.find("torch._C._ExcludeDispatchKeyGuard")
get_dispatch_mode: Any = _FEATURE.find("torch._C._get_dispatch_mode")
get_tracing_state: Any = _LOSSES.find("torch._C._get_tracing_state")
has_kernel: Any = _FEATURE.find("torch._C._dispatch_has_kernel_for_dispatch_key")
is_traceable_wrapper_subclass: Any = _FEATURE.find(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass"
)
parse_to: Any = _INFERENCE.find("torch._C._nn._parse_to")
peek_interpreter_stack: Any = _LOSSES.find("torch._C._functorch.peek_interpreter_stack")
pop_mode: Any = _CHECKPOINTING.find("torch.utils._python_dispatch._pop_mode")
push_mode: Any = _CHECKPOINTING.find("torch.utils._python_dispatch._push_mode")
script_builtins: Any = _SCRIPTS.find("torch.jit._builtins._get_builtin_table")
SetExcludeDispatchKeyGuard: Any = _CHECKPOINTING.find("torch._C._SetExcludeDispatchKeyGuard")
to_dlpack: Any = _EXCHANGE.find("torch._C._to_dlpack")
TorchDispatchModeKey: Any = _FEATURE.find("torch._C._TorchDispatchModeKey")
variable_functions: Any = _FEATURE.find("torch._C._VariableFunctions")
VF: Any = _RECURRENT.find("torch._VF")
nn_functions: Any = _FEATURE.find("torch._C._nn")
"""The module of C++ behind ``torch.nn.functional``."""

CURRENT_MODE = "_get_current_dispatch_mode"
"""The function of torch/utils/_python_dispatch.py, as modules of torch bind it."""


def take_apart(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite op by its kernel in C++, as torch does above autograd's keys.

    ``OpOverload.decompose`` prefers kernels in Python (torch/_decomp), which ask for other memory: that of ``dropout``
    copies in evaluation, and that of ``matmul`` folds other shapes. NotImplemented where there is no kernel.
    """
    if has_kernel(func.name(), "CompositeImplicitAutograd"):
        return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    return func.decompose(*args, **kwargs)
