"""Records the configurations on a card: what each asks of the allocator, and what it takes in all.

    python benchmarks/record.py [--only PATTERN ...] [--minutes M] [--output DIR] [--jobs N]
        [--pack FILE.tar.gz]
    python benchmarks/record.py --list
    python benchmarks/record.py --gpu H200 ...      the virtual GPU takes the card's place, to test the machinery

Each configuration runs in a process of its own with its own allocator settings, from a warm context and an empty
allocator. What is already recorded is left alone, so that the same command continues a stopped run.
`benchmarks/accuracy.py` compares the predictions with what lies below benchmarks/recordings.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configurations import ALL, CONFIGURATIONS, Configuration
from recording import store
from recording.store import Source

from vramfit.errors import VramfitError
from vramfit.files import Writes
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.launch.tasks import mapped
from vramfit.options.run_options import RunOptions
from vramfit.units import format_bytes
from vramfit.virtual.virtual_run import run_in_child

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).parent / "recording" / "program.py"
RECORDINGS = Path(__file__).parent / "recordings"
VIRTUAL_RECORDINGS = ROOT / "build" / "virtual-recordings"
SECONDS_EACH = 240
"""A configuration that takes longer is ended and counted as failed."""

LIKELY_SECONDS = 25
"""What the first one is thought to take, when there is a limit of minutes."""

SETTINGS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables that would change what is recorded; a configuration sets its own."""

PROBE = "import json, torch; print(json.dumps([torch.cuda.get_device_name(0), torch.__version__]))"


class Failed(Exception):
    """A configuration could not be recorded; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorder:
    """Records one configuration after the other into a folder.

    Attributes:
        folder: where the recordings go.
        gpu: the virtual GPU that takes the card's place, None for the card.
        stacks: whether Python stacks are recorded.
        in_company: whether several run at a time, which leaves only the allocator's figures to record.
    """

    folder: Path
    gpu: GpuSpec | None
    stacks: bool
    in_company: bool = False

    @property
    def source(self) -> Source:
        """What is being recorded."""
        return Source.CARD if self.gpu is None else Source.VIRTUAL

    def has(self, configuration: Configuration) -> bool:
        """Whether this very configuration has been recorded already."""
        file = self.folder / f"{configuration.name}.json"
        if not file.exists():
            return False
        try:
            found = store.load(file)
        except VramfitError:
            return False
        return found.is_of_these_programs and found.source is self.source

    def record(self, configuration: Configuration) -> store.Recording:
        """Run a configuration and keep what it did.

        Raises:
            Failed: it did not come to its end, or a package is missing.
        """
        missing = [name for name in configuration.packages if importlib.util.find_spec(name) is None]
        if missing:
            raise Failed(f"needs {', '.join(missing)}, which is not installed")
        with tempfile.TemporaryDirectory(prefix="vramfit-") as name:
            made = Path(name)
            command = [
                str(PROGRAM),
                configuration.name,
                "--out",
                name,
                *(["--stacks"] if self.stacks else []),
                *(["--in-company"] if self.in_company else []),
            ]
            if self.gpu is None:
                run_on_card(command, configuration.alloc_conf)
            else:
                run_on_virtual_gpu(command, configuration.alloc_conf, self.gpu)
            facts = json.loads((made / f"{configuration.name}.json").read_text(encoding="utf-8"))
            facts["device"]["driver"] = driver_version() if self.gpu is None else None
            facts["command"] = "python " + " ".join([PROGRAM.name, configuration.name])
            snapshot = made / f"{configuration.name}.pickle"
            store.save(self.folder, configuration, self.source, facts, snapshot)
        return store.load(self.folder / f"{configuration.name}.json")


def clean_environment() -> dict[str, str]:
    """This process's environment without the settings that would change what is recorded."""
    return {name: value for name, value in os.environ.items() if name not in SETTINGS}


def run_on_card(command: Sequence[str], alloc_conf: str) -> None:
    """Run the recording program on the card, in a process of its own."""
    environment = clean_environment()
    if alloc_conf:
        environment["PYTORCH_ALLOC_CONF"] = alloc_conf
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_EACH,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"took more than {SECONDS_EACH} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise Failed(lines[-1] if lines else f"ended with code {done.returncode} and no message")


def run_on_virtual_gpu(command: Sequence[str], alloc_conf: str, gpu: GpuSpec) -> None:
    """Run the recording program on the virtual GPU, as ``vramfit run`` would."""
    for name in SETTINGS:
        os.environ.pop(name, None)
    outcome = run_in_child(
        command, RunOptions(gpu=gpu, alloc_conf=alloc_conf, writes=Writes.REAL)
    )  # it leaves its recording there
    if outcome.exit_code:
        raise Failed(outcome.error or f"ended with code {outcome.exit_code}")


def driver_version() -> str | None:
    """Version of the driver, None where nvidia-smi does not tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def probe_card() -> list[str] | None:
    """Name of the card and version of torch, None without a card; asked in a child, which alone wakes it up."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def default_folder(gpu: GpuSpec | None, card: list[str] | None) -> Path:
    """Where recordings go when the command line does not say: one folder for each card and version of torch."""
    if gpu is not None:
        return VIRTUAL_RECORDINGS / slug(gpu.name)
    assert card is not None
    name, version = card
    return RECORDINGS / f"{slug(name)}-torch-{version.partition('+')[0]}"


def slug(name: str) -> str:
    """A name as a folder is called."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def chosen(patterns: Sequence[str]) -> list[Configuration]:
    """The listed configurations, or those of all whose name matches one of the patterns."""
    if not patterns:
        return list(CONFIGURATIONS.values())
    return [c for c in ALL.values() if any(fnmatch.fnmatch(c.name, pattern) for pattern in patterns)]


def print_list(configurations: Sequence[Configuration]) -> None:
    """Every configuration with its options, in the order of recording."""
    for c in configurations:
        options = " ".join(f"{name}={value}" for name, value in c.options.items())
        needs = f"  needs {', '.join(c.packages)}" if c.packages else ""
        conf = f"  {c.alloc_conf}" if c.alloc_conf else ""
        limit = f"  within {format_bytes(c.memory_bytes)}" if c.memory_bytes else ""
        print(
            f"{c.name:32} {c.precision.value:13} {c.optimizer or 'inference':14} {options}{conf}{limit}{needs}"
        )
    print(f"{len(configurations)} configurations")


def describe(recording: store.Recording) -> str:
    """One line on a recording that was just made."""
    facts = recording.facts
    size = recording.file.with_suffix(".vft").stat().st_size
    end = "ran out of memory, as recorded" if facts["oom"] else ""
    return (
        f"allocated {format_bytes(recording.peak_allocated_bytes)}, "
        f"reserved {format_bytes(recording.peak_reserved_bytes)}, {len(recording.trace):,} events, "
        f"{size / 1024:.0f} KiB {end}"
    )


@dataclass(slots=True)
class Progress:
    """How far the recording has come, and what the next one may take."""

    deadline: float | None
    longest: float = float(LIKELY_SECONDS)
    failed: int = 0
    done: int = 0
    left: int = 0

    def attempt(self, recorder: Recorder, configuration: Configuration, head: str) -> None:
        """Record one configuration, unless it is there or would end too late."""
        if recorder.has(configuration):
            print(f"{head}: recorded already", flush=True)
            return
        if self.deadline is not None and time.monotonic() + self.longest > self.deadline:
            self.left += 1
            return
        began = time.monotonic()
        try:
            recording = recorder.record(configuration)
        except (Failed, VramfitError) as error:
            self.failed += 1
            print(f"{head}: not recorded: {error}", flush=True)
            return
        seconds = time.monotonic() - began
        # The first one also fills the caches of the disk; the longest of the rest is what the next may take.
        self.longest = max(self.longest if self.done else 0.0, seconds)
        self.done += 1
        print(f"{head}: {describe(recording)}, {seconds:.0f} s", flush=True)


def record_all(
    recorder: Recorder, configurations: Sequence[Configuration], minutes: float | None, jobs: int = 1
) -> bool:
    """Record what is not there yet, as long as the time lasts; returns whether nothing failed."""
    progress = Progress(None if minutes is None else time.monotonic() + 60 * minutes)

    def attempt(number: int) -> None:
        configuration = configurations[number]
        progress.attempt(
            recorder, configuration, f"[{number + 1}/{len(configurations)}] {configuration.name}"
        )

    for _ in mapped(attempt, range(len(configurations)), at_once=jobs):
        pass
    print(
        f"{progress.done} recorded, {progress.failed} not, {progress.left} left for the next run of the same command"
    )
    return progress.failed == 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="names, * for any letters")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="start none that would not end within so many minutes"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the recordings")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="put the folder into one .tar.gz file too")
    parser.add_argument("--stacks", action="store_true", help="Python stacks too, innermost frames only")
    parser.add_argument("--gpu", metavar="NAME", help="let the virtual GPU take the card's place")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="several at a time (1), if the card holds them together; seconds and what lies outside the allocator are "
        "then left out",
    )
    parser.add_argument("--list", action="store_true", help="list the configurations and leave")
    return parser.parse_args()


def main() -> int:
    """Record; exit code 2 without a card, 1 if something could not be recorded."""
    options = parse()
    configurations = chosen(options.only)
    if not configurations:
        print(f"no configuration is called {' or '.join(options.only)}; --list shows them", file=sys.stderr)
        return 2
    if options.list:
        print_list(configurations)
        return 0
    try:
        gpu = find_gpu(options.gpu) if options.gpu else None
    except VramfitError as error:
        print(f"{error.message}. {error.hint}", file=sys.stderr)
        return 2
    card = probe_card() if gpu is None else None
    if gpu is None and card is None:
        print(
            "PyTorch sees no CUDA card on this machine, so there is nothing to record. "
            "--gpu NAME lets the virtual GPU take its place.",
            file=sys.stderr,
        )
        return 2
    folder: Path = options.output or default_folder(gpu, card)
    if gpu is not None and RECORDINGS.resolve() in (folder.resolve(), *folder.resolve().parents):
        print(f"{folder} is for recordings of cards; give another --output", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder=folder, gpu=gpu, stacks=options.stacks, in_company=options.jobs > 1)
    fine = record_all(recorder, configurations, options.minutes, options.jobs)
    held = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {sum(1 for _ in folder.glob('*.json'))} recordings, {format_bytes(held)}")
    if options.pack is not None:
        print(f"{options.pack}: {format_bytes(store.pack(folder, options.pack))}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
