"""Makes the tables of docs/parallel.md about NCCL: what it takes by card, and what others measured against it.

    python studies/nccl_tables.py

`tests/gpus/nccl/test_nccl_page.py` fails where the page is out of date. Nothing was fitted to the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.gpus import find_gpu
from vramfit.gpus.nccl.collective_times import NcclCollective, RankLayout, collective_seconds
from vramfit.gpus.nccl.communicator_use import ByteRange, CommunicatorUse
from vramfit.gpus.nccl.nccl_memory import communicator_memory, library_part, process_memory
from vramfit.gpus.nccl.nccl_settings import REFERENCE_NCCL, NcclSettings, NcclVersion
from vramfit.gpus.nccl.node_types import usual_node
from vramfit.units import GIB, MIB

PAGE = Path(__file__).parents[1] / "docs" / "parallel.md"
SUMMER_2023 = (2, 18, 3)
REDUCE = frozenset({NcclCollective.ALL_REDUCE})
SHARDED = frozenset({NcclCollective.ALL_GATHER, NcclCollective.REDUCE_SCATTER})
EXCHANGE = frozenset({NcclCollective.ALL_TO_ALL})


def layout(
    card: str, ranks: int, nodes: int = 1, version: NcclVersion = REFERENCE_NCCL, **settings: Any
) -> RankLayout:
    """Ranks in the machine that a card usually stands in."""
    spec = find_gpu(card)
    given = NcclSettings(**settings)
    return RankLayout(
        card=spec, node=usual_node(spec), ranks=ranks, nodes=nodes, version=version, settings=given
    )


def of_communicator(of: RankLayout, collectives: frozenset[NcclCollective]) -> ByteRange:
    """What a communicator takes of a card."""
    return communicator_memory(CommunicatorUse(layout=of, collectives=collectives)).total


def of_process(of: RankLayout, collectives: frozenset[NcclCollective], communicators: int = 1) -> ByteRange:
    """What NCCL takes in a process, its kernels with it."""
    use = CommunicatorUse(layout=of, collectives=collectives)
    return process_memory([use] * communicators).total


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A measurement of others, and what is said of its case."""

    source: str
    case: str
    measured: int
    said: ByteRange


def published() -> list[Published]:
    """All that were found."""
    lone = layout("RTX 3060", 1, cumem=True)
    rtx_3090 = layout("RTX 3090", 1, cumem=True)
    eager = layout("RTX 3090", 1, cumem=True, runtime_connect=False)
    rows: list[tuple[str, str, float, ByteRange]] = [
        (
            "nccl#964",
            "2 of 4 A100, all-reduce (2023)",
            544 * MIB,
            of_communicator(layout("A100", 2, version=SUMMER_2023), REDUCE),
        ),
        (
            "nccl#964",
            "3 or 4 of 4 A100, rank 0",
            688 * MIB,
            of_communicator(layout("A100", 4, version=SUMMER_2023), REDUCE),
        ),
        (
            "nccl#2363",
            "a single rank on B300: its pool",
            512 * MIB,
            of_communicator(layout("B300", 1, cumem=False), REDUCE),
        ),
        ("nccl#2366", "a single rank on RTX 3090, the first", 484 * MIB, of_process(rtx_3090, REDUCE)),
        ("nccl#2366", "the same with NCCL_RUNTIME_CONNECT=0", 996 * MIB, of_process(eager, REDUCE)),
        (
            "sglang#35538",
            "a single rank on RTX 3060, each further",
            388 * MIB,
            of_communicator(lone, REDUCE),
        ),
        ("sglang#35538", "the first of them", 470 * MIB, of_process(lone, REDUCE)),
        (
            "sglang#35538",
            "each further, with NCCL_MAX_NCHANNELS=1",
            10 * MIB,
            of_communicator(layout("RTX 3060", 1, cumem=True, max_channels=1), REDUCE),
        ),
        (
            "nccl#1685",
            "first all-to-all of 8 H100, GB of 10^9 bytes",
            3.28e9,
            of_process(layout("H100", 8, version=(2, 26, 2), cumem=True), EXCHANGE),
        ),
        (
            "nccl#1685",
            "the same, GB of 2^30 bytes",
            3.28 * GIB,
            of_process(layout("H100", 8, version=(2, 26, 2), cumem=True), EXCHANGE),
        ),
        (
            "nccl#864",
            "one communicator (2023; cards not named: 8 A100)",
            1.6e9,
            of_process(layout("A100", 8, version=SUMMER_2023), REDUCE),
        ),
        (
            "nccl#864",
            "one communicator (8 H100)",
            1.6e9,
            of_process(layout("H100", 8, version=SUMMER_2023), REDUCE),
        ),
        (
            "nccl#864",
            "three communicators (8 H100)",
            6e9,
            of_process(layout("H100", 8, version=SUMMER_2023), REDUCE, 3),
        ),
    ]
    return [
        Published(source=source, case=case, measured=round(measured), said=said)
        for source, case, measured, said in rows
    ]


def published_table() -> str:
    """What others measured, and where it falls."""
    lines = [
        "| measured by | what | measured, MiB | low | likely | high | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in published():
        said = row.said
        place = "in" if row.measured in said else "above" if row.measured > said.high else "below"
        figures = " | ".join(f"{one / MIB:,.0f}" for one in (row.measured, said.low, said.likely, said.high))
        lines.append(f"| {row.source} | {row.case} | {figures} | {place} |")
    return "\n".join(lines)


def card_table() -> str:
    """What NCCL takes by card: of a communicator that shards, that reduces, that exchanges, and of its kernels."""
    lines = [
        "| ranks | FSDP (all-gather, reduce-scatter) | DDP (all-reduce) | all-to-all | kernels, once |",
        "|---|---:|---:|---:|---:|",
    ]
    for card, ranks, nodes in (
        ("RTX 4090", 4, 1),
        ("RTX 3090", 2, 1),
        ("A100", 8, 1),
        ("A100", 64, 8),
        ("H100", 8, 1),
        ("H100", 64, 8),
        ("H100", 1024, 128),
        ("B200", 8, 1),
    ):
        of = layout(card, ranks, nodes)
        kernels = library_part(of.card).nbytes
        cells = [
            *(_range(of_communicator(of, kinds)) for kinds in (SHARDED, REDUCE, EXCHANGE)),
            _range(kernels),
        ]
        where = f"{ranks:,} x {of.card.name}" + (f" on {nodes} nodes" if nodes > 1 else "")
        lines.append(f"| {where} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(found: ByteRange) -> str:
    return f"{found.likely / MIB:,.0f} ({found.low / MIB:,.0f} to {found.high / MIB:,.0f})"


def times_table() -> str:
    """Milliseconds of collectives of 1 GiB and of 1 MiB."""
    lines = [
        "| ranks | all-reduce, 1 GiB | all-gather, 1 GiB | all-to-all, 1 GiB each | all-reduce, 1 MiB |",
        "|---|---:|---:|---:|---:|",
    ]
    for card, ranks, nodes in (
        ("RTX 4090", 4, 1),
        ("A100", 8, 1),
        ("A100", 64, 8),
        ("H100", 8, 1),
        ("H100", 64, 8),
        ("H100", 1024, 128),
        ("B200", 8, 1),
    ):
        of = layout(card, ranks, nodes)
        cells = [
            f"{1e3 * collective_seconds(kind, nbytes, of):,.2f}"
            for kind, nbytes in (
                (NcclCollective.ALL_REDUCE, GIB),
                (NcclCollective.ALL_GATHER, GIB),
                (NcclCollective.ALL_TO_ALL, GIB),
                (NcclCollective.ALL_REDUCE, MIB),
            )
        ]
        where = f"{ranks:,} x {of.card.name}" + (f" on {nodes} nodes" if nodes > 1 else "")
        lines.append(f"| {where} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {"published": published_table, "cards": card_table, "times": times_table}


def page() -> str:
    """The text of docs/parallel.md with its tables as they have to be."""
    text = PAGE.read_text(encoding="utf-8")
    for name, made in TABLES.items():
        begin, end = f"<!-- nccl {name}: made by studies/nccl_tables.py -->\n", f"<!-- end of nccl {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{made()}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
