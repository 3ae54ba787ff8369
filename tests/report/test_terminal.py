import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from analysis.synthetic import (
    TRAIN,
    Recorder,
    fitting_run,
    gpt_training,
    needing,
    no_room_run,
    oom_run,
    outcome,
    virtual_run,
)
from report.golden_files import check_golden
from vramfit.analysis import verdict
from vramfit.holders.chains import Root, Through
from vramfit.report import print_report, render, render_html, to_json
from vramfit.report.html.page import run_summary
from vramfit.report.terminal import headline
from vramfit.trace import Category, Frame, Run, RunWarning, SecondRun
from vramfit.trace.holder_notes import HOLDERS, Beyond, HolderNote, notes_text, spans
from vramfit.trace.outcome import CudnnNote, End, Progress, Unit
from vramfit.units import GIB, MIB

ROOT = Path("/home/ada/project")


def two_cards() -> Run:
    recorder = Recorder(devices=2)
    recorder.phase("inference")
    recorder.alloc("float32[1024, 1024, 64]", 256 * MIB, Category.PARAMETERS, module="Net.a", device=0)
    recorder.alloc("float32[1024, 1024, 1024]", 4 * GIB, Category.PARAMETERS, module="Net.b", device=1)
    trace = recorder.finish()
    return virtual_run(trace, devices=(outcome(trace, device=0), outcome(trace, device=1)))


def nothing_allocated() -> Run:
    return virtual_run(Recorder().finish())


def never_used() -> Run:
    """A program that did not come as far as a CUDA context."""
    run = virtual_run(Recorder(context_bytes=0).finish())
    unused = tuple(replace(device, context_bytes=0) for device in run.devices)
    return replace(run, devices=unused, ops=0)


def crowded() -> Run:
    """More of everything than a report can show, with names longer than a line."""
    recorder = Recorder()
    long_module = "Model." + ".".join(f"a_module_with_a_long_name_{depth}" for depth in range(4))
    for part in range(40):
        recorder.phase(f"a phase with a rather long name {part}")
        for category in list(Category)[
            : 1 + Category.WORKSPACES
        ]:  # programs on several cards hold up to three more
            recorder.alloc(
                f"bfloat16[{part + 1}, 1024, 1024, 16, 16, 16, 16, 16]",
                (part + 1) * MIB + category,
                category,
                op="aten._scaled_dot_product_flash_attention.default",
                module=f"{long_module}.part{part}",
                stack=(Frame(f"{ROOT}/a/long/way/down/to/a/file/with_a_long_name.py", 10000 + part, "f"),),
            )
    warnings = tuple(
        RunWarning(
            code=str(number), message="a long warning " * 30, location=f"{TRAIN}:{number}", count=number
        )
        for number in range(30)
    )
    return virtual_run(recorder.finish(), warnings=warnings)


def crowded_out() -> Run:
    """The same, ended by running out with every reason there is."""
    run, known = crowded(), oom_run().oom
    assert known is not None
    line = Frame(f"{ROOT}/a/long/way/down/to/a/file/with_a_long_name.py", 10000, "f")
    return replace(run, exit_code=1, oom=replace(known, user_line=line, op="aten.a_long_operator.default"))


def held_run() -> Run:
    """A checkpoint and a running loss that stay, each found by the name that has it."""
    recorder = Recorder()
    gpt_training(recorder, iterations=1)
    load = Frame("/venv/lib/python3.11/site-packages/torch/serialization.py", 1500, "load")
    rows = []
    for stack in ((load, Frame(TRAIN, 24, "main")), (Frame(TRAIN, 44, "evaluate"), Frame(TRAIN, 50, "main"))):
        for _ in range(3):
            recorder.alloc(
                "float32[4096]", GIB, Category.TEMPORARIES, op="aten._to_copy.default", stack=stack
            )
            rows.append(len(recorder.builder) - 1)
    notes = (
        HolderNote(
            name="checkpoint",
            where="train",
            root=Root.GLOBAL.value,
            through=(),
            chain="train.checkpoint['model']",
            kind="dict",
            elements=0,
            reason=Beyond.UNUSED,
            device=0,
            rows=spans({row: row for row in rows[:3]}),
        ),
        HolderNote(
            name="total",
            where="evaluate() (train.py:44)",
            root=Root.LOCAL.value,
            through=(Through.AUTOGRAD.value,),
            chain="evaluate() (train.py:44) local total -> grad_fn AddBackward0 saved other",
            kind="torch.Tensor",
            elements=1,
            reason=Beyond.GRAPH,
            device=0,
            rows=spans({row: row for row in rows[3:]}),
        ),
    )
    trace = recorder.finish()
    return virtual_run(replace(trace, meta={**trace.meta, HOLDERS: notes_text(notes)}))


RUNS = {
    "needs": needing,
    "needs-garbage": lambda: needing(garbage=True),
    "needs-unknown": lambda: needing(error="EOFError: EOF when reading a line"),
    "needs-unasked": lambda: replace(
        oom_run(), again=SecondRun(run=None, why_not="--no-need (need=False) switches that off")
    ),
    "fits": fitting_run,
    "does-not-fit": oom_run,
    "no-room": no_room_run,
    "no-room-unasked": lambda: no_room_run(asked=False),
    "caught": lambda: oom_run(handled=True, exit_code=0),
    "failed": lambda: replace(fitting_run(), exit_code=1, error="ValueError: no such data set", warnings=()),
    "held": held_run,
    "two-cards": two_cards,
    "nothing": nothing_allocated,
    "unused": never_used,
    "unused-failed": lambda: replace(never_used(), exit_code=1),
    "unused-failed-why": lambda: replace(never_used(), exit_code=1, error="ImportError: no such module"),
    "no-card-failed": lambda: replace(nothing_allocated(), devices=(), exit_code=1, error="IndexError: 0"),
    "no-card": lambda: replace(nothing_allocated(), devices=()),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", RUNS)
def test_report_is_as_agreed(name: str, width: int) -> None:
    run = RUNS[name]()
    text = render(run, verdict(run, cards=()), width=width, root=ROOT)
    check_golden(f"{name}-{width}.txt", text)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("make", [*RUNS.values(), crowded, crowded_out])
def test_a_report_keeps_to_the_width_and_to_sixty_lines(make: object, width: int) -> None:
    assert callable(make)
    run = make()
    lines = render(run, verdict(run, cards=()), width=width, root=ROOT).splitlines()
    assert len(lines) <= (60 if width >= 80 else 70)
    assert max(len(line) for line in lines) <= width
    assert all(line == line.rstrip() for line in lines)


def test_what_is_held_is_on_the_page_and_in_the_json() -> None:
    run = held_run()
    page = render_html(run, verdict(run, cards=()), root=ROOT)
    assert "<h3>Held beyond its use</h3>" in page
    assert "checkpoint, a global of train" in page
    first, second = to_json(run, verdict(run, cards=()))["held"]
    assert (first["name"], first["reason"], first["moment"]) == ("checkpoint", "unused", "peak")
    assert (first["bytes"], first["count"], first["end_bytes"]) == (3 * GIB, 3, 3 * GIB)
    assert first["line"] == {"file": TRAIN, "line": 24, "function": "main"}
    assert second["remedy"] == "torch.no_grad() in evaluate(), or add loss.item() to total"
    assert second["through"] == ["autograd graph"]


def test_the_verdict_comes_first() -> None:
    for make, first in ((fitting_run, "✓ fits RTX 4090"), (oom_run, "✗ does not fit Example 14GB")):
        run = make()
        assert render(run, verdict(run, cards=()), root=ROOT).startswith(first)


def test_a_pipe_gets_no_colour_and_a_terminal_does() -> None:
    run = fitting_run()
    assert "\x1b" not in render(run, verdict(run, cards=()))
    stream = io.StringIO()
    terminal = Console(file=stream, width=80, force_terminal=True, color_system="standard")
    print_report(run, verdict(run, cards=()), console=terminal)
    assert "\x1b[" in stream.getvalue()


def test_who_wants_no_colour_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run, stream = oom_run(), io.StringIO()
    terminal = Console(file=stream, width=80, force_terminal=True, color_system="truecolor")
    print_report(run, verdict(run, cards=()), console=terminal)
    codes = {
        part for found in re.findall(r"\x1b\[([0-9;]*)m", stream.getvalue()) for part in found.split(";")
    }
    assert codes <= {"0", "1", "2"}  # bold and dim are no colours


@pytest.mark.parametrize("make", [fitting_run, oom_run, crowded])
def test_an_ascii_terminal_gets_ascii(make: object) -> None:
    assert callable(make)
    run = make()
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    print_report(run, verdict(run, cards=()), console=Console(file=stream, width=80), root=ROOT)
    stream.flush()
    assert raw.getvalue().decode("ascii").startswith(("+ fits", "x does not fit"))


def test_a_wide_report_names_the_library_between() -> None:
    recorder = Recorder()
    layer = Frame("/venv/lib/python3.11/site-packages/timm/layers/mlp.py", 9, "forward")
    user = Frame(f"{ROOT}/train.py", 5, "main")
    recorder.alloc("float32[8]", 32, Category.ACTIVATIONS, stack=(layer, user))
    run = virtual_run(recorder.finish())
    found = verdict(run, cards=())
    assert "train.py:5 via layers/mlp.py:9" in render(run, found, width=120, root=ROOT)
    assert "mlp.py" not in render(run, found, width=80, root=ROOT)


def test_a_long_error_is_cut_with_a_mark() -> None:
    error = "ValueError: the data set\n" + "lacks a column and " * 40
    for make in (fitting_run, never_used):
        run = replace(make(), exit_code=1, error=error)
        text = " ".join(render(run, verdict(run, cards=())).split())
        assert "ValueError: the data set lacks a column and lacks" in text
        assert "…" in text
        assert 10 < text.count("lacks a column") < 20


def test_a_leak_is_pointed_out() -> None:
    recorder = Recorder()
    for iteration in range(6):
        recorder.phase(f"step {iteration}/forward")
        recorder.alloc("", 3 * MIB, Category.OTHER)
    run = virtual_run(recorder.finish())
    text = " ".join(render(run, verdict(run, cards=())).split())
    assert "Every step leaves 3.00 MiB more, probably a leak: memory runs out about step" in text
    run = fitting_run()
    assert "leak" not in render(run, verdict(run, cards=()))


@pytest.mark.parametrize("width", range(60, 121, 6))
@pytest.mark.parametrize("message", ["its size depends on data", "a sentence that goes on and on " * 12])
def test_a_warning_is_told_whole_and_counts_the_places_it_leaves_out(width: int, message: str) -> None:
    warnings = tuple(
        RunWarning(code="shape-from-data", message=message, location=f"{ROOT}/model.py:{line}", count=line)
        for line in range(1, 31)
    )
    run = replace(fitting_run(), warnings=warnings)
    text = render(run, verdict(run), width=width, root=ROOT)
    told = " ".join(text[text.index("Warnings") :].split())
    assert f"{message.strip()} [model.py:1, " in told
    places = told.partition("[")[2].partition("]")[0]
    listed, _, more = places.partition(" and ")
    assert listed.count("model.py:") + int(more.removesuffix(" more")) == 30
    assert all(len(line) <= width for line in text.splitlines())


def test_no_mark_of_success_for_a_card_that_was_not_used() -> None:
    run = never_used()
    judged = verdict(run)
    for text in (render(run, judged), render_html(run, judged), run_summary(run, judged)):
        assert "the program never used the card RTX 4090" in text
        assert "✓" not in text.partition("<script")[0]


@pytest.mark.parametrize(
    ("progress", "first", "then"),
    [
        (
            Progress(end=End.STEPS, steps=4, unit=Unit.OPTIMIZER, steady=3),
            "✓ fits RTX 4090, steady for 3 steps: ",
            "Not seen: what comes later",
        ),
        (
            Progress(end=End.STEPS, steps=2, unit=Unit.FORWARD, steady=1, module="GPT"),
            "✓ fits RTX 4090: ",
            "Memory is not steady yet",
        ),
        (Progress(end=End.TIME), "✓ fits so far RTX 4090: ", "No whole step was seen"),
        (
            Progress(end=End.INTERRUPTED, steps=1, unit=Unit.OPTIMIZER, steady=1),
            "~ fits so far RTX 4090: ",
            "One step does not tell",
        ),
        (
            Progress(end=End.TERMINATED, steps=9, unit=Unit.OPTIMIZER, steady=2),
            "~ fits so far RTX 4090, steady for 2 steps: ",
            "Memory may not be steady yet",
        ),
    ],
)
def test_an_early_end_is_told(progress: Progress, first: str, then: str) -> None:
    code = {End.INTERRUPTED: 130, End.TERMINATED: -15}.get(progress.end, 0)
    run = replace(fitting_run(), progress=progress, exit_code=code)
    judged = verdict(run)
    lines = headline(run, judged)
    assert lines[0].startswith(first) and lines[1].startswith(then)
    after = {0: "before its first step", 1: "after 1 step", 2: "after 2 forward passes of GPT"}
    assert lines[0].endswith(after.get(progress.steps, f"after {progress.steps} steps"))
    assert judged.fits is (True if progress.was_asked_for else None)


def test_an_error_that_was_caught_before_an_interrupt_is_no_end() -> None:
    caught = oom_run(handled=True, exit_code=130)
    assert verdict(caught).fits is False
    interrupted = replace(caught, progress=Progress(end=End.INTERRUPTED))
    assert verdict(interrupted).fits is None
    assert verdict(replace(oom_run(), progress=Progress(end=End.STEPS))).fits is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attentions": 4}, "cuDNN 9.20.0 asked for H100 SXM, without a card"),
        (
            {"attention_by_rules": "cudnn-frontend is not installed"},
            "cuDNN 9.20.0; attention by rules: cudnn-frontend is not installed",
        ),
        (
            {"convolutions": 2, "torch_version": "9.19.0", "attention_by_rules": "beyond 64 different ones"},
            "cuDNN 9.20.0 asked for H100 SXM, without a card; this torch has 9.19.0, which may choose otherwise; "
            "attention by rules: beyond 64 different ones",
        ),
    ],
)
def test_what_cudnn_was_asked_is_told(changes, words):
    about = {"version": "9.20.0", "torch_version": "9.20.0", "card": "H100 SXM", "convolutions": 0, **changes}
    run = replace(fitting_run(), cudnn=CudnnNote(**about))
    found = verdict(run, cards=())
    text = render(run, found, width=240)
    assert words in " ".join(text.split()).replace(" ;", ";")
    keys = to_json(run, found)["cudnn"]
    assert keys["attentions"] == changes.get("attentions", 0)
    assert keys["attention_by_rules"] == changes.get("attention_by_rules")
