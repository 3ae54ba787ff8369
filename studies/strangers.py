"""Public scripts that other people wrote, each run on a virtual GPU: which of them end with a verdict?

    python studies/strangers.py --work /tmp/strangers                       # all; goes on where it was
    python studies/strangers.py --work /tmp/strangers --only 'ex_*' yolo11   # some, run anew
    python studies/strangers.py --work /tmp/strangers --again failed         # those without a verdict
    python studies/strangers.py --work /tmp/strangers --vramfit ../other/src # another version of vramfit

Nothing of the scripts is kept here: `stranger_runs/manifest.toml` names repository, commit, command, packages and data.
Repositories are cloned, or taken from the git directories under `--mirrors`; data and weights are made up.
"""

from __future__ import annotations

import argparse
import signal
import sys
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from stranger_runs.manifest import MANIFEST, Script, read  # noqa: E402
from stranger_runs.outcome import GOAL, Outcome, load, share, summary, table  # noqa: E402
from stranger_runs.running import GPU, Bench  # noqa: E402

from vramfit.launch.tasks import Task, TaskPlace, run_all  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; the exit code is 3 if fewer than the goal end with a verdict."""
    options = _options(arguments)
    scripts = read(options.manifest)
    if options.only:
        scripts = tuple(
            script for script in scripts if any(fnmatch(script.name, pattern) for pattern in options.only)
        )
    if options.list:
        for script in scripts:
            print(
                f"{script.name:<28} {script.group:<14} {script.repository}/{script.folder}: {' '.join(script.command)}"
            )
        return 0
    if not scripts:
        print(
            f"strangers: no script is called {' or '.join(options.only)}; --list names them", file=sys.stderr
        )
        return 2
    work = options.work.absolute()
    if HERE.parent in work.parents:
        print(
            "strangers: --work must lie outside the repository, since strangers' code is put there",
            file=sys.stderr,
        )
        return 2
    bench = Bench(
        work=work,
        environments=(options.env_root or work / "environments").absolute(),
        results=(options.results or work / "results").absolute(),
        source=options.vramfit.absolute(),
        mirrors=options.mirrors,
        gpu=options.gpu,
        keep=options.keep,
        seconds=options.seconds,
    )
    known = load(bench.results)
    wanted = [script for script in scripts if _is_wanted(script, known, options)]
    if not options.table:
        _run_all(bench, wanted, options.jobs)
    found = load(bench.results)
    outcomes = [found[script.name] for script in scripts if script.name in found]
    print(table(outcomes), summary(outcomes), sep="\n\n")
    if options.write is not None:
        options.write.write_text(f"{table(outcomes)}\n\n{summary(outcomes)}\n", encoding="utf-8")
    return 0 if share(outcomes) >= GOAL else 3


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run public scripts on a virtual GPU: which end with a verdict?"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/strangers"), help="folder for checkouts, data and runs"
    )
    parser.add_argument(
        "--env-root", type=Path, metavar="DIR", help="environments (default: in the work folder)"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="what was found (default: in the work folder)"
    )
    parser.add_argument(
        "--mirrors", type=Path, metavar="DIR", help="git directories named owner+name, not GitHub"
    )
    parser.add_argument(
        "--vramfit", type=Path, default=HERE.parent / "src", metavar="SRC", help="which vramfit runs"
    )
    parser.add_argument("--manifest", type=Path, default=MANIFEST)
    parser.add_argument("--gpu", default=GPU)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, run anew; * stands for anything")
    parser.add_argument("--again", choices=["failed", "all"], help="run anew those without a verdict, or all")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("--seconds", type=int, metavar="S", help="longest that any may take")
    parser.add_argument("--keep", action="store_true", help="leave the folders of the runs")
    parser.add_argument("--list", action="store_true", help="print the scripts")
    parser.add_argument("--table", action="store_true", help="print what earlier runs found")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table too")
    return parser.parse_args(arguments)


def _is_wanted(script: Script, known: dict[str, Outcome], options: argparse.Namespace) -> bool:
    """Whether a script is run now: never tried, asked for by name, or asked for again."""
    before = known.get(script.name)
    if before is None or options.again == "all":
        return True
    if options.again == "failed":
        return not before.has_verdict
    return bool(options.only)


def _run_all(bench: Bench, scripts: list[Script], jobs: int) -> None:
    """Run scripts, a few at once; each outcome is kept when it is there."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and so would they
    tasks = [
        Task(key=script.name, function=bench.run, arguments=(script,), place=TaskPlace.EXECUTOR)
        for script in scripts
    ]
    for done, result in enumerate(run_all(tasks, at_once=jobs), 1):
        if result.error is not None:
            raise result.error
        outcome = result.value
        print(
            f"[{done}/{len(scripts)}] {outcome.name}: {outcome.ending.value}, {outcome.seconds:.0f} s"
            f"{f': {outcome.cause}' if outcome.cause else ''}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
