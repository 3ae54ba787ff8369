"""Where ``vramfit run`` runs a program: on virtual cards, on the card of this machine, or metered on its CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.cli.options import size_of
from vramfit.errors import UsageError
from vramfit.files.policy import Writes
from vramfit.virtual.data_dependent.assume import Assume

if TYPE_CHECKING:
    from vramfit.record.record_run import RecordedRun
    from vramfit.trace import Run
    from vramfit.virtual.virtual_run import VirtualRun

_DEVICES = "Write --device cuda, --device cuda:1 or --device cpu"


def run_program(command: list[str], where: VirtualRun | RecordedRun) -> Run:
    """Run a program to its end; see `vramfit.virtual.virtual_run` and `vramfit.record.record_run`."""
    from vramfit.virtual.virtual_run import VirtualRun

    if isinstance(where, VirtualRun):
        from vramfit.virtual.virtual_run import run_in_child

        return run_in_child(command, where)
    from vramfit.record.record_run import record_in_child

    return record_in_child(command, where)


def chosen(
    gpu: str | None,
    *,
    gpus: int,
    device: str | None,
    budget: str | None,
    assume: Assume,
    profile: str,
    writes: Writes | None = None,
    through: Sequence[Path] = (),
) -> VirtualRun | RecordedRun:
    """What the options choose.

    Raises:
        UsageError: two of them contradict each other, or one cannot be read.
        UnknownGpuError: no such card.
    """
    if gpu is not None:
        if device is not None or budget is not None:
            given = "--device" if device is not None else "--budget"
            raise UsageError(
                f"{given} is for recording a real run, and --gpu for a virtual GPU",
                "Leave one of them out; a virtual GPU of any size is --gpu 20GiB",
            )
        from vramfit.gpus import find_gpu
        from vramfit.virtual.virtual_run import VirtualRun

        if writes is Writes.REAL and through:
            raise UsageError(
                "--writes real writes all files, so --writes-through has no effect",
                "Leave --writes-through out",
            )
        return VirtualRun(
            gpu=find_gpu(gpu),
            gpus=gpus,
            assume=assume.value,
            profile=profile,
            writes=writes or Writes.DISCARD,
            through=tuple(through),
        )
    for option, is_default in (
        ("--gpus", gpus == 1),
        ("--assume", assume is Assume.UPPER),
        ("--profile", profile == "auto"),
    ):
        if not is_default:
            raise UsageError(f"{option} is for a virtual GPU", "Choose one with --gpu NAME")
    for option, is_given in (("--writes", writes is not None), ("--writes-through", bool(through))):
        if is_given:
            raise UsageError(
                f"{option} is for a virtual GPU: a recorded program writes its files as usual",
                "Choose a card with --gpu NAME, or leave it out",
            )
    from vramfit.record.record_run import RecordedRun

    return RecordedRun(device=_device(device), budget=size_of("--budget", budget))


def _device(text: str | None) -> str:
    if text is None:
        return "auto"
    name, _, index = text.partition(":")
    known = text in ("cpu", "cuda") or (name == "cuda" and index.isdecimal())
    if not known:
        raise UsageError(f"--device {text} cannot be recorded", _DEVICES)
    return text
