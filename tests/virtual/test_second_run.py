"""What a program needs that ran out: a second run without the card's limit, held against a card that has no end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vramfit.analysis import Need, Verdict, verdict
from vramfit.files import Writes
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.launch.offline import is_own
from vramfit.options.run_options import RunOptions
from vramfit.trace import CardLimit, Run
from vramfit.units import GIB, MIB, TIB
from vramfit.virtual import second_run
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.ranks.rank_place import RankPlace
from vramfit.virtual.second_run import run_again
from vramfit.virtual.virtual_run import VirtualSettings, run_in_child

ADAMW = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(512, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CNN = """
import torch
layers = [torch.nn.Conv2d(3 if not i else 64, 64, 3, padding=1) for i in range(4)]
model = torch.nn.Sequential(*layers, torch.nn.BatchNorm2d(64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(16, 3, 128, 128, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
INFERENCE = """
import pathlib
import torch
model = torch.nn.Linear(1024, 1024).cuda().half()
with torch.no_grad():
    kept = [model(torch.randn(16384, 1024, device="cuda", dtype=torch.half)) for _ in range(12)]
print(len(kept), pathlib.Path("out.txt").write_text("done"))
"""
READS_THE_CARD = """
import torch
free, total = torch.cuda.mem_get_info()
assert total == torch.cuda.get_device_properties(0).total_memory == 640 << 20, total
kept = [torch.empty(free // 4, device="cuda", dtype=torch.uint8) for _ in range(6)]
assert torch.cuda.mem_get_info() == (0, total)
"""
CYCLES = """
import torch
for i in range(4):
    model = torch.nn.Linear(5120, 5120, bias=False).cuda()
    model.itself = [model]
    del model
    torch.cuda.empty_cache()
"""
CAUGHT = """
import torch
try:
    torch.empty(1 << 40, device="cuda", dtype=torch.uint8)
except torch.OutOfMemoryError:
    torch.empty(1 << 20, device="cuda", dtype=torch.uint8)
"""
GOES_ON = """
import time
import torch
kept = []
for i in range(10_000):
    kept.append(torch.empty(16 << 20, device="cuda", dtype=torch.uint8))
    time.sleep(0.01)
"""
ASKS = """
import torch
torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
input("Go on? ")
"""
CONNECTS = """
import socket
import torch
kept = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
socket.create_connection(("192.0.2.1", 9), timeout=0.01)
"""
LESS = """
import os
import torch
count = 3 if "HF_HUB_OFFLINE" in os.environ else 20
kept = [torch.empty(64 << 20, device="cuda", dtype=torch.uint8) for _ in range(count)]
"""
WHOLE = {"training": ADAMW, "cnn": CNN, "inference": INFERENCE, "reads the card": READS_THE_CARD}
CARD = "640MiB"


def judged(
    folder: Path, program: str, *, options: RunOptions | None = None, wanted: bool = True
) -> tuple[Run, Verdict]:
    script = folder / "program.py"
    script.write_text(program)
    chosen = RunOptions(gpu=find_gpu(CARD)) if options is None else options
    where = replace(chosen, cwd=str(folder), need=wanted)
    run = run_again([str(script)], where, run_in_child([str(script)], where))
    return run, verdict(run)


def need_of(judged: Verdict) -> Need:
    assert judged.need is not None
    return judged.need


def unlimited(program: str, card: GpuSpec) -> VirtualGPU:
    """The program on the same card, with a tebibyte of memory; what it writes is dropped."""
    with VirtualGPU(replace(card, total_bytes=TIB), context_bytes=card.typical_context_bytes) as gpu:
        exec(compile(program, "program.py", "exec"), {})
    return gpu


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_needed_is_what_a_card_without_end_reserves(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, found = judged(tmp_path, WHOLE[name])
    assert "12 4" not in capfd.readouterr().out, "the second run prints nothing"
    assert run.ran_out
    need, card = need_of(found), find_gpu(CARD)
    assert need.whole, need.why_not
    if name != "reads the card":
        reference = unlimited(WHOLE[name], card)
        assert need.peak_reserved == reference.peak_reserved_bytes
        assert need.peak_allocated == reference.peak_allocated_bytes
    else:
        assert need.peak_allocated == 6 * ((640 * MIB - card.typical_context_bytes) // 4)
    assert need.bytes == (need.peak_reserved or 0) + card.typical_context_bytes == found.needed
    chosen = found.smallest_gpu
    assert chosen is not None
    assert chosen.total_bytes >= need.most - card.typical_context_bytes + chosen.typical_context_bytes
    # Workspaces of convolutions, and addresses that decide which free blocks are split.
    assert (need.above > 0) == (name in ("cnn", "training"))
    assert found.advice == ()
    assert not (tmp_path / "out.txt").exists()


def test_where_garbage_fills_the_card_what_lives_is_needed(tmp_path: Path) -> None:
    """Four models of 100 MiB in cycles, of which one lives at a time."""
    run, found = judged(tmp_path, CYCLES)
    need = need_of(found)
    assert run.again is not None
    assert run.again.limit is CardLimit.COLLECTED
    assert run.oom is not None
    assert run.oom.dead is not None
    assert run.oom.dead.total_bytes == 200 * MIB
    assert need.whole
    assert need.collected
    assert need.freed == 100 * MIB
    assert need.peak_reserved == 100 * MIB
    assert found.fits is False
    assert found.advice == (
        "gc.collect() before program.py:4: run again with garbage collected where memory ran short, the program fits "
        "(492.00 MiB of 640.00 MiB)",
    )


def test_a_program_that_went_on_is_not_run_again(tmp_path: Path) -> None:
    run, found = judged(tmp_path, CAUGHT)
    assert run.oom is not None
    assert run.again is None
    assert found.need is None
    assert found.fits is True


def test_a_run_that_is_cut_gives_a_lower_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_run, "_LEAST_SECONDS", 1.0)
    monkeypatch.setattr(second_run, "_TIMES", 1.0)
    _, found = judged(tmp_path, GOES_ON)
    need = need_of(found)
    assert not need.whole
    assert need.bytes > 640 * MIB
    assert "it was stopped after" in need.why_not
    assert found.smallest_gpu is None


@pytest.mark.parametrize(
    ("program", "told"),
    [(ASKS, "EOFError"), (CONNECTS, "unreachable"), (LESS, "it went another way")],
    ids=["asks", "connects", "does less offline"],
)
def test_what_a_second_run_must_not_do_leaves_a_lower_bound(program: str, told: str, tmp_path: Path) -> None:
    _, found = judged(tmp_path, program)
    need = need_of(found)
    assert not need.whole
    assert told in need.why_not
    assert found.smallest_gpu is None


@pytest.mark.parametrize(
    ("wanted", "changed", "why"),
    [
        (False, {}, "--no-need"),
        (True, {"writes": Writes.REAL}, "--writes real"),
        (True, {"place": RankPlace(rank=0, world_size=2, ranks_per_node=2)}, "one rank of several"),
    ],
)
def test_what_is_not_run_again_says_why(
    wanted: bool, changed: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = judged(tmp_path, ASKS, wanted=False)
    monkeypatch.setattr("vramfit.virtual.virtual_run.run_in_child", None)
    place = changed.pop("place", None)
    options = RunOptions(gpu=find_gpu(CARD), need=wanted, **changed)
    again = run_again([], options, replace(first, again=None), VirtualSettings(place=place))
    need = need_of(verdict(again))
    assert not need.whole
    assert need.bytes == GIB + find_gpu(CARD).typical_context_bytes
    assert why in need.why_not


def test_only_this_machine_is_reached() -> None:
    assert all(map(is_own, ("localhost", b"127.0.0.1", "::1", "")))
    assert not any(map(is_own, ("huggingface.co", "10.0.0.1", b"192.0.2.1")))
