"""What the ranks of a distributed program take, side by side: the worst of them and why, and the host of each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from vramfit.analysis._verdict import DeviceVerdict, Outcome, Verdict, verdict
from vramfit.errors import PeerEnded
from vramfit.trace import EXPERT_RANKS, PIPELINE_STAGES, Category, Run, RunWarning
from vramfit.units import format_bytes

NEVER_JOINED = "no-process-group"
"""Code of the warning of a program that never makes a process group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpan:
    """Ranks that were not run, and are taken to be like one that was.

    Attributes:
        first, last: their numbers.
        alike: they are taken to be like it; False where they may differ, and it is the larger of their neighbours.
        same_place: they are, since it holds the same place in the program's groups; False where they lie between two
            that are alike.
    """

    first: int
    last: int
    alike: bool = True
    same_place: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """One rank that ran.

    Attributes:
        rank: its number.
        local_rank: its number on its node, which is that of its card.
        node: of its node.
        run: what it did.
        verdict: whether it fits its card.
        stands_for: the ranks that it stands for.
        waited_for: it ran because another rank waited for it.
    """

    rank: int
    local_rank: int
    node: int
    run: Run
    verdict: Verdict
    stands_for: tuple[RankSpan, ...] = ()
    waited_for: bool = False

    @property
    def card(self) -> DeviceVerdict:
        """Its card; where it ran out on another, that one."""
        found = self.verdict.device
        if self.verdict.outcome is Outcome.DOES_NOT_FIT:
            return found
        return next((card for card in self.verdict.devices if card.index == self.local_rank), found)

    @property
    def strays(self) -> tuple[DeviceVerdict, ...]:
        """Cards of other ranks on which it holds memory. Where it sees one card alone, that is its own."""
        if len(self.run.trace.devices) == 1:
            return ()
        return tuple(card for card in self.verdict.devices if card.is_used and card.index != self.local_rank)

    @property
    def count(self) -> int:
        """How many ranks it tells of, with itself."""
        return 1 + sum(span.last - span.first + 1 for span in self.stands_for)

    @property
    def needed(self) -> int:
        """Bytes of a card that it takes, with the context; where it ran out, at least."""
        return self.verdict.needed

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of a pipeline that it has; none for other programs."""
        written = str(self.run.trace.meta.get(PIPELINE_STAGES, "")).partition("/")[0]
        return tuple(map(int, written.split(","))) if written else ()

    @property
    def waited_in_vain(self) -> bool:
        """Whether it failed because it waited for a rank that had ended."""
        return (self.run.error or "").startswith(f"{PeerEnded.__name__}:")

    @property
    def kind(self) -> tuple[object, ...]:
        """What makes ranks alike."""
        card = self.card
        parts = tuple(sorted((kind.name, size) for kind, size in card.breakdown.categories.items()))
        return (
            card.peak_allocated,
            card.peak_reserved,
            parts,
            self.verdict.outcome,
            self.run.host_pinned_peak_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AlikeRanks:
    """Ranks that are alike.

    Attributes:
        ranks: those that ran.
    """

    ranks: tuple[RankMemory, ...]

    @property
    def first(self) -> RankMemory:
        """The first of them."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """Their numbers, with those that did not run and are taken to be like them."""
        spans = [(rank.rank, rank.rank) for rank in self.ranks]
        spans += [(one.first, one.last) for rank in self.ranks for one in rank.stands_for if one.alike]
        return rank_numbers(spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMemory:
    """Host memory of nodes that are alike.

    Attributes:
        first, last: their numbers.
        ranks: of each.
        pinned: page-locked bytes that torch holds at most in all of a node's ranks, if all of them peak at once.
    """

    first: int
    last: int
    ranks: int
    pinned: int


def rank_numbers(spans: Iterable[tuple[int, int]], most: int = 4) -> str:
    """Numbers of ranks in words: neighbours as one span, and of many spans the first two and the last.

    >>> rank_numbers([(0, 0), (5, 6), (1, 3)])
    '0 to 3, 5 to 6'
    >>> rank_numbers((rank, rank) for rank in range(2, 64, 8))
    '2, 10, ..., 58'

    Args:
        spans: the first and the last of each.
        most: so many spans are listed.
    """
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and joined[-1][1] == first - 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    words = [f"{first}" if first == last else f"{first} to {last}" for first, last in joined]
    return ", ".join(words if len(words) <= most else [*words[:2], "...", words[-1]])


class PeerKind(Enum):
    """What ranks share, so that one may hold more than another."""

    STAGES = "stages of the pipeline"
    EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """A stage of a pipeline, or a rank among those that hold experts together.

    Attributes:
        name: of the stage, or of the rank.
        ranks: those that ran and have it.
        reserved, allocated: peaks of the largest of these.
    """

    name: str
    ranks: tuple[int, ...]
    reserved: int
    allocated: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Stages of a pipeline, or ranks that hold experts together, side by side.

    Attributes:
        kind: which of them.
        members: those of which some rank ran; at least one.
        count: how many there are.
    """

    kind: PeerKind
    members: tuple[PeerMemory, ...]
    count: int

    @property
    def mean(self) -> int:
        """Reserved bytes of a member of those that ran."""
        return sum(member.reserved for member in self.members) // len(self.members)

    @property
    def worst(self) -> PeerMemory:
        """The first of those that reserve most."""
        return max(self.members, key=lambda member: member.reserved)

    @property
    def excess(self) -> float:
        """Reserved bytes of the worst over the mean of those that ran."""
        total = sum(member.reserved for member in self.members)
        return self.worst.reserved * len(self.members) / total if total else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldMemory:
    """A distributed program.

    Attributes:
        size: how many ranks it has.
        per_node: on each node.
        launcher: what was to start it; empty for vramfit's own options.
        ranks: those that ran, by number.
        worst: position of the one that decides.
        why: what makes it the worst, or makes it not fit, in words.
        nodes: host memory; empty where ranks of a node are unknown.
    """

    size: int
    per_node: int
    launcher: str
    ranks: tuple[RankMemory, ...]
    worst: int
    why: tuple[str, ...]
    nodes: tuple[NodeMemory, ...]

    @property
    def decisive(self) -> RankMemory:
        """The worst rank."""
        return self.ranks[self.worst]

    def rank(self, number: int) -> RankMemory:
        """One that ran.

        Raises:
            KeyError: it did not.
        """
        found = {one.rank: one for one in self.ranks}
        return found[number]

    @property
    def rows(self) -> tuple[AlikeRanks, ...]:
        """The ranks that ran, those that are alike together: of a pipeline, those of one stage."""
        found: dict[object, list[RankMemory]] = {}
        for rank in self.ranks:
            found.setdefault((rank.kind, rank.stages), []).append(rank)
        return tuple(AlikeRanks(ranks=tuple(ranks)) for ranks in found.values())

    @property
    def fits(self) -> bool | None:
        """Whether every rank that ran fits its card; None where that is unknown."""
        found = {rank.verdict.fits for rank in self.ranks}
        return False if False in found else None if None in found else True

    @property
    def known(self) -> int:
        """How many ranks the report tells of."""
        return sum(rank.count for rank in self.ranks)

    @property
    def imbalance(self) -> float:
        """Reserved bytes of the largest rank over the mean of all that are known; 1 where all are alike."""
        total = sum(rank.card.peak_reserved * rank.count for rank in self.ranks)
        most = max(rank.card.peak_reserved for rank in self.ranks)
        return most * self.known / total if total else 1.0

    @property
    def balances(self) -> tuple[Balance, ...]:
        """How even stages are, and ranks with experts, where the program has any."""
        return (*_stages(self.ranks), *_experts(self.ranks))

    @property
    def assume(self) -> str:
        """What was assumed of sizes and of other ranks' tokens, as ``--assume`` states it."""
        return self.ranks[0].run.assume

    @property
    def joined(self) -> bool:
        """Whether the program makes a process group."""
        return self.size == 1 or not any(warning.code == NEVER_JOINED for warning in self.warnings)

    @property
    def warnings(self) -> tuple[RunWarning, ...]:
        """The warnings of all ranks, each once."""
        found = {
            (one.code, one.message, one.location): one for rank in self.ranks for one in rank.run.warnings
        }
        return tuple(found.values())

    @property
    def failed(self) -> RankMemory | None:
        """The first rank that failed for another reason than memory, by itself rather than since another had failed."""
        failed = [rank for rank in self.ranks if rank.verdict.outcome is Outcome.FAILED]
        return min(failed, key=lambda rank: rank.waited_in_vain, default=None)


def world_memory(
    runs: Mapping[int, Run],
    *,
    size: int,
    per_node: int,
    launcher: str = "",
    spans: Mapping[int, tuple[RankSpan, ...]] | None = None,
    waited_for: tuple[int, ...] = (),
) -> WorldMemory:
    """Put the runs of ranks side by side.

    Args:
        runs: by rank; at least one.
        size: ranks of the world.
        per_node: ranks of a node.
        launcher: the command that was to start them.
        spans: which others each stands for.
        waited_for: those that ran because another waited for them.
    """
    ranks = tuple(
        RankMemory(
            rank=rank,
            local_rank=rank % per_node,
            node=rank // per_node,
            run=run,
            verdict=verdict(run),
            stands_for=(spans or {}).get(rank, ()),
            waited_for=rank in waited_for,
        )
        for rank, run in sorted(runs.items())
    )
    worst = max(range(len(ranks)), key=lambda at: (_badness(ranks[at]), -ranks[at].rank))
    return WorldMemory(
        size=size,
        per_node=per_node,
        launcher=launcher,
        ranks=ranks,
        worst=worst,
        why=tuple(_reasons(ranks, worst)),
        nodes=_nodes(ranks, size, per_node),
    )


def _stages(ranks: tuple[RankMemory, ...]) -> Iterator[Balance]:
    """The stages of which some rank ran; those of one rank, as in interleaved schedules, are one."""
    found: dict[tuple[int, ...], list[RankMemory]] = {}
    count = 0
    for rank in ranks:
        if rank.stages:
            found.setdefault(rank.stages, []).append(rank)
            count = max(count, int(str(rank.run.trace.meta[PIPELINE_STAGES]).partition("/")[2]))
    if len(found) > 1:
        members = [_peer(" and ".join(map(str, key)), found[key]) for key in sorted(found)]
        yield Balance(kind=PeerKind.STAGES, members=tuple(members), count=count // max(map(len, found)))


def _experts(ranks: tuple[RankMemory, ...]) -> Iterator[Balance]:
    """The ranks of each group that exchanges tokens, of which any ran."""
    found: dict[str, list[RankMemory]] = {}
    for rank in ranks:
        if group := str(rank.run.trace.meta.get(EXPERT_RANKS, "")):
            found.setdefault(group, []).append(rank)
    for group, those in found.items():
        members = tuple(_peer(str(rank.rank), [rank]) for rank in those)
        yield Balance(kind=PeerKind.EXPERTS, members=members, count=group.count(",") + 1)


def _peer(name: str, ranks: list[RankMemory]) -> PeerMemory:
    return PeerMemory(
        name=name,
        ranks=tuple(rank.rank for rank in ranks),
        reserved=max(rank.card.peak_reserved for rank in ranks),
        allocated=max(rank.card.peak_allocated for rank in ranks),
    )


def _badness(rank: RankMemory) -> tuple[bool, bool, bool, int]:
    """What makes a rank the worst: it does not fit, it failed, and by itself, it takes the most."""
    outcome = rank.verdict.outcome
    failed = outcome is Outcome.FAILED
    return outcome is Outcome.DOES_NOT_FIT, failed, failed and not rank.waited_in_vain, rank.needed


def _reasons(ranks: tuple[RankMemory, ...], worst: int) -> list[str]:
    """Why the worst rank is the worst."""
    most = ranks[worst]
    if most.verdict.outcome is Outcome.FAILED:
        return []
    found = list(most.verdict.why)
    others = [rank for rank in ranks if rank.kind != most.kind and rank.verdict.outcome is not Outcome.FAILED]
    if not others:
        return found or ([] if len(ranks) == 1 else ["all that ran are alike"])
    least = min(others, key=lambda rank: rank.needed)
    more = most.card.peak_allocated - least.card.peak_allocated
    if most.card.breakdown.moment.row < 0 or least.run.ran_out or most.run.ran_out:
        return found
    parts = Counter(most.card.breakdown.categories)
    parts.subtract(Counter(least.card.breakdown.categories))
    grown = [(kind, size) for kind, size in parts.most_common() if size > 0][:3]
    told = ", ".join(f"{format_bytes(size)} {_name(kind)}" for kind, size in grown)
    if more > 0:
        found.append(
            f"at its peak rank {most.rank} holds {format_bytes(more)} more than rank {least.rank}"
            + (f": {told}" if told else "")
        )
    elif (apart := most.card.peak_reserved - least.card.peak_reserved) > 0:
        found.append(
            f"rank {most.rank} reserves {format_bytes(apart)} more than rank {least.rank}, and holds no more"
        )
    elif not apart:
        found.append(f"ranks {least.rank} and {most.rank} reserve as much, and differ in something else")
    return found


def _name(kind: Category) -> str:
    return kind.name.lower().replace("_", " ")


def _nodes(ranks: tuple[RankMemory, ...], size: int, per_node: int) -> tuple[NodeMemory, ...]:
    """Host memory of each node whose ranks are all known; neighbours that are alike as one."""
    pinned: dict[int, int] = {}
    for rank in ranks:
        own = rank.run.host_pinned_peak_bytes
        pinned[rank.rank] = own
        for span in rank.stands_for:
            pinned.update(dict.fromkeys(range(span.first, span.last + 1), own))
    found: list[NodeMemory] = []
    for node in range(-(-size // per_node)):
        members = range(node * per_node, min((node + 1) * per_node, size))
        if any(member not in pinned for member in members):
            continue
        total = sum(pinned[member] for member in members)
        last = found[-1] if found else None
        if last is not None and (last.last, last.ranks, last.pinned) == (node - 1, len(members), total):
            found[-1] = NodeMemory(first=last.first, last=node, ranks=len(members), pinned=total)
        else:
            found.append(NodeMemory(first=node, last=node, ranks=len(members), pinned=total))
    return tuple(found)
