"""``vramfit.track`` as a block and as a decorator, and the lines of ``vramfit.snapshot``."""

from __future__ import annotations

import gc
import io
import pickle
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.virtual.conftest import fit_interpreter
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.trace import EventKind, MemoryTrace, load_snapshot, marks, read_any

__all__ = ["fit_interpreter"]  # backward passes on the CPU before tests of the virtual GPU

pytestmark = [pytest.mark.torch_versions, pytest.mark.usefixtures("no_garbage")]

LINE = re.compile(
    r"\[(?P<tag>.*?)\] allocated [\d.]+ \w+, reserved [\d.]+ \w+, peak [\d.]+ \w+"
    r"(?: \((?P<change>[+-][\d.]+ \w+) since \[(?P<last>.*)\]\))?"
)


def test_a_decorator_records_each_call() -> None:
    tracker = vramfit.track(device="cpu")

    @tracker
    def work(count: int) -> int:
        """Make some tensors."""
        return len([torch.ones(256) for _ in range(count)])

    assert work(2) == 2 and work.__doc__ == "Make some tensors."
    first = tracker.run
    assert work(5) == 5
    assert tracker.run is not first and work.tracked is tracker
    assert tracker.peak_allocated_bytes - first.devices[0].peak_allocated_bytes == 3 * 1024


def test_several_models_and_optimizers_can_be_named() -> None:
    models = {"generator": nn.Linear(4, 4), "critic": nn.Sequential(nn.Linear(4, 1))}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models.values()]
    with vramfit.track(model=models, optimizer=optimizers, device="cpu") as tracked:
        models["critic"](models["generator"](torch.ones(2, 4))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert {"generator", "critic.0"} <= set(tracked.trace.modules)


def test_results_are_saved_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(32, 32)
    with vramfit.track(model, device="cpu", budget="1GiB") as tracked:
        model(torch.ones(4, 32)).sum().backward()
    tracked.save(tmp_path / "run.vft")
    tracked.save(tmp_path / "run.pickle")
    assert MemoryTrace.load(tmp_path / "run.vft").equals(tracked.trace)
    assert read_any(tmp_path / "run.pickle").equals(tracked.trace), "through a torch snapshot and back"
    snapshot = load_snapshot(tmp_path / "run.pickle")
    snapshot["device_traces"][0].pop()
    (tmp_path / "shorter.pickle").write_bytes(pickle.dumps(snapshot))
    shorter = read_any(tmp_path / "shorter.pickle")
    events = int((tracked.trace.kind != EventKind.MARKER).sum())
    assert int((shorter.kind != EventKind.MARKER).sum()) == events - 1, "what was changed is read as it is"
    tracked.print()
    out = capsys.readouterr().out
    assert "CPU with a budget of 1.00 GiB" in out and "parameters" in out
    assert "simulated" not in out and "virtual" not in out and "card" not in out


def test_torchs_own_viewer_reads_the_snapshot(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    model = nn.Linear(32, 32)
    with vramfit.track(model, device="cpu") as tracked:
        model(torch.ones(4, 32)).sum().backward()
    tracked.save(tmp_path / "run.pickle")
    with (tmp_path / "run.pickle").open("rb") as stream:
        snapshot = pickle.load(stream)
    assert "torch" in _memory_viz.trace(snapshot) or _memory_viz.trace(snapshot)
    assert _memory_viz.segsum(snapshot) and _memory_viz.trace_plot(snapshot)


def test_lines_tell_what_changed_and_mark_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with vramfit.track(device="cpu") as tracked:
        one = vramfit.snapshot("epoch 1")
        held = torch.ones(1 << 18)
        two = vramfit.snapshot("epoch 2")
        del held
        vramfit.snapshot("epoch 3")
    assert capsys.readouterr().out.splitlines()[:2] == [one, two]
    assert LINE.fullmatch(one)["last"] is None
    assert LINE.fullmatch(two).group("tag", "change", "last") == ("epoch 2", "+1.00 MiB", "epoch 1")
    found = marks(tracked.trace)
    assert [mark.tag for mark in found] == ["epoch 1", "epoch 2", "epoch 3"]
    assert [mark.row for mark in found] == sorted(mark.row for mark in found)


def test_lines_go_where_they_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    stream, said = io.StringIO(), []
    with vramfit.track(device="cpu"):
        line = vramfit.snapshot("a", file=stream)
        vramfit.snapshot("b", file=said.append)
    assert stream.getvalue() == f"{line}\n"
    assert len(said) == 1 and said[0].startswith("[b] ")
    assert capsys.readouterr().out == ""


@pytest.fixture
def no_collection() -> Iterator[None]:
    """The garbage collector runs only when it is called: it could come just between two lines."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_garbage_and_idle_segments_stay_until_asked(capsys: pytest.CaptureFixture[str]) -> None:
    class Knot:
        def __init__(self) -> None:
            self.me, self.tensor = self, torch.ones(8 << 20)

    with vramfit.track(device="cpu") as tracked:
        before = tracked.allocated_bytes
        Knot()
        vramfit.snapshot("as it is")
        assert tracked.allocated_bytes - before == 32 << 20
        vramfit.snapshot("collected", gc=True)
        assert tracked.allocated_bytes == before
        assert tracked.reserved_bytes >= 32 << 20
        vramfit.snapshot("emptied", gc=True, empty_cache=True)
        assert tracked.reserved_bytes < 32 << 20
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_anything_to_measure_the_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = vramfit.snapshot("here")
    assert line.startswith("[here] nothing to measure") and 'device="cpu"' in line
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "tpu"}, "tpu"),
        ({"device": "mps"}, "mps"),
        ({"device": 3.5}, "3.5"),
        ({"budget": "much"}, "much"),
        ({"budget": -1}, "-1"),
        ({"budget": 0}, "0"),
        ({"budget": True}, "True"),
        ({"model": 3}, "int"),
        ({"model": [nn.Linear(1, 1), "a"]}, "str"),
        ({"optimizer": nn.Linear(1, 1)}, "Linear"),
        ({"max_entries": 0}, "max_entries"),
        ({"alloc_conf": "nonsense"}, "nonsense"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments_are_named(options: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        vramfit.track(**{"device": "cpu", **options})


def test_misuse_is_explained() -> None:
    tracker = vramfit.track(device="cpu")
    with pytest.raises(UsageError, match="nothing was recorded"):
        tracker.run  # noqa: B018
    with pytest.raises(UsageError, match="while the recording runs"):
        tracker.mark("now")
    with tracker, pytest.raises(UsageError, match="runs already"):
        tracker.__enter__()

    def generator() -> object:
        yield 1

    with pytest.raises(UsageError, match="generator"):
        tracker(generator)


def test_a_line_of_a_device_that_is_not_there_is_refused() -> None:
    with vramfit.track(device="cpu"), pytest.raises(UsageError, match="no device 1"):
        vramfit.snapshot("x", device=1)


def test_tracks_can_be_nested() -> None:
    with vramfit.track(device="cpu") as outer:
        torch.ones(256)
        with vramfit.track(device="cpu") as inner:
            kept = torch.ones(512)
            assert inner.allocated_bytes and outer.allocated_bytes
        assert outer.allocated_bytes >= kept.nbytes
    assert outer.peak_allocated_bytes >= inner.peak_allocated_bytes


def test_a_journal_is_there_while_the_recording_runs(tmp_path: Path) -> None:
    with vramfit.track(device="cpu", journal=tmp_path / "run.journal") as tracked:
        held = torch.ones(1 << 10)
        now = read_any(tmp_path / "run.journal")
        assert now.size.tolist()[-1] == held.nbytes and now.meta["source"] == "cpu"
        assert now.devices[0].name == "CPU"
    assert list(tmp_path.iterdir()) == [] and len(tracked.trace) > len(now)


class TestMoreIsAliveThanTheBudget:
    """What the model, its gradients and its optimizer hold already exceeds the budget."""

    def test_the_report_names_all_of_it(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)])
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(8, 1024)).sum().backward()
        optimizer.step()
        held = sum(parameter.nbytes for parameter in model.parameters())
        journal = tmp_path / "run.journal"
        tracked = vramfit.track(model, optimizer, device="cpu", budget=held, journal=journal)
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate") as caught:
            tracked.__enter__()
        assert "alive before the recording began exceeds the budget" in caught.value.__notes__[0]
        report = tracked.report
        assert report.fits is False
        assert report.run.oom is not None and not report.run.oom.handled
        assert report.run.oom.user_line.filename == __file__
        categories = report.verdict.device.breakdown.categories
        refused = report.run.oom.requested_bytes
        assert sum(categories.values()) + refused >= 4 * held, "of gradients and two moments as well"
        assert report.verdict.short_by >= 3 * held - (2 << 20)
        tracked.print()
        out = capsys.readouterr().out
        assert out.startswith("✗ does not fit CPU with a budget of")
        assert "parameters" in out and "optimizer state" in out
        assert not journal.exists()

    def test_a_tensor_that_alone_is_too_large_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = nn.Linear(1024, 4096, bias=False)
        tracked = vramfit.track(model, device="cpu", budget="4MiB")
        with pytest.raises(torch.OutOfMemoryError) as caught, tracked:
            raise AssertionError("the block does not begin")
        assert "parameters float32[4096, 1024] of Linear" in caught.value.__notes__[0]
        tracked.print()
        assert "parameters float32[4096, 1024]" in " ".join(capsys.readouterr().out.split())

    def test_nothing_stays_and_a_larger_budget_can_be_tried(self) -> None:
        model = nn.Linear(1024, 4096, bias=False)
        with pytest.raises(torch.OutOfMemoryError), vramfit.track(model, device="cpu", budget="4MiB"):
            pass
        with vramfit.track(model, device="cpu", budget="1GiB") as tracked:
            model(torch.ones(1, 1024))
        assert tracked.report.fits is True


def test_a_tracked_block_follows_its_host_too() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    with vramfit.track(model, optimizer, device="cpu", host_memory=True) as trace:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            kept.append(bytearray(1 << 20))
            optimizer.step()
    host = trace.run.host
    assert host is not None
    assert host.growing[0].line == _line("kept.append(bytearray")
    assert not tracemalloc.is_tracing()


def test_nothing_is_followed_unless_asked_for() -> None:
    with vramfit.track(device="cpu") as trace:
        assert not tracemalloc.is_tracing()
    assert trace.run.host is None


def _line(text: str) -> int:
    """Where a text stands first in this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
