"""Memory held beyond its use is found while a program runs, with its name, and nothing changes by that."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capture.holding_programs import HOLDING, ORDINARY, SETUP, Program
from vramfit.analysis import HeldAt, HeldMemory, held, verdict
from vramfit.analysis.recorded_run import run_from_trace
from vramfit.capture.kept_memory import KeptWatch, watch_kept
from vramfit.patching import PatchStack
from vramfit.record.cpu_recorder import CpuRecorder
from vramfit.report import render
from vramfit.report.explain import Explanation
from vramfit.trace import MemoryTrace
from vramfit.trace.holder_notes import holder_notes
from vramfit.trace.model import COLUMNS
from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.torch_versions  # each Python has its own heap


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Set aside what the test process has already: searches pass over the whole heap."""
    gc.collect()
    gc.freeze()
    yield
    gc.enable()  # a program turns it off


def run(
    program: Program, *, watched: bool = True, card: str = "24GiB"
) -> tuple[VirtualGPU, KeptWatch | None]:
    """Run a program as a module of its own on a virtual card."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    kept = None
    with VirtualGPU(card, alloc_conf="") as gpu, torch.random.fork_rng():
        with PatchStack() as patches:
            if watched:
                kept = watch_kept(gpu.meter, patches)
            exec(compile(SETUP + program.source, "program.py", "exec"), module.__dict__)
        if kept is not None:
            kept.end(None)
    vars(sys.modules.pop("program")).clear()
    return gpu, kept


def found(program: Program) -> list[HeldMemory]:
    gpu, kept = run(program)
    assert kept is not None
    assert kept.seconds < 10
    return list(held(gpu.trace))


@pytest.mark.parametrize("name", HOLDING)
def test_the_holder_is_named_with_what_frees_it(name: str) -> None:
    program = HOLDING[name]
    first, *_ = found(program)
    assert (first.name.partition(" (")[0], first.reason.value) == (program.name, program.reason)
    assert program.least_mib <= first.bytes / MIB <= program.most_mib
    assert program.remedy in first.remedy
    assert first.line is not None
    assert first.line.filename == "program.py"
    assert first.moment is (HeldAt.END if program.at_the_end else HeldAt.PEAK)


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_in_use_is_not_reported(name: str) -> None:
    assert found(ORDINARY[name]) == []


def test_what_is_left_at_the_end_is_named_where_the_peak_was_before() -> None:
    """The last outputs are made after the training, whose peak is far above."""
    program = Program(
        source="model = net()\ntrain(model, torch.optim.AdamW(model.parameters()), 3)\n"
        "big = data(65536); del big\n"
        "kept = [model(data(1024)) for _ in range(2)]\n"
    )
    (left,) = found(program)
    assert (left.name, left.reason.value, left.moment) == ("kept", "graph", HeldAt.END)
    assert left.bytes == left.end_bytes


def test_looking_changes_no_figure_and_no_event() -> None:
    program = HOLDING["a list of outputs"]
    watched, kept = run(program)
    plain, _ = run(program, watched=False)
    assert kept is not None
    assert kept.seconds > 0
    assert watched.run.ops == plain.run.ops
    for column in COLUMNS:
        if column != "time_us":
            assert np.array_equal(getattr(watched.trace, column), getattr(plain.trace, column)), column
    assert watched.run.devices == plain.run.devices


def test_a_search_leaves_nothing_behind_that_keeps_a_tensor() -> None:
    """The collector is off, so that a circle which the search left would keep what it looked at."""
    gc.disable()
    module = types.ModuleType("program")
    sys.modules["program"] = module
    with VirtualGPU("24GiB", alloc_conf="") as gpu, PatchStack() as patches:
        kept = watch_kept(gpu.meter, patches)
        exec(compile(SETUP + HOLDING["a cache by step"].source, "program.py", "exec"), module.__dict__)
        kept.end(None)
        assert any(note.name == "cache" for note in holder_notes({**gpu._builder.meta}))
        references = [weakref.ref(value) for value in module.__dict__["cache"].values()]
        before = torch.cuda.memory_allocated()
        module.__dict__["y"] = None
        module.__dict__["cache"].clear()
        assert [reference for reference in references if reference() is not None] == []
        assert before - torch.cuda.memory_allocated() == 8 * 16 * MIB
        vars(sys.modules.pop("program")).clear()


def test_where_a_request_fails_the_holder_is_named() -> None:
    """The optimizer of a model that is gone is held while the next one is built."""
    source = HOLDING["a scheduler"].source.replace("net(4, 4096)", "net(12, 4096)")
    module = types.ModuleType("program")
    sys.modules["program"] = module
    with VirtualGPU("5GiB", alloc_conf="", context_bytes=0) as gpu:
        with PatchStack() as patches, pytest.raises(torch.OutOfMemoryError) as raised:
            kept = watch_kept(gpu.meter, patches)
            exec(compile(SETUP + source, "program.py", "exec"), module.__dict__)
        kept.end(raised.value)
        gpu.meter.oom = gpu.meter.unhandled_oom()
    vars(sys.modules.pop("program")).clear()
    (first,) = held(gpu.trace)
    assert (first.name, first.moment) == ("schedule.optimizer", HeldAt.RAN_OUT)
    assert first.bytes == 4 * 12 * (4096 * 4096 + 4096) * 4


def test_the_metered_cpu_names_holders_too() -> None:
    module = types.ModuleType("program")
    sys.modules["program"] = module
    source = (
        SETUP.replace(".cuda()", "").replace(', device="cuda"', "")
        + "outputs, model = [], net(2, 256)\n"
        + "with torch.no_grad():\n    for _ in range(20):\n        outputs.append(model(data(2048, 256)))\n"
    )
    recorder = CpuRecorder()
    recorder.start()
    with PatchStack() as patches:
        kept = recorder.watch_kept(patches)
        exec(compile(source, "program.py", "exec"), module.__dict__)
    kept.end(None)
    trace = recorder.stop().trace
    vars(sys.modules.pop("program")).clear()
    (first,) = held(trace)
    assert (first.name, first.reason.value) == ("outputs", "unused")
    assert 36 * MIB <= first.bytes <= 40 * MIB
    assert first.remedy == "empty outputs when its values have been used"


def test_the_trace_keeps_the_holders_for_whoever_explains_it(tmp_path: Path) -> None:
    gpu, _ = run(HOLDING["predictions"])
    gpu.trace.save(tmp_path / "run.vft")
    trace = MemoryTrace.load(tmp_path / "run.vft")
    assert held(trace) == held(gpu.trace)
    explained: Any = run_from_trace(trace)
    text = render(Explanation(run=explained, verdict=verdict(explained), peaks=()), width=100)
    assert "Held beyond its use  at the peak" in text
    assert "predictions, a global of program: " in text


def test_small_memory_is_not_searched_for() -> None:
    _, kept = run(
        Program(source="kept = [data(8, 8) for _ in range(99)]\nmodel = net(1, 64)\nmodel(data(4, 64))\n")
    )
    assert kept is not None
    assert kept._kept == []
    assert kept.seconds < 0.2
