"""CUDA_VISIBLE_DEVICES, read as the CUDA driver and torch read it. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vramfit.doctor.facts import Card


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
