"""What the dispatch mode needs from an aten op's schema, worked out once per op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.torch_internals import dispatch
from vramfit.torch_internals.dispatch import OpOverload
from vramfit.torch_internals.fake_tensors import FakeTensor

# Tells ops apart as `id` does, which Python announces to audit hooks at each call: files/ has one (attribution.py).
identity = object.__hash__

Rule = Callable[..., Any]
"""A rule of an op, of which this floor knows that it can be called; `vramfit.virtual.op_runner.Handler` is one."""

_MADE_FIRST = {
    "aten.native_dropout": (1,),
    "aten._fused_dropout": (1,),
    "aten._scaled_dot_product_cudnn_attention": (6, 7),
}
"""Positions of results that a CUDA kernel makes before the others: the mask of a dropout (Dropout.cu: dropout_cuda),
seed and offset of cuDNN's attention (native/transformers/cuda/attention.cu: _cudnn_attention_forward). Recorded streams
show both."""


class OpInfo:
    """Facts of one op overload.

    Attributes:
        composite: a card has no kernel of its own for it: torch normally shows only the ops that it is made of.
        name: ``aten.mm``, as traces and warnings name it.
        overload: the overload's full name, ``aten.mm.default``.
        mutated: positions and names of the arguments that it writes.
        view: its results only alias its arguments, and nothing is written.
        fresh: at least one result has a storage of its own.
        made_first: positions of results that its kernel makes before the others.
        random: it draws random numbers.
        takes_generator: it has a ``generator`` argument.
        plans: what calls of it did, by what `key_of` makes of their arguments (op_cache.py).
        direct: a plan may be looked for before anything else; for other ops a rule decides first.
        direct_forward: the same, but only outside backward passes.
        shadowed: whether it can run on CPU shadows; set to False once it could not.
        handler: a rule of ours that replaces the general treatment, or None.
    """

    __slots__ = (
        "composite",
        "direct",
        "direct_forward",
        "fresh",
        "func",
        "handler",
        "made_first",
        "mutated",
        "name",
        "overload",
        "plans",
        "random",
        "shadowed",
        "takes_generator",
        "view",
    )

    def __init__(self, func: OpOverload, handler: Rule | None) -> None:
        schema = func._schema
        self.name = schema.name.replace("::", ".")
        self.overload = str(func)
        self.mutated = tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            # Fused kernels declare that they write the step counters; torch.optim counts them up beforehand.
            and argument.name != "state_steps"
        )
        results = schema.returns
        self.fresh = any(r.alias_info is None and "Tensor" in str(r.type) for r in results)
        self.view = bool(results) and not self.mutated and all(r.alias_info is not None for r in results)
        self.made_first = _MADE_FIRST.get(self.name, ())
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.takes_generator = any(a.name == "generator" for a in schema.arguments)
        has_kernel = dispatch.has_kernel
        self.composite = has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(
            func.name(), "CUDA"
        )
        self.shadowed = True
        self.handler = handler
        self.func = func
        self.plans: dict[Any, Any] = {}
        self.direct = getattr(handler, "hands_on", False) or (handler is None and not self.composite)
        self.direct_forward = self.direct or getattr(handler, "backward_only", False)

    def as_made(self, results: Any) -> Any:
        """What belongs to each result, in the order in which the op's kernel makes them."""
        if not self.made_first:
            return results
        rest = [result for position, result in enumerate(results) if position not in self.made_first]
        return [*(results[position] for position in self.made_first), *rest]


class OpTable:
    """`OpInfo` of every op met so far, with the rules registered for it.

    Args:
        late: by the name of an op that may be registered later, or by its namespace as ``name.*``.
        foreign: finds the rule of an op that is not in them.

    Attributes:
        met: `OpInfo` by the `identity` of the op: its own hash is a function in Python.
    """

    def __init__(
        self,
        rules: dict[OpOverload, Rule],
        late: dict[str, Rule] | None = None,
        foreign: Callable[[OpOverload], Rule | None] | None = None,
    ) -> None:
        self._rules = rules
        self._late = late or {}
        self._foreign = foreign
        self._known: dict[OpOverload, OpInfo] = {}
        self.met: dict[int, OpInfo] = {}

    def __getitem__(self, func: OpOverload) -> OpInfo:
        info = self._known.get(func)
        if info is None:
            late = self._late.get(str(func)) or self._late.get(f"{func.namespace}.*")
            handler = self._rules.get(func) or late
            if handler is None and self._foreign is not None:
                handler = self._foreign(func)
            info = self._known[func] = OpInfo(func, handler)
            self.met[identity(func)] = info
        return info

    def forget_plans(self) -> None:
        """Forget what ops did before."""
        for info in self._known.values():
            info.plans.clear()


def mutated_tensors(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes, lists flattened."""
    found: list[torch.Tensor] = []
    for position, name in info.mutated:
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested lists and tuples, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in tensors_in(item)]
    return []


def kinds_among(values: Any) -> tuple[bool, bool]:
    """Whether there are fake tensors, and whether there are others, among arguments (lists one level deep)."""
    fake = real = False
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            fake = True
        elif kind is list or kind is tuple:
            for item in value:
                if type(item) is FakeTensor:
                    fake = True
                elif isinstance(item, torch.Tensor):
                    real = True
        elif isinstance(value, torch.Tensor):
            real = True
    return fake, real


def device_of(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Index of the card on which an op runs, None when it runs on the host."""
    for tree in (out, args, tuple(kwargs.values())):
        for tensor in tensors_in(tree):
            if type(tensor) is FakeTensor and tensor.fake_device.type == "cuda":
                return tensor.fake_device.index or 0
    return None


def placed(tree: Any) -> list[torch.Tensor]:
    """The strided tensors on a card among nested values."""
    return [
        part
        for tensor in tensors_in(tree)
        if type(tensor) is FakeTensor and tensor.fake_device.type == "cuda"
        for part in strided_parts(tensor)
    ]


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a tensor's storage: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
