"""`vramfit gpus [NAME]`: list the catalogue, or show one card with its sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vramfit.cli.options import gpu_names
from vramfit.cli.printing import wide_console
from vramfit.gpus import GpuMatch, GpuSpec, catalogue, match_gpu
from vramfit.units import GIB, MIB, format_bytes

SCHEMA = "vramfit.gpus/1"
_HEADS = ("GPU", "Architecture", "CC", "Memory", "SMs", "L2", "GB/s", "fp32", "fp16", "Price")
_TABLE = 100
"""Columns that the table takes; where there are fewer, each card gets a sentence."""


def gpus_command(
    # typer reads the annotation at run time and wants Optional spelled out on Python 3.11 as elsewhere
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="NAME",
            help="A card, such as 'RTX 4090'; a size, such as 24GiB; or a TOML file.",
            autocompletion=gpu_names,
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the GPUs that vramfit knows, or show one of them with the source of its figures."""
    match = match_gpu(name) if name is not None else None
    if json_output:
        typer.echo(json.dumps(_document(match), indent=2, ensure_ascii=False))
        return
    print_gpus(match, wide_console())


def print_gpus(match: GpuMatch | None, console: Console) -> None:
    """Print the catalogue, or all about the card that was found."""
    from vramfit.report.text import print_lines

    if match is not None:
        print_lines(console, _card_lines(match, console.width), console.width)
        return
    if console.width >= _TABLE:
        console.print(_table(catalogue()))
    else:
        print_lines(console, _narrow_lines(catalogue(), console.width), console.width)
    print_lines(console, [Text(line, style="dim") for line in _LEGEND], console.width)


_LEGEND = (
    "Memory as CUDA reports it on Linux (~ estimated). TFLOP/s are dense; fp16 accumulates in float32.",
    "'vramfit gpus NAME' shows a card with its sources.",
)


def _table(cards: Iterable[GpuSpec]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in _HEADS:
        table.add_column(heading, justify="left" if heading in _HEADS[:2] else "right", no_wrap=True)
    for card in cards:
        table.add_row(*_row(card))
    return table


def _narrow_lines(cards: Iterable[GpuSpec], width: int) -> Iterator[Text]:
    from vramfit.report.folding import table

    return table(_HEADS, [[Text(cell) for cell in _row(card)] for card in cards], width)


def _row(card: GpuSpec) -> list[str]:
    return [
        card.name,
        card.architecture,
        _capability(card),
        f"{'~' if card.memory_estimated else ''}{card.total_bytes / GIB:.2f} GiB",
        str(card.sm_count),
        f"{card.l2_bytes / MIB:.4g} MiB",
        f"{card.bandwidth / 1e9:.0f}",
        _tera(card, "float32"),
        _tera(card, "float16"),
        str(card.price) if card.price else "",
    ]


def _tera(card: GpuSpec, dtype: str) -> str:
    rate = card.peak_flops.get(dtype)
    return "" if rate is None else f"{rate / 1e12:.3g}" if rate < 1e15 else f"{rate / 1e12:.0f}"


def _card_lines(match: GpuMatch, width: int) -> Iterator[Text]:
    """The facts of a card, beside their names where there is room."""
    from vramfit.report.folding import NARROW, broken

    facts = list(_lines(match.spec))
    column = max(len(label) for label, _ in facts) + 2
    yield Text(match.spec.name, style="bold")
    for label, value in facts:
        if width < NARROW:
            yield from broken(Text.assemble((label, "bold"), f": {value}"), width, indent=4)
            continue
        name = Text(f"{label:<{column}}", style="bold")
        for line in broken(Text(value), width - column, indent=0):
            yield name + line
            name = Text(" " * column)
    if match.alternatives:
        others = ", ".join(card.name for card in match.alternatives)
        yield Text(f"The name also fits: {others}.", style="yellow")


def _lines(card: GpuSpec) -> Iterable[tuple[str, str]]:
    """Give the rows of the detail view; what is unknown is left out."""
    limits = card.limits
    clock = f"{card.boost_clock / 1e6:.0f} MHz boost"
    yield "Reported name", card.vendor_name
    yield "Kind", f"{card.kind.value}, {card.architecture}, compute capability {_capability(card)}"
    estimated = " (estimated)" if card.memory_estimated else ""
    yield "Memory", f"{format_bytes(card.total_bytes)} = {card.total_bytes:,} B{estimated}"
    yield "  source", card.memory_source or card.source
    measured = "" if card.context_bytes is not None else " (estimated from the SM count)"
    yield "CUDA context", f"{format_bytes(card.typical_context_bytes)}{measured}"
    if card.context_source:
        yield "  source", card.context_source
    yield "Bandwidth", f"{card.bandwidth / 1e9:,.0f} GB/s, {card.memory_bus_bits} bits"
    yield "SMs", f"{card.sm_count}, {clock}, {limits.max_threads_per_sm} threads each"
    yield "L2 cache", format_bytes(card.l2_bytes)
    yield "Shared memory", f"{format_bytes(limits.shared_memory_per_block_optin)} per block at most"
    yield "Dense TFLOP/s", ", ".join(f"{dtype} {_tera(card, dtype)}" for dtype in card.peak_flops)
    yield "Link to host", f"{card.link}, {card.host_link / 1e9:.1f} GB/s one way"
    if card.nvlink:
        yield "Link to cards", f"{card.nvlink}, {card.nvlink.bandwidth / 1e9:.1f} GB/s one way"
    if card.price:
        yield "Price", f"{card.price} ({card.price.source}, {card.price.date})"
    if card.aliases:
        yield "Also called", ", ".join(card.aliases)
    if card.notes:
        yield "Notes", card.notes
    yield "Source", card.source


def _capability(card: GpuSpec) -> str:
    return "{}.{}".format(*card.compute_capability)


def _document(match: GpuMatch | None) -> dict[str, Any]:
    """Give every card under ``gpus``, or one under ``gpu`` with the ``alternatives`` of its name."""
    if match is None:
        return {"schema": SCHEMA, "gpus": [_as_json(card) for card in catalogue()]}
    return {
        "schema": SCHEMA,
        "gpu": _as_json(match.spec),
        "alternatives": [card.name for card in match.alternatives],
    }


def _as_json(card: GpuSpec) -> dict[str, Any]:
    price = card.price
    return {
        "name": card.name,
        "aliases": list(card.aliases),
        "vendor_name": card.vendor_name,
        "kind": card.kind.value,
        "architecture": card.architecture,
        "compute_capability": _capability(card),
        "total_bytes": card.total_bytes,
        "memory_estimated": card.memory_estimated,
        "memory_source": card.memory_source,
        "sm_count": card.sm_count,
        "max_threads_per_sm": card.max_threads_per_sm,
        "shared_memory_per_block_optin_bytes": card.shared_memory_per_block_optin,
        "l2_bytes": card.l2_bytes,
        "bandwidth_bytes_per_second": card.bandwidth,
        "memory_bus_bits": card.memory_bus_bits,
        "boost_clock_hz": card.boost_clock,
        "peak_flops": dict(card.peak_flops),
        "link": card.link,
        "host_link_bytes_per_second": card.host_link,
        "nvlink": None if card.nvlink is None else str(card.nvlink),
        "nvlink_bytes_per_second": None if card.nvlink is None else card.nvlink.bandwidth,
        "context_bytes": card.context_bytes,
        "context_source": card.context_source,
        "typical_context_bytes": card.typical_context_bytes,
        "integrated": card.integrated,
        "price": price
        and {"value": price.value, "unit": price.unit, "date": price.date, "source": price.source},
        "notes": card.notes,
        "source": card.source,
    }
