"""Ranks of a distributed program side by side: in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from vramfit.analysis import NAMES, DeviceVerdict, Outcome
from vramfit.analysis.rank_memory import (
    NEVER_JOINED,
    Balance,
    PeerKind,
    RankMemory,
    RankSpan,
    WorldMemory,
    rank_numbers,
)
from vramfit.plain import to_plain
from vramfit.report.folding import broken, table
from vramfit.report.json_report import peak_of
from vramfit.report.rendering import json_values, printed_as_page, to_json
from vramfit.report.sections import Sections
from vramfit.report.text import elide_middle, exit_words
from vramfit.trace import Category
from vramfit.units import counted, format_bytes

RANKS_SCHEMA = "vramfit.ranks/1"

_EVEN = 1.02
"""What the largest rank may take of the mean without a word."""
_ERROR = 300
_PEERS = 16
"""Stages or ranks of experts that are listed."""
_SHOWN = 6
"""Warnings that are shown."""
_HEADS = {Category.OPTIMIZER_STATE: "optimizer"}
_WORDS = {
    Outcome.FITS: "fits",
    Outcome.DOES_NOT_FIT: "does not",
    Outcome.FAILED: "failed",
    Outcome.FITS_SO_FAR: "so far",
    Outcome.UNUSED: "no card",
    Outcome.UNKNOWN: "unknown",
}


@printed_as_page(WorldMemory)
class _WorldReport(Sections):
    """The report for one width."""

    def __init__(self, width: int, root: Path | None) -> None:
        super().__init__(width, root)

    def lines(self, found: WorldMemory) -> Iterator[Text]:
        """The verdict, the ranks, the hosts, and what limits the answer."""
        yield from broken(world_headline(found), self.width)
        for reason in found.why:
            yield from broken(Text(f"  {reason}"), self.width, indent=4)
        if not found.joined:
            yield from broken(
                Text(
                    "  ! the program never calls init_process_group: each rank does all of the work by itself",
                    style="bold yellow",
                ),
                self.width,
                indent=4,
            )
        yield Text()
        yield self.heading("Ranks")
        yield from self._ranks(found)
        for balance in found.balances:
            yield from self._balance(balance, found)
        yield from self._standing(found)
        yield from self._hosts(found)
        yield from self._warnings(found)

    def _ranks(self, found: WorldMemory) -> Iterator[Text]:
        """Ranks that are alike in one row, and where their bytes are."""
        shown = found.rows
        styles = ["bold" if found.decisive in row.ranks else "" for row in shown]
        rows = [
            [
                Text(row.name, style=style),
                Text(_WORDS[row.first.verdict.outcome], style="" if row.first.verdict.fits else "red"),
                Text(format_bytes(row.first.needed)),
                Text(format_bytes(row.first.card.peak_reserved)),
                Text(format_bytes(row.first.card.peak_allocated)),
            ]
            for row, style in zip(shown, styles, strict=True)
        ]
        yield from table(("rank", "", "total", "reserved", "allocated"), rows, self.width)
        kinds = [kind for kind in NAMES if any(_part(row.first, kind) for row in shown)]
        if kinds:
            yield Text()
            yield self.heading("Where it is allocated at each one's peak")
            parts = [
                [Text(row.name, style=style), *(Text(format_bytes(_part(row.first, kind))) for kind in kinds)]
                for row, style in zip(shown, styles, strict=True)
            ]
            yield from table(("rank", *(_HEADS.get(kind, NAMES[kind]) for kind in kinds)), parts, self.width)

    def _balance(self, balance: Balance, found: WorldMemory) -> Iterator[Text]:
        """Stages of a pipeline, or ranks with experts, and by how much the worst exceeds the mean."""
        stages = balance.kind is PeerKind.STAGES
        yield Text()
        yield self.heading("Stages of the pipeline" if stages else "Ranks that hold experts together")
        mean = balance.mean
        members = sorted(balance.members, key=lambda one: -one.reserved)[:_PEERS]
        shown = [one for one in balance.members if one in members]
        rows = [
            [
                Text(one.name),
                *([Text(", ".join(map(str, one.ranks)))] if stages else []),
                Text(format_bytes(one.reserved)),
                Text(f"{one.reserved / mean:.2f}" if mean else ""),
            ]
            for one in shown
        ]
        heads = (
            ("stage", "rank", "reserved", "of the mean") if stages else ("rank", "reserved", "of the mean")
        )
        yield from table(heads, rows, self.width)
        more = len(balance.members) - len(shown)
        ran = len(balance.members)
        of = f"the {ran} of {balance.count} that ran" if ran < balance.count else f"all {ran}"
        worst = f"{'stage' if stages else 'rank'} {balance.worst.name}"
        notes = [
            f"{worst} reserves {balance.excess:.2f} times the mean of {of}, {format_bytes(mean)}"
            if balance.excess > _EVEN
            else f"{of} reserve about as much, {format_bytes(mean)}"
        ]
        if more > 0:
            notes.append(f"{more} smaller ones are not listed")
        if not stages:
            notes.append(_tokens(found.assume, balance.count))
            if bound := _with_the_even_share(found, balance):
                notes.append(bound)
        for note in notes:
            yield from broken(Text(f"  {note}"), self.width, indent=4)

    def _standing(self, found: WorldMemory) -> Iterator[Text]:
        """Which ranks ran, and what is taken of the others."""
        notes = []
        if len(found.ranks) < found.size:
            notes.append(f"ran: {_numbers(found.ranks)}")
        waited = tuple(rank for rank in found.ranks if rank.waited_for)
        if waited:
            notes.append(f"{_numbers(waited)} ran since another rank waited for them")
        taken = [span for rank in found.ranks for span in rank.stands_for if span.alike]
        if any(span.same_place for span in taken):
            notes.append(
                "ranks that hold the same place in the program's groups are taken to be alike, as those that ran are"
            )
        if any(not span.same_place for span in taken):
            notes.append("ranks between two that ran and are alike are taken to be like them")
        notes += [
            f"{_spans(doubtful)} did not run and may differ from all that did: taken to be like the larger of the "
            f"neighbours that ran, rank {rank.rank}"
            for rank in found.ranks
            if (doubtful := [span for span in rank.stands_for if not span.alike])
        ]
        if found.known < found.size:
            missing = found.size - found.known
            notes.append(f"nothing is known of {counted(missing, 'other rank')}: --rank all runs every one")
        if found.imbalance > _EVEN:
            notes.append(f"the largest reserves {found.imbalance:.2f} times the mean")
        notes += [_stray(rank, card) for rank in found.ranks for card in rank.strays]
        if notes:
            yield Text()
        for note in notes:
            yield from broken(Text(f"  {note}"), self.width, indent=4)

    def _hosts(self, found: WorldMemory) -> Iterator[Text]:
        pinned = [node for node in found.nodes if node.pinned]
        if not pinned:
            return
        yield Text()
        yield self.heading("Page-locked host memory")
        for node in pinned:
            name = (
                f"node {node.first}"
                if node.first == node.last
                else f"nodes {node.first} to {node.last}, each"
            )
            ranks = counted(node.ranks, "rank")
            yield from broken(Text(f"  {name}: {format_bytes(node.pinned)} of {ranks}"), self.width, indent=4)

    def _warnings(self, found: WorldMemory) -> Iterator[Text]:
        messages = list(dict.fromkeys(one.message for one in found.warnings if one.code != NEVER_JOINED))
        if not messages:
            return
        yield Text()
        yield self.heading("Warnings")
        for message in messages[:_SHOWN]:
            yield from broken(Text(f"  {message}", style="yellow"), self.width, indent=4)
        if (more := len(messages) - _SHOWN) > 0:
            yield Text(f"  and {more} more: --json lists them all", style="bright_black")


def _stray(rank: RankMemory, card: DeviceVerdict) -> str:
    """That a rank is on a card of another one."""
    fix = "call torch.cuda.set_device(LOCAL_RANK) before anything else"
    where = f"GPU {card.index}, another rank's card"
    if rank.card is card:  # and not on its own at all
        return f"rank {rank.rank} runs on {where}; NCCL refuses two ranks on one card: {fix}"
    return f"rank {rank.rank} holds {format_bytes(card.used)} of {where}, which is not counted there: {fix}"


def _tokens(assume: str, ranks: int) -> str:
    """What was assumed of the tokens that reach a rank, and the most that it could be."""
    stated = assume.partition("imbalance=")[2]
    if not stated:
        return (
            f"each is taken to receive the even share of tokens; one could receive up to {ranks} times that "
            "(--assume imbalance=K states K times)"
        )
    factor = min(float(stated), ranks)
    return (
        f"each that ran is taken to be the worst and to receive {factor:g} times the even share of tokens, as "
        f"--assume states; without a statement one could receive up to {ranks} times that share"
    )


def _with_the_even_share(found: WorldMemory, balance: Balance) -> str:
    """What the rank that holds most would hold at least if no other received more tokens; empty without a statement."""
    if "imbalance=" not in found.assume:
        return ""
    rank = next(one for one in found.ranks if str(one.rank) == balance.worst.name)
    card = rank.card
    if not card.error_below:
        return ""
    most, least = format_bytes(card.peak_allocated), format_bytes(card.peak_allocated - card.error_below)
    return f"rank {rank.rank} holds {most} at its peak, and at least {least} with the even share"


def world_headline(found: WorldMemory) -> Text:
    """Whether all ranks fit, and which is the worst."""
    worst = found.decisive
    card = worst.card
    where = f"{counted(found.size, 'card')} {card.gpu}"
    nodes = -(-found.size // found.per_node)
    if nodes > 1:
        where += f" on {counted(nodes, 'node')}"
    ran = len(found.ranks)
    told = f"; {ran:,} of {found.size:,} ranks ran" if ran < found.size else ""
    failed = found.failed
    if found.fits is False:
        beyond = format_bytes(worst.verdict.short_by)
        return Text.assemble(
            ("✗ does not fit ", "bold red"),
            f"{where}: rank {worst.rank} is the worst, {beyond} short of {format_bytes(card.total)}{told}",
        )
    if failed is not None:
        error = elide_middle(failed.run.error or exit_words(failed.run.exit_code), _ERROR)
        return Text.assemble(
            ("! the program failed ", "bold red"), f"on rank {failed.rank} of {found.size:,}: {error}"
        )
    if found.fits is None and worst.verdict.outcome is Outcome.FITS_SO_FAR:
        return Text.assemble(
            ("~ fits so far ", "bold yellow"),
            f"{where}: it was ended early; until then rank {worst.rank} took the most, "
            f"{format_bytes(worst.needed)} of {format_bytes(card.total)}{told}",
        )
    if found.fits is None:
        return Text.assemble(
            ("! not known ", "bold yellow"),
            f"whether it fits {where}: rank {worst.rank} {_WORDS[worst.verdict.outcome]}{told}",
        )
    return Text.assemble(
        ("✓ fits ", "bold green"),
        f"{where}: rank {worst.rank} is the worst, {format_bytes(worst.needed)} of {format_bytes(card.total)}, "
        f"{format_bytes(card.headroom)} free{told}",
    )


def _part(rank: RankMemory, kind: Category) -> int:
    return rank.card.breakdown.categories.get(kind, 0)


def _numbers(ranks: Sequence[RankMemory]) -> str:
    """Numbers of ranks that ran, all of them."""
    return rank_numbers(((rank.rank, rank.rank) for rank in ranks), most=len(ranks))


def _spans(spans: Sequence[RankSpan]) -> str:
    return rank_numbers((span.first, span.last) for span in spans)


@json_values.register(WorldMemory)
def _json_values(found: WorldMemory) -> dict[str, Any]:
    """The same as plain values; docs/json.md describes them."""
    worst = found.decisive
    return {
        "schema": RANKS_SCHEMA,
        "program": list(worst.run.program),
        "launcher": found.launcher or None,
        "gpu": {"name": worst.card.gpu, "total_bytes": worst.card.total},
        "world_size": found.size,
        "ranks_per_node": found.per_node,
        "nodes": -(-found.size // found.per_node),
        "joined": found.joined,
        "fits": found.fits,
        "worst": {"rank": worst.rank, "why": list(found.why)},
        "known_ranks": found.known,
        "imbalance": round(found.imbalance, 6),
        "assume": found.assume,
        "balances": [_balance_values(balance) for balance in found.balances],
        "ranks": [_rank(rank) for rank in found.ranks],
        "hosts": [
            {
                "first_node": node.first,
                "last_node": node.last,
                "ranks": node.ranks,
                "pinned_bytes": node.pinned,
            }
            for node in found.nodes
        ],
        "warnings": to_plain(found.warnings),
        "run": to_json(worst.run, worst.verdict),
        "against": None,
    }


def _balance_values(balance: Balance) -> dict[str, Any]:
    return {
        "kind": balance.kind.name.lower(),
        "count": balance.count,
        "mean_reserved_bytes": balance.mean,
        "worst": balance.worst.name,
        "excess": round(balance.excess, 6),
        "members": [
            {
                "name": member.name,
                "ranks": list(member.ranks),
                "reserved_bytes": member.reserved,
                "allocated_bytes": member.allocated,
            }
            for member in balance.members
        ],
    }


def _rank(rank: RankMemory) -> dict[str, Any]:
    card = rank.card
    categories = card.breakdown.categories
    return {
        "rank": rank.rank,
        "node": rank.node,
        "device": card.index,
        "other_devices": [{"device": one.index, "total_bytes": one.used} for one in rank.strays],
        "stands_for": [
            {"first": one.first, "last": one.last, "alike": one.alike, "same_place": one.same_place}
            for one in rank.stands_for
        ],
        "waited_for": rank.waited_for,
        "fits": rank.verdict.fits,
        "certain": rank.verdict.certain,
        "outcome": rank.verdict.outcome.name.lower(),
        "exit_code": rank.run.exit_code,
        "error": rank.run.error,
        "total_bytes": rank.needed,
        "outside_pytorch_bytes": card.context,
        "peak": peak_of(card),
        "headroom_bytes": card.headroom,
        "short_by_bytes": rank.verdict.short_by,
        "categories": {
            kind.name.lower(): categories.get(kind, 0) for kind in (*list(Category)[1:], Category.OTHER)
        },
        "host_pinned_peak_bytes": rank.run.host_pinned_peak_bytes,
        "steps": rank.run.progress.steps,
        "seconds_simulated": rank.run.seconds_simulated,
        "seconds_wall": rank.run.seconds_wall,
    }
