"""Tensors in tiers of memory, from Python."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from vramfit.arguments import (
    number_argument,
    path_argument,
    shown,
    size_argument,
    text_argument,
    whole_argument,
)
from vramfit.errors import UsageError
from vramfit.runtime.tiers.card_tiers import Allocation, TierBudgets, card_tiers
from vramfit.runtime.tiers.store import Store
from vramfit.runtime.tiers.stored_optimizer import StoredOptimizer
from vramfit.runtime.tiers.stored_weights import StoredWeights
from vramfit.runtime.tiers.tier import Tier
from vramfit.runtime.tiers.unified_memory import Unified

E = TypeVar("E", Allocation, Unified)


class TieredStore(Store):
    """Tensors by keys, of which the device holds those in use: the others are on a peer, the host, or in files.

    >>> store = vramfit.TieredStore("1MiB", pinned="1MiB", file="16MiB")
    >>> for layer in range(8):
    ...     store[layer] = torch.full((256, 256), float(layer))
    >>> store.tier_of(0), store.tier_of(7)
    ('pinned', 'device')
    >>> store[0].mean(), store.tier_of(0)
    (tensor(0.), 'device')
    >>> with store.reading(1, 2) as (one, two):
    ...     total = one + two
    >>> store.usage()["device"].used <= 2**20
    True
    >>> store.close()

    ``store[key]`` is the tensor on the device, to read and to write; it stays there as long as anyone holds it, a view
    or a graph included. What is used least recently goes down where room is needed, and what was given to `done`
    before that. `reading` promises not to write, so that a copy below stays current and nothing is written when the
    tensor goes down again. All methods may be called from several threads.

    Args:
        budget: of the device, such as ``"4GiB"``: what the store holds there, in blocks of 512 bytes.
        device: where tensors are used; None is the current card, or the CPU where there is none.
        peers: budgets of other cards by their names, ``{"cuda:1": "8GiB"}``.
        pinned: budget of page-locked memory of the host, which torch rounds up to powers of two; None for none. Where
            device and host have one memory, it adds to the device's.
        file: budget of memory-mapped files; None for none.
        folder: where these are: ``"/dev/shm"``, or a folder on a disk; None is the one for temporary files.
        more: tiers of one's own (`vramfit.runtime.tiers.tier.Tier`), between pinned memory and files.
        allocation: ``"separate"`` lets torch allocate each tensor, ``"pool"`` takes device and pinned memory at once
            and closes holes by moving tensors that nobody holds.
        unified: ``"within"`` makes the device's tier of unified memory, no more than is free there; ``"beyond"`` also
            more, which moves over the link in each pass; ``"off"`` is plain memory.
        ahead: how many tensors are brought before they are asked for, once their order was seen twice.
        patience: seconds to wait for room that other threads hold.

    Raises:
        UsageError: arguments are no such, or there is no tier below the device.
        WriteError: no file can be written in the folder.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        device: Any = None,
        peers: Mapping[str, int | str] | None = None,
        pinned: int | str | None = None,
        file: int | str | None = None,
        folder: str | os.PathLike[str] | None = None,
        more: Sequence[Tier] = (),
        allocation: str = "separate",
        unified: str = "off",
        ahead: int = 1,
        patience: float = 30.0,
    ) -> None:
        place = device_argument(device)
        given: Sequence[Any] = more
        for tier in given:
            if not isinstance(tier, Tier):
                raise UsageError(
                    f"{shown(tier)} in more is no tier", "Make one: a class that inherits from Tier"
                )
        budgets = TierBudgets(
            device=size_argument("budget", budget),
            peers={
                text_argument("a name in peers", name): size_argument(f"peers[{name!r}]", size)
                for name, size in (peers or {}).items()
            },
            pinned=0 if pinned is None else size_argument("pinned", pinned),
            more=tuple(more),
            file=0 if file is None else size_argument("file", file),
            folder=tempfile.gettempdir() if folder is None else path_argument("folder", folder),
            allocation=_choice("allocation", allocation, Allocation),
            unified=_choice("unified", unified, Unified),
        )
        ahead = whole_argument("ahead", ahead, least=0)
        patience = number_argument("patience", patience, least=0.0, most=1e6)
        super().__init__(card_tiers(place, budgets), place, ahead=ahead, patience=patience)

    def hold_optimizer(
        self, optimizer: torch.optim.Optimizer, *, prefix: str = "optimizer"
    ) -> StoredOptimizer:
        """Keep an optimizer's states here; its own ``step`` brings them slice by slice, until ``undo()`` of the result.

        ``state_dict`` and ``load_state_dict`` of the optimizer work as before; the first gives tensors on the CPU, and
        the second has all states on the device for a moment, before they are taken.

        Raises:
            UsageError: the optimizer may not treat each parameter by itself.
            StoreFull: there is no room; the optimizer is as it was.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer={shown(optimizer)} is no optimizer of torch", "Give the one that the loop steps"
            )
        return StoredOptimizer(optimizer, self, text_argument("prefix", prefix))

    def hold_weights(self, module: nn.Module, *, prefix: str = "weights") -> StoredWeights:
        """Keep a model's parameters here, for inference, until ``undo()`` of the result.

        Raises:
            UsageError: it is no module.
            StoreFull: there is no room; the model is as it was.
        """
        if not isinstance(module, nn.Module):
            raise UsageError(f"module={shown(module)} is no module", "Give the model that is called")
        return StoredWeights(module, self, text_argument("prefix", prefix))


def device_argument(given: Any) -> torch.device:
    """The device that an argument names; None is the current card, or the CPU where there is none.

    Raises:
        UsageError: it is none, or of another kind.
    """
    if given is None:
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    try:
        found = torch.device(given)
    except (RuntimeError, TypeError):  # torch has no other word for it
        raise UsageError(f"device={shown(given)} is no device", 'Give "cuda:0" or "cpu"') from None
    if found == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    if found.type not in ("cuda", "cpu"):
        raise UsageError(f"device={shown(given)} is neither a card nor the CPU", 'Give "cuda:0" or "cpu"')
    return found


def _choice(name: str, given: Any, kind: type[E]) -> E:
    try:
        return kind(text_argument(name, given))
    except ValueError:
        names = ", ".join(repr(one.value) for one in kind)
        raise UsageError(f"{name}={shown(given)} is none of {names}", "Give one of them") from None
