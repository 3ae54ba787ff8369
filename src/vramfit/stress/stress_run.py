"""The parent of a stress test: starts the child where it was asked to run, and reads what it found."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vramfit.analysis._stability import StressReport, stability
from vramfit.errors import EnvironmentUnfitError, UsageError, VramfitError
from vramfit.gpus import GpuSpec
from vramfit.launch.job import failure_of, has_answered, listening, result_of
from vramfit.launch.starting import call
from vramfit.stress.schedule import StressJob, StressResult, Vary
from vramfit.trace import Run, RunWarning, Source
from vramfit.virtual.virtual_run import VirtualRun, run_in_child
from vramfit.workload import split_target

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
        job = StressJob(
            folder=name,
            target=target,
            device="cpu" if gpu is None and device == "cpu" else "cuda",
            budget=budget,
            rounds=rounds,
            vary=tuple(vary),
            alloc_conf=alloc_conf,
        )
        run = _start(job, gpu, progress)
        found = _result(Path(name))
    source = Source.VIRTUAL if gpu is not None else Source.CPU if device == "cpu" else Source.CARD
    return _report(
        target,
        found,
        source=source,
        total=_total(found, gpu, budget, run),
        warnings=() if run is None else run.warnings,
        alloc_conf=_conf(alloc_conf, found.torch_version),
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


def _start(job: StressJob, gpu: GpuSpec | None, progress: Progress | None) -> Run | None:
    """Run the child to its end; the run, if it was on a virtual GPU."""
    folder, file = Path(job.folder), str(job.write())
    with listening(folder, progress):
        if gpu is None:
            _spawn(file, job.alloc_conf)
            return None
        options = VirtualRun(gpu=gpu, alloc_conf=job.alloc_conf, ours=[folder])
        run = run_in_child(["-m", "vramfit.stress.rounds", file], options)
        if run.exit_code == _INTERRUPTED:
            raise KeyboardInterrupt
        if not has_answered(folder):
            raise VramfitError(
                f"the stress test failed: {run.error or f'exit code {run.exit_code}'}",
                "The lines above say where",
            )
        return run


def _spawn(file: str, alloc_conf: str | None) -> None:
    environ = dict(os.environ)
    if alloc_conf is not None:
        environ["PYTORCH_CUDA_ALLOC_CONF"] = environ["PYTORCH_ALLOC_CONF"] = alloc_conf
    # Not by `python_command`: workloads may import what lies in the current folder.
    code = call([sys.executable, "-m", "vramfit.stress.rounds", file], env=environ)
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise VramfitError(f"the process of the stress test {how}", "The lines above say why")


def _result(folder: Path) -> StressResult:
    if (failure := failure_of(folder)) is not None:
        raise failure.error()
    found = result_of(folder, StressResult)
    if found is None:
        raise EnvironmentUnfitError("the stress test ended without results", "The lines above say why")
    return found


def _total(found: StressResult, gpu: GpuSpec | None, budget: int | None, run: Run | None) -> int:
    if gpu is not None:
        context = run.devices[0].context_bytes if run is not None and run.devices else 0
        return max(0, gpu.total_bytes - context)
    return budget or found.total_bytes


def _conf(alloc_conf: str | None, torch_version: str) -> str:
    from vramfit.allocator import alloc_conf_from_env, parse_torch_version

    if alloc_conf is not None:
        return alloc_conf
    return alloc_conf_from_env(os.environ, parse_torch_version(torch_version))


def _report(
    target: str,
    found: StressResult,
    *,
    source: Source,
    total: int,
    alloc_conf: str,
    seconds: float,
    warnings: tuple[RunWarning, ...] = (),
) -> StressReport:
    rounds, cycle = found.rounds, found.cycle
    tried = [one for limit in found.limits for one in limit.rounds]
    return StressReport(
        target=target,
        device=found.device,
        source=source.value,
        total_bytes=total,
        alloc_conf=alloc_conf,
        torch_version=found.torch_version,
        sizes=found.sizes,
        baseline=found.baseline,
        limits=found.limits,
        cycle=cycle,
        rounds=rounds,
        stability=stability(rounds, len(cycle), tried=tried) if rounds and cycle else None,
        seconds=seconds,
        warnings=warnings,
    )
