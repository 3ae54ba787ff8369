"""The recorder of a card, with the virtual GPU in the card's place: it answers the same functions of torch.

What the recorder makes of torch's history is compared with what the virtual GPU itself knows of the same run.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

import vramfit
from vramfit.analysis import peak
from vramfit.trace import Category, EventKind, MemoryTrace, marks

GPU = "RTX 4090"
MIB = 1 << 20

TRAIN = """
import json, sys
import torch, vramfit
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10)).cuda()
    return model, torch.optim.AdamW(model.parameters())

def step(model, optimizer, batch=32):
    x = torch.randn(batch, 256).cuda()
    y = torch.randint(0, 10, (batch,)).cuda()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(tmp_path: Path, body: str) -> tuple[vramfit.Report, Path]:
    script = tmp_path / "script.py"
    script.write_text(TRAIN + textwrap.dedent(body))
    report = vramfit.run(script, gpu=GPU, cwd=tmp_path, writes="real")
    assert report.exit_code == 0, report.run.error
    return report, tmp_path


def facts(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "facts.json").read_text())
    return found


def test_a_recording_tells_what_the_card_knows(tmp_path: Path) -> None:
    known, folder = run(
        tmp_path,
        """
        with vramfit.track() as tracked:
            model, optimizer = build()
            for number in range(3):
                step(model, optimizer)
                vramfit.snapshot(f"step {number}")
            mine = torch.cuda.memory._get_memory_metadata()
        tracked.save("card.vft")
        run = tracked.run
        device = run.devices[0]
        json.dump({"source": run.source.value, "gpu": device.gpu, "context": device.context_bytes,
                   "peaks": [device.peak_allocated_bytes, device.peak_reserved_bytes],
                   "metadata": mine, "warnings": [w.code for w in run.warnings],
                   "enabled": torch._C._cuda_isHistoryEnabled(), "text": str(tracked.report)},
                  open("facts.json", "w"))
        """,
    )
    told, trace = facts(folder), MemoryTrace.load(folder / "card.vft")
    device = known.run.devices[0]
    assert told["source"] == "card" and told["gpu"] == "NVIDIA GeForce RTX 4090"
    assert told["peaks"] == [device.peak_allocated_bytes, device.peak_reserved_bytes]
    assert told["context"] == device.context_bytes
    assert told["metadata"] == "" and not told["enabled"] and told["warnings"] == []
    assert "virtual" not in told["text"] and "simulated" not in told["text"]
    mine, theirs = peak(trace), peak(known.trace)
    assert mine.allocated == theirs.allocated
    for kind in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE):
        assert mine.categories[kind] == theirs.categories[kind] > 0, kind
    labels = 512  # given to no module, so that a recorder cannot know what they are
    assert mine.categories[Category.INPUTS] == theirs.categories[Category.INPUTS] - labels > 0
    assert mine.moment.phase == theirs.moment.phase
    assert {"Sequential.0", "Sequential.1", "Sequential.2"} <= set(trace.modules)
    tags = ["step 0", "step 1", "step 2"]
    assert [mark.tag for mark in marks(trace)] == [mark.tag for mark in marks(known.trace)] == tags
    assert _phases(trace) == _phases(known.trace)


def _phases(trace: MemoryTrace) -> list[tuple[str, int]]:
    """Each phase with the number of requests in it."""
    rows = trace.kind == EventKind.ALLOC
    counts: dict[str, int] = {}
    for index in trace.phase[rows].tolist():
        counts[trace.phases[index]] = counts.get(trace.phases[index], 0) + 1
    return list(counts.items())


def test_what_was_there_before_and_what_the_ring_lost(tmp_path: Path) -> None:
    _, folder = run(
        tmp_path,
        """
        model, optimizer = build()
        step(model, optimizer)
        numbers = sum(p.numel() for p in model.parameters())
        with vramfit.track(model, optimizer) as tracked:
            step(model, optimizer)
        tracked.save("warm.vft")
        with vramfit.track(model={"net": model}, optimizer=optimizer, max_entries=60) as short:
            for _ in range(4):
                step(model, optimizer)
        short.save("short.vft")
        json.dump({"numbers": numbers, "warnings": [w.code for w in short.run.warnings],
                   "peaks": [short.peak_allocated_bytes, torch.cuda.max_memory_allocated()]}, open("facts.json", "w"))
        """,
    )
    told = facts(folder)
    for name in ("warm", "short"):
        trace = MemoryTrace.load(folder / f"{name}.vft")
        held = peak(trace).categories
        assert held[Category.PARAMETERS] >= 4 * told["numbers"], name
        assert held[Category.OPTIMIZER_STATE] >= 8 * told["numbers"], name
        assert len(trace.phases) > 2
    assert "net.0" in trace.modules
    assert told["warnings"] == ["history-full"]
    assert told["peaks"][0] == told["peaks"][1]


def test_peaks_of_before_the_recording_are_not_its_own(tmp_path: Path) -> None:
    _, folder = run(
        tmp_path,
        """
        mib = 1 << 20
        for size in (600, 800):  # the first block is kept and does not serve the second
            torch.empty(size * mib, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        before = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        with vramfit.track() as more:
            torch.empty(900 * mib, dtype=torch.uint8, device="cuda")
            torch.cuda.empty_cache()
        with vramfit.track() as less:
            torch.empty(700 * mib, dtype=torch.uint8, device="cuda")
        told = [run.devices[0] for run in (more.run, less.run)]
        json.dump({"before": before, "peaks": [[d.peak_allocated_bytes, d.peak_reserved_bytes, d.peak_active_bytes]
                                               for d in told]}, open("facts.json", "w"))
        """,
    )
    told = facts(folder)
    assert told["before"] == [800 * MIB, 1400 * MIB]
    assert told["peaks"] == [[900 * MIB] * 3, [700 * MIB] * 3]


def test_a_parameter_at_the_address_of_a_dead_one_does_not_get_its_name(tmp_path: Path) -> None:
    _, folder = run(
        tmp_path,
        """
        import gc
        with vramfit.track() as tracked:
            model = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(100)))
            optimizer = torch.optim.SGD(model.parameters())
            model[:2](torch.ones(4, 64, device="cuda")).sum().backward()
            optimizer.step()
            dead = {id(p) for p in model.parameters()}
            del model, optimizer
            gc.collect()
            # Whose turn it is Python decides: of two hundred addresses some are given again.
            made = [nn.Parameter(torch.ones(64, device="cuda")) for _ in range(2_000)]
            again = [p for p in made if id(p) in dead]
            for p in again:
                p.grad = torch.ones_like(p)
            recorder = tracked._recorder
            known = len(recorder._tensors)
            optimizer = torch.optim.SGD(again)
            optimizer.step()
            names = sorted({name for note in recorder._tensors[known:] for name in note.modules})
            sizes = [len(recorder._paths), len(recorder._gradients_at), len(recorder._last)]
        json.dump({"again": len(again), "names": names, "sizes": sizes}, open("facts.json", "w"))
        """,
    )
    told = facts(folder)
    assert told["again"] > 0, "Python gives an address again"
    assert told["names"] == [""]
    assert told["sizes"] == [0, 1, 2], (
        "what has died is forgotten: there is one optimizer, and the recorder's inputs"
    )


def test_running_out_is_told_with_its_line_and_all_is_put_back(tmp_path: Path) -> None:
    _, folder = run(
        tmp_path,
        """
        before = nn.Module.__call__, torch.autograd.graph._engine_run_backward
        fraction = torch.cuda.get_per_process_memory_fraction()
        caught = None
        try:
            with vramfit.track(budget="256MiB") as tracked:
                held = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
                more = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            caught = str(error)
        oom = tracked.run.oom
        try:
            with vramfit.track(), vramfit.track():
                pass
            nested = ""
        except vramfit.VramfitError as error:
            nested = str(error)
        with vramfit.track() as unused:
            pass
        after = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
        json.dump({"caught": caught, "message": oom.message, "requested": oom.requested_bytes, "handled": oom.handled,
                   "line": oom.user_line.filename, "allocated": oom.allocated_bytes, "fits": tracked.report.fits,
                   "nested": nested, "put_back": fraction == torch.cuda.get_per_process_memory_fraction()
                   and before == (nn.Module.__call__, torch.autograd.graph._engine_run_backward)},
                  open("facts.json", "w"))
        """,
    )
    told = facts(folder)
    assert "CUDA out of memory" in told["caught"] and told["message"] == told["caught"]
    assert told["requested"] == 200 * MIB and told["allocated"] == 100 * MIB
    assert told["handled"] is False and told["fits"] is False
    assert told["line"].endswith("script.py")
    assert "recorded already" in told["nested"]
    assert told["put_back"] is True


def test_what_a_kill_would_leave_is_saved_in_between(tmp_path: Path) -> None:
    _, folder = run(
        tmp_path,
        """
        from vramfit.record.card_recorder import CardRecorder
        recorder = CardRecorder(partial="partial.vft")
        recorder.start()
        model, optimizer = build()
        step(model, optimizer)
        first = vramfit.MemoryTrace.load("partial.vft")
        step(model, optimizer)
        same = vramfit.MemoryTrace.load("partial.vft").equals(first)
        run = recorder.stop()
        json.dump({"phases": first.phases, "events": len(first), "same": same, "in_all": len(run.trace)},
                  open("facts.json", "w"))
        """,
    )
    told = facts(folder)
    assert told["phases"][-1] == "step 1/optimizer" and 0 < told["events"] < told["in_all"]
    assert told["same"], "it is not written at every step"


@pytest.mark.gpu
def test_a_recording_on_a_real_card(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    with vramfit.track(device="cuda") as tracked:
        model = torch.nn.Linear(1024, 1024).cuda()
        model(torch.ones(64, 1024, device="cuda")).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
    held = peak(tracked.trace).categories
    assert len(gradients) == 2 and held[Category.PARAMETERS] >= 4 * 1024 * 1025
    assert tracked.peak_allocated_bytes == torch.cuda.max_memory_allocated()
