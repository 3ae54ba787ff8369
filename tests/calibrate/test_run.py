"""Whole calibrations, the virtual GPU in the card's place: limits, crashes, going on, planted disagreements."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.calibrate.calibration_result import Calibration, OpVerdict
from vramfit.calibrate.calibration_run import (
    Options,
    _cases,
    _MeasuredCase,
    _outcome,
    calibrate,
    compare_again,
    spec_of,
)
from vramfit.calibrate.cases import OpFamily, find_case, grid
from vramfit.calibrate.measurement_journal import About, CalibrationJournal
from vramfit.calibrate.predict import PredictingGPU
from vramfit.calibrate.records import CaseRecord, record_to_plain
from vramfit.calibrate.worker import Child, CommandFailed, Role, WorkerConfig
from vramfit.gpus import find_gpu
from vramfit.gpus.measured_profile import (
    MeasuredCall,
    MeasuredOp,
    MeasuredProfile,
    load_profile,
    save_profile,
)
from vramfit.virtual.gpu import VirtualGPU

from .support import ABOUT, op, record

H200 = find_gpu("H200")
SORT = next(
    case.name for case in grid([OpFamily.SORTING]) if case.name.startswith("sorting/sort/100x50000/fp32")
)
CONVOLUTION = next(case.name for case in grid([OpFamily.CONVOLUTION]) if case.name.endswith("bf16/inference"))
SOFTMAX = next(
    case.name for case in grid([OpFamily.LOSS]) if case.name.startswith("loss/softmax/64x1000/fp32")
)


class Silent:
    """Hears all and keeps it."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}

    def about(self, about: About, journal: CalibrationJournal) -> None:
        self.known = len(journal.records)

    def doing(self, what: str) -> None:
        self.notes[what] = ""

    def case(self, number: int, of: int, name: str, note: str) -> None:
        self.notes[name] = note


def run(folder: Path, cases: Sequence[str], **more: Any) -> tuple[Calibration, Silent]:
    observer = Silent()
    settings: dict[str, Any] = {"gpu": H200, "surroundings": False, **more}
    options = Options(cases=cases, journal=folder / "m.measured.jsonl", **settings)
    return calibrate(options, observer), observer


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Calibration]]:
    """A card whose sort and convolution take other blocks than the rules say, measured with all around it."""
    folder = tmp_path_factory.mktemp("planted")
    calls: dict[str, dict[str, MeasuredCall]] = {}
    with PredictingGPU(H200, alloc_conf="", profile="none") as gpu:
        for name, usual in (
            (SORT, MeasuredOp(before=(111,), after=(222, -1, 333))),
            (CONVOLUTION, MeasuredOp(after=(777_777,))),
        ):
            (op,) = gpu.predict(find_case(name)).ops
            calls[op.op] = {op.signature: MeasuredCall(usual=usual)}
    acting = MeasuredProfile(
        gpu_name=H200.vendor_name,
        total_bytes=H200.total_bytes,
        torch_version=torch.__version__,
        date="2026-01-02",
        context_bytes=600 << 20,
        library_bytes={"cudnn": 40 << 20},
        workspace_bytes={"cublas": 3 << 20},
        ops=calls,
    )
    save_profile(acting, folder / "acting.json")
    found, _ = run(
        folder, [SORT, CONVOLUTION, SOFTMAX], acting=str(folder / "acting.json"), surroundings=True
    )
    yield folder, found


def test_planted_disagreement_is_named(planted: tuple[Path, Calibration]) -> None:
    _, found = planted
    assert {comparison.case for comparison in found.disagreements} == {SORT, CONVOLUTION}
    by_case = {comparison.case: comparison for comparison in found.disagreements}
    assert by_case[SORT].op == "aten.sort.default"
    assert by_case[SORT].verdict is OpVerdict.DIFFERENT
    assert by_case[SORT].measured is not None
    assert by_case[SORT].measured.measured == MeasuredOp(before=(111,), after=(222, -1, 333))
    assert found.total.exact == found.total.calls - 2


def test_surroundings_are_those_of_the_card(planted: tuple[Path, Calibration]) -> None:
    _, found = planted
    growths = {growth["name"]: growth for growth in found.growths}
    told = {growth["name"]: growth for growth in found.expected_growths}
    assert growths["context"]["outside"] == 600 << 20
    assert told["context"]["outside"] == H200.typical_context_bytes
    assert growths["cudnn"]["outside"] == 40 << 20
    assert growths["cublas"]["kept"] == growths["cublas_backward"]["kept"] == 3 << 20
    assert told["cublas"]["kept"] == 32 << 20
    assert found.rates is not None
    assert found.rates.bandwidth == pytest.approx(H200.bandwidth * 0.8, rel=0.05)  # the launch counts too
    assert found.rates.to_host["pinned"] == pytest.approx(H200.host_link, rel=0.01)
    # Onto the card, the virtual GPU counts the traffic in its memory besides.
    assert H200.host_link * 0.94 < found.rates.to_card["pinned"] < H200.host_link
    assert found.rates.flops["bfloat16"] == pytest.approx(H200.peak_flops["bfloat16"] * 0.7, rel=0.02)
    assert set(found.rates.to_card) == set(found.rates.to_host) == {"pinned", "pageable"}


def test_profile_of_it_is_then_preferred(planted: tuple[Path, Calibration]) -> None:
    folder, found = planted
    path = folder / "profile.json"
    save_profile(found.profile("2026-03-04"), path)
    profile = load_profile(path)
    assert set(profile.ops) >= {"aten.sort.default", "aten.convolution.default"}
    with PredictingGPU(H200, alloc_conf="", profile=profile) as gpu:
        again = {name: gpu.predict(find_case(name)) for name in (SORT, CONVOLUTION)}
    for name in (SORT, CONVOLUTION):
        assert [op.steps for op in again[name].ops] == [op.steps for op in found.measured[name].ops]
    assert again[CONVOLUTION].ops[0].above == 0
    assert found.predicted[CONVOLUTION].ops[0].above > 0
    with VirtualGPU(H200, alloc_conf="", profile=path) as gpu:
        find_case(SORT).build()()
    note = gpu.run.profile
    assert note is not None
    assert (note.file, note.date, note.source, note.used) == (str(path), "2026-03-04", "virtual", 1)
    assert gpu.run.devices[0].context_bytes == 600 << 20


def test_it_is_compared_again_without_measuring(planted: tuple[Path, Calibration]) -> None:
    folder, found = planted
    again = compare_again(CalibrationJournal.read(folder / "m.measured.jsonl"), [SORT, SOFTMAX], Silent())
    assert [c.case for c in again.disagreements] == [SORT]
    assert again.growths == found.growths
    assert again.expected_growths == found.expected_growths


class Told:
    """Stands for a worker: its replies are known beforehand."""

    def __init__(self, replies: Mapping[str, CaseRecord | CommandFailed]) -> None:
        self.replies = dict(replies)
        self.asked: list[str] = []

    def send(self, do: str, *, name: str) -> None:
        self.asked.append(name)

    def receive(self, timeout: float) -> Any:
        found = self.replies[self.asked[-1]]
        if isinstance(found, CommandFailed):
            raise found
        return record_to_plain(found)

    def ask(self, do: str, timeout: float, *, name: str) -> Any:
        self.send(do, name=name)
        return self.receive(timeout)


def go_through(
    folder: Path, names: Sequence[str], card: Told, *, seconds: float = 60.0, limit: int = 1 << 30
) -> tuple[Calibration, Silent]:
    """The loop over the cases, between workers that are not there."""
    journal = CalibrationJournal(folder / "m.measured.jsonl", ABOUT)
    predictions = {name: replace(record(name, op("o32@0")), peak_bytes=1 << 20) for name in names}
    found, observer = _MeasuredCase(), Silent()
    _cases(
        Options(cases=names, journal=journal.path),
        journal,
        card,  # type: ignore[arg-type]
        Told(predictions),  # type: ignore[arg-type]
        found,
        observer,
        deadline=time.monotonic() + seconds,
        limit=limit,
    )
    return _outcome(journal, found), observer


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    names = ["a/1", "a/2", "a/3"]
    card = Told({name: record(name, op("o32@0")) for name in names})
    go_through(tmp_path, names[:2], card)
    found, observer = go_through(tmp_path, names, card)
    assert card.asked == names
    assert set(observer.notes) == set(names)
    assert found.total.cases == 3


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    names = ["a/1", "a/2", "a/3"]
    card = Told({name: record(name, op("o32@0")) for name in names})
    go_through(tmp_path, names[:1], card)
    found, observer = go_through(tmp_path, names, card, seconds=-1.0)
    assert card.asked == ["a/1"]
    assert found.left == 2
    assert set(observer.notes) == {"a/1"}
    assert found.total.cases == 1


def test_case_that_fails_leaves_the_others(tmp_path: Path) -> None:
    died = CommandFailed("died", "the process ended by signal SIGSEGV")
    card = Told({"a/1": record("a/1", op("o32@0")), "a/2": died, "a/3": record("a/3", op("o32@0"))})
    found, observer = go_through(tmp_path, ["a/1", "a/2", "a/3"], card)
    assert set(found.measured) == {"a/1", "a/3"}
    assert found.failures["a/2"].kind == "died"
    assert observer.notes["a/2"] == "the process ended by signal SIGSEGV"
    again, _ = go_through(tmp_path, ["a/1", "a/2", "a/3"], card)
    assert card.asked == ["a/1", "a/2", "a/3"]
    assert again.failures == found.failures


def test_case_that_needs_more_memory_is_passed_over(tmp_path: Path) -> None:
    card = Told({})
    found, observer = go_through(tmp_path, ["a/1"], card, limit=1 << 19)
    assert card.asked == []
    assert found.failures["a/1"].kind == "skipped"
    assert observer.notes["a/1"] == "needs about 1,048,576 bytes of 524,288"


def worker(role: Role = Role.VIRTUAL_CARD, **more: Any) -> WorkerConfig:
    return WorkerConfig(role=role, gpu=H200, **more)


def test_worker_that_dies_is_explained_and_replaced() -> None:
    with Child(worker()) as child:
        child.limit(64 << 20, 60)
        assert child._process is not None
        child._process.kill()
        with pytest.raises(CommandFailed, match="the process ended by signal SIGKILL") as caught:
            child.ask("case", 60, name=SOFTMAX)
        assert caught.value.kind == "died"
        assert child.ask("case", 60, name=SOFTMAX)["ops"]
        assert child.starts == 2
        with pytest.raises(CommandFailed, match="Tried to allocate") as caught:
            child.ask("rates", 60)  # within the limit that the new worker was given too
        assert caught.value.kind == "memory"
        with pytest.raises(CommandFailed, match="no-such-case") as caught:
            child.ask("case", 60, name="no-such-case")
        assert caught.value.kind == "error"
        with pytest.raises(CommandFailed, match="took longer") as caught:
            child.ask("about", 0.0)
        assert caught.value.kind == "time"
    assert child._process is None


def test_card_that_is_not_in_the_catalogue_is_known_by_its_figures() -> None:
    unknown = replace(ABOUT, name="NVIDIA Z9", total_bytes=20 << 30, capability=(8, 6), sm_count=11)
    spec = spec_of(unknown)
    assert (spec.vendor_name, spec.total_bytes, spec.sm_count) == ("NVIDIA Z9", 20 << 30, 11)
    assert spec.compute_capability == (8, 6)
    known = spec_of(ABOUT)
    assert (known.name, known.total_bytes) == ("H200 SXM", ABOUT.total_bytes)


def test_journal_is_json_lines_of_a_few_hundred_bytes(planted: tuple[Path, Calibration]) -> None:
    folder, _ = planted
    lines = (folder / "m.measured.jsonl").read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["schema", "fact", "fact", *["case"] * 3]
    assert max(map(len, lines)) < 2000
