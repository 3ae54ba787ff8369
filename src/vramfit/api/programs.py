"""The Python face of ``vramfit run``: run a program on a virtual GPU, or recorded, and get its report as a value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vramfit.analysis import (
    Breakdown,
    Need,
    Reconciliation,
    Tolerance,
    Verdict,
    check_device,
    peak,
    reconcile,
    verdict,
)
from vramfit.arguments import (
    flag_argument,
    path_argument,
    paths_argument,
    size_argument,
    text_argument,
    whole_argument,
)
from vramfit.cudnn.asker import wanted_cudnn
from vramfit.cudnn.found_library import NONE
from vramfit.errors import UsageError
from vramfit.files import Writes
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.launch.limits import limits_from
from vramfit.record.record_run import AUTO, RecordedRun, record_in_child
from vramfit.report import json_text, print_report, render, to_json
from vramfit.report.forms import Material, write_as
from vramfit.report.html.page import run_summary, summary_lines
from vramfit.trace import Actual, MemoryTrace, Run, read_actual
from vramfit.virtual.data_dependent.assume import assumption
from vramfit.virtual.second_run import run_again
from vramfit.virtual.virtual_run import MOST_GPUS, VirtualRun, run_in_child

_MARKS = "✓✗~! "
"""What headlines begin with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a program did, on a virtual GPU or for real; `run` makes it.

    >>> report = vramfit.run("mlp.py", device="cpu")
    >>> report.fits, report.exit_code, report.peak_allocated_bytes
    (None, 0, 0)

    Attributes:
        run: the facts: devices, warnings, out-of-memory, exit code.
        verdict: whether it fits, and why not.
        against: how it differs from the real run that it was compared with; None if it was not.
    """

    run: Run
    verdict: Verdict
    against: Reconciliation | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the program fits its cards; None when that is unknown."""
        return self.verdict.fits

    @property
    def need(self) -> Need | None:
        """What the program needs of a card that ran out: in all, or at least; None where it did not run out."""
        return self.verdict.need

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

    def reconcile(
        self, *files: str | os.PathLike[str], device: int | None = None, tolerance: str = "1%"
    ) -> Report:
        """The report with ``against``: how the run differs from a real one.

        Args:
            files: the real run's snapshot or trace, its figures as JSON, or one of each; docs/json.md lists the forms.
            device: the device of the real run to compare; by default those of the same index.
            tolerance: how far they may differ, ``"0.5%"`` or ``"50MiB"``; ``against.within`` says whether they do.

        Raises:
            TraceFormatError: a file is of none of these forms.
            UsageError: the two have no device in common.
        """
        return self._beside(
            read_actual(*paths_argument("against", files)), device, Tolerance.parse(tolerance)
        )

    def _beside(self, actual: Actual, device: int | None, tolerance: Tolerance) -> Report:
        return replace(self, against=reconcile(self.run, actual, device=device, tolerance=tolerance))

    def to_dict(self) -> dict[str, Any]:
        """The report as ``vramfit run --json`` writes it."""
        return to_json(self.run, self.verdict, self.against)

    def to_json(self) -> str:
        """The same as text."""
        return json_text(self.run, self.verdict, self.against)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run in the form that the file's ending asks for, as ``vramfit export`` does.

        ``.html`` is the page, ``.json`` this report, ``.vft`` the trace, ``.pickle`` a torch snapshot,
        ``.perfetto.json`` for ui.perfetto.dev, ``.csv``, ``.svg`` and ``.png`` the timeline.

        Raises:
            UsageError: the ending is that of no form.
            WriteError: it cannot be written.
        """
        write_as(path, Material(source=self.run, judged=self.verdict, root=Path.cwd()))

    def print(self) -> None:
        """Print the report as ``vramfit run`` does."""
        from vramfit.console import SafeConsole

        # In a notebook rich would make an output of every line, each as HTML and once more as text; and what is
        # written line by line would be an output each.
        with SafeConsole(force_jupyter=False) as console:
            print_report(self.run, self.verdict, console=console, root=Path.cwd())
            if self.against is not None:
                console.print()
                print_report(self.against, console=console, root=Path.cwd())

    def __repr__(self) -> str:
        return f"<Report: {summary_lines(self.run, self.verdict)[0].lstrip(_MARKS)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict and the timeline, without scripts."""
        return run_summary(self.run, self.verdict)

    def __str__(self) -> str:
        """The report as plain text."""
        text = render(self.run, self.verdict)
        return text if self.against is None else f"{text}\n{render(self.against)}"


def run(
    program: str | os.PathLike[str],
    *arguments: str,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    gpus: int = 1,
    device: str | None = None,
    budget: str | float | None = None,
    module: bool = False,
    alloc_conf: str | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    assume: str = "upper",
    profile: str | os.PathLike[str] = "auto",
    cudnn: str | os.PathLike[str] | None = None,
    against: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    tolerance: str = "1%",
    steps: int | str | None = None,
    time: str | float | None = None,
    writes: str | None = None,
    writes_through: Sequence[str | os.PathLike[str]] = (),
    host_memory: bool = False,
    need: bool = True,
) -> Report:
    """Run a program on virtual GPUs, or for real and recorded, in a process of its own.

    >>> _ = Path("train.py").write_text("import torch; torch.nn.Linear(4096, 4096).cuda()")
    >>> report = vramfit.run("train.py", gpu="RTX 4090")
    >>> report.fits, report.peak_allocated_bytes
    (True, 67125248)

    Args:
        program: a script, or the name of a module with ``module=True``.
        arguments: the program's own.
        gpu: a card's name, a size (``"24GiB"``), a TOML file or a `GpuSpec`; None records the real run.
        gpus: how many of them.
        device: what is recorded without ``gpu``: ``"cuda"`` (or None), this machine's card, or ``"cpu"``, its CPU.
        budget: memory that a recorded program may hold, ``"2GiB"`` or bytes.
        module: run ``program`` as ``python -m`` does.
        alloc_conf: allocator settings, instead of ``PYTORCH_ALLOC_CONF``.
        environ: variables added to this process's.
        cwd: folder to run in.
        assume: ``"upper"`` or ``"typical"``: what is taken for sizes that depend on data; ``"typical,imbalance=2"``: a
            rank of experts receives twice its even share of tokens.
        profile: a file that ``vramfit calibrate`` wrote, ``"none"``, or ``"auto"`` for that of this card and torch.
        cudnn: an installed cuDNN to be asked what convolutions and attention take: its path, ``"auto"`` or
            ``"none"``; None is what ``VRAMFIT_CUDNN`` says, by default none.
        against: files that tell of a real run of the same program, to compare with; see `Report.reconcile`.
        tolerance: how far they may differ.
        steps: end the program after as many, or ``"steady"``: when three in a row asked for the same memory.
        time: end it after ``"90s"``, ``"10m"``, ``"1h"`` or as many seconds.
        writes: what happens to files that a program writes on a virtual GPU: ``"discard"`` (the default) sets them
            aside and drops them, ``"keep"`` leaves them in a folder beside it, ``"real"`` writes them.
        writes_through: paths that it writes for real even so, such as a folder of downloads.
        host_memory: follow the host's memory too, by `tracemalloc`: `Run.host`. It costs time.
        need: run a program that runs out on a virtual GPU again without the card's limit, so that `Report.need` says
            what it needs in all.

    Raises:
        UnknownGpuError: no such card.
        UsageError: no such script, no such device, or nothing in common with the real run.
        TraceFormatError: a file of the real run cannot be read.
        EnvironmentUnfitError: this torch cannot carry the virtual GPU.
    """
    _check_place(gpu, of_real=(device, budget), of_virtual=(writes, writes_through or None))
    spec = None if gpu is None else find_gpu(gpu)
    limit = None if budget is None else size_argument("budget", budget)
    count = whole_argument("gpus", gpus, least=1, most=MOST_GPUS)
    limits = limits_from(steps, time)
    flag_argument("host_memory", host_memory)
    flag_argument("need", need)
    folder = None if cwd is None else _folder(cwd)
    command = _command(program, arguments, module, folder)
    _check_texts(device=device, alloc_conf=alloc_conf)
    added = None if environ is None else _environ(environ)
    bound = Tolerance.parse(tolerance)
    actual = None if against is None else read_actual(*paths_argument("against", against))
    if actual is not None:
        check_device(actual, None)  # a wrong file should not cost a run
    where: VirtualRun | RecordedRun
    if spec is None:
        where = RecordedRun(device=device or AUTO, budget=limit)
    else:
        where = VirtualRun(
            gpu=spec,
            gpus=count,
            assume=assumption(assume).text,
            profile=profile,
            cudnn=wanted_cudnn(cudnn) or NONE,
            writes=Writes.DISCARD if writes is None else writes,
            through=paths_argument("writes_through", writes_through),
        )
    where = replace(
        where, alloc_conf=alloc_conf, environ=added, cwd=folder, limits=limits, host_memory=host_memory
    )
    if isinstance(where, VirtualRun):
        outcome = run_again(command, where, run_in_child(command, where), wanted=need)
    else:
        outcome = record_in_child(command, where)
    report = Report(run=outcome, verdict=verdict(outcome))
    return report if actual is None else report._beside(actual, None, bound)


def _check_place(gpu: object, *, of_real: Sequence[object], of_virtual: Sequence[object]) -> None:
    """Make sure that what was given is either for a real run or for a virtual one; None stands for nothing."""
    if gpu is not None and any(given is not None for given in of_real):
        raise UsageError(
            "device= and budget= are for recording a real run, gpu= for a virtual GPU", "Give one"
        )
    if gpu is None and any(given is not None for given in of_virtual):
        raise UsageError(
            "writes= and writes_through= are for a virtual GPU: a recorded program writes its files as usual",
            "Give gpu= too, or leave them out",
        )


def _command(program: object, arguments: Sequence[object], module: bool, folder: Path | None) -> list[str]:
    """What python would be given."""
    name = path_argument("program", program)
    own = [path_argument(f"arguments[{at}]", one) for at, one in enumerate(arguments)]
    if module:
        return ["-m", name, *own]
    if not (Path(folder or ".") / name).is_file():
        raise UsageError(f"there is no script {name}", "Give the path of a Python file, or module=True")
    return [name, *own]


def _folder(cwd: object) -> Path:
    folder = Path(path_argument("cwd", cwd))
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "cwd= names the one that the program runs in")
    return folder


def _check_texts(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            text_argument(name, value)


def _environ(environ: object) -> dict[str, str]:
    """Variables, as a child process can be given them."""
    if not isinstance(environ, Mapping):
        raise UsageError(f"environ={environ!r} holds no variables", 'Give a dict, such as {"SEED": "1"}')
    for name, value in environ.items():
        text = text_argument(f"environ[{name!r}]", value)
        if not isinstance(name, str) or not name or "=" in name or "\0" in name + text:
            raise UsageError(
                f"environ cannot set {name!r} to {text!r}", "Names hold no = and no null character"
            )
    return dict(environ)
