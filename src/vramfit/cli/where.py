"""Where ``vramfit run`` runs a program: on virtual cards, on the card of this machine, or metered on its CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vramfit.cli.options import size_of
from vramfit.errors import UsageError
from vramfit.files.policy import Writes
from vramfit.virtual.data_dependent.assume import Assume

if TYPE_CHECKING:
    from vramfit.gpus import GpuSpec
    from vramfit.launch.limits import Limits
    from vramfit.trace import Run

_DEVICES = "Write --device cuda, --device cuda:1 or --device cpu"


class ProgramTarget(Protocol):
    """Runs a program."""

    def run(
        self,
        command: list[str],
        *,
        alloc_conf: str | None,
        journal: Path | None,
        limits: Limits,
        host_memory: bool = False,
    ) -> Run:
        """Run it to its end; see `vramfit.virtual.virtual_run` and `vramfit.record.record_run`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnVirtual:
    """On virtual cards."""

    gpu: GpuSpec
    gpus: int
    assume: Assume
    profile: str
    writes: Writes = Writes.DISCARD
    through: tuple[Path, ...] = ()

    def run(
        self,
        command: list[str],
        *,
        alloc_conf: str | None,
        journal: Path | None,
        limits: Limits,
        host_memory: bool = False,
    ) -> Run:
        """Run it on virtual cards."""
        from vramfit.virtual.virtual_run import run_in_child

        return run_in_child(
            command,
            gpu=self.gpu,
            gpus=self.gpus,
            alloc_conf=alloc_conf,
            assume=self.assume.value,
            profile=self.profile,
            journal=journal,
            limits=limits,
            host_memory=host_memory,
            writes=self.writes,
            through=self.through,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """For real, recorded."""

    device: str
    budget: int | None

    def run(
        self,
        command: list[str],
        *,
        alloc_conf: str | None,
        journal: Path | None,
        limits: Limits,
        host_memory: bool = False,
    ) -> Run:
        """Run it for real."""
        from vramfit.record.record_run import record_in_child

        return record_in_child(
            command,
            device=self.device,
            budget=self.budget,
            alloc_conf=alloc_conf,
            journal=journal,
            limits=limits,
            host_memory=host_memory,
        )


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
) -> ProgramTarget:
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

        if writes is Writes.REAL and through:
            raise UsageError(
                "--writes real writes all files, so --writes-through has no effect",
                "Leave --writes-through out",
            )
        return OnVirtual(
            gpu=find_gpu(gpu),
            gpus=gpus,
            assume=assume,
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
    return Recorded(device=_device(device), budget=size_of("--budget", budget))


def _device(text: str | None) -> str:
    if text is None:
        return "auto"
    name, _, index = text.partition(":")
    known = text in ("cpu", "cuda") or (name == "cuda" and index.isdecimal())
    if not known:
        raise UsageError(f"--device {text} cannot be recorded", _DEVICES)
    return text
