"""Weights that wait on disk: read by a thread into a few buffers, ahead of the copies to the card.

NOTE [Memory of the host]: files are read into buffers that are taken once, not through the mapped pages: so the host
holds as many layers as there are buffers, whatever the model has. Between calls the parameters show the mapped files,
of which nothing is in memory before somebody looks. The system may keep what was read in its cache, as of any file.
What is written to a parameter stays in memory, beside the file, and is brought from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vramfit.inference.host_lane import Lane
from vramfit.inference.streaming.layer_weights import LayerWeights, laid_out, shaped
from vramfit.inference.streaming.weight_files import StoredTensor, unreadable

BUFFERS = 3
"""One is copied from while another is filled, and a third is ready."""


class DiskHome:
    """Lets parameters show what is stored in files, and gives them memory again.

    Args:
        stored: where each parameter's values are, by its id.
    """

    def __init__(self, stored: Mapping[int, StoredTensor]) -> None:
        self._stored = stored
        self._moved: list[tuple[nn.Parameter, torch.device]] = []
        self._versions: dict[int, int] = {}

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let parameters show the files; their memory goes."""
        for parameter in parameters:
            self._moved.append((parameter, parameter.device))
            parameter.data = self._stored[id(parameter)].mapped()
            self._versions[id(parameter)] = _version(parameter)

    def written(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has other values than the file."""
        return _version(parameter) != self._versions.get(id(parameter))

    def give_back(self) -> None:
        """Let the parameters have memory where they had it before."""
        while self._moved:
            parameter, device = self._moved.pop()
            parameter.data = parameter.detach().to(device, copy=True)


@dataclass(slots=True)
class _Buffer:
    """A buffer of the host: for which layer it is read, and until when it is copied from."""

    memory: torch.Tensor
    layer: LayerWeights | None = None
    versions: list[int] = field(default_factory=list)
    read: Future[None] | None = None
    copied: Any = None
    lane: Lane | None = None

    def free(self) -> bool:
        """Whether nothing is read into it, or waits in it."""
        if self.layer is None and self.lane is not None and self.lane.ended(self.copied):
            self.lane = self.copied = None
        return self.layer is None and self.lane is None


class FileSource:
    """Reads layers from files, some ahead; a `WeightSource`.

    Args:
        stored: where each parameter's values are, by its id.
        pinned: whether the buffers are pinned, as for a card.
        written: whether a parameter has other values than its file, to be taken from the parameter.
    """

    def __init__(
        self,
        stored: Mapping[int, StoredTensor],
        *,
        pinned: bool,
        written: Callable[[nn.Parameter], bool],
    ) -> None:
        self._stored, self._pinned, self._written = stored, pinned, written
        self._buffers: list[_Buffer] = []
        self._thread: ThreadPoolExecutor | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def open(self, largest: int) -> None:
        """Take the buffers' memory.

        Args:
            largest: bytes of the largest layer.
        """
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vramfit-weights")
        self._buffers = [
            _Buffer(torch.empty(largest, dtype=torch.uint8, pin_memory=self._pinned)) for _ in range(BUFFERS)
        ]

    def close(self) -> None:
        """Give the buffers back, once nothing is read into them or copied from them."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        for buffer in self._buffers:
            if buffer.lane is not None:
                buffer.lane.finish(buffer.copied)
        self._buffers.clear()

    def prepare(self, layer: LayerWeights) -> None:
        """See `WeightSource`: begin to read, where a buffer is free."""
        if self._of(layer) is None:
            buffer = next((one for one in self._buffers if one.free()), None)
            if buffer is not None:
                self._begin(buffer, layer)

    def ready(self, layer: LayerWeights) -> bool:
        """See `WeightSource`."""
        buffer = self._of(layer)
        return buffer is not None and buffer.read is not None and buffer.read.done()

    def tensors(self, layer: LayerWeights) -> list[torch.Tensor]:
        """See `WeightSource`.

        Raises:
            UsageError: the file cannot be read any more.
        """
        buffer = self._of(layer)
        if buffer is None:
            buffer = self._emptied()
            self._begin(buffer, layer)
        assert buffer.read is not None
        try:
            buffer.read.result()
        except BaseException:
            buffer.layer = buffer.read = None
            raise
        offsets, _ = laid_out(layer.parameters)
        return [
            shaped(buffer.memory[offset:], like.detach())
            for offset, like in zip(offsets, layer.parameters, strict=True)
        ]

    def copied(self, layer: LayerWeights, end: Any, lane: Lane) -> None:
        """See `WeightSource`."""
        buffer = self._of(layer)
        assert buffer is not None
        buffer.layer = buffer.read = None
        buffer.copied, buffer.lane = end, lane

    def _of(self, layer: LayerWeights) -> _Buffer | None:
        """The buffer of a layer; one that was read before the layer was written to is given up."""
        buffer = next((buffer for buffer in self._buffers if buffer.layer is layer), None)
        if buffer is not None and buffer.versions != layer.versions():
            if buffer.read is not None:
                buffer.read.exception()
            buffer.layer = buffer.read = None
            return None
        return buffer

    def _emptied(self) -> _Buffer:
        """A free buffer: a wrong guess goes, else a copy is waited for."""
        buffer = next((one for one in self._buffers if one.free()), None)
        if buffer is None:
            buffer = next((one for one in self._buffers if one.read is not None), self._buffers[0])
            if buffer.read is not None:
                buffer.read.exception()
            if buffer.lane is not None:
                buffer.lane.finish(buffer.copied)
            buffer.layer = buffer.read = buffer.lane = buffer.copied = None
        return buffer

    def _begin(self, buffer: _Buffer, layer: LayerWeights) -> None:
        offsets, _ = laid_out(layer.parameters)
        bytes_of: memoryview = buffer.memory.numpy().data
        parts: list[tuple[StoredTensor | memoryview, memoryview]] = []
        for offset, parameter in zip(offsets, layer.parameters, strict=True):
            place = bytes_of[offset : offset + parameter.nbytes]
            parts.append(
                (_bytes(parameter) if self._written(parameter) else self._stored[id(parameter)], place)
            )
        assert self._thread is not None
        buffer.layer, buffer.versions = layer, layer.versions()
        buffer.read = self._thread.submit(_read, parts)


def _version(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version


def _bytes(parameter: nn.Parameter) -> memoryview:
    found: memoryview = parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    return found


def _read(parts: list[tuple[StoredTensor | memoryview, memoryview]]) -> None:
    for stored, memory in parts:
        if isinstance(stored, memoryview):
            memory[:] = stored
            continue
        try:
            with stored.path.open("rb", buffering=0) as stream:
                at = 0
                while at < len(memory):
                    count = os.preadv(stream.fileno(), [memory[at:]], stored.offset + at)
                    if not count:
                        raise OSError("the file ends too early")
                    at += count
        except OSError as error:
            raise unreadable(stored.path, error.strerror or error) from error
