"""A TOML table that describes a card as a GpuSpec, or in one line what is wrong with it; and the catalogue of them.

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
from typing import Any

from vramfit.errors import UsageError
from vramfit.gpus.spec import ARCHITECTURES, LIMITS, GpuKind, GpuSpec, Price
from vramfit.units import parse_bytes

DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8", "int8", "fp4")

# GB/s of one lane one way, as the PCI Express base specifications give them after encoding.
_PCIE_GBS_PER_LANE = {"3.0": 0.985, "4.0": 1.969, "5.0": 3.938, "6.0": 7.563}
_LINK = re.compile(r"PCIe (3\.0|4\.0|5\.0|6\.0) x(1|2|4|8|16)")
_C2C = "NVLink-C2C"
_UNIFIED = "unified memory"
_C2C_GBS = 450.0  # NVIDIA states 900 GB/s for both directions together

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


class _Fault(Exception):
    """One thing wrong with a table; the caller adds where."""


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Fault(f"{key} must be text, not {value!r}")
    return value


def _texts(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _Fault(f"{key} must be a list of texts, not {value!r}")
    return tuple(_text(item, key) for item in value)


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise _Fault(f"{key} must be true or false, not {value!r}")
    return value


def _positive(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _Fault(f"{key} must be a positive number, not {value!r}")
    return float(value)


def _scaled(factor: float) -> Callable[[Any, str], float]:
    return lambda value, key: round(_positive(value, key) * factor) * 1.0


def _count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _Fault(f"{key} must be a positive whole number, not {value!r}")
    return value


def _size(value: Any, key: str) -> int:
    if isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError as error:
            raise _Fault(f"{key}: {error}") from None
    return _count(value, key)


def _capability(value: Any, key: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)", value) if isinstance(value, str) else None
    capability = (int(match.group(1)), int(match.group(2))) if match else None
    if capability not in LIMITS:
        known = ", ".join(f"{major}.{minor}" for major, minor in LIMITS)
        raise _Fault(f'{key} must be text and one of {known} (as in "8.9"), not {value!r}')
    return capability


def _peaks(value: Any, key: str) -> Mapping[str, float]:
    if not isinstance(value, dict) or not value:
        raise _Fault(f"{key} must be a table of dtype = TFLOP/s, not {value!r}")
    for dtype in value:
        if dtype not in DTYPES:
            raise _Fault(f"{key}.{dtype} is not a known dtype: write one of {', '.join(DTYPES)}")
    rates = {dtype: _positive(rate, f"{key}.{dtype}") for dtype, rate in value.items()}
    # round() so that 82.6 TFLOP/s is 82.6e12 to the last digit
    return MappingProxyType({dtype: float(round(rate * 1e12)) for dtype, rate in rates.items()})


def _price(value: Any, key: str) -> Price:
    if not isinstance(value, dict) or set(value) != {"value", "unit", "date", "source"}:
        raise _Fault(f"{key} must be a table with value, unit, date and source, not {value!r}")
    if value["unit"] not in ("USD", "USD/h"):
        raise _Fault(f'{key}.unit must be "USD" or "USD/h", not {value["unit"]!r}')
    when = (
        value["date"].isoformat() if isinstance(value["date"], date) else _text(value["date"], f"{key}.date")
    )
    return Price(
        value=_positive(value["value"], f"{key}.value"),
        unit=value["unit"],
        date=when,
        source=_text(value["source"], f"{key}.source"),
    )


def _kind(value: Any, key: str) -> GpuKind:
    try:
        return GpuKind(value)
    except ValueError:
        raise _Fault(
            f"{key} must be one of {', '.join(kind.value for kind in GpuKind)}, not {value!r}"
        ) from None


def _link(value: Any, key: str) -> str:
    if not isinstance(value, str) or (value not in (_C2C, _UNIFIED) and not _LINK.fullmatch(value)):
        raise _Fault(f'{key} must be like "PCIe 4.0 x16", or "{_C2C}" or "{_UNIFIED}", not {value!r}')
    return value


# key in the file -> (attribute of GpuSpec, reader)
_KEYS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "name": ("name", _text),
    "aliases": ("aliases", _texts),
    "vendor_name": ("vendor_name", _text),
    "kind": ("kind", _kind),
    "architecture": ("architecture", _text),
    "compute_capability": ("compute_capability", _capability),
    "total_bytes": ("total_bytes", _size),
    "memory_estimated": ("memory_estimated", _flag),
    "memory_source": ("memory_source", _text),
    "sm_count": ("sm_count", _count),
    "l2_bytes": ("l2_bytes", _size),
    "bandwidth_gbs": ("bandwidth", _scaled(1e9)),
    "memory_bus_bits": ("memory_bus_bits", _count),
    "boost_clock_mhz": ("boost_clock", _scaled(1e6)),
    "peak_tflops": ("peak_flops", _peaks),
    "link": ("link", _link),
    "host_link_gbs": ("host_link", _scaled(1e9)),
    "context_bytes": ("context_bytes", _size),
    "context_source": ("context_source", _text),
    "integrated": ("integrated", _flag),
    "price": ("price", _price),
    "source": ("source", _text),
    "notes": ("notes", _text),
}


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
    """The key that one of another name most likely stands for."""
    asked = key.lower()
    if asked in _SYNONYMS:
        return _SYNONYMS[asked]
    return max(
        ("base", *_KEYS), key=lambda known: SequenceMatcher(None, asked, known, autojunk=False).ratio()
    )


def _read_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    for key in table:
        if key not in _KEYS:
            raise _Fault(f"unknown key {key!r}: did you mean {_nearest_key(key)!r}?")
    return {attribute: read(table[key], key) for key, (attribute, read) in _KEYS.items() if key in table}


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
            raise _Fault(f'missing {", ".join(missing)} (or inherit them with base = "RTX 4090")')
    except _Fault as fault:
        raise UsageError(
            f"{where} does not describe a card: {fault}", "See 'vramfit gpus NAME' for an example"
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
        path: the TOML file.
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
