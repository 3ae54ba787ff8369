"""How many tokens a rank of experts receives, which only the routers of all ranks know: the even share, or as stated.

Programs with experts on several ranks tell one another how many tokens they send by an all-to-all of whole numbers, and
size what they receive by it. Where all send as many, the even share of a rank is what it sends itself. It may receive
up to as many times that as there are ranks, if all tokens go to it; ``--assume imbalance=K`` states K times. The rank
that receives most has at least the even share, so with a statement the report's error bar begins there.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.data_dependent.expectations import WATCHED
from vramfit.virtual.fake_impls.shapes import assumed
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.ranks.asked_sizes import by_program, few
from vramfit.virtual.ranks.communicators import Communicator
from vramfit.virtual.ranks.peer_values import PeerValues
from vramfit.virtual.ranks.rank_roles import RankRoles

CODE = "tokens-of-other-ranks"


class RoutedTokens:
    """Sets what a rank receives by the numbers that it exchanges.

    Args:
        mode: the dispatch mode.
        values: reads and writes known values.
        roles: notes which ranks hold experts together.
    """

    def __init__(self, mode: OpRunner, values: PeerValues, roles: RankRoles) -> None:
        self._mode = mode
        self._values = values
        self._roles = roles

    def exchanged(
        self, results: list[torch.Tensor], sources: list[torch.Tensor], group: Communicator
    ) -> None:
        """Set what an all-to-all in equal parts has brought, if it is of whole numbers and called by the program."""
        if group.size == 1 or not sources or not all(map(_counts, sources)) or not by_program():
            return
        self._roles.exchanges(group.ranks)
        known = [self._values.look(source) for source in sources]
        sent = sum(int(one.sum()) for one in known if one is not None)
        stated = self._mode.machine.assumptions.imbalance
        if stated is None:
            self._tell(
                "their even share is taken, which is as many as this rank sends, and it could be up to "
                f"{group.size} times that (--assume imbalance=2 states twice)"
            )
        elif None in known or not sent:
            self._tell("nor how many this rank sends, so the imbalance that was stated is not applied")
        else:
            factor = min(stated, float(group.size))
            self._receive(results, sent, round(sent * factor), group.size)
            most = f"; {group.size} ranks cannot send more" if stated > group.size else ""
            self._tell(f"{factor:g} times the even share is assumed, as stated{most}")

    def _receive(self, results: list[torch.Tensor], sent: int, total: int, ranks: int) -> None:
        """Let results hold a number of tokens in all, as evenly as whole numbers can, and bound what rests on it."""
        elements = sum(result.numel() for result in results)
        each, rest = divmod(total, elements)
        numbers = torch.full((elements,), each)
        numbers[:rest] += 1
        place = 0
        for result in results:
            part = numbers[place : place + result.numel()].reshape(result.shape).to(result.dtype)
            self._values.write(result, part)
            place += result.numel()
        shown = {total, *numbers.tolist()}
        if elements % ranks == 0:
            by_rank_and_expert = numbers.reshape(ranks, -1)
            shown |= {*by_rank_and_expert.sum(0).tolist(), *by_rank_and_expert.sum(1).tolist()}
        for size in shown:
            assumed(self._mode, size, -(-size * sent // total), size)

    def _tell(self, what: str) -> None:
        self._mode.machine.warn(
            CODE,
            f"how many tokens this rank's experts receive is not known, since other ranks send them: {what}",
            location=self._mode.guesses.location() or None,
        )


def _counts(tensor: torch.Tensor) -> bool:
    whole = tensor.dtype in WATCHED and tensor.dtype is not torch.bool
    return type(tensor) is FakeTensor and whole and few(tensor)
