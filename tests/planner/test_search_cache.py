"""A later search goes on from an earlier one, and believes nothing where anything differs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.planner.test_search import CONTEXT, GPU, MIB
from tests.planner.test_search_clock import Second, Timed, request

from vramfit.planner.candidates import Candidates
from vramfit.planner.planner_job import DeviceMemory, MemoryBudget, PlannerJob, PlanOptions
from vramfit.planner.planner_run import plan_in_child
from vramfit.planner.plans import Plan
from vramfit.planner.search import PlanSearch
from vramfit.planner.search_cache import SearchCache
from vramfit.planner.search_clock import TIME_OVER, SearchClock
from vramfit.planner.search_evidence import SEARCH_FILE, Evidence, digest_of, earlier_searches

JOB = PlannerJob(target="work.py:training", memory=DeviceMemory(device="cuda", gpu=GPU, budget=1 << 30))


def searched(folder: Path, *, limit: float | None = None, **other: Any) -> tuple[Plan, Timed, SearchCache]:
    """A search with what is remembered in a folder."""
    second = Second()
    device = Timed(second)
    cache = SearchCache(folder / "search.jsonl", Evidence(JOB, folder))
    search = PlanSearch(
        Candidates(
            device=device, request=request(**other), clock=SearchClock(limit=limit, now=second), cache=cache
        )
    )
    return search.plan(), device, cache


@dataclass(frozen=True, kw_only=True)
class Before:
    """A search that came to its end.

    Attributes:
        text: of its file.
        runs: that it made.
        plan: that it found.
    """

    text: str
    runs: int
    plan: Plan


_BEFORE: list[Before] = []


@pytest.fixture
def before(tmp_path_factory: pytest.TempPathFactory) -> Before:
    """Made once, under the variables that each test has."""
    if not _BEFORE:
        folder = tmp_path_factory.mktemp("before")
        plan, device, _ = searched(folder)
        _BEFORE.append(Before(text=(folder / "search.jsonl").read_text(), runs=device.runs, plan=plan))
    return _BEFORE[0]


def test_a_stopped_search_goes_on_where_it_was(tmp_path: Path, before: Before) -> None:
    short, _, _ = searched(tmp_path, limit=before.runs - 2.5)
    assert short.solved.stopped == TIME_OVER
    again, rest, cache = searched(tmp_path)
    assert again.solved.stopped is None
    assert rest.runs < before.runs
    assert cache.used == again.solved.remembered > 0
    assert again.choices == before.plan.choices
    assert again.after == before.plan.after
    # All over again, only the plain program runs.
    third, last, _ = searched(tmp_path)
    assert last.runs == 1
    assert third.after == before.plan.after
    assert third.notes == before.plan.notes


def test_another_budget_sees_the_same_runs(tmp_path: Path, before: Before) -> None:
    (tmp_path / "search.jsonl").write_text(before.text)
    other, second, cache = searched(tmp_path, budget_bytes=CONTEXT + 900 * MIB)
    assert other.aim.budget_bytes == CONTEXT + 900 * MIB
    assert other.fits
    assert cache.used > 0
    assert second.runs < before.runs


def test_less_that_is_allowed_asks_no_technique_again(tmp_path: Path, before: Before) -> None:
    (tmp_path / "search.jsonl").write_text(before.text)
    other, second, cache = searched(tmp_path, forbidden=frozenset({"chunked-loss"}))
    assert "chunked-loss" not in [choice.name for choice in other.choices]
    assert cache.used > 0
    # No model is made for a question that was answered before: only the plain program runs twice.
    known, found = (
        [line["key"] for line in map(json.loads, text.splitlines()) if line.get("kind") in ("sight", "price")]
        for text in (before.text, cache.file.read_text()[len(before.text) :])
    )
    assert len(found) == second.runs
    assert len(set(found) & set(known)) == 1


def _head(lines: list[dict[str, Any]]) -> None:
    lines[0]["packages"] = "others"


def _schema(lines: list[dict[str, Any]]) -> None:
    lines[0]["schema"] = "vramfit.search/0"


def _card(lines: list[dict[str, Any]]) -> None:
    lines[0]["gpu"]["sm_count"] += 1


def _plain(lines: list[dict[str, Any]]) -> None:
    plain = next(line for line in lines if line.get("kind") == "sight")
    plain["observation"]["stretches"][0][2] += 1


def _slower(lines: list[dict[str, Any]]) -> None:
    plain = next(line for line in lines if line.get("kind") == "sight")
    plain["observation"]["seconds"] += 1e-9


def _file(lines: list[dict[str, Any]]) -> None:
    lines.insert(1, {"kind": "file", "path": __file__, "digest": "0" * 64})


@pytest.mark.parametrize("change", [_head, _schema, _card, _plain, _slower, _file])
def test_nothing_is_believed_where_anything_differs(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], before: Before
) -> None:
    file = tmp_path / "search.jsonl"
    lines = [json.loads(line) for line in before.text.splitlines()]
    assert not any(line.get("kind") == "file" and not digest_of(Path(line["path"])) for line in lines)
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, again, cache = searched(tmp_path)
    assert cache.used == 0
    assert again.runs == before.runs
    anew = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(line.get("kind") == "sight" for line in anew) >= 3  # what was seen now is kept in its place


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path, before: Before) -> None:
    (tmp_path / "search.jsonl").write_text(before.text[:-20])
    assert 1 < searched(tmp_path)[1].runs < before.runs


WORKLOAD = """
import json, pathlib
import torch
from torch import nn
from helper import width
from vramfit import Workload

def model():
    count = json.loads((pathlib.Path(__file__).parent / "layers.json").read_text())
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(count))
    return nn.Sequential(*layers)

training = Workload(
    model=model,
    batch=lambda batch_size: torch.ones(batch_size, width),
    sizes={"batch_size": 8192},
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
)
"""


def test_calls_go_on_from_one_another_until_a_file_is_another(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORKLOAD)
    (tmp_path / "helper.py").write_text("width = 128")
    layers = tmp_path / "layers.json"
    layers.write_text("2")

    def planned(*, fresh: bool = False) -> Plan:
        room = MemoryBudget(gpu=GPU, budget=CONTEXT + 48 * MIB, host_bytes=1 << 34)
        chosen = ["activation-checkpointing"]
        return plan_in_child(
            f"{tmp_path}/work.py:training", room, PlanOptions(allow=chosen), fresh=fresh
        ).plan

    first = planned()
    assert first.solved.remembered == 0
    second = planned()
    assert second.solved.runs == 1
    assert second.solved.remembered >= first.solved.runs - 1
    assert second.after == first.after
    layers.write_text(" 2")
    assert planned().solved.remembered == 0
    assert planned(fresh=True).solved.remembered == 0


def test_files_that_come_later_are_seen_though_paths_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that a later run imports, a file that could not be read at first, and the same name elsewhere."""
    evidence = Evidence(JOB, tmp_path / "own")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "sizes.json").write_text(folder.name)
    late, absent, module = tmp_path / "late.json", tmp_path / "absent.json", tmp_path / "later_module.py"

    def opened(path: object) -> None:
        evidence._opened("open", (str(path), "r", 0))

    monkeypatch.chdir(first)
    for path in ("sizes.json", late, absent, tmp_path / "own" / "answer.json"):
        opened(path)
    for _ in range(2):
        found = evidence.files()
        assert str(first / "sizes.json") in found and not {str(late), str(absent)} & found.keys()
    late.write_text("4")
    module.write_text("width = 128")
    imported = ModuleType(module.stem)
    imported.__file__ = str(module)
    monkeypatch.setitem(sys.modules, module.stem, imported)
    monkeypatch.chdir(second)
    opened("sizes.json")
    found = evidence.files()
    own = {str(path) for path in (first / "sizes.json", second / "sizes.json", late, module)}
    assert own <= found.keys()
    assert {path: found[path] for path in own} == {path: digest_of(Path(path)) for path in own}
    assert not {str(absent), str(tmp_path / "own" / "answer.json")} & found.keys()


def test_a_damaged_file_of_the_cache_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAMFIT_CACHE_DIR", str(tmp_path / "cache"))
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    with earlier_searches(first, JOB):
        (first / SEARCH_FILE).write_text("what was seen " * 100, encoding="utf-8")
    (kept,) = (tmp_path / "cache").rglob("*.gz")
    with earlier_searches(second, JOB):
        assert (second / SEARCH_FILE).exists()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:10] + b"\xff" * 8 + whole[18:])  # no block that zlib knows
    with earlier_searches(third, JOB):
        assert not (third / SEARCH_FILE).exists()
