"""cuDNN's backend interface by ctypes, as far as plans of convolutions want it. Loaded in a process of its own.

Numbers of attributes, types and descriptors are those of ``cudnn_graph_v9.h`` (part of every package of cuDNN): what
torch asks by way of cudnn-frontend in ``aten/src/ATen/native/cudnn/Conv_v8.cpp`` is asked here in the same order.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from vramfit.cudnn.questions import ConvAnswer, ConvPass, ConvPlan, ConvQuestion, TensorShape


class BackendError(Exception):
    """cuDNN refused something; its own words."""


class Kind(IntEnum):
    """``cudnnBackendDescriptorType_t``."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    ENGINE_HEURISTICS = 4
    EXECUTION_PLAN = 5
    FORWARD = 10
    BACKWARD_FILTER = 11
    BACKWARD_DATA = 12
    OPERATION_GRAPH = 15
    TENSOR = 17
    DEVICE_PROPERTIES = 38


class Type(IntEnum):
    """``cudnnBackendAttributeType_t``."""

    DATA_TYPE = 1
    INT64 = 3
    DOUBLE = 5
    CONVOLUTION_MODE = 7
    HEURISTIC_MODE = 8
    NUMERICAL_NOTE = 11
    DESCRIPTOR = 15
    CHAR = 24


class Attribute(IntEnum):
    """``cudnnBackendAttributeName_t``."""

    CONVOLUTION_COMPUTE_TYPE = 100
    CONVOLUTION_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_DIMENSIONS = 106
    HEURISTICS_MODE = 200
    HEURISTICS_GRAPH = 201
    HEURISTICS_RESULTS = 202
    HEURISTICS_DEVICE = 204
    CONFIG_ENGINE = 300
    PLAN_CONFIG = 401
    PLAN_WORKSPACE = 402
    PLAN_DEVICE = 407
    GRAPH_OPERATIONS = 801
    TENSOR_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_ID = 906
    ENGINE_INDEX = 1301
    ENGINE_NOTES = 1303
    DEVICE_JSON = 2702


_CROSS_CORRELATION = 1
_MODE_INSTANT, _MODE_B, _MODE_FALLBACK = 0, 1, 2

_TENSOR_CORE, _DOWN_CONVERT, _NONDETERMINISTIC = 0, 1, 4
"""``cudnnBackendNumericalNote_t``."""

_DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
"""``cudnnDataType_t``."""

_OPERATIONS = {
    ConvPass.FORWARD: (Kind.FORWARD, 700, {"w": 703, "x": 704, "y": 705}),
    ConvPass.BACKWARD_DATA: (Kind.BACKWARD_DATA, 706, {"w": 709, "x": 710, "y": 711}),
    ConvPass.BACKWARD_FILTER: (Kind.BACKWARD_FILTER, 712, {"w": 715, "x": 716, "y": 717}),
}
"""For each pass: the descriptor, its factor alpha (then beta, then the convolution), and its tensors."""


class Cudnn:
    """A loaded library.

    Args:
        library: path of ``libcudnn.so.9``.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, library: str) -> None:
        self._calls = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self._calls.cudnnGetErrorString.restype = ctypes.c_char_p
        self._calls.cudnnGetVersion.restype = ctypes.c_size_t
        self.version = int(self._calls.cudnnGetVersion())

    @property
    def handle(self) -> int:
        """What ``dlopen`` gave for it."""
        return int(self._calls._handle)

    @property
    def cuda(self) -> int:
        """The major version of the CUDA that it was built with: 13."""
        self._calls.cudnnGetCudartVersion.restype = ctypes.c_size_t
        return int(self._calls.cudnnGetCudartVersion()) // 1000

    def card(self, properties: Mapping[str, Any]) -> ctypes.c_void_p:
        """A descriptor of a card that is not there.

        Args:
            properties: see `vramfit.cudnn.questions.device_properties`.

        Raises:
            BackendError: cuDNN does not know such a card.
        """
        text = json.dumps(properties).encode()
        card = self._create(Kind.DEVICE_PROPERTIES)
        self._set(card, Attribute.DEVICE_JSON, Type.CHAR, ctypes.create_string_buffer(text), len(text))
        return self._finalized(card)

    def plans(self, question: ConvQuestion, card: ctypes.c_void_p) -> ConvAnswer:
        """The plans that torch would try for a convolution, in order.

        torch asks the heuristics and takes the first plan that can be made and run; only where none can does it ask for
        fallbacks (``run_single_conv``). Benchmark mode tries all of both lists (``get_plans_from_find``).

        Args:
            question: the convolution.
            card: of `card`.

        Raises:
            BackendError: cuDNN does not take such a convolution.
        """
        with self._descriptors() as made:
            graph = self._graph(question, made)
            found: list[ConvPlan] = []
            for mode in (_MODE_B if question.mode_b else _MODE_INSTANT, _MODE_FALLBACK):
                for plan in self._plans_of(mode, graph, card, question):
                    found.append(plan)
                    if len(found) == question.most:
                        break
                if found and question.most:
                    break
        return ConvAnswer(plans=tuple(found))

    # -- the operation -------------------------------------------------------------------------------------------

    def _graph(self, question: ConvQuestion, made: list[ctypes.c_void_p]) -> ctypes.c_void_p:
        """One convolution as a graph of operations."""
        kind, alpha, places = _OPERATIONS[question.kind]
        # Half precision is summed in float32 (``getConvDescriptor``).
        compute = "float64" if question.dtype == "float64" else "float32"
        convolution = self._new(Kind.CONVOLUTION, made)
        self._set_one(convolution, Attribute.CONVOLUTION_COMPUTE_TYPE, Type.DATA_TYPE, _DATA_TYPES[compute])
        self._set_one(convolution, Attribute.CONVOLUTION_MODE, Type.CONVOLUTION_MODE, _CROSS_CORRELATION)
        for attribute, values in (
            (Attribute.CONVOLUTION_DIMENSIONS, (len(question.stride),)),
            (Attribute.CONVOLUTION_DILATIONS, question.dilation),
            (Attribute.CONVOLUTION_STRIDES, question.stride),
            (Attribute.CONVOLUTION_PRE_PADDINGS, question.padding),
            (Attribute.CONVOLUTION_POST_PADDINGS, question.padding),
        ):
            self._set_numbers(convolution, attribute, values)
        self._finalized(convolution)
        operation = self._new(kind, made)
        self._set(operation, alpha, Type.DOUBLE, (ctypes.c_double * 1)(1.0), 1)
        self._set(operation, alpha + 1, Type.DOUBLE, (ctypes.c_double * 1)(0.0), 1)
        self._set_descriptors(operation, alpha + 2, convolution)
        for name, place in places.items():
            tensor = self._tensor(getattr(question, name), ord(name), question.dtype, made)
            self._set_descriptors(operation, place, tensor)
        self._finalized(operation)
        graph = self._new(Kind.OPERATION_GRAPH, made)
        self._set_descriptors(graph, Attribute.GRAPH_OPERATIONS, operation)
        return self._finalized(graph)

    def _tensor(
        self, shape: TensorShape, identity: int, dtype: str, made: list[ctypes.c_void_p]
    ) -> ctypes.c_void_p:
        tensor = self._new(Kind.TENSOR, made)
        self._set_one(tensor, Attribute.TENSOR_DATA_TYPE, Type.DATA_TYPE, _DATA_TYPES[dtype])
        self._set_numbers(tensor, Attribute.TENSOR_DIMENSIONS, shape.dims)
        self._set_numbers(tensor, Attribute.TENSOR_STRIDES, shape.strides)
        self._set_numbers(tensor, Attribute.TENSOR_ID, (identity,))
        self._set_numbers(tensor, Attribute.TENSOR_ALIGNMENT, (shape.alignment,))
        return self._finalized(tensor)

    # -- its plans -----------------------------------------------------------------------------------------------

    def _plans_of(
        self, mode: int, graph: ctypes.c_void_p, card: ctypes.c_void_p, question: ConvQuestion
    ) -> Iterator[ConvPlan]:
        """Plans of one list of configurations; those that torch passes over or that cannot be made are left out."""
        with self._descriptors() as made:
            heuristics = self._new(Kind.ENGINE_HEURISTICS, made)
            self._set_descriptors(heuristics, Attribute.HEURISTICS_GRAPH, graph)
            self._set_one(heuristics, Attribute.HEURISTICS_MODE, Type.HEURISTIC_MODE, mode)
            self._set_descriptors(heuristics, Attribute.HEURISTICS_DEVICE, card)
            try:
                self._finalized(heuristics)
            except BackendError:  # it has none of this mode
                return
            for config in self._configs(heuristics, made):
                engine, notes = self._engine(config)
                if not _passed_over(notes, question):
                    try:
                        workspace = self._workspace(config, card)
                    except BackendError:  # as in ``try_configs``: the next one is tried
                        continue
                    yield ConvPlan(workspace=workspace, engine=engine)

    def _configs(self, heuristics: ctypes.c_void_p, made: list[ctypes.c_void_p]) -> Sequence[ctypes.c_void_p]:
        count = ctypes.c_int64()
        self._get(heuristics, Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR, 0, count, None)
        configs = [self._new(Kind.ENGINE_CONFIG, made) for _ in range(count.value)]
        array = (ctypes.c_void_p * max(1, len(configs)))(*(config.value for config in configs))
        self._get(heuristics, Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR, len(configs), count, array)
        return configs[: count.value]

    def _engine(self, config: ctypes.c_void_p) -> tuple[int, list[int]]:
        """Number of a configuration's engine, and its notes on what it does to numbers."""
        with self._descriptors() as made:
            engine = self._new(Kind.ENGINE, made)
            count = ctypes.c_int64()
            array = (ctypes.c_void_p * 1)(engine.value)
            self._get(config, Attribute.CONFIG_ENGINE, Type.DESCRIPTOR, 1, count, array)
            number = (ctypes.c_int64 * 1)()
            self._get(engine, Attribute.ENGINE_INDEX, Type.INT64, 1, count, number)
            notes = (ctypes.c_int * 32)()
            self._get(engine, Attribute.ENGINE_NOTES, Type.NUMERICAL_NOTE, 32, count, notes)
            return number[0], list(notes[: count.value])

    def _workspace(self, config: ctypes.c_void_p, card: ctypes.c_void_p) -> int:
        """Bytes that the plan of a configuration takes."""
        with self._descriptors() as made:
            plan = self._new(Kind.EXECUTION_PLAN, made)
            self._set_descriptors(plan, Attribute.PLAN_CONFIG, config)
            self._set_descriptors(plan, Attribute.PLAN_DEVICE, card)
            self._finalized(plan)
            count, found = ctypes.c_int64(), (ctypes.c_int64 * 1)()
            self._get(plan, Attribute.PLAN_WORKSPACE, Type.INT64, 1, count, found)
            return int(found[0])

    # -- descriptors ---------------------------------------------------------------------------------------------

    @contextmanager
    def _descriptors(self) -> Iterator[list[ctypes.c_void_p]]:
        """A list of descriptors that are destroyed at the end, the last one first."""
        made: list[ctypes.c_void_p] = []
        try:
            yield made
        finally:
            for descriptor in reversed(made):
                self._calls.cudnnBackendDestroyDescriptor(descriptor)

    def _new(self, kind: Kind, made: list[ctypes.c_void_p]) -> ctypes.c_void_p:
        made.append(self._create(kind))
        return made[-1]

    def _create(self, kind: Kind) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self._check(self._calls.cudnnBackendCreateDescriptor(ctypes.c_int(kind), ctypes.byref(found)))
        return found

    def _finalized(self, descriptor: ctypes.c_void_p) -> ctypes.c_void_p:
        self._check(self._calls.cudnnBackendFinalize(descriptor))
        return descriptor

    def _set_one(self, descriptor: ctypes.c_void_p, attribute: int, kind: Type, value: int) -> None:
        self._set(descriptor, attribute, kind, (ctypes.c_int * 1)(value), 1)

    def _set_numbers(self, descriptor: ctypes.c_void_p, attribute: int, values: Sequence[int]) -> None:
        array = (ctypes.c_int64 * len(values))(*values)
        self._set(descriptor, attribute, Type.INT64, array, len(values))

    def _set_descriptors(self, descriptor: ctypes.c_void_p, attribute: int, value: ctypes.c_void_p) -> None:
        self._set(descriptor, attribute, Type.DESCRIPTOR, (ctypes.c_void_p * 1)(value.value), 1)

    def _set(self, descriptor: ctypes.c_void_p, attribute: int, kind: Type, array: Any, count: int) -> None:
        self._check(
            self._calls.cudnnBackendSetAttribute(
                descriptor,
                ctypes.c_int(attribute),
                ctypes.c_int(kind),
                ctypes.c_int64(count),
                ctypes.byref(array),
            )
        )

    def _get(
        self,
        descriptor: ctypes.c_void_p,
        attribute: Attribute,
        kind: Type,
        most: int,
        count: ctypes.c_int64,
        array: Any,
    ) -> None:
        """Read at most so many values of an attribute into an array, and how many there are into a count."""
        self._check(
            self._calls.cudnnBackendGetAttribute(
                descriptor,
                ctypes.c_int(attribute),
                ctypes.c_int(kind),
                ctypes.c_int64(most),
                ctypes.byref(count),
                None if array is None else ctypes.byref(array),
            )
        )

    def _check(self, status: int) -> None:
        if not status:
            return
        text = ctypes.create_string_buffer(1024)
        self._calls.cudnnGetLastErrorString(text, ctypes.c_size_t(len(text)))
        name = self._calls.cudnnGetErrorString(status).decode(errors="replace")
        raise BackendError(f"{name}: {text.value.decode(errors='replace').strip()}".strip(": "))


def _passed_over(notes: Sequence[int], question: ConvQuestion) -> bool:
    """Whether torch leaves a configuration out (``filterEngineConfigs``)."""
    if _DOWN_CONVERT in notes or (question.deterministic and _NONDETERMINISTIC in notes):
        return True
    return question.dtype == "float32" and not question.tf32 and _TENSOR_CORE in notes
