"""What an op returns, by shape: FakeTensorMode works it out once, and a cache of our own gives it again.

FakeTensorMode has a cache too, but building its key and its results takes most of a virtual training step. A key here
is the op, each tensor's shape, strides, offset, dtype and device, and the other arguments with their types (``2`` and
``2.0`` promote differently); a result is a recipe for the fake tensors: fresh, a view of an argument, or an argument
itself. An op whose results do not fit that form goes to FakeTensorMode each time.

``FakeTensorMode._dispatch_impl`` (torch/_subclasses/fake_tensor.py) looks at an op's arguments in a dozen ways, most of
which a program without symbolic sizes, constants and tensors of other kinds never needs. For most ops of aten on plain
tensors of one card it then runs the op's kernel for the meta device, and puts the results on that card. Doing so at
once takes a tenth of the time. Which ops allow it follows from the op alone (`is_plain`).

Ops that FakeTensorMode cannot describe, or describes wrongly, are named here too, with what a user can do about them.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from vramfit.capture.ops import tensors_in
from vramfit.torch_internals.custom_ops import fake_kernel_of
from vramfit.torch_internals.dispatch import DispatchKey, OpOverload, has_kernel, variable_functions
from vramfit.torch_internals.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    decomposition_table,
    device_of,
    has_meta,
    in_kernel_invocation_manager,
    meta_table,
    op_implementations_checks,
    set_throw_on_mutable_data_ptr,
    stride_incorrect_op,
    takes_symbols,
    torch_decomp_decompositions,
)
from vramfit.torch_internals.kernel_choice import get_cudnn_enabled
from vramfit.torch_internals.tensor_objects import original_make_subclass
from vramfit.virtual.lazy_dynamo import borrowed, give_back

# -- Ops that FakeTensorMode cannot describe, or describes wrongly ---------------------------------------------


_aten = torch.ops.aten

OF_TORCH = ("aten", "prims", "prim", "c10d", "_c10d_functional", "quantized", "inductor")
"""Namespaces of torch's own operators."""

COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc})
"""Layouts of matrices of which torch makes a product in several ops."""

MATRIX_AT: dict[OpOverload, int] = {
    _aten.mm.default: 0,
    _aten._sparse_mm.default: 0,
    _aten._sparse_sparse_matmul.default: 0,
    _aten.mv.default: 0,
    _aten.addmm.default: 1,
    _aten._sparse_addmm.default: 1,
}
"""Products of matrices: the place of the first among the arguments; the other follows."""

MISDESCRIBED = frozenset(
    {
        _aten.add.Tensor,
        _aten.clone.default,
        _aten._to_copy.default,
        _aten.t.default,
        _aten.transpose.int,
    }
)
"""Ops that FakeTensorMode describes, of sparse tensors without elements."""


class SparseOperation(Exception):
    """An op that FakeTensorMode cannot describe has sparse arguments."""


class DynamicSizes(Exception):
    """The fake implementation of a custom operator needs a size that depends on data."""


def has_sparse(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a sparse COO tensor is among the arguments."""
    return any(t.layout is torch.sparse_coo for t in tensors_in((args, tuple(kwargs.values()))))


def is_compressed_product(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an op is a product with a CSR or CSC matrix, which torch makes from several ops."""
    first = MATRIX_AT.get(func)
    return first is not None and any(factor.layout in COMPRESSED for factor in args[first : first + 2])


def fake_implementation(func: OpOverload) -> Any:
    """The fake implementation that the author of a custom operator registered; None without one."""
    return fake_kernel_of(func.name())


def advice(func: OpOverload) -> str:
    """What the user can do about an operator that nobody described; empty for torch's own."""
    if func.namespace in OF_TORCH:
        return ""
    return (
        f'. Describe it: @torch.library.register_fake("{func._schema.name}") or '
        f'@vramfit.fake_kernel("{func._schema.name}"), in the program or in a file for --kernels (docs/kernels.md)'
    )


# -- The FakeTensorMode that describes ops for the virtual card ----------------------------------------------


class _PerThread(threading.local):
    in_kernel = False

    def __init__(self) -> None:
        self.enter_stack: list[Any] = []


class VirtualFakeMode(FakeTensorMode):
    """A FakeTensorMode that never touches a device, and keeps its state per thread, since programs have several."""

    def __init__(self) -> None:
        self._per_thread = _PerThread()
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        # describe.py has its own: using torch's takes longer than the answer, and it is one for all modes.
        self.cache_enabled = False

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether this thread is inside a kernel, where tensors are on the meta device."""
        return self._per_thread.in_kernel

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._per_thread.in_kernel = value

    @property
    def enter_stack(self) -> list[Any]:
        """What ``__enter__`` left for ``__exit__`` on this thread."""
        return self._per_thread.enter_stack

    @enter_stack.setter
    def enter_stack(self, value: list[Any]) -> None:
        self._per_thread.enter_stack = value

    @property
    def avoid_device_init(self) -> bool:
        """Always: there is no device to initialise."""
        return True


# -- Ops for which FakeTensorMode would ask nothing but torch's kernel for the meta device ---------------------


_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_VIEWS = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overloads in {
        "slice": "Tensor",
        "select": "int",
        "expand": "default",
        "transpose": "int",
        "permute": "default",
        "unsqueeze": "default",
        "squeeze": "default dim dims",
        "t": "default",
        "alias": "default",
        "detach": "default",
    }.items()
    for overload in overloads.split()
}
"""Views of which torch has descriptions in Python too, for symbolic sizes, and kernels that serve every device.

``view`` is not among them: the two give dimensions of size one different strides.
"""
_UNFIT = {
    torch.Tag.inplace_view,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}


def is_plain(func: OpOverload) -> bool:
    """Whether FakeTensorMode describes an op by its kernel for the meta device, whatever its (plain) arguments are."""
    if func in _VIEWS:
        return True
    if func.namespace != "aten" or not _UNFIT.isdisjoint(func.tags) or not stride_incorrect_op:
        return False
    if stride_incorrect_op(func):
        return False
    if any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments):
        return False
    if func not in meta_table and not takes_symbols(func):
        if func in decomposition_table and torch_decomp_decompositions(func):
            return False
        name = func.name()
        if _COMPOSITE in func.py_kernels or has_kernel(name, _COMPOSITE):
            return False
    if fake_kernel_of(func.name()) is not None or not has_meta(func):
        return False
    return not any(check(func) for check, _ in op_implementations_checks)


def fakes_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[FakeTensor]:
    """The fake tensors among arguments; none if a list or another kind of tensor is among them."""
    fakes: list[FakeTensor] = []
    for value in (*args, *kwargs.values()):
        if type(value) is FakeTensor:
            fakes.append(value)
        elif isinstance(value, (torch.Tensor, list, tuple)):
            return []
    return fakes


def described(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[FakeTensor],
    mode: FakeTensorMode,
) -> tuple[torch.device, Any] | None:
    """Results of a plain op (see `is_plain`) on the meta device, with the card that they belong to.

    None where FakeTensorMode has to describe it: the arguments lie on several devices, or the op refuses them.
    """
    if not tensors or "device" in kwargs:
        return None
    device = tensors[0].fake_device
    if device.type != "cuda" or any(t.fake_device != device or t.constant is not None for t in tensors):
        return None
    try:
        with in_kernel_invocation_manager(mode):
            return device, func(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError):
        return None  # FakeTensorMode then raises the error in its usual words


_META = torch.device("meta")
_STRIDED = torch.strided
_PLAIN = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format, str, type(None)})
_MAX_ENTRIES = 100_000
_MAX_KEPT = 20_000  # about 30 MB, which stay until the process ends
# Looked up once: these are called for every op.
_empty = variable_functions.empty
_empty_strided = variable_functions.empty_strided
_make_subclass = original_make_subclass  # the program's is replaced (torch_patches/identity.py)
_throw_on_mutable_data_ptr = set_throw_on_mutable_data_ptr
_is_inference = torch.is_inference_mode_enabled
_default_dtype = torch.get_default_dtype
_has_cudnn = get_cudnn_enabled


class Output(IntEnum):
    """How one result is made: with a storage of its own, as a view of an argument, as an argument, or a plain value."""

    FRESH = 0
    VIEW = 1
    ARGUMENT = 2
    VALUE = 3


_FRESH, _VIEW, _ARGUMENT, _VALUE = map(int, Output)
_VALUES = (type(None), int, bool, float)
# Its masks have become positions by the time it is described (fake_impls/shapes.py).
_INDEX = torch.ops.aten.index.Tensor
_CONVOLUTIONS = frozenset({torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default})
_Output = tuple[int, Any]
Recipe = tuple[type | None, tuple[_Output, ...]]
"""How to make the results of an op: the kind of list they come in, None for a single one, and each of them."""


class FakeFactory:
    """Makes fake tensors around meta tensors, without the checks of FakeTensor's own constructor."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def make(self, elem: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor on a device (with its index) over a meta tensor."""
        attributes = self._attributes.get(device)
        if attributes is None:
            model = FakeTensor(self._mode, torch.empty(0, device="meta"), device)
            attributes = self._attributes[device] = dict(model.__dict__)
        fake: FakeTensor = _make_subclass(
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
        )
        _throw_on_mutable_data_ptr(fake)
        fake.__dict__ = attributes.copy()
        return fake


@dataclass(slots=True, eq=False)
class KnownOps:
    """What was worked out of ops.

    Attributes:
        most: recipes that are kept at once.
        recipes: by an op and its arguments; None where no recipe can say what it returns.
        uncached: whether what an op returns does not follow from a key.
        plain: whether FakeTensorMode is not needed to describe an op.
    """

    most: int = _MAX_ENTRIES
    recipes: dict[Any, Recipe | None] = field(default_factory=dict)
    uncached: dict[Any, bool] = field(default_factory=dict)
    plain: dict[Any, bool] = field(default_factory=dict)

    def keep(self, key: Any, recipe: Recipe | None) -> None:
        """Keep a recipe, in the place of all others where there are too many."""
        if len(self.recipes) >= self.most:
            self.recipes.clear()
        self.recipes[key] = recipe


_of_aten: dict[Hashable, KnownOps] = {}


def known_of_aten(cards: Hashable) -> KnownOps:
    """What this process knows of aten's ops on cards of a kind."""
    known = _of_aten.get(cards)
    return known if known is not None else _of_aten.setdefault(cards, KnownOps(most=_MAX_KEPT))


class Describer:
    """Describes the results of ops on fake tensors.

    Args:
        aten: what is known of aten's ops already.
    """

    def __init__(self, mode: FakeTensorMode, aten: KnownOps) -> None:
        self._mode = mode
        self._aten = aten
        self._others = KnownOps()
        self._dense: dict[tuple[torch.Size, tuple[int, ...]], tuple[int, ...]] = {}
        self.factory = FakeFactory(mode)

    def _known(self, func: OpOverload) -> KnownOps:
        return self._aten if func.namespace == "aten" else self._others

    def describe(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``func`` returns on fake tensors; raises what FakeTensorMode raises."""
        tensors: list[FakeTensor] = []
        key = None if self.never(func) else key_of(args, kwargs, tensors)
        if key is None:
            if is_compressed_product(func, args) or (func in MISDESCRIBED and has_sparse(args, kwargs)):
                raise SparseOperation
            return self._dispatched(func, args, kwargs)
        # Whose convolution it is decides the order of its result's dimensions: cuDNN keeps channels last.
        key = (func, key, _has_cudnn()) if func in _CONVOLUTIONS else (func, key)
        known = self._known(func)
        recipe = known.recipes.get(key)
        if recipe is not None:
            return self.build(recipe, tensors)
        recipe = self._recipe_at_once(func, args, kwargs, tensors)
        if recipe is None:
            out = self._dispatched(func, args, kwargs)
            recipe = recipe_of(out, tensors)
        else:
            out = self.build(recipe, tensors)
        known.keep(key, recipe)
        return out

    def _dispatched(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._mode.dispatch(func, (), args, kwargs)
        finally:
            if borrowed:
                give_back()

    def _recipe_at_once(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[FakeTensor],
    ) -> Recipe | None:
        """How to make the results of an op without FakeTensorMode; None where only that can say. See `is_plain`."""
        known = self._known(func).plain
        plain = known.get(func)
        if plain is None:
            plain = known[func] = is_plain(func)
        found = described(func, args, kwargs, tensors, self._mode) if plain else None
        if borrowed:
            give_back()
        return None if found is None else recipe_of(found[1], tensors, found[0])

    def never(self, func: OpOverload) -> bool:
        """Whether what an op returns does not follow from a key."""
        known = self._known(func).uncached
        uncached = known.get(func)
        if uncached is None:
            uncached = known[func] = _never_cached(func)
        return uncached

    def like(self, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor of the same shape, dtype, device and (dense) strides."""
        key = tensor.shape, tensor.stride()
        strides = self._dense.get(key)
        if strides is None:
            model = torch.empty_like(torch.empty_strided(*key, device="meta"))
            strides = self._dense[key] = model.stride()
        elem = _empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=_META)
        return self.factory.make(elem, tensor.device)

    def build(self, recipe: Recipe, tensors: list[FakeTensor]) -> Any:
        """Results by a recipe, from the tensors among the arguments."""
        container, outputs = recipe
        if container is None:
            return self._build_one(outputs[0], tensors)
        built = [self._build_one(output, tensors) for output in outputs]
        return built if container is list else tuple(built)

    def _build_one(self, output: _Output, tensors: list[FakeTensor]) -> Any:
        kind, facts = output
        if kind == _FRESH:
            shape, stride, dtype, device = facts
            return self.factory.make(_empty_strided(shape, stride, dtype=dtype, device=_META), device)
        if kind == _VIEW:
            base = tensors[facts[0]]
            if _is_inference() and not base.is_inference():
                # A view of a normal tensor is normal in inference mode too: it shares the version counter.
                with torch.inference_mode(False):
                    return self._view(base, facts)
            return self._view(base, facts)
        return tensors[facts] if kind == _ARGUMENT else facts

    def _view(self, base: FakeTensor, facts: Any) -> FakeTensor:
        _, shape, stride, offset, dtype, device = facts
        elem = _empty(0, dtype=dtype, device=_META)
        elem.set_(base.untyped_storage(), offset, shape, stride)
        return self.factory.make(elem, device)


def _never_cached(func: OpOverload) -> bool:
    tags = func.tags
    return (
        torch.Tag.inplace_view in tags
        or (torch.Tag.dynamic_output_shape in tags and func is not _INDEX)
        or torch.Tag.data_dependent_output in tags
        or func._schema.name.startswith("prims::")
        or any(
            a.alias_info is not None and a.alias_info.is_write and a.kwarg_only
            for a in func._schema.arguments
        )
    )


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[FakeTensor]) -> Any:
    """What decides the results of an op besides the op itself; None where the arguments hold what no key can.

    The tensors among the arguments are appended to `tensors`, in order.
    """
    parts: list[Any] = [_is_inference(), _default_dtype()]  # the latter is what whole numbers divide into
    if not _add(args, parts, tensors):
        return None
    if kwargs:
        for name, value in kwargs.items():
            parts.append(name)
            if not _add((value,), parts, tensors):
                return None
    return tuple(parts)


def _add(values: Any, parts: list[Any], tensors: list[FakeTensor]) -> bool:
    """Append what identifies some arguments to a key; False when they cannot be part of one."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.layout is not _STRIDED or value.is_conj() or value.is_neg():
                return False
            parts.append((value.shape, value.stride(), value.storage_offset(), value.dtype, device_of(value)))
            tensors.append(value)
        elif kind is int or kind is float or kind is bool:
            parts.append(kind)
            parts.append(value)
        elif kind in _PLAIN:
            parts.append(value)
        elif kind is list or kind is tuple:
            parts.append(len(value))
            if not _add(value, parts, tensors):
                return False
        else:
            return False  # real tensors, generators, symbolic sizes, complex numbers
    return True


def recipe_of(out: Any, tensors: list[FakeTensor], device: torch.device | None = None) -> Recipe | None:
    """How to build results again from the tensors among the arguments; None where no recipe can say so.

    The results are fake tensors or, where `device` says which card they belong to, tensors on the meta device.
    """
    if isinstance(out, (list, tuple)):
        seen: set[int] = set()
        outputs = []
        for item in out:
            output = _output(item, tensors, seen, device)
            if output is None:
                return None
            outputs.append(output)
        return type(out), tuple(outputs)
    output = _output(out, tensors, set(), device)
    return None if output is None else (None, (output,))


def _output(
    item: Any, tensors: list[FakeTensor], seen: set[int], device: torch.device | None
) -> _Output | None:
    if type(item) in _VALUES:
        return _VALUE, item
    wanted = FakeTensor if device is None else torch.Tensor
    if type(item) is not wanted or item.layout is not torch.strided or item.is_conj() or item.is_neg():
        return None
    for position, tensor in enumerate(tensors):
        if item is tensor:
            return _ARGUMENT, position
    if type(item) is FakeTensor:
        device = item.fake_device
    key = item.untyped_storage()._cdata
    for position, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata == key:
            facts = (position, item.shape, item.stride(), item.storage_offset(), item.dtype, device)
            return _VIEW, facts
    model = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
    if (
        key in seen
        or item.storage_offset()
        or model.untyped_storage().nbytes() != item.untyped_storage().nbytes()
    ):
        return None  # two results in one storage, or a storage larger than its tensor
    seen.add(key)
    return _FRESH, (item.shape, item.stride(), item.dtype, device)
