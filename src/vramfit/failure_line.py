"""The line that says why a program failed: the cause itself, however deep other processes and errors have wrapped it.

An error that comes from another process carries that process's traceback as text: torch's DataLoader and DataParallel
put it into the message (torch/_utils.py, ExceptionWrapper), torch.multiprocessing.spawn and torchrun do too, and
multiprocessing, concurrent.futures and joblib hang it onto the error as its cause. The last line of such a text is what
went wrong; what stands before it says where.
"""

from __future__ import annotations

import builtins
import linecache
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

_OURS = str(Path(__file__).resolve().parent)
_FRAME = re.compile(r'^(?P<indent>\s*)File ".*", line \d+')
_HEADING = re.compile(r"\(most recent call last\):\s*$")
_CAUGHT = re.compile(r"Caught \S+ (?P<where>.+?)\.?$")
_SPAWNED = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error:$")
_TORCHRUN = "Root Cause (first observed failure):"
_FIELD = re.compile(r"^\s*(?P<name>rank|exitcode|traceback)\s*: ?(?P<value>.*)$")
_GROUPED = re.compile(r"^\s*\|( |$)")
_BETWEEN_GROUPED = re.compile(r"^\s*\+[-+]+( \d+ -+)?\s*$")
_TEXT_ENDS = ('"""', "====", "The above exception was", "During handling of the above")
_TRANSPORTED = ("RemoteTraceback", "_RemoteTraceback")
"""Causes that hold the traceback of another process: of multiprocessing.pool, concurrent.futures and loky."""
_SHOWN_OF_GROUP = 3


def failure_line(error: BaseException) -> str:
    """Why a program failed: the kind of the error, its message, and what caused it.

    An error without a message names the line that raised it.
    """
    told = " ".join((_line(error, set()), *_notes(error)))
    return " ".join(told.split())


def _line(error: BaseException, seen: set[int]) -> str:
    """The line of an error and of what it was raised from, without its notes; empty for one that was seen already."""
    if id(error) in seen:  # a program can tie them to a ring
        return ""
    seen.add(id(error))
    line = _group(error, seen) or _own_line(error)
    cause = _cause(error, seen)
    if not cause or cause in line or _message_of(cause) in line:
        return line
    return f"{line}, caused by {cause}"


def _own_line(error: BaseException) -> str:
    kind, message = type(error).__name__, _message(error)
    if isinstance(error, SystemExit) and message:
        return message  # the program's own words to its user
    if not message:
        return f"{kind}{_raised_at(error)}"
    return _of_torchrun(kind, message) or _of_traceback(kind, message) or f"{kind}: {message}"


def _message(error: BaseException) -> str:
    if isinstance(error, KeyError) and len(error.args) == 1 and _has_lines(error.args[0]):
        return str(error.args[0]).strip()  # its own str() is that of repr(), which hides where lines end
    try:
        return str(error).strip()
    except Exception:  # the program's own __str__ may raise anything
        return f"<str() of this {type(error).__name__} failed>"


def _has_lines(value: object) -> bool:
    return isinstance(value, str) and "\n" in value


def _notes(error: BaseException) -> Iterator[str]:
    """What was added to an error by ``add_note``, in parentheses."""
    notes = getattr(error, "__notes__", ())
    for note in notes if isinstance(notes, list | tuple) else ():
        if isinstance(note, str) and note.strip() and _FRAME.search(note) is None:
            yield f"({note.strip()})"


def _raised_at(error: BaseException) -> str:
    """The line that raised an error: its file's name, its number and what stands there; empty where that is unknown."""
    places = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    theirs = [place for place in places if not place[0].startswith(_OURS)]
    if not theirs:
        return ""
    file, number = theirs[-1]
    source = linecache.getline(file, number).strip()
    return f" at {Path(file).name}:{number}{f': {source}' if source else ''}"


# -- Errors that stand for others ------------------------------------------------------------------------------


def _group(error: BaseException, seen: set[int]) -> str:
    """The line of a group of errors with those in it; empty for any other error."""
    if not isinstance(error, builtins.BaseExceptionGroup):
        return ""
    lines = [line for inner in error.exceptions if (line := _line(inner, seen))]
    more = len(lines) - _SHOWN_OF_GROUP
    told = "; ".join(lines[:_SHOWN_OF_GROUP]) + (f"; and {more} more" if more > 0 else "")
    return f"{told} ({type(error).__name__}: {error.message})" if told else ""


def _cause(error: BaseException, seen: set[int]) -> str:
    """The line of what an error was raised from; empty where it was not."""
    cause = error.__cause__
    if cause is None and not _message(error) and not error.__suppress_context__:
        cause = error.__context__  # an error that says nothing: what was being handled says more
    if cause is None:
        return ""
    if type(cause).__name__ not in _TRANSPORTED:
        return _line(cause, seen)
    text = str(cause)
    lines = [line for part in _parts(text) if (line := _last_error(part))]
    others = [line for line in lines if _message_of(line) not in _message(error)]
    return others[0] if others else ""  # of a chain the first is what all the others were raised from


def _parts(text: str) -> list[str]:
    """The tracebacks of a text that holds several, in order: each error led to the next."""
    ends = [
        match.start() for match in re.finditer(r"^(The above exception was|During handling of)", text, re.M)
    ]
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _message_of(line: str) -> str:
    """What stands behind the kind of an error."""
    kind, colon, message = line.partition(": ")
    return message.strip() if colon and message.strip() else kind


def _of_traceback(kind: str, message: str) -> str:
    """The line of an error whose message holds a traceback; empty for any other."""
    last = _last_error(message)
    if not last:
        return ""
    head = message.splitlines()[0].strip()
    if caught := _CAUGHT.match(head):
        return f"{last} ({caught['where']})"
    if spawned := _SPAWNED.match(head):
        return f"{last} (in process {spawned['rank']})"
    if _HEADING.search(head):
        return last
    return f"{kind}: {head} {last}"


def _of_torchrun(kind: str, message: str) -> str:
    """The line of torchrun's error about its ranks; empty for any other."""
    _, found, text = message.partition(_TORCHRUN)
    if not found:
        return ""
    fields = {match["name"]: match["value"] for line in text.splitlines() if (match := _FIELD.match(line))}
    rank = fields.get("rank", "?").split()[0]
    last = _last_error(text)
    if last:
        return f"{last} (in rank {rank})"
    name = message.strip("= \n").splitlines()[0].strip()
    return f"{kind}: {name}: rank {rank} ended with exit code {fields.get('exitcode', '?').split()[0]}"


def _last_error(text: str) -> str:
    """The last error of a printed traceback, its message included; empty where a text holds no traceback."""
    lines = [_GROUPED.sub("", line) for line in text.splitlines() if not _BETWEEN_GROUPED.match(line)]
    frames = [index for index, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return ""
    match = _FRAME.match(lines[frames[-1]])
    indent = len(match["indent"]) if match else 0
    told: list[str] = []
    for line in lines[frames[-1] + 1 :]:
        if line.strip().startswith(_TEXT_ENDS):
            break
        if told or (line.strip() and len(line) - len(line.lstrip()) < indent):
            told.append(line.strip())
    return "\n".join(told).strip()
