"""Find a card by what people write: a name, a size such as 24GiB, or a file that describes one.

Names are forgiving: case, spaces, hyphens and the words NVIDIA, GeForce and Tesla do not matter, nor does
RTX, GTX or Quadro before a number (``4090``), and memory may be written 80, 80G, 80GB or 80GiB. A name that
cards of one family share means the one with the least memory, and among equals the SXM one: ``A100`` is A100
SXM 40GB, so that what is said to fit it fits whichever of them it meets. Where the cards are too different
for that (``RTX 6000``), the error names the candidates.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from vramfit.arguments import path_argument, shown
from vramfit.errors import UnknownGpuError, UsageError
from vramfit.gpus.card_file import ambiguous_names, catalogue, read_card_file
from vramfit.gpus.spec import GpuKind, GpuSpec
from vramfit.units import GIB, MIB, format_bytes, is_size, parse_bytes

_VENDOR_WORDS = frozenset({"nvidia", "geforce", "tesla", "corporation", "gpu", "graphics", "card", "jetson"})
_SYNONYMS = {
    "mobile": "laptop",
    "notebook": "laptop",
    "hbm3": "",
    "hbm3e": "",
    "hbm2e": "",
    "hbm2": "",
    "generation": "",
    "edition": "",
}
_MEMORY = re.compile(r"(?<![a-z0-9])(\d+)\s*(?:gib|gb|g)(?![a-z0-9])")
_BARE_MEMORY = re.compile(r"(?<=\S )(4|6|8|10|11|12|16|20|24|32|40|48|64|80|94|96|141|144)$")
_SERIES = re.compile(r"(?<![a-z])(rtx|gtx)(?=\d|a\d)")
_SUFFIX = re.compile(r"(?<=\d)(ti|super|laptop|mobile|max|sxm\d?|pcie|nvl|ada|d)(?![a-z0-9])")
_PREFIX_WORDS = frozenset({"rtx", "gtx", "quadro"})

_GENERIC_NAME = re.compile(r"^generic (.+) GPU$")
_SMALLEST = 64 * MIB
_LARGEST = 1024 * GIB
_HOPPER_FROM = 49 * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMatch:
    """The card that a text means.

    Attributes:
        alternatives: other cards that the same text fits; empty when it is one card's own name.
    """

    spec: GpuSpec
    alternatives: tuple[GpuSpec, ...] = ()


def _tokens(text: str) -> frozenset[str]:
    """Split a name into the words that tell cards apart: "NVIDIA A100-80G" gives {"a100", "80gb"}."""
    text = text.lower().replace("max-q", "maxq").replace("max q", "maxq").replace("tisuper", "ti super")
    text = re.sub(r"[\s\-_/(),]+", " ", text)
    text = _MEMORY.sub(r" \1gb ", _BARE_MEMORY.sub(r"\1gb", text.strip()))
    text = _SERIES.sub(r"\1 ", text)
    text = _SUFFIX.sub(r" \1", _SUFFIX.sub(r" \1", text))
    words = (_SYNONYMS.get(word, word) for word in text.split())
    return frozenset(re.sub(r"^sxm\d$", "sxm", word) for word in words if word and word not in _VENDOR_WORDS)


@cache
def _by_tokens() -> dict[frozenset[str], GpuSpec]:
    """Every way to write a card exactly, as tokens."""
    names: dict[frozenset[str], GpuSpec] = {}
    for spec in catalogue():
        for text in (spec.name, *spec.aliases):
            names[_tokens(text)] = spec
    return names


_Row = tuple[GpuSpec, frozenset[str], frozenset[str]]


@cache
def _all_tokens() -> tuple[_Row, ...]:
    """Each card with the words of its name and all words that may describe it."""
    rows = []
    for spec in catalogue():
        own = _tokens(spec.name)
        size = f"{round(spec.total_bytes / GIB)}gb"
        every = own.union(_tokens(spec.vendor_name), *(_tokens(alias) for alias in spec.aliases), {size})
        rows.append((spec, own, every))
    return tuple(rows)


def match_gpu(text: str) -> GpuMatch:
    """Find a card as :func:`find_gpu` does, and say what else the text could have meant.

    Raises:
        UnknownGpuError: no card fits, or several that differ too much; the message names the nearest.
        UsageError: a card file cannot be read, or a size is out of range.
    """
    text = text.strip()
    if text.lower().endswith(".toml"):
        return GpuMatch(spec=read_card_file(Path(text), find_gpu))
    if text.startswith("-") and is_size(text[1:].lstrip()):
        raise UsageError(f"the size {text} is not positive", "Write it as 24GiB")
    if is_size(size := _GENERIC_NAME.sub(r"\1", text)):  # as generic cards are called in plans and reports
        return GpuMatch(spec=_generic(size))
    wanted = _tokens(text)
    _refuse_ambiguous(text, wanted)
    fitting = [row for row in _all_tokens() if wanted and wanted <= row[2]]
    exact = next((_by_tokens()[key] for key in _spellings(wanted) if key in _by_tokens()), None)
    if exact is not None:
        own = _bare(_tokens(exact.name)) == _bare(wanted) or _reported_by_one(text)
        others = () if own else tuple(spec for spec, _, _ in fitting if spec is not exact)
        return GpuMatch(spec=exact, alternatives=others)
    return GpuMatch(spec=_nearest(text, wanted, fitting))


def _reported_by_one(text: str) -> bool:
    """Whether the text is what torch reports for one card and no other."""
    return sum(text.lower() == spec.vendor_name.lower() for spec in catalogue()) == 1


def _bare(words: frozenset[str]) -> frozenset[str]:
    return words - _PREFIX_WORDS


def _has_number(words: frozenset[str]) -> bool:
    return any(char.isdigit() for word in words for char in word)


def _spellings(wanted: frozenset[str]) -> tuple[frozenset[str], ...]:
    """The words themselves; if they contain a number, also with each series before it."""
    if not _has_number(wanted):
        return (wanted,)
    return wanted, wanted | {"rtx"}, wanted | {"gtx"}, wanted | {"quadro", "rtx"}


def _nearest(text: str, wanted: frozenset[str], fitting: list[_Row]) -> GpuSpec:
    """Of the cards that fit, give the one whose name adds the least: "4090" is not the laptop part."""
    if not fitting:
        raise UnknownGpuError(f"no GPU is called {shown(text)}", _suggestion(text))
    # A series word is no difference beside a number, and all the difference beside "titan".
    ignored = _PREFIX_WORDS if _has_number(wanted) else frozenset()
    extra = {spec.name: len(own - wanted - ignored) for spec, own, _ in fitting}
    nearest = [spec for spec, _, _ in fitting if extra[spec.name] == min(extra.values())]
    if len(nearest) > 1:
        more = f" and {len(nearest) - 5} more" if len(nearest) > 5 else ""
        raise UnknownGpuError(
            f"{text!r} could be {', '.join(spec.name for spec in nearest[:5])}{more}", "Name one"
        )
    return nearest[0]


def find_gpu(given: str | os.PathLike[str] | GpuSpec) -> GpuSpec:
    """Find a card by name, alias, size or file.

    Args:
        given: ``"RTX 4090"``, ``"a100-80g"``, ``"24GiB"`` (a generic card of that size), the path of a ``.toml`` file,
            or a card, which is given back.

    Raises:
        UnknownGpuError: no card fits, with the three nearest names; or several do, with theirs.
        UsageError: a card file cannot be read, a size is out of range, or it is none of these.
    """
    if isinstance(given, GpuSpec):
        return given
    if isinstance(given, os.PathLike):
        return read_card_file(Path(path_argument("gpu", given)), find_gpu)
    if not isinstance(given, str):
        raise UsageError(
            f"gpu={shown(given)} names no card: it is of type {type(given).__name__}",
            'Write a name such as "RTX 4090", a size such as "24GiB", or the path of a TOML file',
        )
    return match_gpu(given).spec


def _refuse_ambiguous(text: str, wanted: frozenset[str]) -> None:
    for name, cards in ambiguous_names().items():
        if _tokens(name) == wanted | {"rtx"}:
            raise UnknownGpuError(
                f"{text!r} is used for different cards: {', '.join(cards)}", "Name one of them"
            )


def _generic(text: str) -> GpuSpec:
    """Give a card of a size: an RTX 4090 (Ada) up to 48 GiB, an H100 SXM (Hopper) above, with that memory."""
    try:
        size = parse_bytes(text)
    except ValueError:  # larger than any memory: `is_size` has looked at the form
        size = _LARGEST + 1
    if not _SMALLEST <= size <= _LARGEST:
        raise UsageError(
            f"a GPU of {text.strip()} is out of range",
            f"Sizes from {format_bytes(_SMALLEST)} to {format_bytes(_LARGEST)}",
        )
    base = find_gpu("RTX 4090" if size < _HOPPER_FROM else "H100 SXM")
    name = f"generic {format_bytes(size)} GPU"
    return replace(
        base,
        name=name,
        aliases=(),
        vendor_name=name,
        kind=GpuKind.GENERIC,
        total_bytes=size,
        memory_estimated=False,
        memory_source="as given",
        price=None,
        source=f"all but the memory is that of the {base.name}: {base.source}",
        notes=f"A generic card: {base.name} ({base.architecture}) with {format_bytes(size)} of memory.",
    )


def _letters(name: str) -> str:
    """Write a name as its words run together, without the maker's: "NVIDIA RTX-4091" gives "rtx4091"."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in _VENDOR_WORDS)


_NO_SLIP = 4


def _slip(asked: str, number: str) -> int:
    """The kind of slip that turns one number into another.

    0: nothing, 1: two neighbours that changed places or another last digit, 2: another digit, 3: a digit too many
    or too few, 4: more than one slip.
    """
    if asked == number:
        return 0
    if re.sub(r"\d", "", asked) != re.sub(r"\d", "", number) or sum(map(str.isdigit, number)) < 3:
        return _NO_SLIP
    if len(asked) == len(number):
        at = [place for place, (one, other) in enumerate(zip(asked, number, strict=True)) if one != other]
        if len(at) == 1:
            return 1 if at[0] == len(number) - 1 else 2
        swapped = (
            len(at) == 2 and at[1] == at[0] + 1 and asked[at[0] : at[1] + 1] == number[at[1]] + number[at[0]]
        )
        return 1 if swapped else _NO_SLIP
    short, long = sorted((asked, number), key=len)
    one_more = len(long) == len(short) + 1
    dropped = one_more and any(long[:at] + long[at + 1 :] == short for at in range(len(long)))
    return 3 if dropped else _NO_SLIP


def _suggestion(text: str) -> str:
    """Name the three nearest cards: first those of the same number, then of one mistyped, then by their letters.

    Among cards of a mistyped number the words beside it decide, then how the slip was made.
    """
    asked, numbers = _letters(text), {word for word in _tokens(text) if _has_number(frozenset({word}))}
    scored: list[tuple[tuple[int, int, float], str]] = []
    for spec, own, words in _all_tokens():
        names = (spec.name, *spec.aliases)
        likeness = max(SequenceMatcher(None, asked, _letters(name), autojunk=False).ratio() for name in names)
        slip = min((_slip(asked, word) for asked in numbers for word in words), default=_NO_SLIP)
        different = len((own ^ _tokens(text)) - _PREFIX_WORDS)
        rank = (slip, different) if 0 < slip < _NO_SLIP else (slip, 0)
        scored.append(((*rank, -likeness), spec.name))
    # sorted() is stable, so cards of equal score stay in the order of the catalogue.
    nearest = [name for _, name in sorted(scored, key=lambda row: row[0])[:3]]
    return f"Did you mean {nearest[0]}, {nearest[1]} or {nearest[2]}? 'vramfit gpus' lists all"
