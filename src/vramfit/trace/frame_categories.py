"""What a block is for, as far as the stack of its request says: C++ frames, and Python files of torch and libraries.

torch's snapshots name no categories. Their stacks often do: ``at::cuda::getNewWorkspace`` asks for a workspace of
cuBLAS, ``_init_group`` in ``torch/optim`` for the state of an optimizer. The innermost frame that says anything
decides, so that what a checkpoint computes again within the backward pass counts as activations.

The names are those of torch 2.0 to 2.15: aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp,
aten/src/ATen/native/cudnn (Conv_v7.cpp and Conv_v8.cpp), torch/csrc/autograd/engine.cpp, torch/csrc/distributed/c10d,
torch/nn/modules/module.py, torch/optim.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from vramfit.trace.model import Category, Frame

BY_FRAMES = "frames"
"""Value of ``categories`` in a trace's ``meta`` where they come from stacks alone, so that many blocks have none."""

_CPP = (
    (
        Category.WORKSPACES,
        re.compile(
            # Outputs are allocated before these are entered: whatever is asked for below them is scratch memory.
            r"getNewWorkspace|getNewCUDABlasLtWorkspace|getCUDABlasLtWorkspace|getCurrentCUDABlasHandle"
            r"|at::cuda::(?:blas|solver)::|raw_cudnn_|run_conv_plan|run_single_conv|generate_and_filter_plans"
            r"|\bWorkspace::Workspace\b|raw_miopen_"
        ),
    ),
    (Category.COMMUNICATION_BUFFERS, re.compile(r"\bc10d::|\bProcessGroup(?:NCCL|Gloo)\b|\bncclComm")),
    (
        Category.GRADIENTS,
        re.compile(
            r"torch::autograd::(?:AccumulateGrad|Engine|GraphTask|InputBuffer|CppNode|PyNode|Node"
            r"|generated::\w*Backward\w*|python::PythonEngine)\b"
        ),
    ),
)
_PYTHON = (
    (Category.OPTIMIZER_STATE, r"\boptim\w*/.*", r"_init_group|_?init_state|get_state_buffer"),
    (
        Category.OPTIMIZER_STATE,
        r"\btorch/optim/optimizer",
        r"load_state_dict|_process_value_according_to_param_policy",
    ),
    (Category.TEMPORARIES, r"\btorch/optim/(?!sgd\b)\w+", r"_(?:multi|single)_tensor_\w+|_fused_\w+"),
    (
        Category.GRADIENTS,
        r"\btorch/(?:autograd/(?:__init__|graph)|_tensor)",
        r"backward|grad|_engine_run_backward",
    ),
    (
        Category.UNSHARDED_PARAMETERS,
        r"\btorch/distributed/fsdp/.*",
        r"_alloc_storage|alloc_storage|_?alloc_padded_unsharded_flat_param|alloc_all_gather_outputs|unshard",
    ),
    (
        Category.COMMUNICATION_BUFFERS,
        r"\btorch/(?:distributed/(?:distributed_c10d|_functional_collectives|fsdp/.*)|nn/parallel/(?:comm|distributed))",
        r"(?:all_|_?foreach_)?(?:reduce|gather)\w*|broadcast\w*|_ddp_init_helper|all_to_all\w*",
    ),
    (
        Category.PARAMETERS,
        r"\btorch/nn/modules/module",
        r"_apply|to|cuda|half|float|double|bfloat16|to_empty|convert|load_state_dict",
    ),
    (Category.PARAMETERS, r"\btorch/nn/modules/\w+", r"__init__|_load_from_state_dict"),
    (
        Category.PARAMETERS,
        r"\btorch/serialization",
        r"load|_load|_legacy_load|load_tensor|persistent_load|_cuda_deserialize|restore_location",
    ),
    (
        Category.PARAMETERS,
        r"\b(?:transformers|diffusers|accelerate|safetensors)/.*",
        r"(?:_?from_pretrained|_?load_\w*model\w*|_?load_\w*state_dict\w*|set_module_tensor_to_device|load_file)",
    ),
    (Category.ACTIVATIONS, r"\btorch/nn/modules/module", r"_call_impl|_wrapped_call_impl|_slow_forward"),
    (Category.ACTIVATIONS, r"\btorch/nn/modules/(?!loss\b)\w+", r"forward"),
    (
        Category.INPUTS,
        r"\b(?:transformers|accelerate|lightning|lightning_fabric|pytorch_lightning)/.*",
        r"_prepare_inputs?|send_to_device|move_data_to_device|batch_to|transfer_batch_to_device",
    ),
)
_RULES = tuple(
    (category, re.compile(rf"{file}\.py$"), re.compile(function)) for category, file, function in _PYTHON
)
_SGD = re.compile(r"\btorch/optim/sgd\.py$")


def category_of(stack: Sequence[Frame]) -> Category:
    """The category that the innermost telling frame names; ``OTHER`` where no frame tells.

    Args:
        stack: frames, innermost first, of Python and C++.
    """
    for position, frame in enumerate(stack):
        told = _told_by(frame)
        if told is not Category.OTHER:
            return told
        if _SGD.search(frame.filename) and frame.name.endswith("_tensor_sgd"):
            return _of_sgd(stack[:position])
    return Category.OTHER


def _of_sgd(inner: Sequence[Frame]) -> Category:
    """SGD makes its momentum where it computes, as a clone of the gradient; only C++ frames distinguish the two."""
    if any("clone" in frame.name for frame in inner):
        return Category.OPTIMIZER_STATE
    return Category.TEMPORARIES if inner else Category.OTHER


@lru_cache(maxsize=65536)
def _told_by(frame: Frame) -> Category:
    """What one frame says of the request, ``OTHER`` for nothing."""
    file, name = frame.filename.replace("\\", "/"), frame.name
    if not file.endswith(".py"):
        return next((category for category, pattern in _CPP if pattern.search(name)), Category.OTHER)
    return next(
        (
            category
            for category, of_file, function in _RULES
            if function.fullmatch(name) and of_file.search(file)
        ),
        Category.OTHER,
    )
