"""Where the bytes of a card are: what the driver counts, brought together with what torch counts. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vramfit.doctor.facts import Card, Facts, Process, TorchDevice


@dataclass(frozen=True, kw_only=True, slots=True)
class CardAccount:
    """One card while a process of ours held a context and one tensor on it. Bytes; None where unknown.

    ``total = driver_reserved + others + own_context + own_reserved + unaccounted + free``. Where processes share
    memory, so that their figures sum to more than is used, nothing is unaccounted and the sum exceeds the total.

    Attributes:
        index: the driver's index of the card.
        torch_index: of torch, None if torch does not see it.
        total: all memory, as the driver counts.
        driver_reserved: kept by driver and firmware.
        others: bytes of other processes, as far as the driver reports them.
        processes: these processes.
        own_context: the CUDA context of the process that asked: what the card lost to it less its allocator's.
        own_reserved: bytes that its allocator held.
        unaccounted: used by nobody whom the driver names.
        free: as ``torch.cuda.mem_get_info`` says, or the driver where torch does not see the card.
        torch_total: ``torch.cuda.mem_get_info``: what a program can at most have, with its context.
    """

    index: int
    name: str
    torch_index: int | None
    total: int
    driver_reserved: int
    others: int
    processes: tuple[Process, ...]
    own_context: int | None
    own_reserved: int
    unaccounted: int
    free: int
    torch_total: int | None


def accounts(facts: Facts) -> tuple[CardAccount, ...]:
    """The account of every card of the driver; of a card in MIG mode, which is shared out, none."""
    seen = facts.torch.devices if facts.torch else ()
    found = []
    for card in facts.cards:
        if card.mig_enabled or not card.total_bytes:
            continue
        device = next((d for d in seen if not d.error and match_card((card,), d) is not None), None)
        found.append(_account(card, device))
    return tuple(found)


def match_card(cards: tuple[Card, ...], device: TorchDevice) -> Card | None:
    """The driver's card that a device of torch's is, by name, then by place; None for a slice or an unknown one."""
    for card in cards:
        if device.uuid and card.uuid.removeprefix("GPU-") == device.uuid.removeprefix("GPU-"):
            return card
    for card in cards:
        if device.pci_bus_id and _place(card.pci_bus_id) == _place(device.pci_bus_id):
            return card
    return None


def _place(bus_id: str) -> str:
    """Drivers write four or eight digits for the domain."""
    domain, _, rest = bus_id.upper().partition(":")
    return f"{domain.lstrip('0')}:{rest}"


def _account(card: Card, device: TorchDevice | None) -> CardAccount:
    reserved = card.reserved_bytes or 0
    others = sum(process.used_bytes or 0 for process in card.processes)
    used = card.used_bytes
    own_reserved = 0
    own_context: int | None = None
    free = card.free_bytes
    if device is not None and device.driver_used_bytes is not None:
        own = device.own_bytes
        if (
            own is None
        ):  # a container hides which process is ours: what the card lost since it was asked without us
            own = max(0, device.driver_used_bytes - card.used_bytes)
        own_reserved = device.reserved_bytes
        own_context = max(0, own - own_reserved)
        used = device.driver_used_bytes
        free = card.total_bytes - reserved - used
    held = others + own_reserved + (own_context or 0)
    return CardAccount(
        index=card.index,
        name=card.name,
        torch_index=None if device is None else device.index,
        total=card.total_bytes,
        driver_reserved=reserved,
        others=others,
        processes=card.processes,
        own_context=own_context,
        own_reserved=own_reserved,
        unaccounted=max(0, used - held),
        free=free,
        torch_total=None if device is None else device.total_bytes,
    )


def account_lines(account: CardAccount) -> Iterator[tuple[str, int]]:
    """The parts of an account with their names, as they are shown; they sum to its total."""
    yield "kept by the driver", account.driver_reserved
    yield "other processes", account.others
    if account.own_context is not None:
        yield "CUDA context of one process", account.own_context
    if account.own_reserved:
        yield "torch's allocator, one small tensor", account.own_reserved
    yield "unaccounted", account.unaccounted
    yield "free", account.free
