"""Legacy tensor types: ``torch.cuda.FloatTensor(2, 3)``, ``torch.LongTensor([token])``, ``Tensor.type``, a default."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals.cuda_device import default_device_context
from vramfit.torch_internals.fake_tensors import FakeTensor

_DTYPES = {
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}
_PREFIX = "torch.cuda."


class _TensorTypeMeta(type):
    """Metaclass of the stand-ins: calling one makes a tensor, isinstance asks for dtype and device."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        return _construct(cls.dtype, args, torch.device("cuda") if device is None else torch.device(device))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __repr__(cls) -> str:
        return f"<class '{cls.__name__}'>"


def _construct(dtype: torch.dtype, args: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    # torch/csrc/utils/tensor_new.cpp, legacy_tensor_generic_ctor_new
    first = args[0] if args else 0
    if isinstance(first, torch.Size):
        return torch.empty(first, dtype=dtype, device=device)
    if not args:
        return torch.empty(0, dtype=dtype, device=device)
    if all(isinstance(size, int) for size in args):
        return torch.empty(args, dtype=dtype, device=device)
    if isinstance(first, torch.Tensor):
        if first.dtype != dtype or first.device.type != device.type:
            raise TypeError(f"expected {dtype} on {device.type} (got {first.dtype} on {first.device.type})")
        return first.detach()
    if isinstance(first, torch.UntypedStorage | torch.TypedStorage):
        return torch.empty(0, dtype=dtype, device=device).set_(first)
    return torch.tensor(first, dtype=dtype, device=device)


class _HostTypeMeta(type):
    """Metaclass of stand-ins for the host's types, C types that cannot be patched: only the call is ours."""

    original: type

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cls.original(*_as_numbers(args), **kwargs)  # type: ignore[no-any-return]  # torch's own type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or subclass is cls.original

    def __eq__(cls, other: object) -> bool:
        # torch and others keep such types in tables that they made before.
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)

    def __repr__(cls) -> str:
        return repr(cls.original)


@cache
def _host_type(name: str, original: type) -> _HostTypeMeta:
    return _HostTypeMeta(name, (), {"original": original, "__module__": "torch"})


def _as_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a constructor, with numbers in place of the card's tensors in a list of data.

    torch reads them one by one below the dispatcher, where the virtual GPU has no values, and takes them for lists.
    """
    if not args or not isinstance(args[0], list | tuple):
        return args
    return _number_of(args[0]), *args[1:]


def _number_of(data: Any) -> Any:
    if isinstance(data, FakeTensor):
        return data.item()
    if isinstance(data, list | tuple) and any(isinstance(item, FakeTensor | list | tuple) for item in data):
        return [_number_of(item) for item in data]
    return data


def _patch_host_constructors(patches: PatchStack) -> None:
    """``torch.LongTensor([token])``, ``torch.Tensor([loss])`` and ``tensor.new([loss])`` with tensors of the card."""
    originals = {name: getattr(torch, name) for name in _DTYPES}
    patches.rebind([(original, _host_type(name, original)) for name, original in originals.items()])

    make: Callable[..., torch.Tensor] = torch.Tensor.__new__
    new: Callable[..., torch.Tensor] = torch.Tensor.new
    new_tensor: Callable[..., torch.Tensor] = torch.Tensor.new_tensor

    def construct(*args: Any, **options: Any) -> torch.Tensor:
        # Dynamo compares this signature with that of its own version, unless all is left open.
        return make(args[0], *_as_numbers(args[1:]), **options)

    patches.set(torch.Tensor, "__new__", construct)
    patches.set(torch.Tensor, "new", lambda self, *args, **options: new(self, *_as_numbers(args), **options))
    patches.set(
        torch.Tensor,
        "new_tensor",
        lambda self, *args, **options: new_tensor(self, *_as_numbers(args), **options),
    )


def _own(wanted: Any) -> Any:
    """torch's own type for the stand-in of a host type, which C++ would not know."""
    return wanted.original if isinstance(wanted, _HostTypeMeta) else wanted


def _stand_in(name: str, dtype: torch.dtype) -> type:
    # The name is what Tensor.type() gives for a tensor of this type.
    return _TensorTypeMeta(_PREFIX + name, (), {"dtype": dtype, "is_cuda": True, "__module__": "torch.cuda"})


def patch_legacy_tensors(patches: PatchStack) -> None:
    """Replace the tensor types of ``torch.cuda``, C types that a CPU build refuses to call, and those of the host."""
    _patch_host_constructors(patches)  # before the default type, which replaces a constructor for a time
    types = {name: _stand_in(name, dtype) for name, dtype in _DTYPES.items()}
    for name, stand_in in types.items():
        patches.set(torch.cuda, name, stand_in)
    # Tensor.type and the default tensor type parse such a type in C++, and ask for the CUDA library.
    patches.set(torch.Tensor, "type", _tensor_type(torch.Tensor.type))
    defaults = _DefaultType(patches)
    patches.set(
        torch, "set_default_tensor_type", _set_default_tensor_type(torch.set_default_tensor_type, defaults)
    )
    _restore_defaults(patches)


class _DefaultType:
    """``torch.Tensor(...)`` where the default tensor type is one of the card's; a default device does not change it."""

    def __init__(self, patches: PatchStack) -> None:
        self._constructing: PatchStack | None = None
        patches.call(self.on_host)

    def on_host(self) -> None:
        """torch's own constructor again."""
        if self._constructing is not None:
            self._constructing.undo()
            self._constructing = None

    def on_card(self) -> None:
        """Make what ``torch.Tensor`` makes on the card, of the default dtype. Its subclasses are left alone."""
        if self._constructing is not None:
            return
        original = torch.Tensor.__new__

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            if cls is not torch.Tensor or kwargs.keys() - {"device"}:
                return original(cls, *args, **kwargs)
            device = kwargs.get("device")
            return _construct(
                torch.get_default_dtype(), args, torch.device("cuda" if device is None else device)
            )

        self._constructing = PatchStack()
        self._constructing.set(torch.Tensor, "__new__", new)


def _cuda_dtype(wanted: object) -> torch.dtype | None:
    """The dtype of a legacy cuda type given as text or stand-in, None for anything else."""
    if isinstance(wanted, _TensorTypeMeta):
        return wanted.dtype
    if isinstance(wanted, str) and wanted.startswith(_PREFIX):
        return _DTYPES.get(wanted.removeprefix(_PREFIX))
    return None


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    def type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        found = _cuda_dtype(dtype)
        if found is not None:
            return self.to(
                device=self.device if self.is_cuda else "cuda", dtype=found, non_blocking=non_blocking
            )
        if dtype is None:
            return original(self)
        return original(self, _own(dtype), non_blocking, **kwargs)

    type.__doc__ = original.__doc__
    return type


def _set_default_tensor_type(original: Callable[..., Any], defaults: _DefaultType) -> Callable[..., Any]:
    def set_default_tensor_type(t: Any, /) -> None:
        found = _cuda_dtype(t)
        if found is None:
            if isinstance(t, str):
                t = getattr(torch, t.removeprefix("torch."), t)
            original(_own(t))
            torch.set_default_device(None)
            defaults.on_host()
        else:
            torch.set_default_dtype(found)
            torch.set_default_device("cuda")
            defaults.on_card()

    set_default_tensor_type.__doc__ = original.__doc__
    return set_default_tensor_type


def _restore_defaults(patches: PatchStack) -> None:
    """A program's default dtype and device live in C++ and in a mode of torch; put them back at the undo."""
    dtype = torch.get_default_dtype()
    context = default_device_context()

    def undo() -> None:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if default_device_context() is not context:
            torch.set_default_device(None if context is None else context.device)

    patches.call(undo)
