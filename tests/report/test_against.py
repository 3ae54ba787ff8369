import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from analysis.reconciling import (
    CONTEXT,
    Give,
    Program,
    Take,
    late,
    outcome_of,
    predicted,
    recorded,
    serve,
    training,
    without_history,
)
from analysis.synthetic import TRAIN, virtual_run
from report.golden_files import check_golden
from vramfit.analysis import Reconciliation, reconcile
from vramfit.report import print_report, render, to_json
from vramfit.trace import Actual, Category, DeviceFigures, Frame
from vramfit.units import MIB

ROOT = Path("/home/ada/project")
PROGRAM = training()


def changed() -> Program:
    """Two blocks more at the peak, one workspace less, one activation held longer."""
    program: Program = [step for step in PROGRAM if not isinstance(step, Take) or step.name != "w1"]
    at = program.index(Give("a1.5.0"))
    end = program.index(Give("g10up"))
    extra = Take("extra", 30 * MIB, Category.TEMPORARIES, "aten.erf.default", Frame(TRAIN, 99, "more"))
    again = replace(extra, name="again", size=1000)
    before = [*program[:at], extra, again]
    return [*before, *program[at + 1 : end], Give("a1.5.0"), Give("extra"), Give("again"), *program[end:]]


def equal() -> Reconciliation:
    return reconcile(predicted(PROGRAM), recorded(PROGRAM))


def differs() -> Reconciliation:
    figures = DeviceFigures(outside=CONTEXT + 25 * MIB, gpu="NVIDIA A100-SXM4-80GB", torch="2.6.0")
    return reconcile(predicted(changed()), replace(recorded(PROGRAM), figures=(figures,)))


def settings() -> Reconciliation:
    return reconcile(predicted(PROGRAM, conf="roundup_power2_divisions:4"), recorded(PROGRAM))


def a_stretch() -> Reconciliation:
    actual = recorded(changed())
    assert actual.trace is not None
    return reconcile(predicted(PROGRAM), late(actual, len(actual.trace) // 3))


def no_history() -> Reconciliation:
    return reconcile(predicted(PROGRAM), without_history(recorded(changed()[:150])))


def figures_alone() -> Reconciliation:
    figures = DeviceFigures(peak_reserved=600 * MIB, peak_allocated=450 * MIB, outside=CONTEXT)
    return reconcile(predicted(PROGRAM), Actual(name="card.json", figures=(figures,)))


def two_devices() -> Reconciliation:
    trace = serve(PROGRAM)
    run = virtual_run(trace, devices=(outcome_of(trace), outcome_of(trace, device=1)))
    devices = tuple(DeviceFigures(device=index, peak_reserved=550 * MIB) for index in (0, 1))
    return reconcile(run, Actual(name="card.json", figures=devices))


MADE: dict[str, Callable[[], Reconciliation]] = {
    "equal": equal,
    "differs": differs,
    "settings": settings,
    "stretch": a_stretch,
    "no-history": no_history,
    "figures": figures_alone,
    "two-devices": two_devices,
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", MADE)
def test_a_comparison_is_shown_as_agreed(name: str, width: int) -> None:
    text = render(MADE[name](), width=width, root=ROOT)
    assert max(len(line) for line in text.splitlines()) <= width
    check_golden(f"against-{name}-{width}.txt", text)


@pytest.mark.parametrize("name", ["equal", "differs", "no-history"])
def test_a_comparison_is_written_as_agreed(name: str) -> None:
    value = to_json(MADE[name]())
    check_golden(f"against-{name}.json", json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def test_an_ascii_terminal_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    print_report(differs(), console=Console(file=stream, width=80), root=ROOT)
    stream.flush()
    assert raw.getvalue().decode("ascii").startswith("x differs from card.pickle")
