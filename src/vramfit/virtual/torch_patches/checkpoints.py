"""``torch.save``, ``torch.load`` and safetensors: a virtual checkpoint is a file without values, and comes back whole.

Copies and pickles of virtual tensors begin here too; the latter are in pickled.py.

Where a protection stands (vramfit.files), a file is written of the size that it would have, with holes where virtual
tensors would be, and a token in it leads back to the object, which stays in memory: see NOTE [Tokens]. Where files are
written for real, such a file would replace a good one of the same name: nothing is written then, and the object is
found by the file's name.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vramfit import files
from vramfit.patching import PatchStack
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.serialization import package_registry, rebuild_tensor
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.tensor_subclasses import is_wrapper
from vramfit.virtual.torch_patches.pickled import VirtualPickles
from vramfit.virtual.torch_patches.saved_files import (
    OpenedSafetensors,
    TorchFiles,
    is_writing,
    new_token,
    reduced,
    safetensors_header,
    safetensors_token,
    torch_token,
    write_safetensors,
)

_MARK = "checkpoint of a virtual run, without values"


class _VirtualTensorMet(pickle.PicklingError):
    """A virtual tensor was met while an object was looked through."""


class _Probe(pickle.Pickler):
    """Walks an object as pickling would, without its storages' contents."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.storages: dict[int, Any] = {}
        """Storages that were met, in order."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
            storage = _untyped(obj)
            self.storages.setdefault(storage._cdata, storage)
            return "storage"
        return None


def _untyped(storage: Any) -> torch.UntypedStorage:
    return storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage


class _Sink(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Patch ``torch.save``, ``torch.load``, pickling and deep copies of fake tensors, and safetensors."""
    kept: dict[object, Any] = {}

    pickles = VirtualPickles(mode, patches, torch.save, for_real)

    def reduce_ex(self: FakeTensor, protocol: Any) -> Any:
        if is_writing():
            return reduced(self, protocol)
        if getattr(_looking, "active", False):
            raise _VirtualTensorMet
        if self.fake_mode is not mode.fake:  # of torch's compiler, whose own pickler takes care of them
            raise pickle.PicklingError("a fake tensor of torch's compiler cannot be pickled")
        return pickles.reduced(self)

    def shallow_copy(self: FakeTensor) -> Any:
        """As pickling without bytes would give it: another tensor on the same storage."""
        with torch.no_grad():
            out = _like(self, self.detach())
        out.__dict__.update(_attributes(self, out))
        return out

    def deepcopy(self: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol "
                "at the moment."
            )
        out = _duplicate(self)
        memo[id(self)] = out
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        own = _attributes(self, out).items()
        out.__dict__.update({name: copy.deepcopy(value, memo) for name, value in own})
        return out

    patches.set(FakeTensor, "__reduce_ex__", reduce_ex)
    patches.supply(FakeTensor, "__copy__", shallow_copy)
    patches.set(FakeTensor, "__deepcopy__", deepcopy)
    _patch_torch_save(mode, patches, kept, pickles)
    _patch_safetensors(mode, patches, kept)

    def _duplicate(tensor: FakeTensor) -> Any:
        with torch.no_grad():
            return _like(tensor, tensor.detach().clone())


def _like(tensor: FakeTensor, out: torch.Tensor) -> Any:
    """A tensor as a parameter where another one is, and with its need of a gradient."""
    if getattr(tensor, "_is_param", False):
        return torch.nn.Parameter(out, tensor.requires_grad)
    return out.requires_grad_(tensor.requires_grad)


def _attributes(tensor: FakeTensor, out: torch.Tensor) -> dict[str, Any]:
    """What a program has set on a tensor, and its copy has not."""
    own = vars(tensor).items()
    return {name: value for name, value in own if name not in out.__dict__ and not name.startswith("_fake")}


_looking = threading.local()


def holds_virtual(obj: Any) -> bool:
    """Whether pickling an object would meet a virtual tensor."""
    _looking.active = True
    try:
        _Probe(_Sink(), protocol=2).dump(obj)
    except _VirtualTensorMet:
        return True
    except (pickle.PicklingError, AttributeError, TypeError):
        return False  # not picklable for another reason: torch.save will say so
    finally:
        _looking.active = False
    return False


def _storages(obj: Any) -> list[Any]:
    """The storages of an object in the order in which pickling meets them."""
    probe = _Probe(_Sink(), protocol=2)
    probe.dump(obj)
    return list(probe.storages.values())


def for_real() -> bool:
    """Whether files are written for real."""
    return _scratch() is None


def _scratch() -> str | None:
    """A folder for passing files, where files are protected; None where they are written for real."""
    standing = files.current()
    if standing is None or standing.backend is files.Backend.NONE:
        return None
    return standing.policy.temporary


def _name(file: Any) -> object:
    return os.path.abspath(os.fspath(file)) if isinstance(file, (str, os.PathLike)) else None


def _patch_torch_save(
    mode: OpRunner, patches: PatchStack, kept: dict[object, Any], pickles: VirtualPickles
) -> None:
    save, load = torch.save, torch.load
    uploads = _Uploads(patches)
    pickles.patch_building(patches)
    written = TorchFiles(patches, save, _storages)

    def virtual_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not holds_virtual(obj):
            kept.pop(_name(f), None)
            return save(obj, f, *args, **kwargs)
        scratch = _scratch()
        if scratch is None and _name(f) is not None:
            kept[_name(f)] = _park(mode, obj)
            tell_skipped(mode, f)
            return None
        token = None
        if scratch is not None and _is_zip(args, kwargs):
            token = written.write(obj, f, scratch, *args, **kwargs)
        if token is None:  # too large for a buffer, or of the old format: a mark leads back
            token = new_token()
            save({_MARK: token}, f, *args, **kwargs)
            _tell_mark(mode, f)
        kept[token] = _park(mode, obj)
        return None

    def virtual_load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kept:
            for found in (_name(f), torch_token(f)):
                if found is not None and found in kept:
                    return _unpark(mode, kept[found], map_location)
        if isinstance(f, io.BytesIO) and (storage := pickles.read(f.getbuffer())) is not None:
            return storage
        with uploads:
            out = uploads.kept_for(load(f, map_location, *args, **kwargs))
        if (storage := pickles.marked(out)) is not None:
            return storage
        if not (isinstance(out, dict) and out.keys() == {_MARK}):
            return out
        if out[_MARK] not in kept:
            raise RuntimeError(f"vramfit: this file is of another virtual run, and holds no values: {f}")
        return _unpark(mode, kept[out[_MARK]], map_location)

    patches.set(torch, "save", virtual_save)
    patches.set(torch, "load", virtual_load)
    patches.set(torch.serialization, "save", virtual_save)
    patches.set(torch.serialization, "load", virtual_load)


def _is_zip(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether ``torch.save`` is to write its present format, rather than that before torch 1.6."""
    return bool(options.get("_use_new_zipfile_serialization", args[2] if len(args) > 2 else True))


class _Uploads:
    """Moves tensors of a real file to the card that ``torch.load`` maps them to, or on which they were saved.

    torch moves storages, which only a CUDA build can do. Here the storage stays on the host with a note of where it
    should go, and the tensor that is built on it is moved instead.
    """

    def __init__(self, patches: PatchStack) -> None:
        self._wanted: dict[int, torch.device] = {}
        self._moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        registry: list[Any] = package_registry
        entry = (0, lambda storage: None, self._note)
        registry.insert(0, entry)
        patches.call(lambda: registry.remove(entry))
        self._rebuild: Callable[..., torch.Tensor] = rebuild_tensor.get()
        rebuild_tensor.replace(patches, self._build)

    def __enter__(self) -> None:
        """Begin to read a file."""

    def __exit__(self, *error: object) -> None:
        """Forget its storages."""
        self._wanted.clear()
        self._moved.clear()

    def kept_for(self, out: Any) -> Any:
        """What was read; a storage alone, as pickles of tensors hold them, remembers where it is to go."""
        if isinstance(out, (torch.TypedStorage, torch.UntypedStorage)):
            out._vramfit_device = self._wanted.get(_untyped(out)._cdata)  # type: ignore[union-attr]
        return out

    def _note(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        if not location.startswith("cuda"):
            return None
        index: int = torch.serialization.validate_cuda_device(location)
        self._wanted[storage._cdata] = torch.device("cuda", index)
        return storage

    def _build(self, storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
        untyped: torch.UntypedStorage = _untyped(storage)
        device = self._wanted.get(untyped._cdata) or getattr(storage, "_vramfit_device", None)
        if device is None:
            return self._rebuild(storage, offset, size, stride)
        key = untyped._cdata, storage.dtype
        whole = self._moved.get(key)
        if whole is None:  # tensors that share a storage keep sharing it
            whole = torch.empty(0, dtype=storage.dtype, device="cpu").set_(untyped).to(device)
            self._moved[key] = whole
        return whole.as_strided(size, stride, offset)


def _patch_safetensors(mode: OpRunner, patches: PatchStack, kept: dict[object, Any]) -> None:
    try:
        import safetensors.torch as safetensors
    except ImportError:
        return
    save_file, load_file, save, load = (
        safetensors.save_file,
        safetensors.load_file,
        safetensors.save,
        safetensors.load,
    )
    opened: Any = vars(safetensors)["safe_open"]

    def find(file: Any) -> tuple[Any, Any]:
        """The object that a file leads to, and the file's header; None for a file that is real."""
        if _name(file) in kept:
            return kept[_name(file)], None
        if not kept:
            return None, None
        try:
            with open(file, "rb") as reading:
                token = safetensors_token(reading)
        except OSError:
            return None, None  # the original says why
        found: tuple[Any, Any] = kept.get(token, (None, None))
        return found

    def virtual_save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
        if not any(type(t) is FakeTensor for t in tensors.values()):
            kept.pop(_name(filename), None)
            save_file(tensors, filename, metadata)
            return
        parked = _park(mode, dict(tensors))
        if _scratch() is None:
            kept[_name(filename)] = parked
            tell_skipped(mode, filename)
            return
        with open(filename, "w+b") as file:
            token = write_safetensors(tensors, file, metadata)
        # Without a token, for tensors of a few bytes, the name leads back.
        kept[token or _name(filename)] = parked if token is None else (parked, _header(tensors, metadata))

    def virtual_save(tensors: dict[str, torch.Tensor], metadata: Any = None) -> bytes:
        if not any(type(t) is FakeTensor for t in tensors.values()):
            return save(tensors, metadata)
        buffer = io.BytesIO()
        token = write_safetensors(tensors, buffer, metadata)
        if token is not None:
            kept[token] = _park(mode, dict(tensors)), _header(tensors, metadata)
        return buffer.getvalue()

    def virtual_load(data: bytes) -> Any:
        token = safetensors_token(io.BytesIO(data)) if kept else None
        return _unpark(mode, kept[token][0], "cpu") if token in kept else load(data)

    def virtual_load_file(filename: Any, device: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        parked, _ = find(filename)
        return (
            load_file(filename, device, *args, **kwargs) if parked is None else _unpark(mode, parked, device)
        )

    def virtual_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        parked, header = find(filename)
        if parked is None or framework not in ("pt", "torch", "pytorch"):
            return opened(filename, framework, device, **options)
        names = [name for name in header or parked if name != "__metadata__"]
        return OpenedSafetensors(
            lambda name: _unpark(mode, parked[name], device), names, header or _header(parked, None)
        )

    patches.rebind(
        [
            (save_file, virtual_save_file),
            (load_file, virtual_load_file),
            (save, virtual_save),
            (load, virtual_load),
            (opened, virtual_open),
        ]
    )


def _header(tensors: dict[str, Any], metadata: Any) -> Any:
    """The header of a safetensors file, read."""
    whole = {name: one.tensor if isinstance(one, _Parked) else one for name, one in tensors.items()}
    return json.loads(safetensors_header(whole, metadata)[0][8:])


def tell_skipped(mode: OpRunner, file: Any) -> None:
    """Tell that a file was not replaced by one without values."""
    mode.machine.warn(
        "save-skipped",
        f"saving to {Path(file)} was skipped: its tensors are virtual and hold no values, and files are written for "
        "real. What lies there stays as it was, which the program's own deletions and renames do not know",
        location=mode.guesses.location(),
    )


def _tell_mark(mode: OpRunner, file: Any) -> None:
    what = str(Path(file)) if isinstance(file, (str, os.PathLike)) else "a file object"
    mode.machine.warn(
        "save-short",
        f"what was saved to {what} is shorter than it would be: its tensors are virtual, and a mark leads to them",
        location=mode.guesses.location(),
    )


class _Parked:
    """A virtual tensor set aside: it holds no memory of the card, and remembers on which device it was."""

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self.tensor = tensor
        self.device = device


class _ParkedWrapper:
    """A wrapper tensor (see NOTE [Tensor classes]) whose inner tensors are set aside."""

    def __init__(self, wrapper: Any, inside: dict[str, Any], context: Any) -> None:
        self.cls = type(wrapper)
        self.inside = inside
        self.context = context
        self.shape, self.strides = wrapper.shape, wrapper.stride()

    def rebuild(self, inside: dict[str, Any]) -> Any:
        """The wrapper around other tensors."""
        return self.cls.__tensor_unflatten__(inside, self.context, self.shape, self.strides)


def _park(mode: OpRunner, obj: Any) -> Any:
    """A copy of an object in which virtual tensors hold no card memory."""

    def park(tensor: Any) -> _Parked:
        with mode.twins.as_fake((tensor,)):
            return aside(tensor)

    def aside(tensor: FakeTensor) -> _Parked:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        parked = FakeTensor(mode.fake, meta, torch.device("cpu"))
        view = mode.shadows.view(tensor)
        if view is not None:
            shadow = mode.shadows.find(tensor)
            mode.shadows.set(parked, view.detach(), guessed=bool(shadow and shadow.guessed))
        return _Parked(parked, tensor.device)

    return _walk(obj, (FakeTensor, *mode.twins.classes), park)


def _unpark(mode: OpRunner, obj: Any, map_location: Any) -> Any:
    def unpark(parked: _Parked) -> torch.Tensor:
        target: Any = parked.device
        if isinstance(map_location, dict):
            target = map_location.get(str(parked.device), parked.device)
        elif isinstance(map_location, Callable):  # type: ignore[arg-type]
            target = parked.device if "cuda" in str(map_location) else torch.device("cpu")
        elif map_location is not None:
            target = map_location
        out = parked.tensor.clone()
        return out.to(target) if torch.device(target).type != "cpu" else out

    return _walk(obj, _Parked, unpark)


def _walk(obj: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Rebuild nested containers with ``change`` applied to each instance of ``kind``; other leaves are copied."""
    if isinstance(obj, kind):
        return change(obj)
    if isinstance(obj, dict):
        out = copy.copy(obj)
        for key, value in obj.items():
            out[key] = _walk(value, kind, change)
        return out
    if isinstance(obj, tuple):
        items = [_walk(item, kind, change) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    if isinstance(obj, list):
        return [_walk(item, kind, change) for item in obj]
    if isinstance(obj, _ParkedWrapper):
        return obj.rebuild({name: _walk(inner, kind, change) for name, inner in obj.inside.items()})
    if is_wrapper(obj):
        names, context = obj.__tensor_flatten__()
        inside = {name: _walk(getattr(obj, name), kind, change) for name in names}
        return _ParkedWrapper(obj, inside, copy.copy(context))
    if isinstance(obj, torch.Tensor):
        return obj.clone()
    return copy.deepcopy(obj)
