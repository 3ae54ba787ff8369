"""Text that the reports share: figures, bars, shortened names, module trees as lines, and how a run ended."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from vramfit.analysis import NO_CARD, Verdict
from vramfit.analysis.groups import ModuleNode
from vramfit.report.folding import folded
from vramfit.trace import ChangeKind, FileChange, FileChanges, Run, Source
from vramfit.trace.outcome import End, Progress, Unit
from vramfit.units import counted, format_bytes

_EIGHTHS = " ▏▎▍▌▋▊▉"
_ASCII = str.maketrans("✓✗…×→·µ█▉▊▋▌▍▎▏▓▒░", "+x~x>,u#####   +c.")
"""Stand-ins of the same width for terminals that cannot show the real ones."""


def print_lines(console: Console, lines: Iterable[Text], width: int) -> None:
    """Print lines, each folded to ``width`` and in characters that the terminal can show."""
    for line in lines:
        line.rstrip()
        for part in folded(line, width):
            if console.options.ascii_only:
                part.plain = part.plain.translate(_ASCII).encode("ascii", "replace").decode("ascii")
            console.print(part, soft_wrap=True, highlight=False)


def exit_words(code: int) -> str:
    """How a process ended, ``exit code 1`` or ``signal 9``, by the code that `subprocess` gives it."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def bar(share: float, width: int) -> str:
    """A horizontal bar of ``share`` (0 to 1) of ``width`` characters, to an eighth of a character."""
    share = min(max(share, 0.0), 1.0)
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def split_width(amounts: Sequence[int], width: int) -> list[int]:
    """Divide ``width`` characters in proportion to ``amounts``; what is not zero gets at least one.

    The sum is ``width`` whenever the amounts are not all zero and ``width`` suffices for one character each.
    """
    total = sum(amounts)
    if total <= 0:
        return [0 for _ in amounts]
    exact = [amount * width / total for amount in amounts]
    cells = [max(int(share), 1 if amount > 0 else 0) for share, amount in zip(exact, amounts, strict=True)]
    while sum(cells) < width:
        position = max(range(len(cells)), key=lambda index: exact[index] - cells[index])
        cells[position] += 1
    while sum(cells) > width and max(cells) > 1:
        position = max(
            (index for index in range(len(cells)) if cells[index] > 1),
            key=lambda index: cells[index] - exact[index],
        )
        cells[position] -= 1
    return cells


def signed(size: int) -> str:
    """A difference in bytes, with a plus sign where there are more: ``+1.00 MiB``."""
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def percent(part: int, whole: int) -> str:
    """A share as ``57 %``; below one percent as ``<1 %``."""
    if whole <= 0 or part <= 0:
        return "0 %"
    share = 100 * part / whole
    return "<1 %" if share < 1 else f"{share:.0f} %"


def relative(share: float) -> str:
    """A change by a share of what was before, in at most ten characters: ``+2.50 %``, ``+52,961 %``, ``+1.2e+09 %``."""
    percent = 100 * share
    if abs(percent) < 999.995:
        return f"{percent:+.2f} %"
    return f"{percent:+,.0f} %" if abs(percent) < 999_999.5 else f"{percent:+.1e} %"


def short_op(op: str) -> str:
    """An operator without overload, and of aten without its name: ``aten.mm.default`` is ``mm``."""
    namespace, _, rest = op.replace("::", ".", 1).partition(".")
    name = rest.split(".", 1)[0]
    if not name:
        return op
    return name if namespace == "aten" else f"{namespace}.{name}"


def each(count: int, size: int) -> str:
    """How many blocks of one size there are, and what one takes, ``12 × 48.00 MiB``; empty for a single one."""
    return f"{count:,} × {format_bytes(size)}" if count > 1 else ""


def each_of_sizes(count: int, least: int, most: int) -> str:
    """The same for blocks of several sizes: ``31 × 8.00-196.00 MiB``, the unit once where it is the same."""
    if least == most or count < 2:
        return each(count, most)
    low, high = format_bytes(least), format_bytes(most)
    number, unit = low.split()
    return f"{count:,} × {number if unit == high.split()[1] else low}-{high}"


def elide_left(text: str, width: int) -> str:
    """Cut the beginning of a path that is too long: its end, with the line number, says most."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def elide_middle(text: str, width: int) -> str:
    """A message in one line, its middle left out where it is longer than ``width``: the end often holds the cause."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    head = (width - 1) * 2 // 3
    return f"{line[:head].rstrip()}…{line[len(line) - (width - 1 - head) :].lstrip()}"


def seconds(value: float) -> str:
    """A duration with three digits: ``1.23 s``, ``45.6 ms``, ``7.0 min``."""
    if value >= 600:
        return f"{value / 60:.1f} min"
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeLine:
    """One line of a shortened module tree.

    Attributes:
        depth: how far to indent.
        label: the module, chains of single children joined: ``transformer.h.*``; `` ×12`` where layers were
            folded.
        node: the module, or None for the rest that is not shown.
    """

    depth: int
    label: str
    node: ModuleNode | None
    total_bytes: int


def tree_lines(root: ModuleNode, *, limit: int, least_share: float = 0.01) -> list[TreeLine]:
    """The levels of a folded module tree that matter, in at most ``limit`` lines.

    The largest modules are opened first, as long as there are lines left; children below ``least_share`` of
    the whole are summed up as "n smaller".

    Args:
        root: the node above all root modules (see `module_tree`), folded.
        least_share: share of the root's total from which a module gets its own line.
    """
    least = root.total_bytes * least_share
    opened: set[str] = {root.path}
    # Opening a node costs a line per child that is worth showing and one for the rest.
    lines = _cost(root, least)
    candidates: list[tuple[int, str, ModuleNode]] = []
    for child in _worth(root, least):
        _push(candidates, child, least)
    while candidates:
        _, path, node = heapq.heappop(candidates)
        cost = _cost(node, least)
        if lines + cost > limit:
            continue
        opened.add(path)
        lines += cost
        for child in _worth(node, least):
            _push(candidates, child, least)
    found: list[TreeLine] = []
    _collect(root, -1, opened, least, found)
    return found[:limit]


def _push(heap: list[tuple[int, str, ModuleNode]], node: ModuleNode, least: float) -> None:
    end = _chain(node)[-1]
    if _worth(end, least):
        heapq.heappush(heap, (-end.total_bytes, end.path, end))


def _worth(node: ModuleNode, least: float) -> list[ModuleNode]:
    """The children that get a line of their own; a single small one takes no more room than its sum would."""
    held = [child for child in node.children if child.total_bytes > 0]
    worth = [child for child in held if child.total_bytes >= least]
    return held if len(held) - len(worth) == 1 else worth


def _cost(node: ModuleNode, least: float) -> int:
    worth = _worth(node, least)
    rest = any(child.total_bytes > 0 for child in node.children if child not in worth)
    return len(worth) + (1 if rest else 0)


def _chain(node: ModuleNode) -> list[ModuleNode]:
    """The node and its only descendants, as long as they hold all of its bytes: shown as one line."""
    chain = [node]
    while len(chain[-1].children) == 1 and chain[-1].own_bytes == 0:
        chain.append(chain[-1].children[0])
    return chain


def _collect(
    node: ModuleNode, depth: int, opened: set[str], least: float, found: list[TreeLine], around: int = 1
) -> None:
    """Append the lines below ``node``, and its own unless it is the root; ``around``: its parent's count."""
    end = node
    if depth >= 0:
        chain = _chain(node)
        end = chain[-1]
        label = ".".join(part.name for part in chain)
        if end.count != around:
            label += f" ×{end.count}"
        found.append(TreeLine(depth=depth, label=label, node=end, total_bytes=end.total_bytes))
    if end.path not in opened:
        return
    worth = _worth(end, least)
    for child in worth:
        _collect(child, depth + 1, opened, least, found, end.count)
    rest = [child for child in end.children if child not in worth and child.total_bytes > 0]
    if rest:
        total = sum(child.total_bytes for child in rest)
        found.append(TreeLine(depth=depth + 1, label=f"{len(rest)} smaller", node=None, total_bytes=total))


_HOW = {
    End.STEPS: "stopped",
    End.TIME: "stopped when its time was over",
    End.INTERRUPTED: "interrupted",
    End.TERMINATED: "terminated",
}
_LATER = "Not seen: what comes later, such as validation, checkpoints or larger batches."
_NAMED = 4
"""Paths that are named of each kind; --json lists them all."""
_TITLES = {
    "discard": "Files: what it wrote was set aside and dropped",
    "keep": "Files: what it wrote was set aside and kept",
}
_KINDS = {
    ChangeKind.REPLACED: ("would have replaced", "file"),
    ChangeKind.DELETED: ("would have deleted", "path"),
    ChangeKind.WRITTEN: ("would have written", "file"),
    ChangeKind.FOLDER: ("would have made", "folder"),
    ChangeKind.METADATA: ("would have changed times or modes of", "path"),
}


def fits_words(progress: Progress) -> str:
    """The beginning of the headline of a run that fits, as far as it went."""
    if progress.end in (End.PROGRAM, End.STEPS):
        return "✓ fits "
    return "✓ fits so far " if progress.end is End.TIME else "~ fits so far "


def steady_words(progress: Progress) -> str:
    """For how many steps memory was steady; nothing for a run that ended by itself."""
    if not progress.is_cut or progress.steady < 2:
        return ""
    return f", steady for {_counted(progress.steady, progress)}"


def ending_words(progress: Progress) -> str:
    """What ended a run, beginning with a comma; nothing for one that ended by itself."""
    if not progress.is_cut:
        return ""
    of = f" of {progress.module}" if progress.module else ""
    after = f"after {_counted(progress.steps, progress)}{of}" if progress.steps else "before its first step"
    return f", {_HOW[progress.end]} {after}"


def unseen_words(progress: Progress) -> str:
    """What a run that was ended early leaves open."""
    if not progress.steps:
        return "No whole step was seen: a training step, or a forward pass where there is no optimizer."
    if progress.is_steady:
        return _LATER
    if progress.steps == 1:
        return f"One step does not tell whether memory is steady. {_LATER}"
    if progress.steady == 1:
        return f"Memory is not steady yet: the last step asked for other memory. {_LATER}"
    return f"Memory may not be steady yet: --steps steady waits for that. {_LATER}"


def unused_words(run: Run, verdict: Verdict) -> tuple[str, str]:
    """That a program never used a card, and why that may be."""
    if verdict.device.index == NO_CARD:
        return "the program saw no card", "CUDA_VISIBLE_DEVICES hides them all."
    if run.source is Source.CPU:
        return "the program made no tensors", "Nothing was metered, so nothing can be said of its memory."
    said = f"the program never used the card {verdict.device.gpu}{ending_words(run.progress)}"
    if run.progress.is_cut:
        return said, "It had not come so far yet, or it chose the CPU. Nothing can be said of its memory."
    return said, (
        "Either it chose the CPU (by an option or a setting of its own, such as --device or --no-cuda), or it ended "
        "before it came to the card. Nothing can be said of its memory."
    )


def _counted(count: int, progress: Progress) -> str:
    one, more = ("forward pass", "forward passes") if progress.unit is Unit.FORWARD else ("step", "steps")
    return f"{count:,} {one if count == 1 else more}"


def files_lines(changes: FileChanges | None, relative: Callable[[str], str]) -> list[str]:
    """A title and a line for each kind of change; empty where nothing changed.

    Args:
        changes: what happened; None where nobody looked.
    """
    if changes is None or changes.writes not in _TITLES or not (changes.entries or changes.notes):
        return []
    lines = [_TITLES[changes.writes]]
    for kind, (did, what) in _KINDS.items():
        if entries := changes.of(kind):
            lines.append(_change_line(did, what, entries, relative))
    if changes.omitted:
        lines.append(f"and {counted(changes.omitted, 'change')} more")
    lines += changes.notes
    if changes.kept_at is not None:
        lines.append(f"kept in {relative(changes.kept_at)}")
    why = f" ({changes.reason})" if changes.reason else ""
    lines.append(f"the real files were protected by {changes.backend}{why}")
    return lines


def _change_line(did: str, what: str, entries: Sequence[FileChange], relative: Callable[[str], str]) -> str:
    size = sum(entry.size_bytes for entry in entries)
    total = f", {format_bytes(size)}" if size else ""
    named = ", ".join(relative(entry.path) for entry in entries[:_NAMED])
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return f"{did} {counted(len(entries), what)}{total}: {named}{more}"
