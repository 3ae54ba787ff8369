"""CUDA_VISIBLE_DEVICES, read as the CUDA driver and torch read it, and the order of the cards. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from vramfit.doctor.card_accounting import match_card
from vramfit.doctor.facts import Card, Check, Facts, Finding, FindingArea, Severity


class Trouble(Enum):
    """Why a value does not mean what it seems to."""

    EMPTY = "empty"
    """It hides every card."""
    DUPLICATE = "duplicate"
    """An entry is there twice, so that no card is seen."""
    OUT_OF_RANGE = "out of range"
    """There is no such card: this entry and all after it are dropped."""
    NEGATIVE = "negative"
    """The usual way to hide a card and all named after it."""
    NOT_A_CARD = "not a card"
    """Neither a number nor a name of a card: it and all after it are dropped."""
    MIXED = "mixed"
    """Numbers and names together: what is of the other kind, and all after it, is dropped."""
    UNKNOWN_NAME = "unknown name"
    """No card or slice has this name (or name's beginning)."""
    AMBIGUOUS = "ambiguous"
    """The beginning of a name that several have."""
    TRAILING = "trailing"
    """A number with something after it, which is ignored."""


_SAID: dict[Trouble, tuple[Severity, str, str]] = {
    Trouble.EMPTY: (
        Severity.ERROR,
        "an empty value hides every card",
        "Unset it (unset CUDA_VISIBLE_DEVICES) to see them all",
    ),
    Trouble.DUPLICATE: (
        Severity.ERROR,
        "{entry} is there twice, and a repeated card makes CUDA show none at all",
        "Name each card once",
    ),
    Trouble.OUT_OF_RANGE: (
        Severity.ERROR,
        "there is no card {entry}: it and all after it are dropped without a word",
        "Count from 0 to {last}; inside a container cards are counted anew",
    ),
    Trouble.NEGATIVE: (
        Severity.INFO,
        "{entry} ends the list: cards after it are hidden",
        "Unset the variable to see them all",
    ),
    Trouble.NOT_A_CARD: (
        Severity.ERROR,
        "{entry!r} is neither a number nor a name: it and all after it are dropped without a word",
        "Write 0,1 or GPU-... or MIG-..., separated by commas alone, without brackets or words",
    ),
    Trouble.MIXED: (
        Severity.ERROR,
        "{entry!r} is of another kind than the first: it and all after it are dropped without a word",
        "Name all by number or all by UUID",
    ),
    Trouble.UNKNOWN_NAME: (
        Severity.ERROR,
        "no card or slice here is called {entry!r}: it and all after it are dropped",
        "nvidia-smi -L lists the names",
    ),
    Trouble.AMBIGUOUS: (
        Severity.ERROR,
        "several cards' names begin with {entry!r}: it and all after it are dropped",
        "Write more of the name; nvidia-smi -L lists them",
    ),
    Trouble.TRAILING: (
        Severity.WARNING,
        "of {entry!r} only the number counts",
        "Write the number alone",
    ),
}


def check_visible(facts: Facts) -> Iterator[Finding]:
    """The value names cards that are there, once each."""
    text = facts.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return
    if not facts.cards:
        yield FindingArea.VISIBILITY.info(
            "visible-devices",
            f"CUDA_VISIBLE_DEVICES={text!r}, and no card is known here",
            why="the virtual GPU obeys it as a card would: an empty value or -1 hides the virtual cards too",
            fix="Unset it if programs say that they find no card",
        )
        return
    visible = read_visible(text, facts.cards)
    for trouble, entry in visible.troubles:
        yield _trouble(text, trouble, entry, visible, facts.cards)
    if len(visible.slices) > 1:
        yield FindingArea.VISIBILITY.warning(
            "visible-devices",
            f"CUDA_VISIBLE_DEVICES names {len(visible.slices)} MIG slices",
            why="a process uses one slice, the first",
            fix="Start one process for each slice, each with its own value",
        )
    if not visible.troubles:
        names = ", ".join(f"cuda:{n} is GPU {index}" for n, index in enumerate(visible.cards))
        yield FindingArea.VISIBILITY.ok("visible-devices", f"CUDA_VISIBLE_DEVICES={text}: {names}")


def check_order(facts: Facts) -> Iterator[Finding]:
    """Torch counts the cards as nvidia-smi does."""
    if len(facts.cards) < 2:
        return
    order = facts.environ.get("CUDA_DEVICE_ORDER", "")
    seen = _torch_order(facts)
    if seen and seen != sorted(seen):
        if "CUDA_VISIBLE_DEVICES" in facts.environ:
            return  # the value itself chose the order
        listed = ", ".join(f"cuda:{n} is GPU {index}" for n, index in enumerate(seen))
        yield FindingArea.VISIBILITY.warning(
            "device-order",
            f"torch counts the cards otherwise than nvidia-smi: {listed}",
            why="CUDA puts the fastest first unless told otherwise: watching or choosing a card by nvidia-smi's number "
            "hits another one",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    elif order != "PCI_BUS_ID" and len({card.name for card in facts.cards}) > 1:
        yield FindingArea.VISIBILITY.warning(
            "device-order",
            f"cards of several kinds, and CUDA_DEVICE_ORDER is {order or 'not set'}",
            why="CUDA then counts the fastest first, nvidia-smi by PCI bus: the same number may mean two cards",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    if order not in ("", "PCI_BUS_ID", "FASTEST_FIRST"):
        yield FindingArea.VISIBILITY.warning(
            "device-order",
            f"CUDA_DEVICE_ORDER={order!r} means nothing to CUDA",
            why="it is ignored, and the fastest card comes first",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def _trouble(text: str, trouble: Trouble, entry: str, visible: Visible, cards: Sequence[Card]) -> Finding:
    severity, why, fix = _SAID[trouble]
    count = len(visible.cards)
    shown = "no card is" if not count else "1 card is" if count == 1 else f"{count} cards are"
    filled = {"entry": entry, "last": len(cards) - 1}
    return Finding(
        check="visible-devices",
        area=FindingArea.VISIBILITY,
        severity=severity,
        finding=f"CUDA_VISIBLE_DEVICES={text!r}: {shown} visible of {len(cards)}",
        why=why.format(**filled),
        fix=fix.format(**filled),
    )


def _torch_order(facts: Facts) -> list[int]:
    """The driver's index of each of torch's cards; empty where one is not known."""
    found = []
    for device in facts.torch.devices if facts.torch else ():
        card = match_card(facts.cards, device)
        if card is None:
            return []
        found.append(card.index)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Visible:
    """What a value makes visible.

    Attributes:
        cards: indices of the driver's cards in the order of the value; for MIG slices that of their card.
        troubles: each with the entry it is about.
        slices: the names of MIG slices, if the value names any.
    """

    cards: tuple[int, ...]
    troubles: tuple[tuple[Trouble, str], ...] = ()
    slices: tuple[str, ...] = ()


def read_visible(text: str, cards: Sequence[Card]) -> Visible:
    """What ``CUDA_VISIBLE_DEVICES=text`` shows of the cards.

    The rules are torch's ``torch.cuda._parse_visible_devices``, which follows the driver: entries are taken up to the
    first that is not valid, numbers are read as C's ``strtoul`` does, and an entry that is there twice hides all.

    Args:
        text: the value of the variable.
        cards: the driver's cards in the order in which CUDA counts them.
    """
    if not text.strip():
        return Visible(cards=(), troubles=((Trouble.EMPTY, text),))
    if text.startswith(("GPU-", "MIG-")):
        return _names(text, cards)
    return _numbers(text, cards)


def _numbers(text: str, cards: Sequence[Card]) -> Visible:
    taken: list[int] = []
    troubles: list[tuple[Trouble, str]] = []
    for entry in (part.strip() for part in text.split(",")):
        match = re.match(r"[+-]?\d+", entry)
        if match is None:
            kind = Trouble.MIXED if entry.startswith(("GPU-", "MIG-")) else Trouble.NOT_A_CARD
            troubles.append((kind, entry))
            break
        number = int(match.group())
        if match.end() != len(entry):
            troubles.append((Trouble.TRAILING, entry))
        if number in taken:
            return Visible(cards=(), troubles=((Trouble.DUPLICATE, entry),))
        if number < 0 or number >= len(cards):
            troubles.append((Trouble.NEGATIVE if number < 0 else Trouble.OUT_OF_RANGE, entry))
            break
        taken.append(number)
    return Visible(cards=tuple(cards[number].index for number in taken), troubles=tuple(troubles))


def _names(text: str, cards: Sequence[Card]) -> Visible:
    prefix = text[:4]
    known = [(card.uuid, card.index) for card in cards]
    if prefix == "MIG-":
        known = [(instance.uuid, card.index) for card in cards for instance in card.mig]
    taken: list[tuple[str, int]] = []
    troubles: list[tuple[Trouble, str]] = []
    entries = text.split(",")
    for position, entry in enumerate(entries):
        if entry in entries[:position]:
            return Visible(cards=(), troubles=((Trouble.DUPLICATE, entry),))
        if not entry.startswith(prefix):
            troubles.append((Trouble.MIXED, entry))
            break
        fitting = [(name, index) for name, index in known if name.startswith(entry)]
        if len(fitting) != 1:
            troubles.append((Trouble.AMBIGUOUS if fitting else Trouble.UNKNOWN_NAME, entry))
            break
        if fitting[0] in taken:
            return Visible(cards=(), troubles=((Trouble.DUPLICATE, entry),))
        taken.append(fitting[0])
    slices = tuple(name for name, _ in taken) if prefix == "MIG-" else ()
    return Visible(cards=tuple(index for _, index in taken), troubles=tuple(troubles), slices=slices)


CHECKS: tuple[Check, ...] = (check_visible, check_order)
