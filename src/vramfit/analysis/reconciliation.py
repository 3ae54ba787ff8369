"""The difference between a prediction and a recording, as values: its parts, and the requests behind them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum

from vramfit.analysis.requests import RequestLabel
from vramfit.arguments import size_argument
from vramfit.errors import UsageError
from vramfit.units import format_bytes

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """A bound on differences.

    Attributes:
        share: share of the recorded figure (0.01 is one percent); None where the bound is in bytes.
        size: bytes; 0 where the bound is a share.
    """

    share: float | None = None
    size: int = 0

    @staticmethod
    def parse(text: str) -> Tolerance:
        """Read ``"1%"``, ``"0.5 %"``, ``"50MiB"`` or ``"7B"``.

        Raises:
            UsageError: it is none of these.
        """
        match = _SHARE.fullmatch(text) if isinstance(text, str) else None
        if match and math.isfinite(share := float(match.group(1)) / 100):
            return Tolerance(share=share)
        try:
            return Tolerance(size=size_argument("tolerance", text, least=0))
        except UsageError:
            raise UsageError(
                f"{text!r} is not a tolerance",
                'Write it as a share such as "1%" or "0.5%", or as a size such as "50MiB"',
            ) from None

    def bound(self, recorded: int) -> int:
        """The largest difference in bytes that is allowed from a recorded figure."""
        return self.size if self.share is None else math.floor(self.share * recorded)

    def allows(self, difference: int, recorded: int) -> bool:
        """Whether a difference, more or less, is within the bound."""
        return abs(difference) <= self.bound(recorded)

    def __str__(self) -> str:
        """As it would be written on the command line."""
        return format_bytes(self.size) if self.share is None else f"{100 * self.share:g}%"


DEFAULT_TOLERANCE = Tolerance(share=0.01)


class Quantity(Enum):
    """What is compared."""

    ALLOCATED = "allocated"
    """Blocks handed out, ``torch.cuda.memory_allocated()``."""
    RESERVED = "reserved"
    """Segments held from the driver, ``torch.cuda.memory_reserved()``."""
    TOTAL = "total"
    """Reserved, and what the process holds outside PyTorch: what nvidia-smi shows of it."""


class When(Enum):
    """The moment at which it is compared."""

    PEAK = "peak"
    """Each where its own figure is highest."""
    SNAPSHOT = "snapshot"
    """When a snapshot without history was taken, beside the moment of the prediction that resembles it most."""


class Part(Enum):
    """What a quantity consists of. Some files do not distinguish all of them; each of the last five covers several."""

    REQUESTS = "requests"
    """Bytes requested for live blocks, without workspaces."""
    WORKSPACES = "workspaces"
    """Bytes requested for the workspaces of cuBLAS and other libraries."""
    SLACK = "rounding and slack"
    """Bytes of live blocks beyond what was requested."""
    WAITING = "awaited by streams"
    """Given back, but still in use on another stream."""
    FRAGMENTED = "free between blocks"
    """Free, in a segment that also holds a live block: fragmentation."""
    CACHED = "free segments"
    """Segments without a live block, which the allocator keeps for later."""
    ELSEWHERE = "higher at another moment"
    """The parts above are those where the other side has its peak; at its own this one is so much higher."""
    OUTSIDE = "outside PyTorch"
    """The CUDA context and everything else outside torch's allocator."""
    REQUESTED = "requests and workspaces"
    BLOCKS = "blocks"
    UNUSED = "free in segments"
    SEGMENTS = "segments"
    HELD = "reserved by PyTorch"


class Cause(Enum):
    """Why a block is part of a difference."""

    EXTRA = "only predicted"
    """The recording has no such request."""
    MISSING = "only recorded"
    """The prediction has no such request."""
    LONGER = "held in prediction"
    """Both make the request, but the recording does not hold it at its peak."""
    SHORTER = "held in recording"
    """Both make the request, but the prediction does not hold it at its peak."""
    ROUNDED = "other block size"
    """Both hold it at their peaks, in blocks of different sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartDifference:
    """One part of a quantity on both sides, in bytes."""

    part: Part
    predicted: int
    recorded: int

    @property
    def difference(self) -> int:
        """Predicted less recorded."""
        return self.predicted - self.recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Like blocks by which the two differ.

    Attributes:
        cause: why the blocks differ.
        label: who asked for them.
        is_near: the recording does not say who asked; ``label`` is of the request before, which both make.
        is_workspace: whether the blocks are workspaces of a library.
        size: bytes that each was asked for.
        total: bytes that they add to the prediction, negative for those that it lacks. Of ROUNDED blocks, which are
            in both, what their sizes differ by.
    """

    cause: Cause
    label: RequestLabel
    is_near: bool
    is_workspace: bool
    size: int
    count: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A quantity on both sides, in bytes.

    Attributes:
        quantity: the figure that is compared.
        predicted, recorded: its highest value, or its value at the snapshot.
        parts: its parts; each column sums to the figure above, so their differences sum to the difference.
        differing: the blocks behind the differences of requests, workspaces and rounding, largest first.
    """

    quantity: Quantity
    predicted: int
    recorded: int
    parts: tuple[PartDifference, ...]
    differing: tuple[Difference, ...] = ()

    @property
    def difference(self) -> int:
        """Predicted less recorded."""
        return self.predicted - self.recorded

    @property
    def share(self) -> float | None:
        """The difference as a share of the recorded figure; None if that is 0 and the other is not."""
        if self.recorded:
            return self.difference / self.recorded
        return None if self.difference else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamDifference:
    """Like requests that only one of the two makes, at whatever moment.

    Attributes:
        cause: EXTRA or MISSING.
        label: who asked; see ``is_near`` of `Difference`.
        is_near: the label is of the request before.
        size: bytes that each asked for.
    """

    cause: Cause
    label: RequestLabel
    is_near: bool
    size: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamComparison:
    """The requests for blocks, in their order.

    Attributes:
        recorded: requests of the recording.
        predicted: requests of the prediction in the stretch that the recording covers.
        matched: requests that both have.
        before, after: further requests of the prediction before and after that stretch.
        moved_frees: blocks that both ask for but give back at another point of the sequence.
        differing: requests that only one side makes, the most bytes first.
    """

    recorded: int
    predicted: int
    matched: int
    before: int
    after: int
    moved_frees: int
    differing: tuple[StreamDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether both ask for the same in the same order, and give it back at the same points."""
        return self.matched == self.recorded == self.predicted and not self.moved_frees


@dataclass(frozen=True, kw_only=True, slots=True)
class Counterfactual:
    """Peak reserved bytes if only one thing had been different: the difference by cause. Sizes are in bytes.

    Attributes:
        predicted: the prediction's own peak.
        under_its_settings: the recorded requests, served by our allocator under the prediction's settings.
        replayed: the recorded requests, served by our allocator under the recorded settings.
        recorded: the recording's own peak.
        is_exact: the replay gives every block its recorded address, every segment its size and its moment.
    """

    predicted: int
    under_its_settings: int
    replayed: int
    recorded: int
    is_exact: bool

    @property
    def by_requests(self) -> int:
        """What the requests, and the state in which the recording begins, make of the difference."""
        return self.predicted - self.under_its_settings

    @property
    def by_settings(self) -> int:
        """What the settings of the allocator make of it."""
        return self.under_its_settings - self.replayed

    @property
    def by_allocator(self) -> int:
        """The rest: allocator and driver behave differently from ours, given the same requests and settings."""
        return self.replayed - self.recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReconciliation:
    """One device of the prediction beside one of the recording.

    Attributes:
        device, recorded_device: their indices.
        gpu, recorded_gpu: their cards; empty where unknown.
        when: the moment that is compared.
        comparisons: one for each quantity that the recording tells.
        requests: how the sequences of requests differ; None where only figures are known.
        counterfactual: the peaks of the recorded requests in our allocator; None where they cannot be replayed.
        run_peak_reserved: peak of the whole prediction, of which the recording may cover only a stretch.
        notes: what should be known about the comparison, in words.
    """

    device: int
    recorded_device: int
    gpu: str
    recorded_gpu: str
    when: When
    comparisons: tuple[Comparison, ...]
    requests: StreamComparison | None
    counterfactual: Counterfactual | None
    run_peak_reserved: int
    notes: tuple[str, ...]

    def of(self, quantity: Quantity) -> Comparison | None:
        """The comparison of a quantity, if the recording contains it."""
        return next((found for found in self.comparisons if found.quantity is quantity), None)

    def beyond(self, tolerance: Tolerance) -> tuple[Comparison, ...]:
        """The comparisons that are farther apart than that."""
        return tuple(
            found for found in self.comparisons if not tolerance.allows(found.difference, found.recorded)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciliation:
    """A prediction beside a run that really happened, or beside another prediction.

    Attributes:
        name: name of the files that describe that run.
        devices: one entry for each device that both have.
        notes: what should be known about the comparison as a whole.
    """

    name: str
    tolerance: Tolerance
    devices: tuple[DeviceReconciliation, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        within = "within" if self.within else "beyond"
        return f"<Reconciliation with {self.name}: {within} {self.tolerance}>"

    @property
    def within(self) -> bool:
        """Whether every quantity of every device is within the tolerance."""
        return not any(device.beyond(self.tolerance) for device in self.devices)
