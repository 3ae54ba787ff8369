"""Cards as TOML tables, read with one-line errors: users' card files, and the catalogue.

The catalogue and users' own card files share this form::

    name = "My card"
    base = "RTX 4090"            # optional, in users' files: every key not given is taken from this card
    total_bytes = "47.5GiB"      # as CUDA reports it; a number of bytes or a size
    compute_capability = "8.9"
    sm_count = 142
    l2_bytes = "96MiB"
    bandwidth_gbs = 864.0        # 10^9 bytes per second
    memory_bus_bits = 384
    boost_clock_mhz = 2490
    link = "PCIe 4.0 x16"        # host_link_gbs = 26.0 beside it overrides the figure of the standard
    peer_link = "NVLink 4"       # optional: to the other cards of a node, with peer_link_gbs = 450.0 one way
    network_gbs = 50.0           # optional: of one card's network between nodes, one way
    [peak_tflops]                # dense, by dtype, 10^12 operations per second
    float32 = 90.5
    float16 = 181.0
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from vramfit.errors import UsageError
from vramfit.gpus.spec import ARCHITECTURES, LIMITS, GpuKind, GpuSpec, PositiveNumber, Price, Text
from vramfit.plain import Misfit, read
from vramfit.units import parse_bytes

# GB/s of one lane one way, as the PCI Express base specifications give them after encoding.
_PCIE_GBS_PER_LANE = {"3.0": 0.985, "4.0": 1.969, "5.0": 3.938, "6.0": 7.563}
_LINK = re.compile(r"PCIe (3\.0|4\.0|5\.0|6\.0) x(1|2|4|8|16)")
_C2C = "NVLink-C2C"
_UNIFIED = "unified memory"
_C2C_GBS = 450.0  # NVIDIA states 900 GB/s for both directions together

# -- The keys of a card's table: the types of their values, with the words that errors have for them ----------

DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8", "int8", "fp4")
_Flag = Annotated[bool, Meta(description="true or false")]
_Count = Annotated[int, Meta(gt=0, description="a positive whole number")]
_CAPABILITIES = [f"{major}.{minor}" for major, minor in LIMITS]
_Capability = Annotated[
    str,
    Meta(
        pattern=rf"^({'|'.join(map(re.escape, _CAPABILITIES))})\Z",
        description=f'text and one of {", ".join(_CAPABILITIES)} (as in "8.9")',
    ),
]
_Link = Annotated[
    str,
    Meta(
        pattern=rf"^({_LINK.pattern}|{_C2C}|{_UNIFIED})\Z",
        description=f'like "PCIe 4.0 x16", or "{_C2C}" or "{_UNIFIED}"',
    ),
]


_PRICE = "a table with value, unit, date and source"


class _CardTable(TypedDict, total=False):
    name: Text
    aliases: Annotated[tuple[Text, ...], Meta(description="a list of texts")]
    vendor_name: Text
    kind: GpuKind
    architecture: Text
    compute_capability: _Capability
    total_bytes: _Count
    memory_estimated: _Flag
    memory_source: Text
    sm_count: _Count
    l2_bytes: _Count
    bandwidth_gbs: PositiveNumber
    memory_bus_bits: _Count
    boost_clock_mhz: PositiveNumber
    peak_tflops: Annotated[
        Mapping[str, PositiveNumber], Meta(min_length=1, description="a table of dtype = TFLOP/s")
    ]
    link: _Link
    host_link_gbs: PositiveNumber
    peer_link: Text
    peer_link_gbs: PositiveNumber
    network_gbs: PositiveNumber
    context_bytes: _Count
    context_source: Text
    integrated: _Flag
    price: Annotated[Price, Meta(description=_PRICE)]
    source: Text
    notes: Text


_KEYS = tuple(_CardTable.__annotations__)
_REQUIRED = (
    "name",
    "total_bytes",
    "compute_capability",
    "sm_count",
    "l2_bytes",
    "bandwidth_gbs",
    "memory_bus_bits",
    "boost_clock_mhz",
    "link",
    "peak_tflops",
)

_SCALED = {
    "bandwidth_gbs": ("bandwidth", 1e9),
    "boost_clock_mhz": ("boost_clock", 1e6),
    "host_link_gbs": ("host_link", 1e9),
    "peer_link_gbs": ("peer_bandwidth", 1e9),
    "network_gbs": ("network_bandwidth", 1e9),
}
"""Keys with a unit, with the attribute of `GpuSpec` and the factor that they stand for."""


def link_rate(link: str, bandwidth: float) -> float:
    """Give the rate in B/s one way of a link in words, such as ``"PCIe 4.0 x16"``.

    With unified memory a copy to the host stays in the same memory, so ``bandwidth`` (B/s) is its rate.
    """
    if link == _UNIFIED:
        return bandwidth
    match = _LINK.fullmatch(link)
    if match is None:
        return _C2C_GBS * 1e9
    return _PCIE_GBS_PER_LANE[match.group(1)] * int(match.group(2)) * 1e9


# What people call a key that has another name here.
_SYNONYMS = {
    "memory": "total_bytes",
    "memory_bytes": "total_bytes",
    "vram": "total_bytes",
    "size": "total_bytes",
    "cc": "compute_capability",
    "sms": "sm_count",
    "speed": "boost_clock_mhz",
    "clock": "boost_clock_mhz",
    "tflops": "peak_tflops",
    "flops": "peak_tflops",
    "pcie": "link",
}


def _nearest_key(key: str) -> str:
    """The known key that an unknown one most likely means."""
    asked = key.lower()
    if asked in _SYNONYMS:
        return _SYNONYMS[asked]
    return max(
        ("base", *_KEYS), key=lambda known: SequenceMatcher(None, asked, known, autojunk=False).ratio()
    )


def _read_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of `GpuSpec` that a table gives.

    Raises:
        ValueError: what is wrong with the table, in one line.
    """
    for key in table:
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}: did you mean {_nearest_key(key)!r}?")
    try:
        values: dict[str, Any] = read(
            {key: _prepared(value, key) for key, value in table.items()}, _CardTable
        )
    except Misfit as misfit:
        raise ValueError(f"{misfit.place} must be {misfit.wanted}, not {misfit.value!r}") from None
    for key, (attribute, factor) in _SCALED.items():
        if key in values:
            values[attribute] = _scaled(values.pop(key), factor)
    if "compute_capability" in values:
        major, minor = values["compute_capability"].split(".")
        values["compute_capability"] = (int(major), int(minor))
    if "peak_tflops" in values:
        rates = values.pop("peak_tflops")
        values["peak_flops"] = MappingProxyType({dtype: _scaled(rate, 1e12) for dtype, rate in rates.items()})
    return values


def _prepared(value: Any, key: str) -> Any:
    """A value with sizes as numbers of bytes and dates as text, in tables that have known keys only."""
    if key.endswith("_bytes") and isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    if key == "peak_tflops" and isinstance(value, dict):
        for dtype in value:
            if dtype not in DTYPES:
                raise ValueError(f"{key}.{dtype} is not a known dtype: write one of {', '.join(DTYPES)}")
    if key == "price" and isinstance(value, dict):
        if value.keys() != Price.__annotations__.keys():
            raise ValueError(f"price must be {_PRICE}, not {value!r}")
        return {name: item.isoformat() if isinstance(item, date) else item for name, item in value.items()}
    return value


def _scaled(value: float, factor: float) -> float:
    """A figure in another unit, rounded so that 82.6 TFLOP/s is 82.6e12 to the last digit."""
    return float(round(value * factor))


def card_from_table(table: Mapping[str, Any], *, where: str, base: GpuSpec | None = None) -> GpuSpec:
    """Build a card from a table, with what the table leaves out taken from ``base``.

    Args:
        table: keys and values as in this module's docstring, without ``base``.
        where: what to name in the message of an error, such as the path of the file.
        base: the card to inherit from; None when every required key must be given.

    Raises:
        UsageError: an unknown key, a missing one, or a value of the wrong type or range.
    """
    try:
        values = _read_keys(table)
        if base is not None:
            return _inherit(base, values, where)
        missing = [key for key in _REQUIRED if key not in table]
        if missing:
            raise ValueError(f'missing {", ".join(missing)} (or inherit them with base = "RTX 4090")')
    except ValueError as error:
        raise UsageError(
            f"{where} does not describe a card: {error}", "See 'vramfit gpus NAME' for an example"
        ) from None
    values.setdefault("host_link", link_rate(values["link"], values["bandwidth"]))
    values.setdefault("vendor_name", values["name"])
    values.setdefault("architecture", ARCHITECTURES[values["compute_capability"]])
    values.setdefault("source", where)
    return GpuSpec(**values)


def _inherit(base: GpuSpec, values: dict[str, Any], where: str) -> GpuSpec:
    """Overlay ``values`` on ``base``; what belongs to the other card only (aliases, price, context) goes."""
    if "compute_capability" in values:
        values.setdefault("architecture", ARCHITECTURES[values["compute_capability"]])
    if "link" in values:
        values.setdefault("host_link", link_rate(values["link"], values.get("bandwidth", base.bandwidth)))
    if "total_bytes" in values:
        values.setdefault("memory_estimated", False)
        values.setdefault("memory_source", where)
    own: dict[str, Any] = {
        "name": f"{base.name} ({where})",
        "aliases": (),
        "kind": GpuKind.GENERIC,
        "price": None,
        "source": f"{where}, based on {base.name} ({base.source})",
        "notes": "",
    }
    return replace(base, **(own | values))


def read_card_file(path: Path, find_base: Callable[[str], GpuSpec]) -> GpuSpec:
    """Read a user's card file.

    Args:
        find_base: gives the card that ``base`` names.

    Raises:
        UsageError: the file cannot be read, is not TOML, or does not describe a card.
        UnknownGpuError: ``base`` names no card.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the card file {path}: {error.strerror}", "Check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the card file {path} is not UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the card file {path} is not TOML: {error}") from error
    base_name = table.pop("base", None)
    if base_name is None:
        return card_from_table(table, where=str(path))
    if not isinstance(base_name, str):
        raise UsageError(f"{path} does not describe a card: base must be text, not {base_name!r}")
    return card_from_table(table, where=str(path), base=find_base(base_name))


# -- Read the catalogue: a TOML file in the package, one table per card, every figure with its source --------


@cache
def _document() -> dict[str, Any]:
    text = files("vramfit.gpus").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def catalogue() -> tuple[GpuSpec, ...]:
    """Give every card of the catalogue, in the order of the file: by generation, then from small to large."""
    return tuple(card_from_table(table, where="catalogue.toml") for table in _document()["card"])


@cache
def ambiguous_names() -> dict[str, tuple[str, ...]]:
    """Give the names that are used for different cards, with the cards each could mean."""
    return {name: tuple(cards) for name, cards in _document()["ambiguous"].items()}
