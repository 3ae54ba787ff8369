"""Ranks of one job on the cards: each on its own, contexts on nobody else's, and what forks inherited. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vramfit.doctor.facts import Check, Facts, Finding, FindingArea, HostProcess
from vramfit.units import MIB, format_bytes

_LISTED = 4
_CONTEXT = 1536 * MIB
"""At most this much of a rank on a card that is not its own is taken for a context and what came with it: around 1 GB
in github.com/pytorch/pytorch/issues/135279."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlaces:
    """Where the ranks of one job are.

    Attributes:
        own: by process, the card on which it holds most.
        held: by process and card, bytes.
        names: how each process is told of: ``rank 3 (pid 4711)``.
    """

    own: Mapping[int, int]
    held: Mapping[tuple[int, int], int]
    names: Mapping[int, str]


def jobs_on_cards(facts: Facts) -> tuple[RankPlaces, ...]:
    """The jobs of several processes that compute on the cards here.

    Processes belong together if a launcher gave them one port to meet at, or if they are children of one process and
    run one program. Processes whose memory the driver does not tell are left out, and so is all where it names
    processes of the host that are not seen in this container.
    """
    known = {process.pid: process for process in facts.processes}
    held: dict[tuple[int, int], int] = {}
    for card in facts.cards:
        for process in card.processes:
            if not process.graphics and process.used_bytes and process.pid in known:
                held[process.pid, card.index] = process.used_bytes
    groups = defaultdict(set)
    for pid, _ in held:
        groups[_job(known[pid])].add(pid)
    found = []
    for job in sorted(groups):
        pids = sorted(groups[job])
        if len(pids) < 2:
            continue
        of_job = {place: nbytes for place, nbytes in held.items() if place[0] in groups[job]}
        found.append(
            RankPlaces(
                own={pid: _own_card(of_job, pid) for pid in pids},
                held=of_job,
                names={pid: _called(known[pid]) for pid in pids},
            )
        )
    return tuple(found)


def _own_card(held: Mapping[tuple[int, int], int], pid: int) -> int:
    """The card on which a process holds most; of equals the last, as strays are on the first."""
    return max((nbytes, card) for (one, card), nbytes in held.items() if one == pid)[1]


def _job(process: HostProcess) -> tuple[str, int, str]:
    if process.job:
        return (process.job, 0, "")
    return ("", process.parent, process.name) if process.parent > 1 else ("", -process.pid, "")


def _called(process: HostProcess) -> str:
    rank = process.rank if process.rank is not None else process.local_rank
    return f"pid {process.pid}" if rank is None else f"rank {rank} (pid {process.pid})"


def check_shared_cards(facts: Facts) -> Iterator[Finding]:
    """Several ranks compute on one card."""
    for places in jobs_on_cards(facts):
        by_card = defaultdict(list)
        for pid, card in places.own.items():
            by_card[card].append(pid)
        for card, pids in sorted(by_card.items()):
            if len(pids) < 2:
                continue
            total = sum(places.held[pid, card] for pid in pids)
            idle = [one.index for one in facts.cards if one.index not in by_card and not one.mig_enabled]
            others = (
                f", while GPU {_numbers(idle)} {'has' if len(idle) == 1 else 'have'} none" if idle else ""
            )
            yield FindingArea.RANKS.warning(
                "ranks-on-one-card",
                f"GPU {card}: {len(pids)} ranks of one job hold {format_bytes(total)}: "
                f"{_listed(places, pids)}{others}",
                why="each has its own context, and its own copy of what is not sharded; NCCL refuses two ranks on one "
                "card ('Duplicate GPU detected')",
                fix="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything touches CUDA, and as many "
                "processes as there are cards (torchrun --nproc-per-node)",
            )


def check_stray_contexts(facts: Facts) -> Iterator[Finding]:
    """A rank has memory on a card that is another rank's: most often every rank's context on GPU 0."""
    for places in jobs_on_cards(facts):
        strays = defaultdict(list)
        for pid, card in places.held:
            if card != places.own[pid]:
                strays[card].append(pid)
        for card, pids in sorted(strays.items()):
            total = sum(places.held[pid, card] for pid in pids)
            small = all(places.held[pid, card] <= _CONTEXT for pid in pids)
            what = "contexts" if small else "memory"
            yield FindingArea.RANKS.warning(
                "context-on-another-card",
                f"GPU {card}: {what} of {len(pids)} rank{'s' * (len(pids) > 1)} whose own card is another: "
                f"{format_bytes(total)}, {_listed(places, sorted(pids))}",
                why="that memory is missing for the rank whose card it is, which is the first to run out; its "
                "allocator does not see it",
                fix="torch.cuda.set_device(LOCAL_RANK) first, or CUDA_VISIBLE_DEVICES with one card each; "
                "torch.load(..., map_location='cpu'); barrier(device_ids=[LOCAL_RANK]); "
                "init_process_group(device_id=...)",
            )


def check_forks(facts: Facts) -> Iterator[Finding]:
    """Processes that were forked from one with a context: they keep the card's memory, and cannot use it."""
    on_cards = {process.pid for card in facts.cards for process in card.processes}
    known = {process.pid: process for process in facts.processes}
    if facts.container.kind and not on_cards & known.keys():
        return  # the driver names no process that is seen here: which of them have a context is not known
    heirs = [one for one in facts.processes if one.has_card_open and one.pid not in on_cards]
    alive = [one for one in heirs if one.parent in on_cards]
    orphans = [one for one in heirs if one.parent <= 1]
    if orphans:
        yield FindingArea.RANKS.warning(
            "forks-left-behind",
            f"{len(orphans)} process{'es' * (len(orphans) > 1)} of a program that has ended still "
            f"{'have' if len(orphans) > 1 else 'has'} a card open: {_pids(orphans)}",
            why="a fork of a process with a CUDA context keeps that context's memory on the card, also after the "
            "process has ended; the driver names nobody for it",
            fix=f"End them: kill {' '.join(str(one.pid) for one in orphans[:_LISTED])}",
        )
    if alive:
        yield FindingArea.RANKS.info(
            "fork-after-cuda",
            f"{len(alive)} process{'es were' if len(alive) > 1 else ' was'} forked after CUDA was started: "
            f"{_pids(alive)}",
            why="they cannot use CUDA ('Cannot re-initialize CUDA in forked subprocess'); should their parent die, "
            "its memory on the card stays taken until they end",
            fix="Nothing to do for DataLoader workers that stay on the CPU; else start them before CUDA, or with "
            "multiprocessing_context='spawn' or 'forkserver'",
        )


def _listed(places: RankPlaces, pids: list[int]) -> str:
    more = len(pids) - _LISTED
    return ", ".join(places.names[pid] for pid in pids[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _pids(processes: list[HostProcess]) -> str:
    more = len(processes) - _LISTED
    named = ", ".join(f"{one.name or '?'} (pid {one.pid})" for one in processes[:_LISTED])
    return named + (f" and {more} more" if more > 0 else "")


def _numbers(cards: list[int]) -> str:
    return ", ".join(map(str, cards))


CHECKS: tuple[Check, ...] = (check_shared_cards, check_stray_contexts, check_forks)
