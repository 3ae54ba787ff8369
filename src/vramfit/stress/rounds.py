"""The child of a stress test: runs the workload's steps and writes down what each needs.

Started as ``python -m vramfit.stress.rounds JOB``, on the virtual GPU, on a card or on metered CPU; it sees the memory
through torch's own figures, or through the recorder of metered CPU.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.arguments import size_argument
from vramfit.errors import UsageError, VramfitError
from vramfit.failure_line import failure_line
from vramfit.launch.job import tell
from vramfit.searching.largest import LargestSearch
from vramfit.searching.tries import Tries
from vramfit.stress.stability import Limit, LimitReason, Round, RoundOutcome
from vramfit.stress.stress_run import CYCLES, StressJob, StressResult, Vary, chosen, cycle_of
from vramfit.workload import State, Workload, load_workload

if TYPE_CHECKING:
    from vramfit.record.cpu_recorder import CpuRecorder


class Memory(ABC):
    """The figures of the device."""

    device: str

    @abstractmethod
    def begin(self) -> None:
        """A round begins: peaks are counted anew."""

    @abstractmethod
    def figures(self) -> dict[str, int]:
        """``peak_allocated`` and ``peak_reserved`` of the round so far; ``allocated`` and ``reserved`` now."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached memory back."""


class CudaMemory(Memory):
    """A card, real or virtual."""

    device = "cuda"

    def begin(self) -> None:
        """Reset torch's peaks."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def figures(self) -> dict[str, int]:
        """By torch's own statistics."""
        import torch

        torch.cuda.synchronize()
        return {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }

    def empty_cache(self) -> None:
        """As torch does."""
        import torch

        torch.cuda.empty_cache()


class CpuMemory(Memory):
    """Metered CPU. The peaks of a round are read from the trace, since the recording has only those of the whole."""

    device = "cpu"

    def __init__(self, recorder: CpuRecorder) -> None:
        self.recorder = recorder
        self.number = 0

    def begin(self) -> None:
        """Mark the place in the trace."""
        self.number += 1
        self.recorder.mark(f"round {self.number}")

    def figures(self) -> dict[str, int]:
        """What the trace shows since the last mark."""
        from vramfit.analysis import Measure, curves, lifetimes
        from vramfit.trace import marks

        trace = self.recorder.run().trace
        found = curves(trace, lifetimes(trace, 0))
        begin = next(mark.row for mark in reversed(marks(trace)) if mark.tag == f"round {self.number}")
        peaks = {
            name: int(found.of(measure)[begin:].max())
            for name, measure in (
                ("peak_allocated", Measure.ALLOCATED),
                ("peak_reserved", Measure.RESERVED),
            )
        }
        return {
            **peaks,
            "allocated": int(found.allocated[-1]),
            "reserved": int(found.reserved[-1]),
        }

    def empty_cache(self) -> None:
        """Give the metered segments back."""
        self.recorder.empty_cache()


class Stress:
    """One stress test.

    Args:
        job: which sizes vary, and for how many rounds.
        tell: called with what is being done, its number, and of how many (0 if that is open).
    """

    def __init__(
        self, workload: Workload, memory: Memory, job: StressJob, tell: Callable[[str, int, int], object]
    ) -> None:
        self.workload, self.memory, self.job, self.tell = workload, memory, job, tell
        self.varied = chosen(workload.sizes, job.vary)
        self.state: State | None = None
        self.usable = False
        self.shown = False

    def run(self) -> StressResult:
        """All of it."""
        usual = dict(self.workload.sizes)
        baseline = self.baseline(usual)
        limits = [self.limit(one, usual) for one in self.varied]
        largest = {limit.name: limit.largest for limit in limits}
        cycle = cycle_of(usual, self.varied, largest)
        rounds = []
        wanted = self.job.rounds
        count = CYCLES * len(cycle) if wanted is None else wanted
        if count and cycle:
            self.fresh()
            for number in range(count):
                sizes = cycle[number % len(cycle)]
                self.tell("rounds", number + 1, count)
                rounds.append(self.step(sizes))
        return StressResult(
            sizes=usual, baseline=baseline, limits=tuple(limits), cycle=cycle, rounds=tuple(rounds)
        )

    def baseline(self, usual: dict[str, int]) -> Round:
        """Two steps at the usual sizes: the first makes the optimizer's state."""
        self.tell("baseline", 1, 2)
        first = self.probe(usual)
        if not first.fits:
            return first
        self.tell("baseline", 2, 2)
        return self.step(usual)

    def fresh(self) -> None:
        """Forget everything: a new model and optimizer on an empty cache."""
        self.state = None
        self.usable = False
        gc.collect()
        self.memory.empty_cache()

    def probe(self, sizes: dict[str, int]) -> Round:
        """A step on an empty cache; the model and what the optimizer keeps stay, if they are whole."""
        if not self.usable:
            self.fresh()
        self.memory.empty_cache()
        if self.state is None and self.workload.trains:
            first = self.step(sizes)
            if not first.fits:
                return first
            self.memory.empty_cache()
        return self.step(sizes)

    def step(self, sizes: Mapping[str, int]) -> Round:
        """One step, whatever comes of it; memory that it held is free afterwards."""
        import torch

        self.memory.begin()
        outcome, message = RoundOutcome.FITS, ""
        try:
            if self.state is None:
                self.state = self.workload.start(self.memory.device)
            self.workload.run_step(self.state, sizes)
        except torch.OutOfMemoryError as error:
            outcome, message = RoundOutcome.OUT_OF_MEMORY, failure_line(error)
        except VramfitError:
            raise
        except Exception as error:
            outcome, message = RoundOutcome.REFUSED, failure_line(error)
            if not self.shown:  # a line alone does not say where; of the same at other sizes, one is enough
                self.shown = True
                traceback.print_exc()
        # Only here, the exception and the frames that it held being gone, can the step's tensors go.
        figures = self.memory.figures() if outcome is RoundOutcome.FITS else None
        if outcome is not RoundOutcome.FITS:
            self._drop_gradients()
            gc.collect()
            peaks = self.memory.figures()
            self.memory.empty_cache()
            figures = {
                **self.memory.figures(),
                **{key: peaks[key] for key in peaks if key.startswith("peak")},
            }
            # An optimizer that failed in its first step may have made half of its state.
            if not self.usable:
                self.state = None
        else:
            self.usable = True
        assert figures is not None
        return Round(sizes=dict(sizes), outcome=outcome, message=message, **figures)

    def _drop_gradients(self) -> None:
        if self.state is None:
            return
        self.state.model.zero_grad(set_to_none=True)
        if self.state.optimizer is not None:
            self.state.optimizer.zero_grad(set_to_none=True)

    def limit(self, one: Vary, usual: dict[str, int]) -> Limit:
        """The largest value of a size that fits: doubled until it does not, then halved in between."""
        tries: Tries[int, Round] = Tries(
            lambda value: self.probe({**usual, one.name: value}),
            progress=lambda value: self.tell(f"limit of {one.name}", value, 0),
        )
        largest = LargestSearch(tries, lambda tried: tried.fits, one.strategy(usual[one.name])).run()
        failing = largest.failing or None
        return Limit(
            name=one.name,
            usual=usual[one.name],
            largest=largest.value,
            failing=failing,
            reason=LimitReason.NOT_REACHED if failing is None else LimitReason[tries(failing).outcome.name],
            rounds=tuple(tries.answers.values()),
        )


@contextlib.contextmanager
def _memory(job: StressJob) -> Iterator[Memory]:
    if job.device == "cpu":
        from vramfit.record.cpu_recorder import CpuRecorder

        budget = None if job.budget is None else size_argument("budget", job.budget)
        recorder = CpuRecorder(budget=budget, alloc_conf=job.alloc_conf)
        recorder.start()
        try:
            yield CpuMemory(recorder)
        finally:
            recorder.stop()
        return
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "torch finds no CUDA card here",
            "Give --gpu NAME for a virtual one, or --device cpu --budget 2GiB for metered CPU",
        )
    yield CudaMemory()


def main(job_file: str) -> int:
    """Run the job; 0 where results were written."""
    job = StressJob.read(job_file)

    def progress(what: str, number: int, of: int) -> None:
        tell(Path(job.folder), f"{what}: {number:,}" + (f" of {of:,}" if of else ""))

    try:
        import torch

        workload = load_workload(job.target)
        with _memory(job) as memory:
            found = Stress(workload, memory, job, progress).run()
        found = replace(found, torch_version=torch.__version__)
        if memory.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            found = replace(found, total_bytes=total, device=torch.cuda.get_device_name(0))
        job.answer(found)
    except VramfitError as error:
        job.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
