"""Stress tests of small workloads, in child processes: on a virtual GPU and on metered CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vramfit.errors import UsageError, VramfitError
from vramfit.gpus import find_gpu
from vramfit.record.cpu_recorder import CpuRecorder
from vramfit.record.recorder import Subjects
from vramfit.stress import Vary, stress
from vramfit.stress.rounds import CpuMemory, Stress, _memory
from vramfit.stress.stability import LimitReason, RoundOutcome, StressReport, Trend
from vramfit.stress.stress_run import StressJob, _report
from vramfit.trace import Source
from vramfit.units import MIB
from vramfit.workload import load_workload

WORKLOADS = """
import torch
from torch import nn
from vramfit.workload import Workload

kept = []

def big(batch_size, width):
    return torch.ones(batch_size, width)

def narrow(batch_size, width):
    return torch.ones(batch_size, 1)

def loss(model, batch):
    return model(batch.repeat(1, 1024)).relu().sum()  # 4 KiB a row, made on the device

def leak(state, batch):
    kept.append(torch.ones(3 << 20, device=state.device))
    state.model(batch)

class Short(nn.Module):
    def forward(self, batch):
        if len(batch) > 24:
            raise IndexError("position 24 is out of range")
        return batch * 2

training = Workload(
    model=lambda: nn.Linear(1024, 1024),
    batch=narrow,
    sizes={"batch_size": 256, "width": 1024},
    loss=loss,
    optimizer=torch.optim.Adam,
)
leaking = Workload(model=lambda: nn.Linear(8, 8), batch=big, sizes={"batch_size": 4, "width": 8}, step=leak)
short = Workload(model=Short, batch=big, sizes={"batch_size": 16, "width": 8})
hungry = Workload(model=lambda: nn.Identity(), batch=big, sizes={"batch_size": 8192, "width": 1024})
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stress") / "loads.py"
    path.write_text(WORKLOADS)
    return path


def test_a_training_step_on_a_virtual_card(file: Path) -> None:
    told: list[str] = []
    report = stress(
        f"{file}:training",
        gpu=find_gpu("1GiB"),
        rounds=32,
        vary=[Vary.parse("batch_size=1..")],
        progress=told.append,
    )
    assert report.fits
    assert report.source == "virtual"
    assert report.total_bytes < 1024 * MIB
    # The weight and the two moments of Adam stay, 4 MiB each.
    assert report.baseline.allocated >= 12 * MIB
    (limit,) = report.limits
    assert limit.reason is LimitReason.OUT_OF_MEMORY
    assert limit.failing is not None
    assert limit.largest < limit.failing <= limit.largest + limit.largest // 32 + 1
    best = next(one for one in limit.rounds if one.sizes["batch_size"] == limit.largest)
    assert best.fits
    assert best.peak_reserved <= report.total_bytes
    failed = next(one for one in limit.rounds if one.sizes["batch_size"] == limit.failing)
    assert failed.outcome is RoundOutcome.OUT_OF_MEMORY
    assert failed.message.startswith("OutOfMemoryError: CUDA out of memory")
    assert failed.allocated < 64 * MIB  # what the step held is gone
    assert len(report.rounds) == 32
    assert report.stability is not None
    assert report.stability.trend is Trend.STEADY
    assert report.stability.cycles == 4
    assert all(one.peak_allocated <= one.peak_reserved for one in report.rounds)
    assert told


def metered(file: Path, name: str, *, budget: int, rounds: int = 0, vary: str = "") -> StressReport:
    """A stress test on metered CPU in this process: what the child does."""
    varied = (Vary.parse(vary),) if vary else ()
    job = StressJob(folder="", target=f"{file}:{name}", device="cpu", rounds=rounds, vary=varied)
    # With a model named, what other tests have left alive in this process does not count.
    recorder = CpuRecorder(budget=budget, subjects=Subjects.of(torch.nn.Identity(), None))
    recorder.start()
    try:
        found = Stress(load_workload(job.target), CpuMemory(recorder), job, lambda *_: None).run()
    finally:
        recorder.stop()
    found = replace(found, torch_version=torch.__version__)
    return _report(name, found, source=Source.CPU, total=budget, alloc_conf="", seconds=0.0)


def test_a_leak_shows_as_growth(file: Path) -> None:
    report = metered(file, "leaking", budget=1 << 30, rounds=32, vary="batch_size=1..8")
    assert report.stability is not None
    assert report.stability.trend is Trend.ALLOCATED_GROWS
    assert report.stability.growth_per_cycle == len(report.cycle) * 12 * MIB
    (limit,) = report.limits
    assert (limit.largest, limit.failing, limit.reason) == (8, None, LimitReason.NOT_REACHED)


def test_sizes_that_the_workload_refuses(file: Path) -> None:
    (limit,) = metered(file, "short", budget=64 * MIB).limits
    assert (limit.largest, limit.failing, limit.reason) == (24, 25, LimitReason.REFUSED)
    assert limit.rounds[1].message == "IndexError: position 24 is out of range"


def test_a_workload_that_does_not_fit_at_its_usual_sizes(file: Path) -> None:
    report = metered(file, "hungry", budget=24 * MIB, rounds=8, vary="batch_size=1..8192")
    assert not report.fits
    assert report.baseline.outcome is RoundOutcome.OUT_OF_MEMORY
    (limit,) = report.limits
    assert limit.failing is not None
    assert limit.largest * 4096 <= 24 * MIB < limit.failing * 4096 + 2 * MIB
    assert all(one.fits for one in report.rounds)  # after the failures, the next sizes go on


def test_what_cannot_be_run(file: Path) -> None:
    with pytest.raises(UsageError, match="no size depth"):
        metered(file, "short", budget=MIB, vary="depth")
    for arguments, message in (
        ({"device": "cpu"}, "needs a budget"),
        ({"device": "tpu"}, "not a device"),
        ({"budget": 5}, "for metered CPU"),
        ({"gpu": find_gpu("1GiB"), "device": "cuda"}, "both a virtual GPU and a device"),
        ({"device": "cpu", "budget": MIB, "rounds": -1}, "number of rounds is -1"),
    ):
        with pytest.raises(UsageError, match=message):
            stress(f"{file}:short", **arguments)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_other_devices_are_named() -> None:
    with (
        pytest.raises(UsageError, match="no CUDA card here") as caught,
        _memory(StressJob(folder="", target="")),
    ):
        pass
    assert "--gpu NAME" in caught.value.hint


def test_a_file_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("import torch\nraise ValueError('no data here')\n")
    with pytest.raises(VramfitError, match=r"wrong\.py:2: ValueError: no data here") as caught:
        stress(f"{path}:x", gpu=find_gpu("1GiB"))
    assert caught.value.exit_code == 1
