"""Reconciles a prediction with what really happened: splits the difference into parts that sum to it, to the byte.

At its peak each side consists of the bytes that live blocks were asked for, workspaces of libraries, rounding and
slack, blocks that a stream still uses, and free memory in segments. The parts of both sides, one beside the other, are
what the difference consists of. The requests behind it follow from aligning the two sequences of requests; and the
recorded requests, replayed through our allocator, tell whether it would have come to the recorded figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vramfit.allocator import AllocatorConfig
from vramfit.analysis._lifetimes import Flags, Ints, Measure
from vramfit.analysis.breakdown import peak
from vramfit.analysis.occupancy import fragmentation
from vramfit.analysis.pairing import Pairing
from vramfit.analysis.reconciliation import (
    DEFAULT_TOLERANCE,
    Comparison,
    Counterfactual,
    DeviceReconciliation,
    Part,
    PartDifference,
    Quantity,
    Reconciliation,
    StreamComparison,
    Tolerance,
    When,
)
from vramfit.analysis.requests import ALIKE, Requests, align_requests
from vramfit.errors import TraceFormatError, UsageError
from vramfit.trace import Category, DeviceOutcome, MemoryTrace, Run, replay
from vramfit.trace.actual import Actual, DeviceFigures
from vramfit.trace.settings import recorded_config
from vramfit.units import format_bytes

_MEASURES = {Quantity.ALLOCATED: Measure.ALLOCATED, Quantity.RESERVED: Measure.RESERVED}


def reconcile(
    run: Run,
    actual: Actual,
    *,
    device: int | None = None,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
) -> Reconciliation:
    """Compare a run on the virtual GPU with what really happened.

    Devices are compared by index. A single device on each side is compared whatever its index.

    Args:
        run: the prediction.
        actual: the recording.
        device: compare this device of the recording, with that of the same index, or with the fullest one.

    Raises:
        UsageError: the two have no device in common.
    """
    pairs = _pairs(run, actual, device)
    return Reconciliation(
        name=actual.name,
        tolerance=tolerance,
        devices=tuple(_device(run, predicted, actual, recorded) for predicted, recorded in pairs),
        notes=tuple(_notes_of_run(run, actual, pairs, device)),
    )


def check_device(actual: Actual, device: int | None) -> None:
    """Find out before a run whether a recording knows of a device.

    Raises:
        UsageError: it does not.
    """
    known = actual.devices
    if not known:
        raise UsageError(
            f"{actual.name} holds no memory of any device", "Record a program that uses the card"
        )
    if device is not None and device not in known:
        listed = ", ".join(map(str, known))
        raise UsageError(f"{actual.name} knows nothing of device {device}", f"It has: {listed}")


def _pairs(run: Run, actual: Actual, device: int | None) -> list[tuple[DeviceOutcome, int]]:
    check_device(actual, device)
    here = {found.index: found for found in run.devices}
    if not here:
        raise UsageError("the run saw no card to compare", "Do not hide the cards with CUDA_VISIBLE_DEVICES")
    if device is not None:
        fullest = max(run.devices, key=lambda found: found.peak_reserved_bytes)
        return [(here.get(device, fullest), device)]
    if len(here) == 1 and len(actual.devices) == 1:
        return [(run.devices[0], actual.devices[0])]
    pairs = [(here[index], index) for index in actual.devices if index in here]
    if not pairs:
        raise UsageError(
            f"{actual.name} is of devices {', '.join(map(str, actual.devices))}, which the run does not have",
            "Choose one with --against-device, or run with as many --gpus",
        )
    return pairs


def _notes_of_run(
    run: Run, actual: Actual, pairs: Sequence[tuple[DeviceOutcome, int]], device: int | None
) -> Iterator[str]:
    if run.exit_code != 0:
        yield "the program failed, so the prediction ends there"
    left = [str(index) for index in actual.devices if index not in {recorded for _, recorded in pairs}]
    if left and device is None:
        yield f"the recording also has device {', '.join(left)}, which the run does not"
    told = {figures.torch for figures in map(actual.figures_of, actual.devices)} - {""}
    for version in sorted(told):
        if _release(version) != _release(run.torch_version):
            yield f"recorded with torch {version}, predicted with {run.torch_version}"


def _release(version: str) -> list[str]:
    return version.partition("+")[0].split(".")[:2]


def _device(run: Run, predicted: DeviceOutcome, actual: Actual, index: int) -> DeviceReconciliation:
    figures = actual.figures_of(index)
    recorded = None if actual.trace is None else Requests(actual.trace, index)
    if recorded is not None and (len(recorded) or figures.peak_reserved is None):
        return _with_trace(run.trace, predicted, recorded, figures)
    return _with_figures(run, predicted, figures, index)


# -- with a recording of the requests ------------------------------------------------------------------------


def _with_trace(
    trace: MemoryTrace, outcome: DeviceOutcome, recorded: Requests, figures: DeviceFigures
) -> DeviceReconciliation:
    predicted = Requests(trace, outcome.index)
    alignment = align_requests(recorded, predicted)
    pairing = Pairing(recorded, predicted, alignment)
    has_history = bool(len(recorded))
    comparisons = [
        _compare(pairing, quantity, None if has_history else _most_alike(recorded, predicted))
        for quantity in _MEASURES
    ]
    held = has_history or any(one.recorded for one in comparisons)
    comparisons += _total(comparisons[-1].predicted, comparisons[-1].recorded, outcome, figures)
    streams = pairing.streams() if has_history else None
    counterfactual, trouble = (None, "") if not has_history else _replayed(pairing, comparisons[1])
    notes = [*_notes_of_device(outcome, figures), trouble]
    if held:
        notes[-1:-1] = _notes_of_trace(pairing, streams, outcome)
    return DeviceReconciliation(
        device=outcome.index,
        recorded_device=recorded.device,
        gpu=outcome.gpu,
        recorded_gpu=figures.gpu,
        when=When.PEAK if has_history else When.SNAPSHOT,
        comparisons=tuple(comparisons),
        requests=streams,
        counterfactual=counterfactual,
        run_peak_reserved=outcome.peak_reserved_bytes,
        notes=tuple(note for note in notes if note),
    )


def _compare(pairing: Pairing, quantity: Quantity, moment: int | None) -> Comparison:
    """One quantity: at both peaks, or at the end of the recording and at ``moment`` of the prediction.

    Programs have many moments that are nearly as high as the peak, and a small difference may make another of them the
    highest. So the side that is lower may be looked at where the higher one has its peak, since that is where the
    reason shows; how much higher it is at its own is then a part. Of the two ways, and of three where both peaks are
    equal, the one is taken in which the fewest bytes differ.
    """
    one, two = pairing.recorded, pairing.predicted
    if moment is not None:
        return _at_moments(pairing, quantity, (one.lives.rows - 1, moment), (0, 0))
    here = _peak_row(one, quantity, -1, one.lives.rows - 1)
    there = _peak_row(two, quantity, pairing.start_row, pairing.stop_row)
    recorded, predicted = _value(one, quantity, here), _value(two, quantity, there)
    pairs = {(here, there)}
    if predicted >= recorded:
        pairs.add((pairing.recorded_row(there), there))
    if recorded >= predicted:
        pairs.add((here, pairing.predicted_row(here)))
    found = []
    for recorded_row, predicted_row in sorted(pairs):
        higher = (
            recorded - _value(one, quantity, recorded_row),
            predicted - _value(two, quantity, predicted_row),
        )
        found.append(_at_moments(pairing, quantity, (recorded_row, predicted_row), higher))
    return min(found, key=_unlikeness)


def _at_moments(
    pairing: Pairing, quantity: Quantity, rows: tuple[int, int], higher: tuple[int, int]
) -> Comparison:
    """One quantity at (recorded, predicted) rows; ``higher``: how much higher each is at its own peak."""
    recorded = _parts(pairing.recorded, rows[0], quantity, pairing.recorded_workspaces)
    predicted = _parts(pairing.predicted, rows[1], quantity, pairing.predicted_workspaces)
    recorded[Part.ELSEWHERE], predicted[Part.ELSEWHERE] = higher
    return Comparison(
        quantity=quantity,
        predicted=sum(predicted.values()),
        recorded=sum(recorded.values()),
        parts=tuple(
            PartDifference(part=part, predicted=predicted[part], recorded=recorded[part])
            for part in predicted
        ),
        differing=pairing.at(*rows),
    )


def _unlikeness(found: Comparison) -> int:
    """Bytes of the blocks by which two moments differ, and of what is not at these moments."""
    blocks = sum(abs(row.total) for row in found.differing)
    return blocks + sum(part.predicted + part.recorded for part in found.parts if part.part is Part.ELSEWHERE)


def _value(requests: Requests, quantity: Quantity, row: int) -> int:
    measure = _MEASURES[quantity]
    return requests.curves.start[measure] if row < 0 else int(requests.curves.of(measure)[row])


def _peak_row(requests: Requests, quantity: Quantity, first: int, last: int) -> int:
    """The row from ``first`` to ``last`` where a figure is highest; of equal ones that with most allocated."""
    curves, measure = requests.curves, _MEASURES[quantity]

    def over(which: Measure) -> Ints:
        before = curves.start[which] if first < 0 else int(curves.of(which)[first])
        return np.concatenate([[before], curves.of(which)[first + 1 : last + 1]])

    figure = over(measure)
    highest = np.flatnonzero(figure == figure.max())
    return first + int(highest[over(Measure.ALLOCATED)[highest].argmax()])


def _parts(requests: Requests, row: int, quantity: Quantity, workspaces: Flags) -> dict[Part, int]:
    """What a quantity consists of after an event; the parts sum to it."""
    lives = requests.lives
    alive = lives.alive(row)
    library = workspaces[alive]
    size, block = lives.size[alive], lives.block[alive]
    parts = {
        Part.REQUESTS: int(size[~library].sum()),
        Part.WORKSPACES: int(size[library].sum()),
        Part.SLACK: int((block - size).sum()),
    }
    if quantity is Quantity.ALLOCATED:
        return parts
    reserved = _value(requests, Quantity.RESERVED, row)
    active = int(lives.block[lives.active(row)].sum())
    cached = fragmentation(requests.trace, lives, row).releasable
    parts[Part.WAITING] = active - sum(parts.values())
    parts[Part.FRAGMENTED] = reserved - active - cached
    parts[Part.CACHED] = cached
    return parts


def _most_alike(recorded: Requests, predicted: Requests) -> int:
    """The last row of the prediction at which the sizes of live blocks differ least, in bytes, from a snapshot's."""
    lives = recorded.lives
    alive = lives.alive(lives.rows - 1)
    wanted: dict[int, int] = {}
    for size in lives.size[alive].tolist():
        wanted[size] = wanted.get(size, 0) + 1
    row, off, least = -1, 0, 0
    sizes = predicted.lives.size[predicted.block].tolist()
    for at_row, takes, size in zip(predicted.rows.tolist(), predicted.takes.tolist(), sizes, strict=True):
        missing = wanted.get(size, 0)
        if takes:
            off += -size if missing > 0 else size
            wanted[size] = missing - 1
        else:
            off += size if missing >= 0 else -size
            wanted[size] = missing + 1
        if off <= least:
            row, least = at_row, off
    return predicted.settled(row)


def _replayed(pairing: Pairing, reserved: Comparison) -> tuple[Counterfactual | None, str]:
    """The peaks of the recorded requests in our allocator, or why they are unknown."""
    one, two = pairing.recorded, pairing.predicted
    trace = one.trace.for_device(one.device)
    here, there = recorded_config(one.trace), recorded_config(two.trace)
    try:
        found = replay(trace).devices[0]
        other = found if here == there else replay(trace, there).devices[0]
    except TraceFormatError as error:
        return None, f"the recorded requests cannot be replayed: {error.message}"
    counterfactual = Counterfactual(
        predicted=reserved.predicted,
        under_its_settings=other.replayed.peak_reserved,
        replayed=found.replayed.peak_reserved,
        recorded=reserved.recorded,
        is_exact=found.exact,
    )
    return counterfactual, "" if here == there else _settings(here, there)


def _settings(here: AllocatorConfig, there: AllocatorConfig) -> str:
    recorded, predicted = here.to_string() or "the defaults", there.to_string() or "the defaults"
    return f"allocator settings differ: {predicted} in the prediction, {recorded} in the recording"


def _notes_of_trace(
    pairing: Pairing, streams: StreamComparison | None, outcome: DeviceOutcome
) -> Iterator[str]:
    if streams is None:
        yield (
            "the snapshot has no history, so what it holds is compared, not the peak: call "
            "torch.cuda.memory._record_memory_history() before the program to record that"
        )
        return
    if streams.recorded and streams.matched < ALIKE * streams.recorded:
        yield "most requests differ: is it the same program, with the same arguments and sizes?"
    if not pairing.recorded.is_from_the_beginning():
        yield "the recording begins on a device in use; it is compared with the stretch that it covers"
    elsewhere = outcome.peak_reserved_bytes - int(
        max(pairing.predicted.curves.reserved[max(pairing.start_row, 0) : pairing.stop_row + 1], default=0)
    )
    if elsewhere > 0:
        yield (
            f"the prediction reserves {format_bytes(elsewhere)} more outside the stretch that the recording covers"
        )


def _notes_of_device(outcome: DeviceOutcome, figures: DeviceFigures) -> Iterator[str]:
    if figures.gpu and bare_name(figures.gpu) != bare_name(outcome.gpu):
        yield f"recorded on {figures.gpu}, predicted for {outcome.gpu}"


def bare_name(name: str) -> str:
    """The name of a card without its maker, in one case."""
    words = name.lower().replace("nvidia", " ").replace("geforce", " ").split()
    return " ".join(words)


def _total(predicted: int, recorded: int, outcome: DeviceOutcome, figures: DeviceFigures) -> list[Comparison]:
    """What the process holds of the device in all, if the recording says what it holds outside PyTorch."""
    if figures.outside is None:
        return []
    parts = (
        PartDifference(part=Part.HELD, predicted=predicted, recorded=recorded),
        PartDifference(part=Part.OUTSIDE, predicted=outcome.context_bytes, recorded=figures.outside),
    )
    return [
        Comparison(
            quantity=Quantity.TOTAL,
            predicted=sum(part.predicted for part in parts),
            recorded=sum(part.recorded for part in parts),
            parts=parts,
        )
    ]


# -- with figures alone --------------------------------------------------------------------------------------


def _with_figures(
    run: Run, outcome: DeviceOutcome, figures: DeviceFigures, index: int
) -> DeviceReconciliation:
    stats = {} if figures.whole_run else outcome.stats
    allocated = stats.get("allocated_bytes.all.peak", outcome.peak_allocated_bytes)
    reserved = stats.get("reserved_bytes.all.peak", outcome.peak_reserved_bytes)
    parts: list[PartDifference] = []
    comparisons: list[Comparison] = []
    if figures.peak_allocated is not None:
        parts = _allocated_parts(run, outcome, figures, allocated, stats)
        comparisons.append(_comparison(Quantity.ALLOCATED, parts))
    if figures.peak_reserved is not None:
        unused = Part.SEGMENTS if figures.peak_allocated is None else Part.UNUSED
        parts.append(
            PartDifference(
                part=unused,
                predicted=reserved - sum(part.predicted for part in parts),
                recorded=figures.peak_reserved - sum(part.recorded for part in parts),
            )
        )
        comparisons.append(_comparison(Quantity.RESERVED, parts))
        comparisons += _total(reserved, figures.peak_reserved, outcome, figures)
    notes = [
        *_notes_of_device(outcome, figures),
        "only figures are known of the run: a snapshot with history would tell which requests differ",
    ]
    return DeviceReconciliation(
        device=outcome.index,
        recorded_device=index,
        gpu=outcome.gpu,
        recorded_gpu=figures.gpu,
        when=When.PEAK,
        comparisons=tuple(comparisons),
        requests=None,
        counterfactual=None,
        run_peak_reserved=outcome.peak_reserved_bytes,
        notes=tuple(notes),
    )


def _comparison(quantity: Quantity, parts: Sequence[PartDifference]) -> Comparison:
    return Comparison(
        quantity=quantity,
        predicted=sum(part.predicted for part in parts),
        recorded=sum(part.recorded for part in parts),
        parts=tuple(parts),
    )


def _allocated_parts(
    run: Run, outcome: DeviceOutcome, figures: DeviceFigures, allocated: int, stats: dict[str, int]
) -> list[PartDifference]:
    """The parts of the allocated bytes that the figures distinguish."""
    assert figures.peak_allocated is not None
    if figures.slack is not None and figures.workspaces is not None:
        here = peak(run.trace, outcome.index, tensors=0)
        slack, workspaces = here.fragmentation.slack, here.categories[Category.WORKSPACES]
        rest = figures.peak_allocated - figures.slack - figures.workspaces
        return [
            PartDifference(part=Part.REQUESTS, predicted=allocated - slack - workspaces, recorded=rest),
            PartDifference(part=Part.WORKSPACES, predicted=workspaces, recorded=figures.workspaces),
            PartDifference(part=Part.SLACK, predicted=slack, recorded=figures.slack),
        ]
    requested = stats.get("requested_bytes.all.peak")
    if figures.peak_requested is not None and requested is not None:
        return [
            PartDifference(part=Part.REQUESTED, predicted=requested, recorded=figures.peak_requested),
            PartDifference(
                part=Part.SLACK,
                predicted=allocated - requested,
                recorded=figures.peak_allocated - figures.peak_requested,
            ),
        ]
    return [PartDifference(part=Part.BLOCKS, predicted=allocated, recorded=figures.peak_allocated)]
