"""A program that records itself as docs/reconciliation.md shows, and the prediction beside what it recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vramfit
from vramfit.analysis import Cause, DeviceReconciliation, Part, Quantity
from vramfit.errors import TraceFormatError, UsageError

SCRIPT = """
import json, sys, torch
{record}
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    out = model(torch.randn(256, 1024, device="cuda"))
    {extra}
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
{dump}
"""
RECORD = "torch.cuda.memory._record_memory_history(max_entries=1_000_000)"
DUMP = """
torch.cuda.memory._dump_snapshot("card.pickle")
free, total = torch.cuda.mem_get_info()
card = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "device_used_bytes": total - free}
json.dump({**torch.cuda.memory_stats(), **card}, open("card.json", "w"))
"""
CARD = "RTX 4090"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program, with another that keeps one more tensor, and with what the first one recorded."""
    path = tmp_path_factory.mktemp("against")
    (path / "train.py").write_text(SCRIPT.format(record=RECORD, extra="pass", dump=DUMP))
    (path / "more.py").write_text(SCRIPT.format(record="", extra="kept = out.repeat(9, 1)", dump=""))
    recorded = vramfit.run("train.py", gpu=CARD, cwd=path, writes="real")  # it writes its own recording
    assert recorded.exit_code == 0
    (path / "run.json").write_text(recorded.to_json())
    recorded.trace.save(path / "run.vft")
    return path


@pytest.fixture(scope="module")
def more(folder: Path) -> vramfit.Report:
    """The prediction for the other program."""
    return vramfit.run("more.py", gpu=CARD, cwd=folder)


def only(report: vramfit.Report) -> DeviceReconciliation:
    assert report.against is not None
    (device,) = report.against.devices
    return device


def test_a_program_agrees_with_its_own_recording(folder: Path) -> None:
    files = [folder / "card.pickle", folder / "card.json"]
    report = vramfit.run("train.py", gpu=CARD, cwd=folder, against=files, tolerance="0%")
    device = only(report)
    assert report.against is not None
    assert report.against.within
    assert [found.quantity for found in device.comparisons] == list(Quantity)
    assert device.requests is not None
    assert device.requests.equal
    assert device.notes == report.against.notes == ()
    assert "✓ equal to card.pickle + card.json to the byte" in str(report)
    assert json.loads(report.to_json())["against"]["within"] is True


def test_one_more_tensor_is_found_by_its_line(folder: Path, more: vramfit.Report) -> None:
    report = more.reconcile(folder / "card.pickle", tolerance="1MiB")
    assert report.against is not None
    assert not report.against.within
    allocated = only(report).of(Quantity.ALLOCATED)
    assert allocated is not None
    found = allocated.differing[0]
    assert (found.cause, found.label.op, found.count) == (Cause.EXTRA, "aten.repeat", 1)
    assert found.total == 9 * 256 * 1024 * 4
    assert found.label.line is not None
    assert (Path(found.label.line.filename).name, found.label.line.line) == ("more.py", 8)
    (requests,) = (part for part in allocated.parts if part.part is Part.REQUESTS)
    assert requests.difference == found.total


@pytest.mark.parametrize("name", ["run.json", "run.vft", "card.json"])
def test_other_forms_tell_of_the_difference_too(folder: Path, more: vramfit.Report, name: str) -> None:
    device = only(more.reconcile(folder / name))
    comparisons = {found.quantity: found.difference for found in device.comparisons}
    assert set(comparisons) == set(Quantity)
    assert comparisons[Quantity.ALLOCATED] > 8 << 20
    assert comparisons[Quantity.TOTAL] == comparisons[Quantity.RESERVED] > 0


def test_what_cannot_be_compared_is_refused_before_the_run(folder: Path) -> None:
    with pytest.raises(TraceFormatError):
        vramfit.run("train.py", gpu=CARD, cwd=folder, against=folder / "train.py")
    with pytest.raises(UsageError, match="not a tolerance"):
        vramfit.run("train.py", gpu=CARD, cwd=folder, against=folder / "card.json", tolerance="some")
