"""Tensors in memory that several processes of a machine have, and that is gone with the one that made it."""

from __future__ import annotations

from typing import Any

import torch

from vramfit.arguments import path_argument
from vramfit.errors import UsageError
from vramfit.runtime.tiers.file_tier import FileTier, SharedTensor
from vramfit.runtime.tiers.tier import dense
from vramfit.workload.containers import mapped_leaves, tensors_in
from vramfit.writing import StrPath

_NO_BUDGET = 1 << 62


class _Place:
    """Where a tensor stood in a tree."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class SharedTicket:
    """A tree of shared tensors, to be sent to another process of this machine."""

    def __init__(self, tree: Any, files: tuple[SharedTensor, ...]) -> None:
        self._tree, self._files = tree, files

    def open(self) -> Any:
        """The tree with the same memory: what one process writes the others read.

        The memory stays as long as one of them has it, also after its owner is gone.

        Raises:
            UsageError: its owner is gone, or has closed it.
        """
        opened = [one.open() for one in self._files]
        return mapped_leaves(
            self._tree, lambda _, leaf: opened[leaf.number] if isinstance(leaf, _Place) else leaf
        )


class SharedTensors:
    """Copies of tensors that other processes can open, in ``/dev/shm`` or another folder.

    >>> with vramfit.SharedTensors({"x": torch.arange(3)}) as shared:
    ...     ticket = shared.ticket  # to another process: a queue, a pipe, an argument
    ...     there = ticket.open()
    ...     there["x"][0] = 7
    ...     shared.tensors["x"]
    tensor([7, 1, 2])

    Nothing is left in the folder after it is closed, after its process ends, by an error too, or after a process that
    opened it is killed. What a killed owner leaves is removed when a `SharedTensors` or a `TieredStore` is next made
    there.

    Args:
        tensors: dense tensors in dicts, lists, tuples, dataclasses or mappings; those of a card are copied to the host.
        folder: where.

    Attributes:
        tensors: the same tree, of the shared memory.
        ticket: what another process opens it with.

    Raises:
        UsageError: it has no tensors, or some that are not dense.
        WriteError: there is no room, or no permission.
    """

    def __init__(self, tensors: Any, *, folder: StrPath = "/dev/shm") -> None:
        given = {id(one): one for one in tensors_in(tensors)}
        if not given:
            raise UsageError("there are no tensors to share", "Give tensors in dicts, lists or tuples")
        plain = [dense(one) for one in given.values()]
        self._tier = FileTier(_NO_BUDGET, path_argument("folder", folder))
        try:
            handles = [self._tier.put(one, _copy) for one in plain]
        except BaseException:
            self._tier.close()
            raise
        number = {key: at for at, key in enumerate(given)}
        shared = [self._tier.get(one) for one in handles]
        self.tensors = mapped_leaves(
            tensors, lambda _, leaf: shared[number[id(leaf)]] if id(leaf) in number else leaf
        )
        self.ticket = SharedTicket(
            mapped_leaves(tensors, lambda _, leaf: _Place(number[id(leaf)]) if id(leaf) in number else leaf),
            tuple(self._tier.ticket(one) for one in handles),
        )

    def close(self) -> None:
        """Let nobody else open it. Who has opened it keeps the memory."""
        self._tier.close()

    def __enter__(self) -> SharedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
