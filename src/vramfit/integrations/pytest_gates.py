"""The gates of the pytest plugin: reading the markers, choosing the device, judging a test. Imports no torch itself."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from vramfit.errors import EnvironmentUnfitError
from vramfit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from vramfit.analysis import Measure
    from vramfit.gpus import GpuSpec
    from vramfit.trace import Run

LIMIT = "limit_vram"
NO_LEAK = "no_vram_leak"
FIXTURE = "vram"
_HERE = str(Path(__file__).resolve().parents[1])
LEAST_ROUNDS = 5
"""Fewest rounds after the warm-up that distinguish growth from chance (see vramfit.analysis.leaks)."""
_WARM_UP = 1  # after the first time, which warms up as well
_WIDTH = 100


class Device(Enum):
    """What tests are metered on."""

    VIRTUAL = "virtual"
    CARD = "card"
    CPU = "cpu"


class BadMarker(Exception):
    """A marker cannot be used as it is written; the message says why and how to write it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VramLimit:
    """``@pytest.mark.limit_vram``.

    Attributes:
        limit: most bytes at the peak.
        of: ``reserved`` or ``allocated``.
        device: index of the device, None for each of them.
    """

    limit: int
    of: str
    device: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoLeak:
    """``@pytest.mark.no_vram_leak``.

    Attributes:
        rounds: how often the test runs after two times that warm up.
    """

    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gates:
    """What a test is held to.

    Attributes:
        limits: for the peak of reserved and of allocated bytes.
        no_leak: None where the test may grow.
        must_use: a limit stands at the test itself, not at its class or module, so it must use the device: a limit
            that nothing comes near would hold for ever.
    """

    limits: tuple[VramLimit, ...] = ()
    no_leak: NoLeak | None = None
    must_use: bool = False


class Metered(Protocol):
    """What meters a test: a virtual GPU or a tracker."""

    @property
    def run(self) -> Run:
        """What happened so far."""


def gates_of(item: pytest.Item) -> Gates | None:
    """The gates of a test; None if it is not to be metered at all.

    The nearest marker wins: a test's own over its class's, that over its module's. A limit of allocated bytes and one
    of reserved bytes hold both.

    Raises:
        BadMarker: a marker's arguments cannot be used.
    """
    limits: dict[tuple[str, int | None], VramLimit] = {}
    for marker in item.iter_markers(LIMIT):  # the nearest first
        limit = _limit(marker)
        limits.setdefault((limit.of, limit.device), limit)
    nearest = item.get_closest_marker(NO_LEAK)
    no_leak = None if nearest is None else _no_leak(nearest)
    if no_leak is not None and not _can_repeat(item):
        raise BadMarker(f"{NO_LEAK} repeats plain test functions and methods, not those of unittest.TestCase")
    if limits or no_leak is not None or FIXTURE in getattr(item, "fixturenames", ()):
        own = any(marker.name == LIMIT for marker in item.own_markers)
        return Gates(limits=tuple(limits.values()), no_leak=no_leak, must_use=own)
    return None


def _limit(marker: pytest.Mark) -> VramLimit:
    example = f'write @pytest.mark.{LIMIT}("2 GiB") or @pytest.mark.{LIMIT}("2 GiB", of="allocated")'
    unknown = sorted(set(marker.kwargs) - {"of", "device"})
    if unknown:
        raise BadMarker(f"{LIMIT} knows no {', '.join(unknown)}: {example}")
    if (
        len(marker.args) != 1
        or isinstance(marker.args[0], bool)
        or not isinstance(marker.args[0], (str, int))
    ):
        raise BadMarker(f"{LIMIT} takes one size: {example}")
    try:
        size = parse_bytes(marker.args[0])
    except ValueError as error:
        raise BadMarker(f"{LIMIT}: {error}") from None
    of, device = marker.kwargs.get("of", "reserved"), marker.kwargs.get("device")
    if size <= 0:
        raise BadMarker(f"{LIMIT}: {size} bytes are no limit that anything could keep: {example}")
    if of not in ("reserved", "allocated"):
        raise BadMarker(f"{LIMIT}: of={of!r} is neither 'reserved' nor 'allocated'")
    if device is not None and (isinstance(device, bool) or not isinstance(device, int) or device < 0):
        raise BadMarker(f"{LIMIT}: device={device!r} is not the index of a device")
    return VramLimit(limit=size, of=of, device=device)


def _no_leak(marker: pytest.Mark) -> NoLeak:
    example = f"write @pytest.mark.{NO_LEAK} or @pytest.mark.{NO_LEAK}(rounds={LEAST_ROUNDS})"
    unknown = sorted(set(marker.kwargs) - {"rounds"})
    if unknown or len(marker.args) > 1 or (marker.args and marker.kwargs):
        raise BadMarker(f"{NO_LEAK} takes rounds and nothing else: {example}")
    rounds = marker.args[0] if marker.args else marker.kwargs.get("rounds", LEAST_ROUNDS)
    if isinstance(rounds, bool) or not isinstance(rounds, int):
        raise BadMarker(f"{NO_LEAK}: rounds={rounds!r} is not a number: {example}")
    if rounds < LEAST_ROUNDS:
        raise BadMarker(
            f"{NO_LEAK}: {rounds} rounds cannot tell growth from chance, {LEAST_ROUNDS} can: {example}"
        )
    return NoLeak(rounds=rounds)


def _can_repeat(item: pytest.Item) -> bool:
    import unittest

    owner = getattr(item, "cls", None)
    return isinstance(item, pytest.Function) and not (owner and issubclass(owner, unittest.TestCase))


# -- the device ----------------------------------------------------------------------------------------------


def chosen_device(gpu: GpuSpec | None) -> Device:
    """A virtual GPU if one is named, else the card, else the CPU."""
    if gpu is not None:
        return Device.VIRTUAL
    import torch

    return Device.CARD if torch.cuda.is_available() else Device.CPU


def describe_device(gpu: GpuSpec | None) -> str:
    """The device in words."""
    device = chosen_device(gpu)
    if gpu is not None:
        return f"virtual {gpu.name}, {format_bytes(gpu.total_bytes)}"
    if device is Device.CPU:
        return "tensors on the CPU, metered (no card; --vram-gpu NAME chooses a virtual one)"
    import torch

    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return f"the card: {names}"


def open_meter(gpu: GpuSpec | None) -> AbstractContextManager[Metered]:
    """What meters a test on the chosen device, as a context."""
    device = chosen_device(gpu)
    if gpu is not None:
        from vramfit.api.in_process import VirtualGPU
        from vramfit.options.run_options import RunOptions

        return VirtualGPU(RunOptions(gpu=gpu))
    from vramfit.api.tracking import track

    if device is Device.CPU:
        return track(device="cpu")
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # what earlier tests left in the cache is none of this test's
    return track(device="cuda")


def prepare_interpreter() -> None:
    """Make this process able to carry virtual GPUs before any test runs a backward pass, after which it is too late.

    Not where there is a card: other tests may use it. Where this fails, tests on the virtual GPU run in children.
    """
    import torch

    from vramfit.torch_internals import build_shim

    if not torch.cuda.is_available():
        with contextlib.suppress(EnvironmentUnfitError):
            build_shim.install()


def carries_virtual_gpu() -> bool:
    """Whether a virtual GPU can be entered in this process."""
    import torch

    from vramfit.torch_internals import build_check, build_shim
    from vramfit.virtual.gpu import check_interpreter

    has_card = torch.cuda.is_available()
    try:
        check_interpreter()
        build_shim.install()
        build_check.self_check()
    except EnvironmentUnfitError:
        return False
    finally:
        if has_card:
            build_shim.uninstall()
    return True


def hide_our_frames(error: BaseException) -> None:
    """End the traceback of an error that the virtual GPU raised where the test's own code called torch."""
    last, trace = None, error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_HERE):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None


# -- judging -------------------------------------------------------------------------------------------------


def unused(run: Run) -> str:
    """Why a limit proved nothing: the test never used the device. Empty where it did."""
    if any(device.peak_reserved_bytes or device.peak_allocated_bytes for device in run.devices):
        return ""
    return (
        f"the test never used the device, so its {LIMIT} proves nothing\n"
        "  Let it run on the device that is metered, or take the marker away. A marker of its class or module may "
        "stay: it holds the tests that use the device"
    )


def over_limits(run: Run, limits: tuple[VramLimit, ...], root: Path) -> Iterator[str]:
    """Why a run is over its limits, one text for each that it passed."""
    from vramfit.report.metered import peak_bytes, render_over_limit

    for limit in limits:
        measure = _measure(limit.of)
        for outcome in run.devices:
            if (
                limit.device in (None, outcome.index)
                and peak_bytes(run, outcome.index, measure) > limit.limit
            ):
                yield render_over_limit(
                    run, device=outcome.index, measure=measure, limit=limit.limit, root=root
                )


def _measure(of: str) -> Measure:
    from vramfit.analysis import Measure

    return Measure.RESERVED if of == "reserved" else Measure.ALLOCATED


def repeat(gate: NoLeak, once: Callable[[], Any], root: Path) -> str:
    """Run something again and again after its first time; says what grows, or nothing where nothing does.

    Dead reference cycles do not count: Python's collector frees them, only later.
    """
    from vramfit.analysis import Release
    from vramfit.api.leak_check import check_leaks
    from vramfit.report import render

    done = 0

    def round_again() -> None:
        nonlocal done
        done += 1
        try:
            once()
        except Exception as error:
            error.add_note(f"in round {done} of those that {NO_LEAK} adds to the first")
            raise

    report = check_leaks(round_again, gate.rounds, warmup=_WARM_UP)
    held = [growing for growing in report.growing if growing.release is Release.HELD]
    if not report.leaks or (report.growing and not held):
        return ""
    return render(report, width=_WIDTH, root=root).rstrip()
