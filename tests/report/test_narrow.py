"""What every report keeps to on any terminal: no line beyond its width, and no figure cut."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from tests.doctor.machines import SHARED_BOX

from analysis import fragmentation_cases as cases
from analysis.synthetic import fitting_run, oom_run
from report import test_against, test_calibration, test_diff, test_leaks, test_terminal
from stress import test_stress_report
from vramfit.analysis import causes, leaks, peaks, tune, verdict
from vramfit.cli import gpus
from vramfit.doctor import diagnose
from vramfit.gpus import match_gpu
from vramfit.report import Explanation, print_report, render
from vramfit.report.folding import NARROW, broken, folded, table
from vramfit.trace import read_any

WIDTHS = (20, 30, 40, 59, 60, 80)
FIGURE = re.compile(r"\d[\d.,]* (?:[KMGT]?i?B|%|(?:GB|TFLOP)/s|MHz|us)(?![\w])|×\d+")


def explained(width: int) -> str:
    run = oom_run()
    found = Explanation(
        run=run, verdict=verdict(run), peaks=peaks(run.trace, most=3), leaks=leaks(run.trace, 0)
    )
    return render(found, width=width)


def told(report: Callable[[Console], None], width: int) -> str:
    stream = io.StringIO()
    report(Console(file=stream, width=width, color_system=None, force_terminal=False, highlight=False))
    return stream.getvalue()


def card(name: str | None, width: int) -> str:
    match = None if name is None else match_gpu(name)
    return told(lambda console: gpus.print_gpus(match, console), width)


REPORTS: dict[str, Callable[[int], str]] = {
    "against": lambda width: render(test_against.differs(), width=width),
    "calibrate": lambda width: told(
        lambda console: print_report(test_calibration.found(), console=console), width
    ),
    "diff": lambda width: render([test_diff.changed()], width=width),
    "doctor": lambda width: render(diagnose(SHARED_BOX), width=width),
    "explain": explained,
    "fragmentation": lambda width: render(causes(cases.checkpoint_in_a_step()), width=width),
    "fragmentation-oom": lambda width: render(causes(cases.oom_of_alternating_blocks()), width=width),
    "gpus": lambda width: card(None, width),
    "gpus-one": lambda width: card("RTX 4090", width),
    "gpus-several": lambda width: card("A100", width),
    "gpus-size": lambda width: card("24GiB", width),
    "leaks": lambda width: render(test_leaks.found(), width=width),
    "run": lambda width: render(fitting_run(), verdict(fitting_run(), cards=()), width=width),
    "run-two-cards": lambda width: render(
        test_terminal.two_cards(), verdict(test_terminal.two_cards(), cards=()), width=width
    ),
    "stress": lambda width: render(test_stress_report.report(), width=width),
    "tune": lambda width: render(tune(cases.growing_trap()), width=width),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(name: str, width: int) -> None:
    text = REPORTS[name](width)
    lines = [line for line in text.splitlines() if "PYTORCH_CUDA_ALLOC_CONF" not in line]
    assert [line for line in lines if len(line) > width] == []
    assert [line for line in lines if line.endswith("…")] == []
    if width < NARROW:  # a wide one shows no more than it does
        assert set(FIGURE.findall(REPORTS[name](NARROW))) - set(FIGURE.findall(text)) == set()


@pytest.mark.parametrize("width", [20, 40, 80])
def test_the_line_for_the_shell_stays_whole(width: int) -> None:
    recording = Path(__file__).parents[1] / "data" / "traces" / "gpt-small-forward.json.gz"
    text = render(tune(read_any(recording)), width=width)
    assert "\n    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" in text


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def test_a_number_keeps_its_unit_and_a_name_its_quotes() -> None:
    assert plain(broken(Text("it takes 12.00 MiB ×3 here"), 16)) == ["it takes", "  12.00 MiB ×3", "  here"]
    assert plain(broken(Text("Memory 23.64 GiB = 25,386,024,960 B"), 22)) == [
        "Memory 23.64 GiB",
        "  = 25,386,024,960 B",
    ]
    assert plain(broken(Text("at 1,008 GB/s, 51.0 TFLOP/s"), 20)) == ["at 1,008 GB/s,", "  51.0 TFLOP/s"]
    assert plain(broken(Text('take --gpu "RTX 4090" then'), 18)) == ["take --gpu", '  "RTX 4090" then']


def test_a_word_longer_than_a_line_is_parted_where_it_reads_best() -> None:
    conf = Text("  ! roundup_power2_divisions:[256:4,>:8],per_process_memory_fraction:0.999: it costs")
    assert plain(broken(conf, 60, indent=4)) == [
        "  ! roundup_power2_divisions:[256:4,>:8],",
        "    per_process_memory_fraction:0.999: it costs",
    ]
    assert plain(broken(conf, 24, indent=4)) == [
        "  ! roundup_power2_",
        "    divisions:[256:4,",
        "    >:8],per_process_",
        "    memory_fraction:",
        "    0.999: it costs",
    ]
    assert plain(broken(Text("a" * 17), 10)) == ["a" * 8, f"  {'a' * 8}", "  a"]


@given(st.text(alphabet="ab,_ /:1\n", max_size=60), st.integers(1, 30), st.integers(0, 6))
def test_breaking_loses_no_character_and_keeps_to_the_width(text: str, width: int, indent: int) -> None:
    lines = broken(Text(text), width, indent=indent)
    assert "".join("".join(line.plain for line in lines).split()) == "".join(text.split())
    if width > max(indent, len(text) - len(text.lstrip(" "))):
        assert max(line.cell_len for line in lines) <= width


def test_columns_are_drawn_together_where_they_do_not_fit() -> None:
    line = Text("  other              51.30 GiB   100 %")
    assert plain(folded(line, 40)) == ["  other              51.30 GiB   100 %"]
    assert plain(folded(line, 30)) == ["  other  51.30 GiB  100 %"]
    assert plain(folded(line, 20)) == ["  other  51.30 GiB", "    100 %"]


def test_a_table_gives_up_empty_columns_and_then_itself() -> None:
    heads = ("settings", "peak", "retries", "failed")
    rows = [
        [Text("a_setting:1,another:2"), Text("10 MiB"), Text("0"), Text("")],
        [Text("b"), Text("9 MiB"), Text("0"), Text("")],
    ]
    assert [line.plain.rstrip() for line in table(heads, rows, 50)] == [
        "settings                 peak  retries  failed",
        "a_setting:1,another:2  10 MiB        0",
        "b                       9 MiB        0",
    ]
    assert [line.plain.rstrip() for line in table(heads, rows, 22)] == [
        "settings          peak",
        "a_setting:1,    10 MiB",
        "another:2",
        "b                9 MiB",
        "in every row 0:",
        "  retries",
    ]
    assert [line.plain.rstrip() for line in table(heads, rows, 18)] == [
        "a_setting:1,",
        "another:2",
        "  peak 10 MiB",
        "b",
        "  peak 9 MiB",
        "in every row 0:",
        "  retries",
    ]
