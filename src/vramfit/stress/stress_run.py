"""A stress test: its options and results, the sizes that it varies, and its run in a child process."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vramfit.errors import EnvironmentUnfitError, UsageError, VramfitError
from vramfit.gpus import GpuSpec
from vramfit.launch.job import Job, failure_of, has_answered, listening, result_of
from vramfit.launch.starting import call
from vramfit.options.run_options import RunOptions
from vramfit.searching.allowed import Allowed, Listed, Multiples
from vramfit.searching.largest import Strategy
from vramfit.stress.stability import Limit, Round, StressReport, stability
from vramfit.torch_internals.releases import refuse_older
from vramfit.trace import Run, RunWarning, Source
from vramfit.virtual.virtual_run import VirtualSettings, run_in_child
from vramfit.workload import split_target

CYCLES = 4
"""How often the sizes repeat, unless a number of rounds is given: enough to see a trend."""
CEILING = 1 << 20
"""A ramp without an upper end stops here."""

_COARSE = 32
"""A limit is found to within a part in so many of its value: nobody needs a sequence length to the token."""

_SHARES = (2, 9, 4, 11, 1, 14, 7, 16)
"""Sizes of a cycle, in sixteenths of the largest: small and large alternate, and the large ones ramp up."""
_FEWER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Vary:
    """One size to vary.

    Attributes:
        low, high: the range, both included; None leaves an end open.
        values: these values only, ascending; empty for all between the ends.
    """

    name: str
    low: int | None = None
    high: int | None = None
    values: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Vary:
        """Read ``batch_size``, ``batch_size=1..64``, ``batch_size=..64`` or ``batch_size=1,2,4``.

        Raises:
            UsageError: the text has none of these forms.
        """
        name, separator, rest = text.partition("=")
        if not name.isidentifier():
            raise _unreadable(text)
        if not separator:
            return cls(name=name)
        if match := re.fullmatch(r"(\d*)\.\.(\d*)", rest.strip()):
            low, high = (int(part) if part else None for part in match.groups())
            if low == 0 or high == 0 or (low is not None and high is not None and low > high):
                raise UsageError(f"{text!r} is an empty range", "Write it as batch_size=1..64")
            return cls(name=name, low=low, high=high)
        if re.fullmatch(r"\d+(\s*,\s*\d+)*", rest.strip()):
            values = tuple(sorted({int(part) for part in rest.split(",")}))
            if values[0] < 1:
                raise UsageError(f"{text!r} has a size of 0", "Sizes are whole numbers of at least 1")
            return cls(name=name, low=values[0], high=values[-1], values=values)
        raise _unreadable(text)

    def nearest(self, value: int) -> int:
        """The largest value of the range that is not above ``value``; the lowest if none is."""
        if self.values:
            return max((one for one in self.values if one <= value), default=self.values[0])
        return max(self.low or 1, min(value, self.high or value))

    def strategy(self, usual: int) -> Strategy:
        """How the largest value is looked for.

        Args:
            usual: the value to begin with.
        """
        start = self.nearest(usual)
        allowed: Allowed = Multiples(least=self.low or 1, most=self.high or max(CEILING, start))
        if self.values:
            allowed = Listed(self.values)
        return Strategy(allowed=allowed, start=start, part=_COARSE)


@dataclass(frozen=True, kw_only=True, slots=True)
class StressJob(Job):
    """A stress test.

    Attributes:
        target: the workload, as ``FILE.py:NAME``.
        device: ``cuda`` or ``cpu``.
        budget: bytes that metered CPU may take.
        rounds: rounds of changing sizes after the limits are known; None makes `CYCLES` cycles.
        vary: the sizes to vary; without any the first of the workload.
        alloc_conf: allocator settings; None leaves them to the environment.
    """

    target: str
    device: str = "cuda"
    budget: int | None = None
    rounds: int | None = None
    vary: tuple[Vary, ...] = ()
    alloc_conf: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StressResult:
    """What a stress test found.

    Attributes:
        baseline: the last step at these.
        limits: how far each varied size can go.
        cycle: the sizes that the rounds went through.
        total_bytes: of the device; 0 for a CPU.
    """

    sizes: Mapping[str, int]
    baseline: Round
    limits: tuple[Limit, ...]
    cycle: tuple[Mapping[str, int], ...]
    rounds: tuple[Round, ...]
    device: str = "cpu"
    total_bytes: int = 0
    torch_version: str = ""


def _unreadable(text: str) -> UsageError:
    return UsageError(
        f"--vary {text!r} cannot be read",
        "Write it as batch_size, batch_size=1..64 or batch_size=1,2,4,8",
    )


def chosen(sizes: Mapping[str, int], varied: Sequence[Vary]) -> tuple[Vary, ...]:
    """The sizes to vary; without any the first one of the workload.

    Raises:
        UsageError: the workload has no size of that name, or a size is named twice.
    """
    if not varied:
        return (Vary(name=next(iter(sizes))),)
    names = [one.name for one in varied]
    for name in names:
        if name not in sizes:
            raise UsageError(f"the workload has no size {name}", f"It has {', '.join(sizes)}")
        if names.count(name) > 1:
            raise UsageError(f"--vary names {name} twice", "Give each size once")
    return tuple(varied)


def cycle_of(
    sizes: Mapping[str, int], varied: Sequence[Vary], largest: Mapping[str, int]
) -> tuple[dict[str, int], ...]:
    """The sizes that the rounds go through: each varied one alone at several shares of its largest value.

    Args:
        largest: the largest value of each that fits.
    """
    found: list[dict[str, int]] = []
    # Several sizes share a cycle, so that it does not get longer than it has to.
    for share in _SHARES if len(varied) == 1 else _SHARES[-_FEWER:]:
        for one in varied:
            top = largest.get(one.name, 0)
            if top < 1:
                continue
            values = one.values and tuple(value for value in one.values if value <= top)
            if values:
                value = values[min(len(values) - 1, share * len(values) // 16)]
            else:
                value = one.nearest(max(1, top * share // 16))
            step = {**sizes, one.name: value}
            if not found or found[-1] != step:
                found.append(step)
    return tuple(found)


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
        alloc_conf=_conf(alloc_conf),
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
        options = RunOptions(gpu=gpu, alloc_conf=job.alloc_conf)
        run = run_in_child(["-m", "vramfit.stress.rounds", file], options, VirtualSettings(ours=[folder]))
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
    refuse_older()
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


def _conf(alloc_conf: str | None) -> str:
    from vramfit.allocator import alloc_conf_from_env

    return alloc_conf_from_env(os.environ) if alloc_conf is None else alloc_conf


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
