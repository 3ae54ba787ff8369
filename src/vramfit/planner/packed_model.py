"""A live model as a file that another process can run steps of: its structure whole, its tensors without their values.

Memory and time do not depend on what weights hold, and weights are large. Small tensors keep their values: tables of
indices decide where a model looks. Classes and functions of the user's script travel in the file (cloudpickle), since
the script cannot be imported by another process without running.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from vramfit.errors import UsageError
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.workload import Batch, Workload

_SMALL = 4096
"""Elements up to which values are kept."""

_WORKLOAD = '''"""What was asked about, put down by vramfit.planner.packed_model."""
import sys

sys.path += [entry for entry in {path!r} if entry not in sys.path]
from vramfit.planner.packed_model import unpacked

workload = unpacked(__file__)
'''
"""With the folders in which this process finds modules: a class of a module beside the script is named, not packed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorForm:
    """A tensor without its values: what `torch.empty_strided` needs, and whose storage it shares."""

    key: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    storage_bytes: int
    dtype: torch.dtype
    parameter: bool
    requires_grad: bool
    values: Any = None


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles with a form in place of each tensor."""

    def persistent_id(self, obj: Any) -> _TensorForm | None:
        """The form of a tensor; None for all else."""
        if not isinstance(obj, torch.Tensor):
            return None
        if obj.layout is not torch.strided:
            raise UsageError(
                f"the model holds a tensor of layout {obj.layout}, which only its own process knows",
                "Give the sizes yourself, in place of a budget",
            )
        storage = obj.untyped_storage()
        with torch.no_grad():
            without = isinstance(obj, FakeTensor) or obj.is_meta  # on a virtual card there are no values
            small = obj.numel() <= _SMALL and not without
            values = obj.detach().cpu().numpy(force=True) if small and obj.dtype in _WITH_NUMPY else None
        return _TensorForm(
            key=id(obj),
            size=tuple(obj.shape),
            stride=obj.stride(),
            offset=int(obj.storage_offset()),
            storage=storage._cdata,
            storage_bytes=storage.nbytes(),
            dtype=obj.dtype,
            parameter=isinstance(obj, torch.nn.Parameter),
            requires_grad=obj.requires_grad,
            values=values,
        )


_WITH_NUMPY = frozenset(
    {torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)
"""Kinds of numbers that NumPy knows; others, such as bfloat16, come without values."""


class _Unpacker(cloudpickle.pickle.Unpickler):  # type: ignore[misc]
    """Makes tensors of the forms, on the CPU; those that were one, or shared their memory, are and do again."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[int, torch.Tensor] = {}
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def persistent_load(self, form: Any) -> torch.Tensor:
        """The tensor of a form."""
        if form.key not in self._made:
            self._made[form.key] = self._make(form)
        return self._made[form.key]

    def _make(self, form: _TensorForm) -> torch.Tensor:
        key = (form.storage, form.dtype)
        if key not in self._storages:  # never written to, so it takes no memory until something computes
            self._storages[key] = torch.empty(
                form.storage_bytes // form.dtype.itemsize, dtype=form.dtype, device="cpu"
            )
        tensor = self._storages[key].as_strided(form.size, form.stride, form.offset)
        if form.values is not None:
            tensor.copy_(torch.from_numpy(form.values))
        if form.parameter:
            return torch.nn.Parameter(tensor, requires_grad=form.requires_grad)
        return tensor.requires_grad_(form.requires_grad)


def pack(model: torch.nn.Module, batch: Batch, folder: Path) -> str:
    """Put a model and what it is called with down as a workload that `unpacked` reads.

    Args:
        model: on any device.
        batch: as of a `Workload`; of large tensors only the shapes count.

    Returns:
        the workload, as ``FILE.py:NAME``.

    Raises:
        UsageError: something that the model holds cannot go to another process.
    """
    file = folder / "packed.py"
    with file.with_suffix(".pickle").open("wb") as stream:
        try:
            _Packer(stream).dump({"model": model, "batch": batch})
        except UsageError:
            raise
        except Exception as error:  # whatever a lock, a file or a generator answers when it is pickled
            raise UsageError(
                f"the model cannot go to another process, where its memory is looked at: {error}",
                "Give the sizes yourself, in place of a budget, or plan for a FILE.py:WORKLOAD",
            ) from error
    here = [str(Path(entry).absolute()) for entry in sys.path]  # "" is the folder that this process is in
    file.write_text(_WORKLOAD.format(path=here), encoding="utf-8")
    return f"{file}:workload"


def unpacked(file: str) -> Workload:
    """The workload that was put down beside a file, for inference; a fresh model each time, without values."""
    content = Path(file).with_suffix(".pickle").read_bytes()

    def part(name: str) -> Any:
        return _Unpacker(io.BytesIO(content)).load()[name]

    return Workload(
        model=lambda: part("model"),
        batch=lambda batch_size: part("batch"),  # noqa: ARG005  # it was given whole
        sizes={"batch_size": 1},
    )
