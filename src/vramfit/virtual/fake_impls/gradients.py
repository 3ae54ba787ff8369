"""Backward formulas that write into a fresh tensor on a card, and make a second one for tensor subclasses.

NOTE [Gradients written in place]
Formulas such as that of ``max(dim)`` fill zeros with the incoming gradient. In torch/csrc/autograd/
FunctionsManual.cpp and in ATen they ask ``areAnyTensorSubclassLike`` first: plain tensors take the in-place op
(``scatter_``), subclasses and anything under a dispatch mode the out-of-place one (``scatter``), which would count a
tensor of the input's size too many. Which formula is at work is told by the autograd node that the engine evaluates.
Where a graph of the backward pass is wanted (``create_graph``) autograd needs the op that it sees, so it stays.
"""

from __future__ import annotations

from typing import Any

import torch

from vramfit.torch_internals.autograd_engine import current_autograd_node, current_graph_task_id
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.fake_impls import shapes
from vramfit.virtual.fake_impls.registry import RULES, find_overload
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner

_INDEX_PUT = find_overload("aten._index_put_impl_.default")
_MASKS = (torch.bool, torch.uint8)
_SELECTING = ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Sort", "Topk")
_BINARY_CROSS_ENTROPY = ("BinaryCrossEntropyWithLogits",)  # ATen/native/Loss.cpp

# Out-of-place op, the op that a card runs instead, and the nodes (without ``Backward0``) in which it does.
_IN_PLACE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("scatter.src", "scatter_.src", _SELECTING),  # value_selecting_reduction_backward
    ("scatter_add.default", "scatter_add_.default", ("Gather", "Cummax", "Cummin")),  # gather_backward
    ("index_put.default", "_index_put_impl_.default", ("Index", "UnsafeIndex")),  # index_backward
    ("index_add.default", "index_add_.default", ("IndexSelect",)),  # index_select_backward
    ("index_fill.int_Tensor", "index_fill_.int_Tensor", ("Trace",)),  # trace_backward
    ("masked_scatter.default", "masked_scatter_.default", ("MaskedSelect",)),  # masked_select_backward
    ("sub.Tensor", "sub_.Tensor", _BINARY_CROSS_ENTROPY),
    ("mul.Tensor", "mul_.Tensor", _BINARY_CROSS_ENTROPY),
)


def _in_place(plain: Any, written: Any, nodes: tuple[str, ...]) -> Handler:
    usual = RULES.get(plain)
    names = frozenset(node + "Backward" for node in nodes)

    def handler(mode: OpRunner, call: OpCall) -> Any:
        """Run the in-place op where the node at work does so on a card. See the NOTE above."""
        args = call.args
        if (
            current_graph_task_id() != -1
            and not torch.is_grad_enabled()
            and type(args[0]) is FakeTensor
            and (node := current_autograd_node()) is not None
            and node.name().rstrip("0123456789") in names
            and _made_in_this_pass(mode, args[0])
        ):
            if written is _INDEX_PUT:
                args = (*args[:3], True, True)  # accumulating, with indices that the forward pass has checked
            in_place = mode.call(written, *args, **call.kwargs)
            if written is _INDEX_PUT and any(i is not None and i.dtype in _MASKS for i in args[1]):
                return shapes.index_put(mode, in_place)  # a mask becomes indices first
            mode.settle(in_place, args[0])
            return args[0]
        if usual is not None:
            return usual(mode, call)
        return mode.run(call)

    handler.backward_only = usual is None  # type: ignore[attr-defined]
    return handler


def _made_in_this_pass(mode: OpRunner, tensor: torch.Tensor) -> bool:
    """Whether a tensor was made in the backward pass: the formulas read others, such as ``pos_weight``, as well."""
    record = mode.meter.record_of(tensor)
    return record is not None and record.phase == mode.meter.phases.index


def _register() -> None:
    for plain_name, written_name, nodes in _IN_PLACE:
        plain, written = find_overload(f"aten.{plain_name}"), find_overload(f"aten.{written_name}")
        if plain is not None and written is not None:
            RULES[plain] = _in_place(plain, written, nodes)


_register()
