"""The file that keeps every measurement at once, so that a stopped calibration can continue. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.calibrate.records import CaseRecord, record_from_plain, record_to_plain
from vramfit.errors import UsageError, WriteError
from vramfit.gpus.measured_profile import rates_from_plain
from vramfit.plain import read, to_plain

SCHEMA = "vramfit.measured/1"
GRID = 1
"""Grows when a case changes its meaning under the same name: earlier measurements are then set aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What was measured, and with what.

    Attributes:
        source: ``card``, or ``virtual`` when the virtual GPU took the card's place.
        name: the card as ``torch.cuda.get_device_name()`` says.
        torch, cuda: versions.
        cudnn: version in cuDNN's numbering, 0 without.
        driver: version of the driver, empty where unknown.
    """

    source: str
    name: str
    total_bytes: int
    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int
    torch: str
    cuda: str
    cudnn: int
    driver: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseFailure:
    """A case that gave no measurement.

    Attributes:
        kind: ``memory``, ``error``, ``broken`` (the CUDA context), ``died``, ``time`` or ``skipped``.
        text: the reason in a line.
    """

    case: str
    kind: str
    text: str


class CalibrationJournal:
    """Measurements of one card with one torch, each kept as soon as it is there.

    Args:
        path: its file, JSON lines; read if it is there.
        about: what is measured; a file about something else is not continued.
        fresh: discard what the file holds.
    """

    def __init__(self, path: Path, about: About, *, fresh: bool = False) -> None:
        self.path = path
        self.about = about
        self.records: dict[str, CaseRecord] = {}
        self.failures: dict[str, CaseFailure] = {}
        self.facts: dict[str, Any] = {}
        self.set_aside = False
        header = {"schema": SCHEMA, "grid": GRID, "about": to_plain(about)}
        found = list(_lines(path)) if path.exists() and not fresh else []
        if found and found[0] == header:
            _end_last_line(path)
            self._take_all(found[1:])
            return
        self.set_aside = bool(found)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        except OSError as error:
            raise WriteError(
                f"cannot write {path}: {(error.strerror or str(error)).lower()}", "Choose another -o"
            ) from None

    @classmethod
    def read(cls, path: Path) -> CalibrationJournal:
        """Read measurements made elsewhere.

        Raises:
            UsageError: the file cannot be read, or holds no measurements.
        """
        hint = "Give the file that ends in .measured.jsonl, beside the profile"
        try:
            found = list(_lines(path))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"cannot read the measurements {path}: {reason}", hint) from None
        if not found or found[0].get("schema") != SCHEMA:
            raise UsageError(f"{path} does not hold measurements of vramfit calibrate", hint)
        journal = cls.__new__(cls)
        journal.path, journal.set_aside = path, False
        journal.records, journal.failures, journal.facts = {}, {}, {}
        try:
            journal.about = read(found[0].get("about"), About, "about")
        except ValueError as error:
            raise _damaged(path, error) from None
        journal._take_all(found[1:])
        return journal

    def has(self, case: str) -> bool:
        """Whether a case was measured or failed already."""
        return case in self.records or case in self.failures

    def add(self, record: CaseRecord) -> None:
        """Keep a measurement."""
        self._write({"case": record.case, "record": record_to_plain(record)})

    def fail(self, failure: CaseFailure) -> None:
        """Keep a failure."""
        self._write({"case": failure.case, "failed": [failure.kind, failure.text]})

    def note(self, name: str, value: Any) -> None:
        """Keep a fact about the card: ``growths`` or ``rates``."""
        self._write({"fact": name, "value": value})

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        self._take(line)

    def _take_all(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take the lines of a file, which may be damaged."""
        try:
            for line in lines:
                self._take(line)
            rates_from_plain(self.facts.get("rates", {}))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise _damaged(self.path, error) from None

    def _take(self, line: dict[str, Any]) -> None:
        if "fact" in line:
            self.facts[line["fact"]] = line["value"]
        elif "record" in line:
            self.records[line["case"]] = record_from_plain(line["case"], line["record"])
        else:
            kind, text = read(line["failed"], tuple[str, str], "failed")
            self.failures[line["case"]] = CaseFailure(case=line["case"], kind=kind, text=text)


def _damaged(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"{path} holds damaged measurements ({type(error).__name__}: {error!s:.80})",
        "Copy it again, or measure anew with vramfit calibrate --fresh",
    )


def _end_last_line(path: Path) -> None:
    """Cut off a last line that was never finished, so that the next one does not continue it."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; one that was cut off when the machine stopped ends it."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not isinstance(found, dict):
                return
            yield found
