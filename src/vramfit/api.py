"""The Python face of ``vramfit run``: run a program on a virtual GPU and get its report as a value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.analysis import Breakdown, Verdict, peak, verdict
from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.report import print_terminal, render_json, render_terminal, run_to_json
from vramfit.trace import MemoryTrace, VirtualRun
from vramfit.virtual.assume import assumption
from vramfit.virtual.runner import run_in_child


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a program did on a virtual GPU.

    Attributes:
        run: the facts: devices, warnings, out-of-memory, exit code.
        verdict: whether it fits, and why not.
    """

    run: VirtualRun
    verdict: Verdict

    @property
    def fits(self) -> bool | None:
        """Whether the program fits its cards; None when that cannot be told."""
        return self.verdict.fits

    @property
    def trace(self) -> MemoryTrace:
        """Every allocation and free."""
        return self.run.trace

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes that tensors held at once on the fullest device."""
        return max((d.peak_allocated_bytes for d in self.run.devices), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes that torch's allocator held at once on the fullest device."""
        return max((d.peak_reserved_bytes for d in self.run.devices), default=0)

    @property
    def exit_code(self) -> int:
        """The program's exit code."""
        return self.run.exit_code

    def peak(self, device: int = 0) -> Breakdown:
        """Where the bytes are at the peak of a device."""
        return peak(self.run.trace, device)

    def to_dict(self) -> dict[str, Any]:
        """The report as ``vramfit run --json`` writes it."""
        return run_to_json(self.run, self.verdict)

    def to_json(self) -> str:
        """The same as text."""
        return render_json(self.run, self.verdict)

    def print(self) -> None:
        """Print the report as ``vramfit run`` does."""
        from rich.console import Console

        print_terminal(self.run, self.verdict, Console(), root=Path.cwd())

    def __str__(self) -> str:
        """The report as plain text."""
        return render_terminal(self.run, self.verdict)


def run(
    program: str | os.PathLike[str],
    *arguments: str,
    gpu: str | GpuSpec,
    gpus: int = 1,
    module: bool = False,
    alloc_conf: str | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    assume: str = "upper",
    profile: str | os.PathLike[str] = "auto",
) -> Report:
    """Run a CUDA program on virtual GPUs, in a process of its own.

    Args:
        program: a script, or the name of a module with ``module=True``.
        arguments: the program's own.
        gpu: a card's name, a size (``"24GiB"``), a TOML file or a `GpuSpec`.
        gpus: how many of them.
        module: run ``program`` as ``python -m`` does.
        alloc_conf: allocator settings, instead of ``PYTORCH_ALLOC_CONF``.
        environ: variables added to this process's.
        cwd: folder to run in.
        assume: ``"upper"`` or ``"typical"``: what is taken for sizes that depend on data.
        profile: a file that ``vramfit calibrate`` wrote, ``"none"``, or ``"auto"`` for that of this card and torch.

    Raises:
        UnknownGpuError: no such card.
        UsageError: no such script.
        EnvironmentUnfitError: this torch cannot carry the virtual GPU.
    """
    spec = find_gpu(gpu) if isinstance(gpu, str) else gpu
    folder = None if cwd is None else Path(cwd)
    name = os.fspath(program)
    if not module and not (Path(folder or ".") / name).is_file():
        raise UsageError(f"there is no script {name}", "Give the path of a Python file, or module=True")
    command = ["-m", name, *arguments] if module else [name, *arguments]
    outcome = run_in_child(
        command,
        gpu=spec,
        gpus=gpus,
        alloc_conf=alloc_conf,
        environ=environ,
        cwd=folder,
        assume=assumption(assume).value,
        profile=profile,
    )
    return Report(run=outcome, verdict=verdict(outcome))
