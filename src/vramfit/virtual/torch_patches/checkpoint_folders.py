"""``torch.distributed.checkpoint`` where files are written for real: a virtual checkpoint replaces no good one.

Its writer opens its files before it saves tensors to them. A checkpoint of virtual tensors holds no values, so it goes
to a folder of its own, is read from there, and is gone after the block.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.names import change_after_import
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_patches.checkpoints import for_real, tell_skipped


class _Folders:
    """Where checkpoints went instead.

    Args:
        kept: closes at the end of the block.
    """

    def __init__(self, kept: ExitStack) -> None:
        self._kept = kept
        self._instead: dict[Path, Path] = {}

    def instead_of(self, path: Path) -> Path:
        """The folder for a checkpoint; new at its first use."""
        if path not in self._instead:
            made = tempfile.TemporaryDirectory(prefix="vramfit-", ignore_cleanup_errors=True)
            self._instead[path] = Path(self._kept.enter_context(made))
        return self._instead[path]

    def of(self, path: Any) -> Any:
        """Where a checkpoint is to be read: where it was written."""
        return self._instead.get(Path(path), path)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Keep virtual checkpoints from the folders that the program names, where files are written for real."""
    kept = ExitStack()
    folders = _Folders(kept)
    patches.call(kept.close)

    def change(module: ModuleType, patches: PatchStack) -> None:
        _patch_writer(distributed.checkpoint_writer.get(), mode, folders, patches)
        _patch_reader(module.FileSystemReader, folders, patches)

    change_after_import(distributed.CHECKPOINTS, {"torch.distributed.checkpoint.filesystem": change}, patches)


def _patch_writer(writer: Any, mode: OpRunner, folders: _Folders, patches: PatchStack) -> None:
    write, finish = writer.write_data, writer.finish

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        if not for_real() or not isinstance(self.path, Path) or not _holds_virtual(plan, planner):
            return write(self, plan, planner)
        self._vramfit_named = self.path
        tell_skipped(mode, self.path)
        self.path = folders.instead_of(self.path)
        try:
            return write(self, plan, planner)
        except BaseException:  # nobody finishes what could not be written
            self.path = vars(self).pop("_vramfit_named")
            raise

    def finished(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return finish(self, *args, **named)
        finally:
            self.path = vars(self).pop("_vramfit_named", self.path)

    patches.set(writer, "write_data", write_data)
    patches.set(writer, "finish", finished)


def _patch_reader(reader: Any, folders: _Folders, patches: PatchStack) -> None:
    for name in ("read_data", "read_metadata"):
        patches.set(reader, name, _reading(getattr(reader, name), folders))


def _reading(original: Any, folders: _Folders) -> Any:
    def read(self: Any, *args: Any, **named: Any) -> Any:
        path = self.path
        self.path = folders.of(path)
        try:
            return original(self, *args, **named)
        finally:
            self.path = path

    return read


def _holds_virtual(plan: Any, planner: Any) -> bool:
    """Whether a plan writes virtual tensors; what it writes as bytes was pickled, which no virtual tensor can be."""
    tensors = (item for item in plan.items if item.tensor_data is not None)
    return any(type(planner.resolve_data(item)) is FakeTensor for item in tensors)
