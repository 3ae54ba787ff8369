"""The host's memory, step by step: growth by line, without what vramfit makes itself."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tests import warm

import vramfit
from vramfit.launch.host_meter import HostMemoryMeter
from vramfit.report import json_text, render
from vramfit.trace.outcome import HostMemory
from vramfit.units import format_bytes

KIB = 1 << 10
MIB = 1 << 20


def line_of(text: str, source: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


def seen(*values: int) -> HostMemory:
    return HostMemory(steps=tuple(range(1, len(values) + 1)), bytes=values, pinned=(0,) * len(values))


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        ((0, MIB, 2 * MIB, 3 * MIB, 4 * MIB), MIB),
        ((0, 50 * MIB, 50 * MIB, 50 * MIB, 50 * MIB, 50 * MIB), 0),  # a cache that fills at once
        ((0, MIB, 2 * MIB, 3 * MIB), 0),  # too few to tell
        ((0, MIB, 3 * MIB, 2 * MIB, 4 * MIB, 5 * MIB), 0),  # it comes and goes
        ((0, KIB, 2 * KIB, 3 * KIB, 4 * KIB, 5 * KIB), 0),  # a list of numbers
        ((9 * MIB, MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB), MIB),  # what loading took is warm-up
    ],
)
def test_growth_is_told_where_every_look_holds_more(values: tuple[int, ...], grows: int) -> None:
    assert seen(*values).grows_by == grows


def test_growth_is_by_step_where_looks_are_apart() -> None:
    found = HostMemory(steps=(2, 4, 6, 8, 10), bytes=(0, 2 * MIB, 4 * MIB, 6 * MIB, 8 * MIB), pinned=(0,) * 5)
    assert found.grows_by == MIB


def test_many_steps_keep_few_looks_evenly_apart() -> None:
    meter = HostMemoryMeter()
    meter.start()
    try:
        kept = []
        for _ in range(50):
            kept.append(np.ones(64 * KIB, dtype=np.uint8))
            meter.step()
    finally:
        found = meter.stop()
    assert not tracemalloc.is_tracing()
    assert len(found.steps) < 16
    assert len(set(np.diff(found.steps))) == 1
    assert found.grows_by >= 64 * KIB
    assert found.growing[0].file == __file__
    assert found.growing[0].line == line_of("kept.append(np.ones", Path(__file__).read_text(encoding="utf-8"))


def test_a_program_that_traces_itself_goes_on_tracing() -> None:
    tracemalloc.start(1)
    try:
        meter = HostMemoryMeter()
        meter.start()
        meter.step()
        meter.stop()
        assert tracemalloc.is_tracing()
        assert tracemalloc.get_traceback_limit() == 1
    finally:
        tracemalloc.stop()


PROGRAM = """
import numpy as np, torch
from torch import nn
model = nn.Linear(256, 256, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
history, losses = [], []
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(64, 256, device="cuda")).sum()
    loss.backward()
    history.append(np.ones(1 << 20, dtype=np.uint8))  # the leak
    losses.append(loss.item())
    optimizer.step()
"""


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> vramfit.Report:
    script = tmp_path_factory.mktemp("host") / "train.py"
    script.write_text(PROGRAM, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vramfit.launch.interrupts.start", warm.start)
        return vramfit.run(script, gpu="RTX 4090", host_memory=True)


def test_a_leak_of_the_host_stands_beside_the_card(leaking: vramfit.Report) -> None:
    host = leaking.run.host
    assert host is not None
    assert MIB <= host.grows_by < MIB + 64 * KIB
    (site,) = host.growing
    assert (Path(site.file).name, site.line) == ("train.py", line_of("# the leak", PROGRAM))
    text = render(leaking.run, leaking.verdict, width=100)
    assert f"{format_bytes(host.grows_by)} more each step, probably a leak" in text
    assert f"train.py:{site.line}" in text
    told = json.loads(json_text(leaking.run, leaking.verdict))["host_memory"]
    assert told["grows_by_bytes"] == host.grows_by
    assert told["sites"][0]["line"] == site.line
