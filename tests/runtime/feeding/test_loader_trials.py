"""``vramfit doctor --loader``: rates, memory of workers, what is recommended, and what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import vramfit
from vramfit.cli import main
from vramfit.errors import UsageError
from vramfit.report import render, to_json
from vramfit.runtime.feeding import loader_trials
from vramfit.runtime.feeding.loader_choices import LoaderTrial, LoaderTrials, recommended
from vramfit.runtime.feeding.loader_trials import items_in, try_loader, with_choice

LOADERS = """
import torch, time
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Slow(Dataset):
    def __len__(self): return 4000
    def __getitem__(self, number):
        time.sleep(0.01)
        return {"x": torch.zeros(64, 64), "y": number}

class Bad(Slow):
    def __getitem__(self, number):
        raise KeyError("no such picture")

class BadInWorkers(Slow):
    def __getitem__(self, number):
        assert torch.utils.data.get_worker_info() is None, "not in a worker"
        return super().__getitem__(number)

class Stream(IterableDataset):
    def __iter__(self): yield from range(10)

def made(): return DataLoader(Slow(), batch_size=4, num_workers=1)
def broken(): raise ValueError("no data here")
slow = DataLoader(Slow(), batch_size=4, shuffle=True)
batches = DataLoader(Slow(), batch_size=None, sampler=torch.utils.data.BatchSampler(range(80), 4, False))
bad, in_workers, stream = DataLoader(Bad()), DataLoader(BadInWorkers(), batch_size=2), DataLoader(Stream())
few = DataLoader(Slow(), batch_size=4000)
words = ["a"]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own_loaders.py"
    path.write_text(LOADERS)
    return path


def trial(workers: int, *rates: float, **more: Any) -> LoaderTrial:
    return LoaderTrial(workers=workers, pinned=False, rates=rates, **more)


class Timed(Dataset[torch.Tensor]):
    """Items take 10 ms each, by a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def __len__(self) -> int:
        return 400

    def __getitem__(self, number: int) -> torch.Tensor:
        self.now += 0.01
        return torch.zeros(2)


def test_a_rate_is_what_the_data_set_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Timed()
    monkeypatch.setattr(loader_trials, "time", data)
    found = loader_trials._round(DataLoader(data, batch_size=4), trial(0), 0.4)
    assert found.first_seconds == pytest.approx(0.04) and found.rate == pytest.approx(100.0)
    assert data.now == pytest.approx(0.04 + 0.4)  # as long as was asked for, from the first batch on
    assert found.worker_bytes is None


def test_each_choice_is_tried_in_each_round_and_the_least_that_is_fast_is_recommended(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def measured(loader: Any, choice: LoaderTrial, seconds: float) -> Any:
        tried.append(choice.workers)
        rate = 100.0 * (1 + min(choice.workers, 2)) + len(tried)
        return loader_trials._Round(rate, 0.1 * (1 + choice.workers), 8 << 20 if choice.workers else None, 0)

    monkeypatch.setattr(loader_trials, "_round", measured)
    monkeypatch.setattr(loader_trials, "_cores", lambda: 4)
    found = try_loader(f"{file}:slow", rounds=2)
    assert tried == [0, 1, 2, 4] * 2
    assert [one.rates for one in found.trials] == [(101, 105), (202, 206), (303, 307), (304, 308)]
    assert found.recommended.workers == 2  # four are as fast, and two are fewer
    assert [one.worker_bytes for one in found.trials] == [None, 8 << 20, 8 << 20, 8 << 20]
    assert (found.cores, found.batches, found.batch_items) == (4, 1000, 4)
    assert found.given == LoaderTrial(workers=0, pinned=False)


def test_workers_are_started_and_looked_at() -> None:
    """With a time limit for batches too, which a loader without workers refuses."""
    data = torch.utils.data.TensorDataset(torch.zeros(400, 2))
    loader = DataLoader(data, batch_size=4, num_workers=1, timeout=60)
    found = loader_trials._round(loader, trial(1), 0.01)
    assert found.rate > 0 and (found.worker_bytes is None or found.worker_bytes > 1 << 20)
    assert with_choice(loader, trial(1)).timeout == 60
    assert loader_trials._round(loader, trial(0), 0.01).rate > 0


def test_the_recommendation_is_the_least_within_the_spread() -> None:
    apart = [
        trial(0, 90, 100, 110),
        trial(1, 180, 200, 220),
        trial(2, 300, 310, 320),
        trial(4, 305, 330, 340),
    ]
    assert recommended(apart).workers == 2
    assert recommended([*apart, trial(8, 900, 1000, 1100)]).workers == 8
    assert recommended([trial(0, 190, 200, 210), trial(1, 180, 195, 205)]).workers == 1  # steps need not wait
    assert recommended([trial(0, 900, 1000, 1100), trial(1, 100, 110, 120)]).workers == 0
    assert recommended([trial(0, 1.0), trial(1, error="no")]).workers == 0


def test_a_loader_is_the_same_but_for_its_workers() -> None:
    data: Dataset[Any] = torch.utils.data.TensorDataset(torch.arange(10))
    loader = DataLoader(
        data, batch_size=3, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True
    )
    made = with_choice(loader, trial(0))
    assert (made.num_workers, made.persistent_workers, made.prefetch_factor) == (0, False, None)
    assert made.batch_sampler is loader.batch_sampler and made.dataset is loader.dataset and made.drop_last
    assert len(list(made)) == 3
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (1, True, 2)
    assert with_choice(made, trial(3)).prefetch_factor == 2


def test_items_are_counted() -> None:
    assert items_in({"x": [torch.zeros(7, 2)], "y": torch.zeros(3)}) == 7
    assert items_in(torch.tensor(1.0)) == 1
    assert items_in(["a", "b"]) == 2
    assert items_in("text") == 1


def test_what_fails_in_workers_alone_is_a_row(file: Path) -> None:
    found = try_loader(f"{file}:in_workers", seconds=0.01, rounds=1)
    assert found.recommended.workers == 0
    errors = {one.workers: one.error for one in found.trials}
    assert errors[0] is None and "not in a worker" in str(errors[1])
    assert "1: fails: AssertionError: not in a worker" in render(found, width=120)
    assert to_json(found)["trials"][1]["items_per_second"] is None


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("slower", 2, "own_loaders.py has no slower"),
        ("words", 2, "words in own_loaders.py is of type list, not a DataLoader"),
        ("stream", 2, "has no length: its data set is a stream"),
        ("few", 2, "has 1 batches, too few to measure"),
        ("bad", 1, "own_loaders.py:13: KeyError: 'no such picture'"),
        ("broken", 1, "ValueError: no data here"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_line(
    file: Path, capsys: pytest.CaptureFixture[str], name: str, code: int, said: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--loader", f"{file.name}:{name}", "--seconds", "0.01"])
    err = capsys.readouterr().err
    assert stop.value.code == code
    assert said in err
    assert "Traceback" not in err and len(err.splitlines()) == 2


def test_files_that_are_not_there(file: Path) -> None:
    for target, said in (
        ("none.py:x", "there is no file none.py"),
        ("own_loaders.py", "names no DataLoader"),
    ):
        with pytest.raises(UsageError, match=said):
            try_loader(target)


def test_the_command_prints_a_table_or_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "--loader", f"{file.name}:made", "--seconds", "0.02"]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--json", "-"])
    assert not stop.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "vramfit.loader/1"
    assert [one["num_workers"] for one in found["trials"]][:2] == [0, 1]
    assert found["given"] == {"num_workers": 1, "pin_memory": False}
    assert all(
        one["slowest_round"] <= one["items_per_second"] <= one["fastest_round"] for one in found["trials"]
    )
    assert found["recommended"]["pin_memory"] is None


def test_a_report_for_people() -> None:
    trials = (
        trial(0, 90.0, 100.0, 110.0, first_seconds=0.01, shared_bytes=0),
        trial(2, 1300.0, 1310.0, 1320.0, first_seconds=0.2, worker_bytes=16 << 20, shared_bytes=3 << 20),
    )
    found = LoaderTrials(
        target="a.py:loader",
        cores=2,
        batches=10,
        batch_items=4,
        card=False,
        trials=trials,
        given=LoaderTrial(workers=0, pinned=False),
        recommended=trials[1],
    )
    text = render(found, width=110)
    assert "2          1,310    1,300    1,320      0.200 s    16.00 MiB  3.00 MiB" in text
    assert "num_workers=2: 1,310 items/s (1,300 to 1,320). It has num_workers=0: 100 items/s" in text
    assert "pin_memory was not measured" in text


def test_pinned_memory_is_tried_where_there_is_a_card() -> None:
    """On a virtual card: its rates mean nothing, but all of it runs."""
    with vramfit.VirtualGPU("RTX 4090"):
        data = torch.utils.data.TensorDataset(torch.zeros(64, 8))
        loader = DataLoader(data, batch_size=4)
        for pinned in (False, True):
            choice = LoaderTrial(workers=0, pinned=pinned)
            assert loader_trials._round(loader, choice, 0.05).rate > 0
        assert torch.cuda.memory_allocated() == 0
