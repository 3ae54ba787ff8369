"""Judges plans by the best peer at each budget, and writes the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from study_files import markdown_table

from frontier_parts.peers import AUTO_SAC, COMPILER, EAGER, SELECTIVE, UNIFORM
from frontier_parts.picture import Dot, picture
from frontier_parts.rows import CUT_PLAN, PLAN, Found, Row
from frontier_parts.subjects import MIB, Subject
from vramfit.writing import write_text

KINDS = (EAGER, UNIFORM, SELECTIVE, COMPILER, AUTO_SAC, PLAN, CUT_PLAN)
_PLANS = (PLAN, CUT_PLAN)
_SAME = 0.001
"""What is no further apart counts as equally quick: the tables show tenths of a percent."""


class Verdict(Enum):
    """How a plan fares beside the quickest peer within the same budget."""

    QUICKER = "quicker"
    SAME = "as quick"
    SLOWER = "SLOWER"
    ALONE = "no peer fits"
    ABOVE = "ABOVE BUDGET"
    NONE = "NOTHING FOUND"
    NOBODY = "nothing fits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A plan at a budget.

    Attributes:
        plan: its row.
        peer: the quickest within the budget, the compiler aside; None if none is.
        compiler: the compiler's row within the budget that is quickest with its pointwise operations for nothing; None
            if none is.
        verdict: how the plan fares beside `peer`.
    """

    plan: Found
    peer: Found | None
    compiler: Found | None
    verdict: Verdict

    @property
    def compiler_could_be_quicker(self) -> bool:
        """Whether a compiler that did all pointwise operations for nothing would take less time than the plan."""
        if self.compiler is None or self.verdict not in (Verdict.QUICKER, Verdict.SAME, Verdict.SLOWER):
            return False
        return _seconds(self.compiler, fused=True) < _seconds(self.plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A subject with what is known of it.

    Attributes:
        subject: it.
        eager: the plain program; None as long as it is not known.
        peers: the rows of others that could be measured, the lowest peak first.
        failed: the rows of others that could not.
        lowest: plans for the lowest peak.
        comparisons: the plans for budgets, the lowest first.
        missing: the rows that were not worked out yet.
    """

    subject: Subject
    eager: Found | None
    peers: tuple[Found, ...]
    failed: tuple[Found, ...]
    lowest: tuple[Found, ...]
    comparisons: tuple[Comparison, ...]
    missing: tuple[Row, ...] = ()

    @property
    def falls_short(self) -> bool:
        """Whether a plan is above its budget, is missing where a peer fits, or takes longer than a peer."""
        bad = (Verdict.SLOWER, Verdict.ABOVE, Verdict.NONE)
        return any(one.verdict in bad for one in self.comparisons)

    def extra(self, found: Found, *, attention: bool = False) -> float:
        """How much more a row computes than the plain program, as a part of that."""
        assert self.eager is not None
        return _work(found, attention) / _work(self.eager, attention) - 1

    def extra_time(self, found: Found, *, fused: bool = False) -> float:
        """How much longer a row takes than the plain program, as a part of that; see `_seconds`."""
        assert self.eager is not None
        return _seconds(found, fused=fused) / _seconds(self.eager) - 1


def _work(found: Found, attention: bool) -> int:
    return found.flops + (found.value["attention_flops"] if attention else 0)


def _seconds(found: Found, *, fused: bool = False) -> float:
    """Of a step on the card.

    Args:
        found: a row.
        fused: whether pointwise operations take no time at all, as if a compiler did each along with another one.
    """
    return float(found.value["seconds"] - (found.value["pointwise_seconds"] if fused else 0.0))


def judge(subject: Subject, rows: Iterable[Found], missing: Iterable[Row] = ()) -> Judged:
    """Compare plans with peers."""
    rows = list(rows)
    others = [found for found in rows if found.row.kind not in _PLANS]
    peers = sorted((found for found in others if found.peak is not None), key=lambda found: found.peak or 0)
    plans = [found for found in rows if found.row.kind in _PLANS]
    asked = [found for found in plans if found.row.budget is not None]
    asked.sort(key=lambda found: (found.row.cut, found.row.budget or 0))
    plain = (found for found in peers if found.row.kind == EAGER and not found.row.chunked)
    return Judged(
        subject=subject,
        eager=next(plain, None),
        peers=tuple(peers),
        failed=tuple(found for found in others if found.peak is None),
        lowest=tuple(found for found in plans if found.row.budget is None and found.peak is not None),
        comparisons=tuple(_compared(found, peers) for found in asked),
        missing=tuple(missing),
    )


def _compared(plan: Found, peers: Sequence[Found]) -> Comparison:
    budget = plan.row.budget
    assert budget is not None
    within = [found for found in peers if found.peak is not None and found.peak <= budget]
    compiled = [found for found in within if found.row.kind == COMPILER]
    others = [found for found in within if found.row.kind != COMPILER]
    best = min(others, key=lambda found: (_seconds(found), found.peak), default=None)
    compiler = min(compiled, key=lambda found: _seconds(found, fused=True), default=None)
    return Comparison(plan=plan, peer=best, compiler=compiler, verdict=_verdict(plan, best, budget))


def _verdict(plan: Found, peer: Found | None, budget: int) -> Verdict:
    if plan.peak is None or not plan.value.get("fits", True):
        return Verdict.NOBODY if peer is None else Verdict.NONE
    if plan.peak > budget:
        return Verdict.ABOVE
    if peer is None:
        return Verdict.ALONE
    ratio = _seconds(plan) / _seconds(peer)
    if abs(ratio - 1) <= _SAME:
        return Verdict.SAME
    return Verdict.QUICKER if ratio < 1 else Verdict.SLOWER


# -- tables ----------------------------------------------------------------------------------------------------------

PEER_HEADS = ("way", "peak, MiB", "extra FLOPs", "with attention", "extra time", "fused", "solver, s")
PLAN_HEADS = (
    "budget, MiB",
    "peak, MiB",
    "extra time",
    "extra FLOPs",
    "quickest peer",
    "its peak",
    "its time",
    "its FLOPs",
    "the plan is",
    "compiler, fused",
    "solver, s",
    "search, s",
    "runs",
    "plan",
)
_WORDS = {"way", "quickest peer", "the plan is", "plan"}
"""Columns of words, which stand to the left."""


def peer_cells(judged: Judged) -> Iterator[tuple[str, ...]]:
    """The ways of others, and the plans for the lowest peak."""
    for found in (*judged.lowest, *judged.peers):
        seconds = found.value.get("solve_seconds")
        yield (
            found.row.name,
            _mib(found.peak),
            _percent(judged.extra(found)),
            _percent(judged.extra(found, attention=True)),
            _percent(judged.extra_time(found)),
            _percent(judged.extra_time(found, fused=True)) if found.row.kind == COMPILER else "",
            "" if seconds is None else f"{seconds:.1f}",
        )
    for found in judged.failed:
        yield (found.row.name, found.value["failed"], *[""] * (len(PEER_HEADS) - 2))


def plan_cells(judged: Judged, *, cut: bool) -> Iterator[tuple[str, ...]]:
    """The plans, those that may cut the batch or the others."""
    for one in judged.comparisons:
        plan, peer = one.plan, one.peer
        if plan.row.cut is not cut:
            continue
        known = plan.peak is not None and plan.value.get("fits", True)
        yield (
            _mib(plan.row.budget),
            _mib(plan.peak) if known else "",
            _percent(judged.extra_time(plan)) if known else "",
            _percent(judged.extra(plan)) if known else "",
            "" if peer is None else peer.row.name,
            "" if peer is None else _mib(peer.peak),
            "" if peer is None else _percent(judged.extra_time(peer)),
            "" if peer is None else _percent(judged.extra(peer)),
            one.verdict.value,
            "" if one.compiler is None else _percent(judged.extra_time(one.compiler, fused=True)),
            f"{plan.value['solve_seconds']:.1f}" if plan.peak is not None else "",
            f"{plan.value['search_seconds']:.0f}" if plan.peak is not None else "",
            str(plan.value.get("runs", "")),
            "; ".join(plan.value.get("words", [plan.value.get("failed", "")])),
        )


def show(judged: Judged, console: Console) -> None:
    """Print all tables of a subject."""
    if judged.eager is None:
        console.print(f"{judged.subject.title}: the plain program was not measured yet")
        return
    _print(console, judged.subject.title, PEER_HEADS, peer_cells(judged))
    for cut, title in ((False, "Plans"), (True, "Plans that may cut the batch")):
        _print(console, f"{title}, {judged.subject.title}", PLAN_HEADS, plan_cells(judged, cut=cut))


def _print(console: Console, title: str, heads: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    rows = list(rows)
    if not rows:
        return
    shown = Table(title=title, title_justify="left")
    for head in heads:
        text = head in _WORDS
        shown.add_column(head, justify="left" if text else "right")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:,.1f}"


def _percent(part: float) -> str:
    return f"{100 * part:+.1f} %"


# -- the page --------------------------------------------------------------------------------------------------------

_INTRODUCTION = """# Peak memory against time

`python studies/frontier.py --write docs/{name}` makes this page: plans of vramfit beside other ways to recompute, on
the same workloads and measured alike. {versions}, float32, without dropout, on the CPU, one thread.

- **Peak**: the most bytes that tensors hold in a step, by the memory events of `torch.profiler`, less parameters and
  gradients. Gradients stay allocated from step to step, in every row. Buffers and the batch count.
- **Extra time**: seconds of a step beyond those of the plain program, as the sum of all operations that it runs, each
  as fast as on an {card} by the rates with which plans for cards are priced. That is an estimate for operations that
  run one after the other, including the masks that transformers leaves out where nothing is masked.
- **Extra FLOPs**: multiplications and additions of a step beyond those of the plain program, by the formulas of
  `torch.utils.flop_counter`, including in-place forms and torch's chunked loss. Torch has no formula for attention on
  the CPU, which therefore counts as zero, as with its own counter; *with attention* counts it by the formula for the
  kernels of cards.
- **Plans** are searched for by that time, and know nothing of the peers. They may use {techniques};
  a second table adds `micro-batching`, which no peer does. *Solver* is the time of the mixed-integer programs, *search*
  the whole time, and *runs* how often the workload ran: budgets of one workload are planned for in turn and share each
  other's runs. In these runs matrix products give zeros, which changes no bytes; what is in the tables was run in full
  afterwards.
- **Quickest peer**: of all that stay within the budget and run torch's own kernels, as plans do. *As quick* is within
  0.1 %. A compiler could fuse pointwise operations with others, in plans as well as in the plain program, which is
  another program to begin with: it has a column of its own, *fused*, which says what is left if these take no time at
  all, a lower bound for any compiler.
- SAC: `create_selective_checkpoint_contexts` on all blocks, keeping the results that are named; convolutions count as
  products. *Torch's chunks*: `torch.nn.functional.linear_cross_entropy`. Compiler: the activation memory budget of
  `torch.compile`, graphs cut by its partitioner (`aot_eager_decomp_partition`) and run without C++. Auto-SAC:
  `torch.distributed._tools`, run for every second budget; its estimator is given the CPU's rates.
"""


def write(path: Path, judged: Sequence[Judged]) -> None:
    """Write the page, and its picture of the first subject beside it."""
    write_text(path, page(path, judged))
    for one in judged[:1]:
        if one.eager is not None:
            write_text(path.with_suffix(".svg"), picture(f"{one.subject.title}: extra time", dots(one)))


def page(path: Path, judged: Sequence[Judged]) -> str:
    """The page as markdown."""
    from frontier_parts.measuring import CARD
    from frontier_parts.plans import WHOLE

    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "transformers"))
    techniques = ", ".join(f"`{name}`" for name in sorted(WHOLE))
    text = _INTRODUCTION.format(name=path.name, versions=versions, techniques=techniques, card=CARD.name)
    for one in judged:
        text += f"\n## {one.subject.title}\n"
        if one.eager is None:
            text += "\nNot measured yet.\n"
            continue
        if one is judged[0]:
            text += f"\n![Peak against extra time]({path.with_suffix('.svg').name})\n"
        text += _summary(one)
        for cut, title in ((False, "Plans"), (True, "Plans that may cut the batch")):
            if rows := list(plan_cells(one, cut=cut)):
                text += f"\n{title}:\n\n" + _markdown(PLAN_HEADS, rows)
        text += "\nEverything that was measured:\n\n" + _markdown(PEER_HEADS, peer_cells(one))
    return text


def _summary(judged: Judged) -> str:
    told = []
    for cut in (False, True):
        verdicts = [one.verdict for one in judged.comparisons if one.plan.row.cut is cut]
        if not verdicts:
            continue
        counts = ", ".join(
            f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict if verdict in verdicts
        )
        whose = "Plans that may cut the batch" if cut else "Plans"
        told.append(f"{whose}, time beside the quickest peer's at {len(verdicts)} budgets: {counts}.")
        fused = sum(one.compiler_could_be_quicker for one in judged.comparisons if one.plan.row.cut is cut)
        if fused:
            told[-1] += (
                f" A compiler that did all pointwise operations for nothing would be quicker at {fused}."
            )
    told += [f"Lowest peak of a {found.row.kind}: {_mib(found.peak)} MiB." for found in judged.lowest]
    if judged.peers:
        lowest = judged.peers[0]
        told.append(f"Lowest peak of a peer: {_mib(lowest.peak)} MiB ({lowest.row.name}).")
    if judged.missing:
        kinds = Counter(row.kind for row in judged.missing)
        told.append(
            "Not measured yet: " + ", ".join(f"{kind} ({count})" for kind, count in kinds.items()) + "."
        )
    return "".join(f"\n{line}\n" for line in told)


def _markdown(heads: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    figures = set(heads) - _WORDS
    return "\n".join(markdown_table(heads, rows, right=figures)) + "\n"


def dots(judged: Judged) -> list[Dot]:
    """What was measured, for the picture; what takes more than half again is left out, and so is the compiler.

    Its operations, taken apart and one after the other, are no time that anybody would wait for.
    """
    found = [
        Dot(
            kind=row.row.kind,
            peak=(row.peak or 0) / MIB,
            extra=100 * judged.extra_time(row),
            name=row.row.name,
        )
        for row in (*judged.peers, *judged.lowest, *(one.plan for one in judged.comparisons))
        if row.peak is not None and row.value.get("fits", True) and row.row.kind != COMPILER
    ]
    return [dot for dot in found if dot.extra <= 50]
