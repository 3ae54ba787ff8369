"""Small whole numbers that a rank sends another as a tensor: handed on where both run.

Stages of a pipeline tell one another so whether they know the shapes of what they exchange
(torch/distributed/pipelining/stage.py, ``_warmup_forward_vote``). Values of activations are nobody's business: tensors
of fractions, and large ones, arrive unknown.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.virtual.data_dependent.expectations import WATCHED
from vramfit.virtual.data_dependent.shadow import MAX_ELEMENTS
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.ranks.mailbox import Mailbox
from vramfit.virtual.ranks.peer_values import PeerValues


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
                fake = type(tensor) is FakeTensor
                known = self._mode.shadows.view(tensor) if fake else tensor.detach()
                self._mailbox.send(f"{group}.numbers", rank, [None if known is None else known.tolist()])

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
                if numbers is not None:
                    self._values.copy(tensor, torch.tensor(numbers, dtype=tensor.dtype).reshape(tensor.shape))

        return fill

    def _carries(self, tensor: torch.Tensor) -> bool:
        return self._mailbox.open and tensor.dtype in WATCHED and 0 < tensor.numel() <= MAX_ELEMENTS
