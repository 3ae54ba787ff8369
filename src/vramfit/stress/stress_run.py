"""The parent of a stress test: starts the child where it was asked to run, and reads what it found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vramfit.analysis._stability import Limit, LimitReason, Round, RoundOutcome, StressReport, stability
from vramfit.errors import EnvironmentUnfitError, UsageError, VramfitError, error_from_plain
from vramfit.gpus import GpuSpec
from vramfit.launch.starting import call
from vramfit.launch.telling import listening
from vramfit.stress.schedule import Vary, as_plain
from vramfit.trace import Run, RunWarning, Source
from vramfit.workload.loading import split_target

Progress = Callable[[str], None]
"""Called with what the test is doing, in words."""

_INTERRUPTED = 130
"""Exit code of a program that was interrupted from the keyboard."""


def stress(
    target: str,
    *,
    gpu: GpuSpec | None = None,
    device: str | None = None,
    budget: int | None = None,
    rounds: int | None = None,
    vary: Sequence[Vary] = (),
    alloc_conf: str | None = None,
    progress: Progress | None = None,
) -> StressReport:
    """Run a workload at changing sizes, in a process of its own.

    Args:
        target: ``FILE.py:NAME``.
        gpu: the virtual card; None for a real device.
        device: ``"cuda"`` or ``"cpu"`` (metered, with a budget); None is the card.
        budget: bytes that metered CPU may take.
        rounds: rounds of changing sizes after the limits are known; 0 leaves them out, None makes `CYCLES` cycles.
        vary: the sizes to vary; by default the first of the workload.
        alloc_conf: allocator settings; None leaves them to the environment.
        progress: called as the test goes on.

    Raises:
        UsageError: the workload, a size or the device is not there.
        VramfitError: the workload's file fails, or its process died.
    """
    split_target(target)
    _check_device(gpu, device, budget, rounds)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="vramfit-") as name:
        folder = Path(name)
        job = {
            "target": target,
            "device": "cpu" if gpu is None and device == "cpu" else "cuda",
            "budget": budget,
            "rounds": rounds,
            "vary": as_plain(vary),
            "alloc_conf": alloc_conf,
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        run = _start(folder, gpu, alloc_conf, progress)
        found = _results(folder)
    source = Source.VIRTUAL if gpu is not None else Source.CPU if device == "cpu" else Source.CARD
    return _report(
        target,
        found,
        source=source,
        total=_total(found, gpu, budget, run),
        warnings=() if run is None else run.warnings,
        alloc_conf=_conf(alloc_conf, found["torch"]),
        seconds=time.perf_counter() - began,
    )


def _check_device(gpu: GpuSpec | None, device: str | None, budget: int | None, rounds: int | None) -> None:
    if gpu is not None and device is not None:
        raise UsageError("both a virtual GPU and a device are given", "Give --gpu NAME, or --device")
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"{device!r} is not a device", "Give cuda or cpu")
    if device == "cpu" and budget is None:
        raise UsageError("metered CPU needs a budget", "Give one, such as --budget 2GiB")
    if budget is not None and device != "cpu":
        raise UsageError("a budget is for metered CPU", "Give --device cpu, or leave --budget out")
    if rounds is not None and rounds < 0:
        raise UsageError(f"the number of rounds is {rounds}", "Give 0 or more")


def _start(
    folder: Path, gpu: GpuSpec | None, alloc_conf: str | None, progress: Progress | None
) -> Run | None:
    """Run the child to its end; the run, if it was on a virtual GPU."""
    with listening(folder, progress):
        if gpu is None:
            _spawn(folder, alloc_conf)
            return None
        from vramfit.virtual.virtual_run import run_in_child

        run = run_in_child(
            ["-m", "vramfit.stress.rounds", str(folder / "job.json")],
            gpu=gpu,
            alloc_conf=alloc_conf,
            ours=[folder],
        )
        if run.exit_code == _INTERRUPTED:
            raise KeyboardInterrupt
        if not (folder / "found.json").exists() and not (folder / "failed.json").exists():
            raise VramfitError(
                f"the stress test failed: {run.error or f'exit code {run.exit_code}'}",
                "The lines above say where",
            )
        return run


def _spawn(folder: Path, alloc_conf: str | None) -> None:
    environ = dict(os.environ)
    if alloc_conf is not None:
        environ["PYTORCH_CUDA_ALLOC_CONF"] = environ["PYTORCH_ALLOC_CONF"] = alloc_conf
    job = str(folder / "job.json")
    arguments = [sys.executable, "-m", "vramfit.stress.rounds", job]
    code = call(arguments, env=environ)
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise VramfitError(f"the process of the stress test {how}", "The lines above say why")


def _results(folder: Path) -> dict[str, Any]:
    failed = folder / "failed.json"
    if failed.exists():
        raise error_from_plain(json.loads(failed.read_text(encoding="utf-8")))
    file = folder / "found.json"
    if not file.exists():
        raise EnvironmentUnfitError("the stress test ended without results", "The lines above say why")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _total(found: Mapping[str, Any], gpu: GpuSpec | None, budget: int | None, run: Run | None) -> int:
    if gpu is not None:
        context = run.devices[0].context_bytes if run is not None and run.devices else 0
        return max(0, gpu.total_bytes - context)
    return int(budget or found["total"])


def _conf(alloc_conf: str | None, torch_version: str) -> str:
    from vramfit.allocator import alloc_conf_from_env, parse_torch_version

    if alloc_conf is not None:
        return alloc_conf
    return alloc_conf_from_env(os.environ, parse_torch_version(torch_version))


def _report(
    target: str,
    found: Mapping[str, Any],
    *,
    source: Source,
    total: int,
    alloc_conf: str,
    seconds: float,
    warnings: tuple[RunWarning, ...] = (),
) -> StressReport:
    rounds = tuple(_round(one) for one in found["rounds"])
    cycle = tuple(found["cycle"])
    limits = tuple(_limit(one) for one in found["limits"])
    tried = [one for limit in limits for one in limit.rounds]
    return StressReport(
        target=target,
        device=found["name"],
        source=source.value,
        total_bytes=total,
        alloc_conf=alloc_conf,
        torch_version=found["torch"],
        sizes=found["sizes"],
        baseline=_round(found["baseline"]),
        limits=limits,
        cycle=cycle,
        rounds=rounds,
        stability=stability(rounds, len(cycle), tried=tried) if rounds and cycle else None,
        seconds=seconds,
        warnings=warnings,
    )


def _limit(values: Mapping[str, Any]) -> Limit:
    return Limit(
        name=values["name"],
        usual=values["usual"],
        largest=values["largest"],
        failing=values["failing"],
        reason=LimitReason[values["reason"]],
        rounds=tuple(_round(one) for one in values["rounds"]),
    )


def _round(values: Mapping[str, Any]) -> Round:
    return Round(
        sizes=dict(values["sizes"]),
        outcome=RoundOutcome[values["outcome"]],
        peak_allocated=values["peak_allocated"],
        peak_reserved=values["peak_reserved"],
        allocated=values["allocated"],
        reserved=values["reserved"],
        message=values["message"],
    )
