"""Running one script: a fresh checkout, its data, vramfit in the environment of its group, a time limit."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stranger_runs.checkouts import CheckoutError, check_out, copy, git_directory
from stranger_runs.environments import EnvironmentFailed, folder_of, python_of
from stranger_runs.manifest import HERE, STAND_INS, Made, Script
from stranger_runs.outcome import Ending, Outcome, judge, save

GPU = "RTX 4090"
GRACE_SECONDS = 60
"""How long a run may go on beyond its limit until it is ended, and how long it has for its report then."""

PREPARING_SECONDS = 600


class NotPrepared(Exception):
    """Data could not be made, or the repository could not prepare it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A script with all that it needs in place.

    Attributes:
        python: the interpreter of its group.
        folder: where it runs.
        words: script or module, and arguments.
        environment: of its process.
    """

    python: Path
    folder: Path
    words: tuple[str, ...]
    environment: dict[str, str]


@dataclass(kw_only=True, slots=True)
class Bench:
    """Where things lie, and what runs."""

    work: Path
    """Checkouts, data and runs; never inside a repository."""
    environments: Path
    results: Path
    source: Path
    """The ``src`` folder whose vramfit runs."""
    mirrors: Path | None = None
    gpu: str = GPU
    keep: bool = False
    """Leave the folders of the runs where they are."""
    seconds: int | None = None
    """Longest that any script may take, in place of what the manifest says."""
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _has_steps: bool | None = None

    def lock(self, name: str) -> threading.Lock:
        """The lock of one thing that two runs must not make at once."""
        with self._guard:
            return self._locks.setdefault(name, threading.Lock())

    def run(self, script: Script) -> Outcome:
        """Run one script and keep what became of it."""
        try:
            outcome = self._attempt(script, self.ready(script))
            if not self.keep:
                shutil.rmtree(self.place(script), ignore_errors=True)
        except EnvironmentFailed as failure:
            outcome = Outcome(name=script.name, ending=Ending.NOT_INSTALLED, cause=str(failure)[:300])
        except (NotPrepared, CheckoutError) as failure:
            outcome = Outcome(name=script.name, ending=Ending.NOT_PREPARED, cause=str(failure)[-300:])
        save(self.results, outcome)
        return outcome

    def place(self, script: Script) -> Path:
        """The folder of a script's checkout."""
        return self.work / "runs" / script.name

    def ready(self, script: Script) -> Ready:
        """Install, check out and prepare what a script needs.

        Raises:
            EnvironmentFailed: its packages do not install.
            CheckoutError: its repository is not to be had.
            NotPrepared: its data could not be made.
        """
        with self.lock(f"environment {script.group}"):
            python = python_of(script.group, self.environments)
            if script.packages:
                folder_of(script.packages, script.group, self.environments)
        place = self.place(script)
        shutil.rmtree(place, ignore_errors=True)
        folder = self._folder(script, place)
        self._prepare(script, python, folder)
        words = tuple(word.replace("{bin}", str(python.parent)) for word in script.command)
        return Ready(python=python, folder=folder, words=words, environment=self._environment(script, folder))

    def _folder(self, script: Script, place: Path) -> Path:
        """The folder in which the script runs, in a fresh copy of its repository."""
        if script.repository != "package":
            tree = self._tree(script)
            copy(tree, place)
        folder = place / script.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _tree(self, script: Script) -> Path:
        key = f"{script.repository.replace('/', '+')}@{script.commit[:12]}"
        if script.only:
            key += "-" + hashlib.sha256(" ".join(script.only).encode()).hexdigest()[:8]
        tree = self.work / "trees" / key
        with self.lock(f"tree {key}"):
            if not tree.is_dir():
                git = git_directory(script.repository, script.commit, self.mirrors, self.work / "clones")
                part = tree.with_name(f"{key}.part")
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                check_out(git, script.commit, script.only, part)
                part.rename(tree)
        return tree

    def _prepare(self, script: Script, python: Path, folder: Path) -> None:
        for made in script.data:
            copy(self._data(script, made, python, folder), folder / made.destination)
        for line in script.prepare:
            self._plainly([str(python), *line], folder, script, "preparing")

    def _data(self, script: Script, made: Made, python: Path, folder: Path) -> Path:
        """What a maker makes, made once for each group and arguments."""
        key = "-".join([made.maker, *made.arguments]).replace("/", "+")
        place = self.work / "data" / script.group / key
        with self.lock(f"data {place}"):
            if not place.exists():
                part = place.with_name(f"{place.name}.part")
                shutil.rmtree(part, ignore_errors=True)
                part.parent.mkdir(parents=True, exist_ok=True)
                command = [
                    str(python),
                    "-P",
                    "-m",
                    "stranger_runs.makers",
                    made.maker,
                    str(part),
                    *made.arguments,
                ]
                self._plainly(command, folder, script, f"making {made.maker}")
                part.rename(place)
        return place

    def _plainly(self, command: list[str], folder: Path, script: Script, what: str) -> None:
        environment = self._environment(script, folder)
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), environment["PYTHONPATH"]])
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=PREPARING_SECONDS,
            )
        except subprocess.TimeoutExpired as late:
            raise NotPrepared(f"{what} took more than {PREPARING_SECONDS} s") from late
        if done.returncode:
            raise NotPrepared(f"{what} failed: {(done.stderr or done.stdout).strip()[-250:]}")

    def _attempt(self, script: Script, ready: Ready) -> Outcome:
        self.results.mkdir(parents=True, exist_ok=True)
        report = self.results / f"{script.name}.json"
        report.unlink(missing_ok=True)
        log = self.results / f"{script.name}.log"
        most = self.seconds or script.seconds
        limits = ["--steps", str(script.steps), "--time", f"{most}s"] if self.has_steps(ready.python) else []
        command = [str(ready.python), "-m", "vramfit", "run", "--gpu", self.gpu, *script.options, *limits]
        command += ["--json", str(report), *ready.words]
        begin = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ready.folder,
                env=ready.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            grace = GRACE_SECONDS if limits else 0
            was_stopped = _wait(process, most + grace)
        seconds = time.monotonic() - begin
        printed = log.read_text(encoding="utf-8", errors="replace")
        return judge(
            script.name,
            shlex.join(ready.words),
            process.returncode,
            seconds,
            _read(report),
            printed,
            was_stopped,
        )

    def has_steps(self, python: Path) -> bool:
        """Whether the vramfit that runs knows ``--steps`` and ``--time``."""
        with self.lock("has steps"):
            if self._has_steps is None:
                environment = dict(os.environ, PYTHONPATH=str(self.source), COLUMNS="200", NO_COLOR="1")
                done = subprocess.run(
                    [python, "-m", "vramfit", "run", "--help"],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                self._has_steps = "--steps" in done.stdout and "--time" in done.stdout
            return self._has_steps

    def _environment(self, script: Script, folder: Path) -> dict[str, str]:
        """No network, no window, one thread; caches of this run alone; stand-ins before what is installed.

        Packages of the script alone come last of what is set here: still before those of its group.
        """
        home = folder / ".home"
        home.mkdir(exist_ok=True)
        stand_ins = [str(STAND_INS / name) for name in script.stand_ins]
        kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}
        own = dict(script.environment)
        behind = [str(folder / own.pop("PYTHONPATH_BEHIND"))] if "PYTHONPATH_BEHIND" in own else []
        alone = (
            [str(folder_of(script.packages, script.group, self.environments).absolute())]
            if script.packages
            else []
        )
        python_bin = str((self.environments / script.group / "bin").absolute())
        return {
            **kept,
            "PATH": os.pathsep.join([*stand_ins, python_bin, os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join([str(self.source), *stand_ins, *behind, *alone]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONFAULTHANDLER": "1",
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "YOLO_OFFLINE": "true",
            "YOLO_CONFIG_DIR": str(home),
            "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "Agg",
            "SDL_VIDEODRIVER": "dummy",
            "NO_COLOR": "1",
            "COLUMNS": "160",
            **own,
        }


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process; past its time it is interrupted, then ended with all it has started. Whether it was."""
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is not None:
            _signal(process, signal.SIGKILL)  # workers that it left behind
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        _signal(process, number)
        try:
            process.wait(GRACE_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    _signal(process, signal.SIGKILL)
    return True


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to all that a process has started; its session is its own."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _read(report: Path) -> dict[str, Any] | None:
    if not report.is_file():
        return None
    values: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return values
