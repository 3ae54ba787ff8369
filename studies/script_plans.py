"""Scripts that nobody prepared: from a card that is too small to a training that runs on it, without an edit.

    python studies/script_plans.py                                        # the examples of this repository
    python studies/script_plans.py --strangers /tmp/strangers --mirrors DIR   # public scripts, as studies/strangers.py
    python studies/script_plans.py --only 'gpt2*' --parts 60 35 --search-seconds 120

Each script is observed alone. Its plain peak is that of a run without a limit; a budget is a part of it, the CUDA
context taken apart, since no change of a program makes that smaller. Then, as a user would: `vramfit run` on a card of
that size tries remedies, `vramfit plan` looks for a plan, `vramfit run --plan` runs the script with it, and `vramfit
verify` compares gradients and losses with the plain script's on the CPU. Scripts that train nothing are left out.

Each row is kept in build/script_plans at once: a study that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from stranger_runs.checkouts import CheckoutError  # noqa: E402
from stranger_runs.environments import EnvironmentFailed  # noqa: E402
from stranger_runs.manifest import read  # noqa: E402
from stranger_runs.running import Bench, NotPrepared, Ready  # noqa: E402
from study_files import keep, kept, markdown_table  # noqa: E402

RESULTS = ROOT / "build" / "script_plans"
CARD = "80GiB"
"""Large enough for each script, and of no make, as the small ones are: all have the same context and the same rates."""
STEPS = 4
PATIENCE_SECONDS = 900.0
"""Longest that any one command may take beyond the time that it was given."""

MIB = 1 << 20

EXAMPLES = (
    "gpt2_train.py",
    "llama_train.py",
    "bert_large_finetune.py",
    "resnet_train.py",
    "unet3d_segmentation.py",
    "vit_train.py",
    "gan_train.py",
    "lstm_lm.py",
    "diffusion_unet.py",
    "frameworks/hf_trainer.py",
    "frameworks/accelerate_train.py",
    "frameworks/lightning_train.py",
    "frameworks/peft_lora.py",
    "frameworks/trl_sft.py",
    "frameworks/diffusers_unet.py",
    "frameworks/monai_segresnet.py",
    "frameworks/channels_last.py",
    "frameworks/torchao_optimizers.py",
)
"""Those of examples/ that train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a command said.

    Attributes:
        exit_code: of it; None where it took too long.
        seconds: that it took.
        printed: what it printed, both streams.
        values: its JSON; None where it wrote none.
    """

    exit_code: int | None
    seconds: float
    printed: str
    values: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A script at one budget.

    Attributes:
        name: of the script.
        part: percent of its plain peak, context apart.
        plain_bytes: its peak, context included.
        budget_bytes: what it may take, context included.
        rows: remedies that were tried; of them, how many fit.
        fitting_rows: the remedies that fit.
        remedy_seconds: of the run on the small card, from its start to the end of its table.
        has_plan: whether one was written.
        plan_seconds: that the search took.
        with_plan_bytes: the peak of the script with the plan, context included; None where it did not run.
        promised_bytes: what the plan had promised.
        step_ratio: the simulated step of the plan beside the plain one.
        verified: what `vramfit verify` said: its exit code.
        techniques: of the plan.
        cause: what stood in the way, in a line.
    """

    name: str
    part: int
    plain_bytes: int
    budget_bytes: int = 0
    rows: int = 0
    fitting_rows: int = 0
    remedy_seconds: float = 0.0
    has_plan: bool = False
    plan_seconds: float = 0.0
    with_plan_bytes: int | None = None
    promised_bytes: int | None = None
    step_ratio: float | None = None
    verified: int | None = None
    techniques: tuple[str, ...] = ()
    cause: str = ""

    @property
    def fits(self) -> bool:
        """Whether the script ran within its budget, as promised."""
        return self.with_plan_bytes is not None and self.with_plan_bytes <= self.budget_bytes


def asked(ready: Ready, verb: Sequence[str], report: Path, seconds: float) -> Answer:
    """Run a command of vramfit; ``report`` is where its JSON goes."""
    report.unlink(missing_ok=True)
    command = [str(ready.python), "-m", "vramfit", *verb]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ready.folder,
            env=ready.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        printed = output.decode(errors="replace") if isinstance(output, bytes) else output
        return Answer(exit_code=None, seconds=time.monotonic() - begin, printed=printed, values=None)
    values = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else None
    return Answer(
        exit_code=done.returncode, seconds=time.monotonic() - begin, printed=done.stdout, values=values
    )


def plain_run(ready: Ready, place: Path) -> Answer:
    """The script as it is, on a card that is large enough."""
    options = ["run", "--gpu", CARD, "--steps", str(STEPS), "--time", "300s", "--remedies", "none"]
    report = place / "plain.json"
    return asked(ready, [*options, "--json", str(report), *ready.words], report, 300 + PATIENCE_SECONDS)


def row_of(name: str, ready: Ready, plain: dict[str, Any], part: int, options: argparse.Namespace) -> Row:
    """A script at one budget: what a user would do, in turn."""
    place = options.results / name
    context = plain["outside_pytorch_bytes"]
    used = plain["peak"]["reserved_bytes"] + context
    budget = (context + (used - context) * part // 100) // MIB * MIB
    found: dict[str, Any] = {"name": name, "part": part, "plain_bytes": used, "budget_bytes": budget}
    if options.remedy_seconds:
        found |= _remedies(ready, budget, place / f"remedies-{part}.json", options.remedy_seconds)
    plan, report = place / f"plan-{part}.toml", place / f"plan-{part}.json"
    plan.unlink(missing_ok=True)
    card = f"{budget // MIB}MiB"
    verb = ["plan", "--gpu", card, "--margin", "0", "-o", str(plan), "--json", str(report)]
    if options.search_seconds:
        verb += ["--search-seconds", str(options.search_seconds)]
    answer = asked(ready, [*verb, *ready.words], report, options.search_seconds + PATIENCE_SECONDS)
    found |= {"has_plan": plan.is_file(), "plan_seconds": answer.seconds}
    if not plan.is_file():
        return Row(**found, cause=reason(answer))
    assert answer.values is not None
    before, after = answer.values["before"], answer.values["after"]
    found |= {
        "promised_bytes": after["total_bytes"],
        "step_ratio": after["step_seconds"] / before["step_seconds"] if before["step_seconds"] else None,
        "techniques": tuple(entry["name"] for entry in answer.values["techniques"]),
    }
    report = place / f"with-plan-{part}.json"
    run = ["run", "--gpu", card, "--steps", str(STEPS), "--plan", str(plan), "--json", str(report)]
    answer = asked(ready, [*run, *ready.words], report, PATIENCE_SECONDS)
    if answer.values is None or answer.exit_code != 0:
        return Row(**found, cause=reason(answer))
    found["with_plan_bytes"] = (
        answer.values["peak"]["reserved_bytes"] + answer.values["outside_pytorch_bytes"]
    )
    if options.verify:
        report = place / f"verify-{part}.json"
        answer = asked(ready, ["verify", str(plan), "--json", str(report)], report, PATIENCE_SECONDS)
        found["verified"] = answer.exit_code
        return Row(**found, cause="" if answer.exit_code == 0 else reason(answer))
    return Row(**found)


def _remedies(ready: Ready, budget: int, report: Path, seconds: float) -> dict[str, Any]:
    """What the run on a card of that size tells."""
    options = ["run", "--gpu", f"{budget // MIB}MiB", "--steps", str(STEPS), "--remedies", str(seconds)]
    answer = asked(ready, [*options, "--json", str(report), *ready.words], report, seconds + PATIENCE_SECONDS)
    rows = ((answer.values or {}).get("remedies") or {}).get("rows", [])[
        1:
    ]  # the program as it is comes first
    return {
        "rows": len(rows),
        "fitting_rows": sum(bool(row["fits"]) for row in rows),
        "remedy_seconds": answer.seconds,
    }


def reason(answer: Answer) -> str:
    """The last error that a command printed, in a line."""
    if answer.exit_code is None:
        return f"took more than {answer.seconds:.0f} s"
    lines = [line.strip() for line in answer.printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("error:", "✗", "!"))]
    return (errors or lines or ["printed nothing"])[-1 if not errors else 0][:200]


def scripts(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Names, and what makes each script ready."""
    if options.strangers is None:
        environment = dict(
            os.environ,
            PYTHONPATH=str(options.vramfit),
            TORCHAO_FORCE_SKIP_LOADING_SO_FILES="1",
            OMP_NUM_THREADS="1",
            NO_COLOR="1",
            COLUMNS="160",
        )
        python = Path(sys.executable)
        for name in EXAMPLES:
            ready = Ready(python=python, folder=ROOT / "examples", words=(name,), environment=environment)
            yield name.replace("/", "."), lambda ready=ready: ready
        return
    work = options.strangers.absolute()
    bench = Bench(
        work=work,
        environments=work / "environments",
        results=options.results,
        source=options.vramfit,
        mirrors=options.mirrors,
    )
    for script in read():
        yield script.name, lambda script=script: bench.ready(script)


def study(options: argparse.Namespace) -> Iterator[Row]:
    """All rows, those that are known already among them."""
    lines = options.results / "rows.jsonl"
    known = {(told["name"], told["part"]): Row(**told) for told in kept(lines)}
    for name, make in scripts(options):
        if options.only and not any(fnmatch(name, pattern) for pattern in options.only):
            continue
        missing = [part for part in options.parts if (name, part) not in known]
        if missing and not options.table:
            (options.results / name).mkdir(parents=True, exist_ok=True)
            try:
                ready = make()
            except (EnvironmentFailed, CheckoutError, NotPrepared) as failure:
                print(f"{name}: left out: {failure}", file=sys.stderr)
                continue
            plain = plain_run(ready, options.results / name)
            if plain.values is None or not (plain.values.get("trains") or {}).get("models"):
                print(f"{name}: left out: {reason(plain)}, or trains nothing", file=sys.stderr)
                continue
            for part in missing:
                row = known[name, part] = row_of(name, ready, plain.values, part, options)
                keep(lines, asdict(row))
                print(f"{name} at {part} %: {'fits' if row.fits else row.cause}", file=sys.stderr, flush=True)
        yield from (known[name, part] for part in options.parts if (name, part) in known)


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of the table of all rows."""

    def size(count: int | None) -> str:
        return "" if count is None else f"{count / MIB:,.0f}"

    heads = [
        "script",
        "part, %",
        "plain, MiB",
        "budget, MiB",
        "remedies that fit",
        "they took, s",
        "plan, s",
        "promised, MiB",
    ]
    heads += ["with the plan, MiB", "step", "fits", "verified", "techniques or cause"]
    cells = [
        [
            row.name,
            str(row.part),
            size(row.plain_bytes),
            size(row.budget_bytes),
            f"{row.fitting_rows} of {row.rows}",
            f"{row.remedy_seconds:.0f}",
            f"{row.plan_seconds:.0f}",
            size(row.promised_bytes),
            size(row.with_plan_bytes),
            "" if row.step_ratio is None else f"{row.step_ratio:.2f} x",
            "yes" if row.fits else "no",
            {None: "", 0: "yes"}.get(row.verified, "no"),
            row.cause or ", ".join(row.techniques),
        ]
        for row in rows
    ]
    return markdown_table(heads, cells, right=heads[1:10])


def main(arguments: list[str] | None = None) -> int:
    """Work out what is asked for; the exit code is 3 if a script with a plan did not run within its budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strangers", type=Path, metavar="DIR", help="public scripts, worked on in DIR")
    parser.add_argument("--mirrors", type=Path, metavar="DIR", help="git directories named owner+name")
    parser.add_argument(
        "--vramfit", type=Path, default=ROOT / "src", metavar="SRC", help="which vramfit runs"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these; * stands for anything")
    parser.add_argument("--parts", nargs="+", type=int, default=[60, 35], help="percent of the plain peak")
    parser.add_argument("--search-seconds", type=float, default=120.0, help="of each plan")
    parser.add_argument(
        "--remedy-seconds", type=float, default=60.0, help="of each run's remedies; 0 for none"
    )
    parser.add_argument("--verify", action="store_true", help="compare gradients and losses, too")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where rows are kept")
    parser.add_argument("--table", action="store_true", help="work out nothing, show what is known")
    options = parser.parse_args(arguments)
    options.results = options.results.absolute()
    options.vramfit = options.vramfit.absolute()
    options.results.mkdir(parents=True, exist_ok=True)
    try:
        rows = list(study(options))
    except KeyboardInterrupt:
        options.table = True
        rows = list(study(options))
    print("\n".join(table(rows)))
    if not rows:
        return 0
    fitting = sum(row.fits for row in rows)
    planned = sum(row.has_plan for row in rows)
    print(
        f"\n{fitting} of {len(rows)} fit with a plan ({100 * fitting / len(rows):.0f} %), {planned} had one."
    )
    return 0 if fitting == planned else 3


if __name__ == "__main__":
    sys.exit(main())
