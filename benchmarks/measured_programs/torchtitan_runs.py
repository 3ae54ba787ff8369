"""Runs of torchtitan's train.py, of any age, behind ``vramfit run``: the commit, the run, the table."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from vramfit.errors import VramfitError
from vramfit.writing import write_text

GIB = 1 << 30
STAND_INS = Path(__file__).resolve().parent / "stand_ins"
_LOGGED = re.compile(r"step: *(\d+) .*?memory: *([0-9.]+)GiB")
_COLOURS = re.compile(r"\x1b\[\d+m")


class Setting(Protocol):
    """How the program is run: a dataclass of its own for each program."""

    @property
    def name(self) -> str:
        """In words."""

    @property
    def published(self) -> float:
        """What the authors measured, in GiB."""

    @property
    def half_unit(self) -> float:
        """Half of the last digit of that figure, in GiB."""

    @property
    def expandable(self) -> bool:
        """With ``expandable_segments:True``."""


S = TypeVar("S", bound=Setting)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came out.

    Attributes:
        setting: how it was run.
        reserved: GiB that the program logged at its last line.
        allocated: bytes at the peak.
        below, above: bytes by which the report says that the peak of reserved memory may be lower and higher.
        certain: whether the report's answer stays the same over that bar.
        seconds: of the run here.
    """

    setting: Setting
    reserved: float
    allocated: int
    below: int
    above: int
    certain: bool
    seconds: float

    @property
    def within(self) -> bool:
        """Whether the published figure, which is rounded, lies within the bar."""
        published, half = self.setting.published, self.setting.half_unit
        least, most = self.reserved - self.below / GIB, self.reserved + self.above / GIB
        return least - half <= published <= most + half


def checked_out(clone: Path, commit: str, paths: Sequence[str], folder: Path) -> Path:
    """The program at its commit, in a folder.

    Raises:
        VramfitError: the clone does not have it.
    """
    git = ["git", "-C", str(clone), "archive", commit, *paths]
    packed = subprocess.run(git, capture_output=True)
    if packed.returncode:
        raise VramfitError(f"{clone} does not have torchtitan's commit {commit[:9]}: fetch its whole history")
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder


def behind_vramfit(card: Path, result: Path, nodes: int) -> list[str]:
    """The command up to the script: the launch script's torchrun on nodes of 8 cards, behind ``vramfit run``."""
    return [
        *(sys.executable, "-m", "vramfit", "run", "--gpu", str(card), "--rank", "0", "--json", str(result)),
        *("--", "torchrun", "--nproc_per_node=8", f"--nnodes={nodes}"),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint=localhost:0", "--local-ranks-filter", "0"),
        *("--role", "rank", "--tee", "3"),
    ]


def run(
    setting: Setting, command: Sequence[str], program: Path, result: Path, environ: Mapping[str, str]
) -> Outcome:
    """Run the program once, in its folder.

    Raises:
        VramfitError: it failed.
    """
    result.unlink(missing_ok=True)
    own = {**environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if setting.expandable else ""}
    done = subprocess.run(command, cwd=program, env=own, capture_output=True, text=True)
    logged = _LOGGED.findall(_COLOURS.sub("", done.stdout + done.stderr))
    if not logged or not result.exists():
        raise VramfitError(f"{setting.name} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    (rank,) = json.loads(result.read_text())["ranks"]
    peak = rank["peak"]
    return Outcome(
        setting=setting,
        reserved=float(logged[-1][1]),
        allocated=peak["allocated_bytes"],
        below=peak["reserved_error"]["below_bytes"],
        above=peak["reserved_error"]["above_bytes"],
        certain=rank["certain"],
        seconds=rank["seconds_wall"],
    )


def table(outcomes: Iterable[Outcome]) -> Table:
    """A line for each run."""
    out = Table(
        *("run", "allocated, GiB", "reserved, GiB", "bar", "published", "error"),
        *("within", "certain", "seconds here"),
    )
    for one in outcomes:
        published = one.setting.published
        out.add_row(
            one.setting.name,
            f"{one.allocated / GIB:.2f}",
            f"{one.reserved:.2f}",
            f"-{one.below / GIB:.2f} +{one.above / GIB:.2f}",
            f"{published:g}",
            f"{one.reserved / published - 1:+.1%}",
            "yes" if one.within else "no",
            "yes" if one.certain else "no",
            f"{one.seconds:.0f}",
        )
    return out


def options(
    description: str, arguments: list[str] | None, *, steps: int, about_steps: str, flavor: str
) -> argparse.Namespace:
    """The command line that these programs share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("clone", type=Path, help="a clone of torchtitan, or its git directory")
    parser.add_argument("--packages", type=Path, help="a folder with the packages that it imports")
    parser.add_argument("--only", default="", help="runs whose name has this text")
    parser.add_argument("--steps", type=int, default=steps, help=about_steps)
    parser.add_argument(
        "--flavor", default=flavor, help="of the model; a smaller one shows whether all works"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def run_all(
    chosen: argparse.Namespace,
    schema: str,
    settings: Iterable[S],
    prepare: Callable[[Path], Path],
    command: Callable[[S, Path, Path], Sequence[str]],
) -> int:
    """Run those that ``--only`` names and print their table; returns the exit code.

    Args:
        prepare: fills a folder with all that the runs need and returns the program's, within it.
        command: of a setting, that folder and the file for the result.
    """
    packages = [str(chosen.packages.resolve())] if chosen.packages else []
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), *packages]))
    environ = {**os.environ, "PYTHONPATH": path}
    console, outcomes = Console(), []
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as name:
        folder = Path(name)
        result = folder / "result.json"
        try:
            program = prepare(folder)
            for setting in settings:
                if chosen.only in setting.name:
                    started = command(setting, folder, result)
                    outcomes.append(run(setting, started, program, result, environ))
                    print(f"{setting.name}: {outcomes[-1].reserved} GiB", file=sys.stderr, flush=True)
        except VramfitError as error:
            console.print(str(error))
            return 1
    console.print(table(outcomes))
    if chosen.json is not None:
        runs = [asdict(one) for one in outcomes]
        write_text(chosen.json, json.dumps({"schema": schema, "runs": runs}))
    return 0
