"""Calls of torch's functions while a network runs by rows: which become nodes, and which get whole tensors.

NOTE [Later]: what a network calls is only written down (`LayerNode`), and computed when values are asked for: by what
has no rule, or at the end. By then the program has let go of what it does not need, and it is known which rows nobody
will read again. So nothing here may keep a row tensor alive by a cycle, as a function that calls itself through its
closure would: the rows that it stands for would stay until the collector finds it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vramfit.errors import UsageError
from vramfit.inference.layerwise.chunk_height import ChunkHeight, ChunkStore
from vramfit.inference.layerwise.row_nodes import (
    Compute,
    LayerNode,
    Outline,
    kept_below,
    produce,
    source_node,
    whole_of,
)
from vramfit.inference.layerwise.row_tensors import Hold, RowTensor, replaced, row_tensors_in
from vramfit.inference.layerwise.row_windows import RowWindow, SameRows
from vramfit.torch_internals.dispatch import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    disable_current_modes,
)

Rule = Callable[["RowCall"], Any]
"""Gives a call's result, or NotImplemented where the call wants whole tensors."""

_ASKED_WORDS = """
size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex element_size get_device
untyped_storage __len__ is_inference __hash__ requires_grad_ is_same_size storage_offset is_signed retain_grad
register_hook _is_view has_names
"""
_ASKED = frozenset(_ASKED_WORDS.split())
_ASKED_PROPERTIES_WORDS = """
shape dtype device ndim layout requires_grad is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_nested
is_mps is_xpu is_xla is_leaf grad grad_fn names output_nr _version itemsize nbytes retains_grad is_sparse_csr
_backward_hooks _grad is_vulkan is_ipu is_maia is_mtia
"""
_ASKED_PROPERTIES = frozenset(_ASKED_PROPERTIES_WORDS.split())


class RowCall:
    """One call of a torch function with row tensors among its arguments.

    Attributes:
        name: of the function, without the mark of its variant in place.
        func: what to call on rows; never one that works in place.
        in_place: the tensor that the call changes in the plain program; None where it gives a new one.
    """

    def __init__(self, session: RowSession, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.session, self.func, self.args, self.kwargs = session, func, tuple(args), dict(kwargs)
        self.name: str = getattr(func, "__name__", "")
        self.in_place: RowTensor | None = None

    @property
    def tensors(self) -> list[RowTensor]:
        """Its row tensors, once each, in the order of its arguments."""
        found: dict[int, RowTensor] = {}
        for tensor in row_tensors_in((self.args, self.kwargs)):
            found.setdefault(id(tensor), tensor)
        return list(found.values())

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def on_meta(self) -> Any:
        """What the call gives for tensors without values: its shapes and types.

        Raises:
            Exception: whatever the function raises for these arguments.
        """
        with disable_current_modes():
            return self.func(*_on_meta(self.args), **_on_meta(self.kwargs))

    def bound(self, found: Sequence[RowTensor]) -> Compute:
        """Makes rows by the call itself, with rows in the place of each tensor."""
        func, holes = self.func, [id(tensor) for tensor in found]

        def plain(tensor: RowTensor) -> Any:
            return _Hole(holes.index(id(tensor)))

        args, kwargs = replaced(self.args, plain), replaced(self.kwargs, plain)
        self.session.note_captured((args, kwargs))

        def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> Any:
            del begin, end, starts
            return func(*_filled(args, parts), **_filled(kwargs, parts))

        return compute

    # -- results --------------------------------------------------------------------------------------------------

    def same_rows(self, compute: Compute, like: torch.Tensor, *, axis: int | None = None) -> RowTensor:
        """A result whose rows are made of the same rows of all its inputs."""
        inputs = [(tensor.node, SameRows(tensor.node.rows)) for tensor in self.tensors]
        return self.result(compute, like, inputs, axis=axis)

    def result(
        self,
        compute: Compute,
        like: torch.Tensor,
        inputs: Sequence[tuple[LayerNode, RowWindow]],
        *,
        axis: int | None = None,
        kept: bool | None = None,
        needs: Sequence[LayerNode] = (),
    ) -> RowTensor:
        """A result of the shape and type of `like`; it takes the place of the tensor that the call changes."""
        if self.in_place is not None and like.dtype != self.in_place.node.outline.dtype:
            dtype, plain = self.in_place.node.outline.dtype, compute
            like = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")

            def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
                return plain(begin, end, parts, starts).to(dtype)

        node = self.session.node(compute, like, inputs, axis=axis, kept=kept, needs=needs)
        if self.in_place is None:
            return RowTensor(node, self.session)
        self.in_place.become(node, self.name)
        return self.in_place


class _Hole:
    """The place of a row tensor among the arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


def _filled(value: Any, parts: list[torch.Tensor]) -> Any:
    if isinstance(value, _Hole):
        return parts[value.index]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_filled(item, parts) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_filled(item, parts) for item in value)
    if type(value) is dict:
        return {name: _filled(item, parts) for name, item in value.items()}
    return value


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_on_meta(item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_on_meta(item) for item in value)
    if type(value) is dict:
        return {name: _on_meta(item) for name, item in value.items()}
    return value


class RowSession:
    """One run of a network by rows.

    Args:
        height: of chunks.
        store: where outputs of layers are kept.
        rules: by the names of functions.
        entries: names of functions that also take plain tensors by rows, where these are higher than a chunk.
    """

    def __init__(
        self,
        height: ChunkHeight,
        store: ChunkStore,
        rules: dict[str, Rule],
        entries: frozenset[str],
    ) -> None:
        self.height, self.store, self.rules, self.entries = height, store, rules, entries
        self._captured: dict[int, weakref.ref[torch.Tensor]] = {}
        self.holds: weakref.WeakSet[Hold] = weakref.WeakSet()

    # -- nodes ----------------------------------------------------------------------------------------------------

    def node(
        self,
        compute: Compute,
        like: torch.Tensor,
        inputs: Sequence[tuple[LayerNode, RowWindow]],
        *,
        axis: int | None = None,
        kept: bool | None = None,
        needs: Sequence[LayerNode] = (),
    ) -> LayerNode:
        """A node on the device of its first input.

        Args:
            kept: whether rows are kept; None where it reads more than one kept tensor, which it lets go then.
        """
        first = inputs[0][0]
        outline = Outline(
            shape=like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            device=first.outline.device,
            axis=first.axis if axis is None else axis,
        )
        return LayerNode(
            outline,
            inputs,
            compute,
            kept=_is_kept(inputs) if kept is None else kept,
            height=self.height_of(outline, [node for node, _ in inputs]),
            needs=needs,
            store=self.store,
        )

    def height_of(self, outline: Outline, inputs: Sequence[LayerNode]) -> int:
        """Rows of a chunk, such that neither it nor what it is made of is larger than allowed."""
        rows = max(1, outline.rows)
        read = sum(node.outline.row_bytes * node.rows for node in inputs) // rows
        return self.height.of(max(outline.row_bytes, read))

    def tensor_of(self, value: torch.Tensor, axis: int) -> RowTensor:
        """A plain tensor as one by rows."""
        self.note_captured(value)
        return RowTensor(source_node(value, axis), self)

    def with_axis(self, tensor: RowTensor, axis: int) -> RowTensor:
        """The tensor with its rows along another dimension; it is computed as a whole for that, unless it is there."""
        if tensor.node.axis == axis:
            return tensor
        return self.tensor_of(self.whole(tensor.node), axis)

    def whole(self, node: LayerNode) -> torch.Tensor:
        """All of the values of a node."""
        with computing(node.outline.device.type):
            return whole_of(node)

    def produce(self, node: LayerNode) -> None:
        """Compute all rows of a node that keeps them."""
        with computing(node.outline.device.type):
            produce(node, node.rows)

    def plain(self, value: Any) -> Any:
        """Plain containers with whole tensors in the place of row tensors."""
        return replaced(value, lambda tensor: tensor.whole())

    # -- changes in place to plain tensors ------------------------------------------------------------------------

    def note_captured(self, value: Any) -> None:
        """Remember plain tensors that are read later."""
        for tensor in plain_tensors(value):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # without storage there are no views
                self._captured[tensor.untyped_storage()._cdata] = weakref.ref(tensor)

    def before_change(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Compute what reads a plain tensor that is about to change in place."""
        for tensor in plain_tensors((args[:1], kwargs.get("out"))):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                known = self._captured.get(tensor.untyped_storage()._cdata)
                if known is not None and known() is not None:
                    self.settle()
                    return

    def settle(self) -> None:
        """Compute all that the program holds."""
        for hold in list(self.holds):
            self.whole(hold.node)
        self._captured.clear()

    # -- calls ----------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One call of a torch function, of which some arguments may be row tensors.

        Raises:
            UsageError: it changes in place what other tensors share.
        """
        name = getattr(func, "__name__", "")
        if next(row_tensors_in((args, kwargs)), None) is None:
            entered = self._entered(name, args)
            if entered is None:
                if _changes(name, kwargs):
                    self.before_change(args, kwargs)
                return func(*args, **kwargs)
            args = entered
        elif name in ("__get__", "__set__"):
            return self._property(func, args, name)
        elif name in _ASKED:
            return _natively(func, args, kwargs)
        call = RowCall(self, func, args, kwargs)
        found = self._ruled(call)
        return self._whole_call(call, func, args, kwargs) if found is NotImplemented else found

    def dispatched(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation below torch's functions, with whole tensors.

        Raises:
            UsageError: it works in place.
        """
        if func._schema.is_mutable:
            raise UsageError(
                f"{func} changes a tensor in place from C++",
                "Layer-wise chunks cannot follow this: run the model whole, or by tiles",
            )
        return func(*self.plain(args), **self.plain(kwargs))

    def _entered(self, name: str, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """The arguments with the first one by rows, where plain tensors enter by the function and it is high."""
        if name not in self.entries or not args or not isinstance(args[0], torch.Tensor):
            return None
        first = args[0]
        if first.dim() < 3 or not first.is_floating_point():
            return None
        rows = first.shape[2]
        if rows <= self.height.of(first.nbytes // max(1, rows)):
            return None
        return (self.tensor_of(first, 2 - first.dim()), *args[1:])

    def _property(self, func: Any, args: Sequence[Any], name: str) -> Any:
        asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__get__" and asked == "data":
            return args[0]
        if asked in _ASKED_PROPERTIES:
            return _natively(func, args, {})
        if name == "__set__":
            raise UsageError(
                f"the model sets {asked} of a tensor",
                "Layer-wise chunks cannot follow this: run the model whole, or by tiles",
            )
        return func(*self.plain(args))

    def _ruled(self, call: RowCall) -> Any:
        """The result of the rule of a call; NotImplemented where there is none, or it wants whole tensors."""
        name = call.name
        if call.kwargs.get("out") is not None:
            return NotImplemented
        if call.kwargs.get("inplace"):
            call.kwargs["inplace"] = False
            call.in_place = call.args[0]
        elif _changes(name, call.kwargs):
            twin = name[:-1] if not name.startswith("__") else f"__{name[3:]}"
            func = getattr(torch.Tensor, twin, None) or getattr(torch, twin, None)
            if func is None or not isinstance(call.args[0], RowTensor):
                return NotImplemented
            call.name, call.func, call.in_place = twin, func, call.args[0]
        rule = self.rules.get(call.name)
        if rule is None:
            return NotImplemented
        apply_autocast(call)
        with torch.no_grad():
            return rule(call)

    def _whole_call(self, call: RowCall, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call with whole tensors; what it changes in place is a copy, for others may read the rows still."""
        target = args[0] if args else None
        if isinstance(kwargs.get("out"), RowTensor):
            target = kwargs["out"]
        if isinstance(target, RowTensor) and (_changes(call.name, kwargs) or call.in_place is not None):
            copied = target.whole().clone()
            others = {id(target): copied}

            def value(tensor: RowTensor) -> torch.Tensor:
                return others[id(tensor)] if id(tensor) in others else tensor.whole()

            made = func(*replaced(args, value), **replaced(kwargs, value))
            target.become(source_node(copied, target.node.axis), call.name)
            return target if made is copied else made
        if _changes(call.name, kwargs):
            self.before_change(args, kwargs)
        return func(*self.plain(tuple(args)), **self.plain(kwargs))


class RowMode(TorchFunctionMode):
    """Passes every call of torch's functions to a session."""

    def __init__(self, session: RowSession) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        del types
        return self.session.call(func, args, kwargs or {})


# -- autocast ---------------------------------------------------------------------------------------------------------

_LOWER_WORDS = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul prelu
"""
_LOWER = frozenset(_LOWER_WORDS.split())
_FLOAT32_WORDS = """
group_norm layer_norm rms_norm __pow__ __rpow__ pow exp expm1 log log10 log1p log2 reciprocal rsqrt softmax
log_softmax softplus norm sum cumsum prod
"""
_FLOAT32 = frozenset(_FLOAT32_WORDS.split())
"""Lists of autocast on cards: pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32"."""


def apply_autocast(call: RowCall) -> None:
    """Cast a call's tensors as autocast would: when it is computed, autocast may be over."""
    tensors = call.tensors
    kind = tensors[0].node.outline.device.type
    if not torch.is_autocast_enabled(kind):
        return
    if call.name in _LOWER:
        dtype = torch.get_autocast_dtype(kind)
    elif call.name in _FLOAT32 and kind == "cuda":
        dtype = torch.float32
    else:
        return

    call.args = tuple(_cast(call.session, value, dtype) for value in call.args)
    call.kwargs = {name: _cast(call.session, value, dtype) for name, value in call.kwargs.items()}


def _cast(session: RowSession, value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, RowTensor):
        return casted(session, value, dtype)
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    if type(value) in (list, tuple):
        return type(value)(_cast(session, item, dtype) for item in value)
    return value


def casted(session: RowSession, tensor: RowTensor, dtype: torch.dtype) -> RowTensor:
    """The tensor in another type, or itself where it has it."""
    node = tensor.node
    if node.outline.dtype in (dtype, torch.float64) or not node.outline.dtype.is_floating_point:
        return tensor
    like = torch.empty_strided(node.outline.shape, node.outline.strides, dtype=dtype, device="meta")

    def compute(begin: int, end: int, parts: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        del begin, end, starts
        return parts[0].to(dtype)

    made = session.node(compute, like, [(node, SameRows(node.rows))])
    return RowTensor(made, session)


def _is_kept(inputs: Sequence[tuple[LayerNode, RowWindow]]) -> bool:
    below = [kept for node, _ in inputs for kept in kept_below(node)]
    return len({id(one) for one in below}) > 1 or len(below) > _MOST_READS


_MOST_READS = 4
"""Times that computing a row anew may read one of the same kept tensor: gates (x times sigmoid of x) double them."""


# -- helpers --------------------------------------------------------------------------------------------------------


def _changes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function of that name works in place."""
    if name.startswith("__"):
        return (name.startswith("__i") and name[3:-2] in _OPERATORS) or name == "__setitem__"
    return (name.endswith("_") and not name.startswith("_")) or kwargs.get("out") is not None


_OPERATORS_WORDS = """
add sub mul truediv div floordiv mod pow and or xor lshift rshift matmul
"""
_OPERATORS = frozenset(_OPERATORS_WORDS.split())


def _natively(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in plain containers that are not by rows."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, RowTensor):
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from plain_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from plain_tensors(item)


@contextlib.contextmanager
def computing(kind: str) -> Iterator[None]:
    """Rows are computed by torch's functions themselves, in the types that were settled when they were called."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(DisableTorchFunction())
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
