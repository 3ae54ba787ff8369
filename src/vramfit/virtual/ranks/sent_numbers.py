"""Small whole numbers that a rank sends another, or all, as a tensor: handed on where both run.

Stages of a pipeline tell one another so whether they know the shapes of what they exchange
(torch/distributed/pipelining/stage.py, ``_warmup_forward_vote``). Values of activations are nobody's business: tensors
of fractions, and large ones, arrive unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.data_dependent.expectations import WATCHED
from vramfit.virtual.data_dependent.shadow import MAX_ELEMENTS
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.ranks.asked_sizes import by_program
from vramfit.virtual.ranks.communicators import Communicator
from vramfit.virtual.ranks.mailbox import Mailbox
from vramfit.virtual.ranks.peer_values import PeerValues

FEW = 64
"""A broadcast of more numbers is one of data, whose values decide nothing."""


class SentNumbers:
    """Hands small numbers to other ranks through their mailbox.

    Args:
        mode: the dispatch mode.
        mailbox: of this rank.
        values: writes known values.
    """

    def __init__(self, mode: OpRunner, mailbox: Mailbox, values: PeerValues) -> None:
        self._mode = mode
        self._mailbox = mailbox
        self._values = values

    def send(self, group: str, rank: int, tensors: list[torch.Tensor]) -> None:
        """Leave what is known of tensors for a rank of the world."""
        for tensor in tensors:
            if self._mailbox.takes_numbers and self._carries(tensor):
                self._mailbox.send(f"{group}.numbers", rank, [self._known(tensor)])

    def forget(self, tensors: list[torch.Tensor]) -> None:
        """Nothing is known of what tensors receive."""
        for tensor in tensors:
            self._values.forget(tensor)

    def receive(self, group: str, rank: int, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """What fills tensors with what a rank sends, once the program waits for them."""
        self.forget(tensors)
        expected = [(t, self._mailbox.expect(f"{group}.numbers", rank)) for t in tensors if self._carries(t)]

        def fill() -> None:
            while expected:
                tensor, letter = expected.pop(0)
                (numbers,) = self._mailbox.take(letter)
                self._fill(tensor, numbers)

        return fill

    def broadcast(self, group: Communicator, root: int, tensors: list[torch.Tensor]) -> bool:
        """Give a group the few whole numbers that the program has its first rank broadcast: sizes, flags, seeds.

        From other roots nothing comes: where every rank tells the others something in turn, all would have to run.

        Args:
            group: of the ranks.
            root: the number in the world of the rank that broadcasts.
            tensors: what holds the numbers, or receives them.

        Returns:
            Whether the tensors hold what the root holds.
        """
        mine = root == group.ranks[group.rank]
        told = [t for t in tensors if t.dtype in WATCHED and 0 < t.numel() <= FEW]
        if not (self._mailbox.open and told and root == group.ranks[0] and by_program()):
            return mine
        if mine:
            self._mailbox.publish(f"{group.name}.numbers", [self._known(tensor) for tensor in told])
            return True
        found = self._mailbox.published(f"{group.name}.numbers", root)
        for tensor, numbers in zip(told, found, strict=True):
            self.forget([tensor])
            self._fill(tensor, numbers)
        return True

    def _known(self, tensor: torch.Tensor) -> Any:
        """The numbers of a tensor; None where they are not known."""
        known = self._mode.shadows.view(tensor) if type(tensor) is FakeTensor else tensor.detach()
        return None if known is None else known.tolist()

    def _fill(self, tensor: torch.Tensor, numbers: Any) -> None:
        if numbers is not None:
            self._values.copy(tensor, torch.tensor(numbers, dtype=tensor.dtype).reshape(tensor.shape))

    def _carries(self, tensor: torch.Tensor) -> bool:
        return self._mailbox.open and tensor.dtype in WATCHED and 0 < tensor.numel() <= MAX_ELEMENTS
