"""What the virtual GPU says of a case: blocks as its meter places them, seconds, and error bars."""

from __future__ import annotations

from typing import Any

from vramfit.calibrate.cases import Case, Flag
from vramfit.calibrate.measure import Event, Given, OpWatch, Taken, WatchedCall, op_record, with_first
from vramfit.calibrate.records import CaseRecord, OpRecord
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.meter import Meter


class WatchedMeter(Meter):
    """A meter that also notes each block of the op that runs."""

    repeats = False

    events: list[Event]
    below: int
    above: int

    def start(self) -> None:
        """Forget what was noted."""
        self.collect()
        self.events, self.below, self.above = [], 0, 0

    def malloc(self, nbytes: int, device: int, **what: Any) -> tuple[int, int]:
        """Take a block, as the meter does."""
        taken = super().malloc(nbytes, device, **what)
        if taken[0] and hasattr(self, "events"):
            self.events.append(Taken(taken[0], nbytes))
        return taken

    def free(self, address: int, device: int) -> None:
        """Give a block back."""
        super().free(address, device)
        if hasattr(self, "events"):
            self.events.append(Given(address))

    def widen(self, device: int, below: int, above: int, op: str) -> None:
        """Note that a size is not known exactly."""
        super().widen(device, below, above, op)
        if hasattr(self, "events"):
            self.below, self.above = max(self.below, below), max(self.above, above)


class _Sight:
    """A listener that keeps what the meter noted during each op."""

    def __init__(self, meter: WatchedMeter) -> None:
        self.ops: list[OpRecord] = []
        self._meter = meter

    def begin(self) -> None:
        """Start to note."""
        self._meter.start()

    def end(self, call: WatchedCall) -> None:
        """Keep what was noted."""
        meter = self._meter
        self.ops.append(op_record(call, meter.events, below=meter.below, above=meter.above))


class PredictingGPU(VirtualGPU):
    """A virtual GPU that says what each op of a case does with memory."""

    meter_type = WatchedMeter
    meter: WatchedMeter

    def predict(self, case: Case) -> CaseRecord:
        """What a case does with memory once it is warm, and how long it takes by the roofline.

        Raises:
            Exception: whatever the case raises.
        """
        machine, device = self.mode.machine, 0
        allocator = machine.devices[device].allocator
        self.meter.collect()
        allocator.reset_peak_stats()
        with case.switched():
            run = case.build()
            first = self._watch(run)
            began = machine.clock_us
            ops = self._watch(run)
        if Flag.SEARCHES in case.flags:
            ops = with_first(ops, first)
        self.meter.collect()
        return CaseRecord(
            case=case.name,
            ops=tuple(ops),
            seconds=(machine.clock_us - began) / 1e6,
            peak_bytes=allocator.peak_allocated_bytes,
        )

    def _watch(self, run: Any) -> list[OpRecord]:
        sight = _Sight(self.meter)
        with OpWatch(sight):
            run()
        return sight.ops
