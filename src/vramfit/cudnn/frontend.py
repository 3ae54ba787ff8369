"""cudnn-frontend's compiled module, as far as torch's attention wants it. Loaded in a process of its own.

The graphs are those of ``build_graph`` and ``build_graph_backward`` in ``aten/src/ATen/native/cudnn/MHA.cpp``: the same
tensors, strides, switches and heuristics (mode A), and the first plan that can be built counts. Only the compiled
module is loaded: the Python package around it would load a cuDNN of its own choice.

cuDNN compiles attention's kernels while it makes a plan, so it wants NVRTC, and it wants the driver's library to be
there, although it calls nothing of it for a card that is only described. Where one of them is missing it is said, and
the rules stay: no stand-in is made for the driver here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from vramfit.cudnn.backend import BackendError, Cudnn
from vramfit.cudnn.found_frontend import WANTS_DRIVER
from vramfit.cudnn.questions import AttentionPass, AttentionQuestion, TensorShape

_ONE = TensorShape(dims=(1, 1, 1, 1), strides=(1, 1, 1, 1))
_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
_MODULE = "_compiled_module"
_REASON = re.compile(r"Reason: (.+)")


class FrontendError(Exception):
    """Attention cannot be asked about at all; why, in a few words."""


class Frontend:
    """A loaded module that makes graphs for one card.

    Args:
        module: path of the compiled module.
        library: the cuDNN that is to make the plans.
        properties: see `vramfit.cudnn.questions.device_properties`.

    Raises:
        FrontendError: it cannot be used here.
    """

    def __init__(self, module: str, library: Cudnn, properties: Mapping[str, Any]) -> None:
        _require(f"libnvrtc.so.{library.cuda}", f"NVRTC for CUDA {library.cuda} is not installed")
        _require("libcuda.so.1", WANTS_DRIVER)
        try:
            self._module = _loaded(module)
            self._module._set_dlhandle_cudnn(library.handle)
            self._graph = getattr(self._module, "backend_graph", None) or self._module.pygraph
            self._card = self._module.create_device_properties(json.dumps(properties))
            self._refusals = RuntimeError, ValueError, self._module.cudnnGraphNotSupportedError
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            raise FrontendError(f"this cudnn-frontend cannot be used: {_first_line(error)}") from error
        self._sm = int(properties["deviceVer"]) // 10

    def workspace(self, question: AttentionQuestion) -> int:
        """Bytes that torch allocates while a pass of attention runs (``get_workspace_size``).

        Args:
            question: the pass.

        Raises:
            BackendError: cuDNN does not take such attention.
            FrontendError: this release of cudnn-frontend has another interface.
        """
        try:
            return self._built(question)
        except self._refusals as error:
            raise BackendError(_words(str(error))) from error
        except (ImportError, TypeError, AttributeError) as error:
            raise FrontendError(f"this cudnn-frontend cannot be used: {_first_line(error)}") from error

    def _built(self, question: AttentionQuestion) -> int:
        types = self._module.data_type
        graph = self._graph(
            io_data_type=self._type(question.dtype),
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            device_property=self._card,
            sm_version=self._sm,
        )
        if question.kind is AttentionPass.FORWARD:
            self._forward(graph, question)
        else:
            self._backward(graph, question)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self._module.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return int(graph.get_workspace_size())

    def _forward(self, graph: Any, question: AttentionQuestion) -> None:
        out, stats = graph.sdpa(
            generate_stats=question.stats, name="forward", **self._inputs(graph, question)
        )
        _as_output(out, question.out)
        if stats is not None:
            stats.set_output(True)._set_data_type(self._module.data_type.FLOAT)

    def _backward(self, graph: Any, question: AttentionQuestion) -> None:
        batch, heads, queries, _ = question.query.dims
        stats = TensorShape(dims=(batch, heads, queries, 1), strides=(heads * queries, queries, 1, 1))
        gradients = graph.sdpa_backward(
            o=self._tensor(graph, "o", question.out, question.dtype),
            dO=self._tensor(graph, "do", question.grad or question.out, question.dtype),
            stats=self._tensor(graph, "stats", stats, "float32"),
            name="backward",
            **self._inputs(graph, question),
        )
        # torch makes the gradients with the strides of the inputs (``empty_like`` in attention_backward.cu).
        for gradient, shape in zip(gradients, (question.query, question.key, question.value), strict=True):
            _as_output(gradient, shape)

    def _inputs(self, graph: Any, question: AttentionQuestion) -> dict[str, Any]:
        """What both passes take."""
        given: dict[str, Any] = {
            "q": self._tensor(graph, "q", question.query, question.dtype),
            "k": self._tensor(graph, "k", question.key, question.dtype),
            "v": self._tensor(graph, "v", question.value, question.dtype),
            "attn_scale": self._tensor(graph, "scale", _ONE, "float32", by_value=True),
            "use_causal_mask": question.causal,
        }
        if question.bias is not None:
            given["bias"] = self._tensor(graph, "bias", question.bias, question.bias_dtype)
        if question.dropout:
            numbers = (self._tensor(graph, name, _ONE, "int64") for name in ("seed", "offset"))
            given["dropout"] = (question.dropout, *numbers)
        return given

    def _tensor(
        self, graph: Any, name: str, shape: TensorShape, dtype: str, *, by_value: bool = False
    ) -> Any:
        return graph._make_tensor(
            dim=list(shape.dims),
            stride=list(shape.strides),
            data_type=self._type(dtype),
            is_virtual=False,
            is_pass_by_value=by_value,
            ragged_offset=None,
            reordering_type=self._module.tensor_reordering.NONE,
            name=name,
            uid=-1,
        )

    def _type(self, dtype: str) -> Any:
        return getattr(self._module.data_type, _TYPES.get(dtype, dtype.upper()))


def _as_output(tensor: Any, shape: TensorShape) -> None:
    tensor.set_output(True).set_dim(list(shape.dims)).set_stride(list(shape.strides))


def _require(library: str, otherwise: str) -> None:
    """Load what cuDNN will look for by this name."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        raise FrontendError(otherwise) from error


def _loaded(path: str) -> ModuleType:
    """The module at a path, without the package that it is part of."""
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["cudnn"] = module  # its ``sdpa_backward`` imports the package for the class ``tensor``
    return module


def _words(text: str) -> str:
    """Why cuDNN refuses, from the many lines that it says it with."""
    found = _REASON.search(text)
    return found.group(1).strip() if found else _first_line(text)


def _first_line(said: object) -> str:
    return (str(said).strip().splitlines() or ["no reason given"])[0]
