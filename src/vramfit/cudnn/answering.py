"""The process that asks cuDNN: reads a question a line, writes an answer a line, and keeps answers on disk.

Started by `vramfit.cudnn.asker` as ``python -P -m vramfit.cudnn.answering``; its first line is an `Opening`. The
library is loaded when the first question comes that the cache does not answer: a run whose questions are all known
never loads it. It ends with its input.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import msgspec

from vramfit.cudnn.backend import BackendError, Cudnn
from vramfit.cudnn.frontend import Frontend, FrontendError
from vramfit.cudnn.questions import AttentionQuestion, ConvAnswer, ConvQuestion
from vramfit.plain import from_plain, to_plain

ATTENTION = "attention"
"""Key under which a question about attention stands in its line; one about a convolution stands there by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What the process is told first.

    Attributes:
        library: path of ``libcudnn.so.9``.
        version: its version where that is known without loading it; else 0.
        card: the card's properties, see `device_properties`.
        others: the same card at other clocks.
        cache: folder of the answers of earlier runs; empty to keep none.
        frontend: path of cudnn-frontend's compiled module; empty where attention is not asked about.
    """

    library: str
    version: int
    card: dict[str, Any]
    others: tuple[dict[str, Any], ...] = ()
    cache: str = ""
    frontend: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One line back.

    Attributes:
        version: of the library, in its own numbering; with the first reply.
        answer: the plans for a convolution; None where cuDNN has none to give.
        workspace: bytes of the plan for attention; None where cuDNN has none to give.
        refusal: why, in its own words.
        fatal: nothing else can be asked either.
        lacks: why attention cannot be asked about at all.
    """

    version: int = 0
    answer: ConvAnswer | None = None
    workspace: int | None = None
    refusal: str = ""
    fatal: bool = False
    lacks: str = ""


@dataclass(slots=True)
class KeptAnswers:
    """Answers on disk: a file for a version and a card, a line for a question, written whole by one call.

    Attributes:
        file: where they are; None to keep none.
        answers: by the question as it is written.
    """

    file: Path | None
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: str, version: int, card: dict[str, Any]) -> KeptAnswers:
        """Read what earlier runs kept; lines that cannot be read are left out."""
        if not folder or not version:
            return cls(None)
        digest = hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()[:16]
        kept = cls(Path(folder) / f"{version}-{digest}.jsonl")
        with contextlib.suppress(OSError):
            assert kept.file is not None
            for line in kept.file.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    from_plain(entry["reply"], Reply)  # as this version writes it
                    kept.answers[entry["question"]] = entry["reply"]
        return kept

    def add(self, question: str, reply: dict[str, Any]) -> None:
        """Keep an answer; where it cannot be written it is asked again in the next run."""
        self.answers[question] = reply
        if self.file is None:
            return
        line = json.dumps({"question": question, "reply": reply}) + "\n"
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)


class Answering:
    """Answers questions about one card, from what is kept or from the library.

    Args:
        opening: the library, the card and the cache.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._loaded: tuple[Cudnn, list[Any]] | None = None
        self._frontend: Frontend | None = None
        if not opening.version:
            self._load()
        self._kept = KeptAnswers.open(opening.cache, self.version, opening.card)

    @property
    def version(self) -> int:
        """Of the library, in its own numbering."""
        return self._opening.version if self._loaded is None else self._loaded[0].version

    def _load(self) -> tuple[Cudnn, list[Any]]:
        """The library and the descriptors of the card, made at the first use.

        Raises:
            OSError: it cannot be loaded.
            BackendError: it does not know the card.
        """
        if self._loaded is None:
            library = Cudnn(self._opening.library)
            cards = (self._opening.card, *self._opening.others)
            self._loaded = library, [library.card(card) for card in cards]
        return self._loaded

    def reply(self, text: str) -> Any:
        """The reply to a question as it is written, in plain values."""
        known = self._kept.answers.get(text)
        if known is not None:
            return known
        try:
            library, cards = self._load()
        except (OSError, BackendError) as error:
            return to_plain(Reply(refusal=str(error), fatal=True))
        if self._opening.version and library.version != self._opening.version:
            reason = f"it says that it is version {library.version}, its package {self._opening.version}"
            return to_plain(Reply(refusal=reason, fatal=True))
        asked = json.loads(text)
        if ATTENTION in asked:
            return self._attention(text, from_plain(asked[ATTENTION], AttentionQuestion), library)
        question = from_plain(asked, ConvQuestion)
        try:
            found = library.plans(question, cards[0])
            if question.any_clock:
                firsts = [library.plans(question.with_most(1), card).plans[:1] for card in cards[1:]]
                found = replace(
                    found, at_other_clocks=tuple(plan.workspace for (plan,) in filter(None, firsts))
                )
            reply = to_plain(Reply(answer=found))
        except BackendError as error:
            reply = to_plain(Reply(refusal=str(error)))
        self._kept.add(text, reply)
        return reply

    def _attention(self, text: str, question: AttentionQuestion, library: Cudnn) -> Any:
        """The reply to a question about attention. A refusal is not kept: what it is for may be installed later."""
        try:
            if self._frontend is None:
                self._frontend = Frontend(self._opening.frontend, library, self._opening.card)
            reply = to_plain(Reply(workspace=self._frontend.workspace(question)))
        except FrontendError as error:
            return to_plain(Reply(lacks=str(error)))
        except BackendError as error:
            return to_plain(Reply(refusal=str(error)))
        self._kept.add(text, reply)
        return reply


def main(lines: TextIO, out: TextIO) -> int:
    """Answer until the input ends; returns the exit code."""
    try:
        answering = Answering(from_plain(json.loads(lines.readline()), Opening))
    except (OSError, BackendError) as error:
        _write(out, to_plain(Reply(refusal=str(error), fatal=True)))
        return 1
    except (ValueError, msgspec.ValidationError):
        return 2
    _write(out, to_plain(Reply(version=answering.version)))
    for line in lines:
        _write(out, answering.reply(line.strip()))
    return 0


def _write(out: TextIO, values: Any) -> None:
    out.write(json.dumps(values) + "\n")
    out.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        # cuDNN may print: what it says must not come between the answers.
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        main(sys.stdin, answers)
    os._exit(0)  # what a library does at the end of its process is not waited for
