"""`vramfit check`: budgets and baselines of programs and of files; exit codes; bad input."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.synthetic import Recorder, fitting_run, gpt_training, oom_run, virtual_run
from cli.conftest import FakeRunner, Invocation
from vramfit.analysis import verdict
from vramfit.files import Writes
from vramfit.options.limits import Limits
from vramfit.options.run_options import RunOptions
from vramfit.report import json_text
from vramfit.trace import EventKind, MemoryTrace, Run, Source, TraceBuilder, TraceDevice
from vramfit.trace.outcome import End, Progress, Unit
from vramfit.virtual.virtual_run import VirtualSettings

Command = Callable[..., Invocation]
RUN = fitting_run()
USED = RUN.devices[0].peak_reserved_bytes + RUN.devices[0].context_bytes


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run.vft"
    RUN.trace.save(path)
    return path


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json_text(RUN, verdict(RUN)))
    return path


def larger() -> Recorder:
    recorder = Recorder()
    gpt_training(recorder, layers=14)
    return recorder


class TestBudget:
    @pytest.mark.parametrize(("budget", "code"), [(USED, 0), (USED - 1, 3)])
    def test_to_the_byte(
        self, vramfit: Command, runner: FakeRunner, script: Path, budget: int, code: int
    ) -> None:
        found = vramfit("check", script, "--budget", f"{budget}B", "--gpu", "RTX 4090")
        assert found.code == code
        assert found.out.startswith("✓ passed" if code == 0 else "✗ failed")
        assert ("At the peak" in found.out) == (code == 3)

    @pytest.mark.parametrize("kind", ["trace", "report"])
    def test_of_a_file(self, vramfit: Command, kind: str, request: pytest.FixtureRequest) -> None:
        path = request.getfixturevalue(kind)
        assert vramfit("check", path, "--budget", f"{USED}B").code == 0
        assert vramfit("check", path, "--budget", f"{USED - 1}B").code == 3

    def test_of_reserved_or_allocated_bytes(self, vramfit: Command, trace: Path) -> None:
        device = RUN.devices[0]
        for quantity, size in (
            ("reserved", device.peak_reserved_bytes),
            ("allocated", device.peak_allocated_bytes),
        ):
            assert vramfit("check", trace, "--budget", f"{size}B", "--of", quantity).code == 0
            assert vramfit("check", trace, "--budget", f"{size - 1}B", "--of", quantity).code == 3

    def test_without_a_card_one_of_that_size_is_taken(
        self, vramfit: Command, runner: FakeRunner, script: Path
    ) -> None:
        vramfit("check", script, "--budget", "6GiB")
        assert runner.options["gpu"].total_bytes == 6 << 30

    @pytest.mark.parametrize("of", ["reserved", "allocated"])
    def test_a_budget_of_torch_lies_beside_the_context(
        self, vramfit: Command, runner: FakeRunner, script: Path, of: str
    ) -> None:
        vramfit("check", script, "--budget", "6GiB", "--of", of)
        card = runner.options["gpu"]
        assert card.total_bytes - card.typical_context_bytes == 6 << 30

    def test_running_out_is_a_failure(self, vramfit: Command, runner: FakeRunner, script: Path) -> None:
        runner.result = oom_run()
        found = vramfit("check", script, "--budget", "20GiB")
        assert found.code == 3
        assert "ran out of memory" in found.out
        assert "✓" not in found.out

    def test_a_program_that_fails_is_not_checked(
        self, vramfit: Command, runner: FakeRunner, script: Path
    ) -> None:
        runner.result = virtual_run(RUN.trace, exit_code=7, error="ValueError: no data")
        found = vramfit("check", script, "--budget", "20GiB")
        assert found.code == 7
        assert "ValueError: no data" in found.err
        assert found.out == ""


class TestBaseline:
    def test_the_same_passes_and_more_fails(
        self, vramfit: Command, runner: FakeRunner, script: Path, report: Path
    ) -> None:
        assert vramfit("check", script, "--baseline", report).code == 0
        runner.result = virtual_run(larger().finish())
        found = vramfit("check", script, "--baseline", report)
        assert found.code == 3
        assert "peak allocated" in found.out
        assert "What changed" in found.out
        assert "optimizer state" in found.out
        assert vramfit("check", script, "--baseline", report, "--tolerance", "90%").code == 0

    def test_its_card_is_taken(
        self, vramfit: Command, runner: FakeRunner, script: Path, report: Path
    ) -> None:
        vramfit("check", script, "--baseline", report)
        assert runner.options["gpu"].name == "RTX 4090"

    def test_written_and_read_again(
        self, vramfit: Command, runner: FakeRunner, script: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "baseline.json"
        found = vramfit("check", script, "--gpu", "RTX 4090", "--write-baseline", path)
        assert found.code == 0
        assert vramfit("check", script, "--baseline", path, "--tolerance", "0%").code == 0
        smaller = Recorder()
        gpt_training(smaller, layers=6)
        runner.result = virtual_run(smaller.finish())
        found = vramfit("check", script, "--baseline", path)
        assert found.code == 0
        assert "write it again" in found.out

    def test_a_card_named_by_its_size_is_taken_again(
        self, vramfit: Command, runner: FakeRunner, script: Path, report: Path
    ) -> None:
        document = json.loads(report.read_text())
        document["devices"][0]["gpu"]["name"] = "generic 24.00 GiB GPU"
        report.write_text(json.dumps(document))
        vramfit("check", script, "--baseline", report)
        assert runner.options["gpu"].total_bytes == 24 << 30

    def test_both_can_be_asked_for(self, vramfit: Command, trace: Path, report: Path) -> None:
        found = vramfit("check", trace, "--baseline", report, "--budget", f"{USED - 1}B")
        assert found.code == 3
        assert found.out.count("✓") == 2

    def test_a_baseline_that_is_not_there(self, vramfit: Command, runner: FakeRunner, script: Path) -> None:
        found = vramfit("check", script, "--baseline", "none.json")
        assert found.code == 2
        assert "--write-baseline none.json" in found.err
        assert not runner.calls


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [
        (("--assume", "typical"), "assume", "typical"),
        (("--gpus", "2"), "gpus", 2),
        (("--writes", "keep"), "writes", Writes.KEEP),
        (("--profile", "none"), "profile", "none"),
    ],
)
def test_options_of_a_card_hold_for_the_one_that_is_implied(
    vramfit: Command, runner: FakeRunner, script: Path, option: tuple[str, str], name: str, value: object
) -> None:
    """By the budget, where no card is named; not where the CPU is."""
    assert vramfit("check", script, "--budget", "40GiB", *option).code == 0
    assert runner.options[name] == value
    refused = vramfit("check", script, "--budget", "40GiB", "--device", "cpu", *option)
    assert (refused.code, f"{option[0]} is for a virtual GPU" in refused.err) == (2, True)


class TestForReal:
    @pytest.fixture
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
        """The child that runs a program for real replaced; what it was asked."""
        calls: list[dict[str, object]] = []

        def record_in_child(command: list[str], options: RunOptions, settings: VirtualSettings) -> Run:
            assert settings.ends_line
            calls.append({"command": command, "device": options.device, "budget": options.budget})
            return replace(RUN, source=Source.CPU)

        monkeypatch.setattr("vramfit.record.record_run.record_in_child", record_in_child)
        return calls

    def test_the_budget_is_that_of_the_metered_cpu(
        self, vramfit: Command, recorded: list[dict[str, object]], script: Path
    ) -> None:
        assert vramfit("check", script, "--device", "cpu", "--budget", "20GiB").code == 0
        (call,) = recorded
        assert (call["device"], call["budget"]) == ("cpu", 20 << 30)

    def test_a_baseline_of_the_cpu_is_compared_with_the_cpu(
        self, vramfit: Command, recorded: list[dict[str, object]], script: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "cpu.json"
        assert vramfit("check", script, "--device", "cpu", "--write-baseline", path).code == 0
        assert vramfit("check", script, "--baseline", path, "--tolerance", "0%").code == 0
        assert [call["device"] for call in recorded] == ["cpu", "cpu"]

    def test_not_both_at_once(
        self, vramfit: Command, recorded: list[dict[str, object]], script: Path
    ) -> None:
        found = vramfit("check", script, "--device", "cpu", "--gpu", "RTX 4090", "--budget", "1GiB")
        assert found.code == 2
        assert not recorded


def test_limits_are_for_programs(vramfit: Command, runner: FakeRunner, script: Path, trace: Path) -> None:
    budget = ("--gpu", "RTX 4090", "--budget", "24GiB")
    runner.result = replace(RUN, progress=Progress(end=End.STEPS, steps=2, unit=Unit.OPTIMIZER), oom=None)
    found = vramfit("check", script, *budget, "--steps", "2")
    assert runner.options["limits"] == Limits(steps=2)
    assert found.code == 0 and "stopped after 2 steps" in " ".join(found.out.split())
    runner.result = replace(RUN, exit_code=130, progress=Progress(end=End.INTERRUPTED), oom=None)
    found = vramfit("check", script, *budget)
    assert found.code == 130 and "the program was interrupted" in found.err and "✓" not in found.out
    found = vramfit("check", trace, "--budget", "1GiB", "--time", "1m")
    assert found.code == 2 and "--time is for a program" in found.err


def test_a_page_is_written(vramfit: Command, trace: Path, report: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert vramfit("check", trace, "--budget", "1B", "--report", page).code == 3
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    found = vramfit("check", report, "--budget", f"{USED}B", "--report", tmp_path / "none.html")
    assert found.code == 2
    assert not (tmp_path / "none.html").exists()


def test_json(vramfit: Command, trace: Path, report: Path, tmp_path: Path) -> None:
    found = vramfit("check", trace, "--budget", f"{USED - 1}B", "--baseline", report, "--json", "-")
    document = json.loads(found.out)
    assert found.code == 3
    assert document["schema"] == "vramfit.check/1"
    assert document["passed"] is False
    assert [gate["passed"] for gate in document["gates"]] == [False, True, True]
    assert document["gates"][0]["over_bytes"] == 1
    assert document["diff"]["devices"][0]["same"] is True
    assert vramfit("check", trace, "--budget", "1TiB", "--json", tmp_path / "x.json").code == 0
    assert json.loads((tmp_path / "x.json").read_text())["passed"] is True


def test_arguments_of_the_program_stand_after_two_dashes(
    vramfit: Command, runner: FakeRunner, script: Path
) -> None:
    vramfit("check", script, "--budget", "20GiB", "--", "--epochs", "3")
    assert runner.command == [str(script), "--epochs", "3"]
    runner.calls.clear()
    vramfit("check", "--budget", "20GiB", "-m", "package", "--", "-v")
    assert runner.command == ["-m", "package", "-v"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "nothing to check"),
        (("--tolerance", "1%"), "nothing to check"),
        (("--budget", "1GiB", "--tolerance", "1%"), "--tolerance has nothing to compare with"),
        (("--budget", "much"), "is not a size"),
        (("--budget", "1e400GiB"), "'1e400GiB' is larger than any memory"),
        (("--budget", "1e290B"), "larger than any memory"),
        (("--budget", "16"), "--budget: 16 has no unit: write 16GiB, or 16B for bytes"),
        (("--budget", "0"), "must be more than 0"),
        (("--budget", "1GiB", "--of", "everything"), "--of is"),
        (("--budget", "1GiB", "--gpu", "RTX 9999"), "RTX 9999"),
        (("--budget", "1GiB", "--alloc-conf", "nonsense:1"), "nonsense"),
        (("--write-baseline", "b.json"), "no card is given"),
        (("--budget", "1GiB", "--json", "same.json", "--write-baseline", "same.json"), "same.json"),
    ],
)
def test_bad_options(
    vramfit: Command,
    runner: FakeRunner,
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    monkeypatch.chdir(script.parent)
    found = vramfit("check", script, *arguments)
    assert found.code == 2
    assert reason in found.err
    assert found.out == ""
    assert not runner.calls


def test_bad_targets(vramfit: Command, runner: FakeRunner, trace: Path, tmp_path: Path) -> None:
    for target in ((), (tmp_path / "none.py",), (tmp_path / "none.vft",), (trace, "more"), (tmp_path,)):
        found = vramfit("check", *target, "--budget", "1GiB")
        assert found.code == 2, target
        assert "error" in found.err
        assert "Traceback" not in found.err


def test_figures_make_no_baseline(vramfit: Command, tmp_path: Path) -> None:
    figures = tmp_path / "card.json"
    figures.write_text(json.dumps({"max_memory_reserved": 1 << 30, "max_memory_allocated": 1 << 29}))
    assert vramfit("check", figures, "--budget", "2GiB", "--of", "reserved").code == 0
    found = vramfit("check", figures, "--write-baseline", tmp_path / "b.json")
    assert found.code == 2
    assert "holds only figures" in found.err
    assert not (tmp_path / "b.json").exists()


class TestWithoutTensors:
    """A program that makes no tensors holds 0 bytes: a trace of it says so as the program itself does."""

    @pytest.fixture
    def unused(self, tmp_path: Path) -> Path:
        path = tmp_path / "unused.vft"
        devices = (TraceDevice(index=0, name="RTX 4090", total_bytes=24 << 30),)
        builder = TraceBuilder(meta={"source": "virtual"})
        builder.append(EventKind.SNAPSHOT, device=0)
        builder.finish(devices=devices).save(path)
        return path

    @pytest.fixture
    def hidden(self, tmp_path: Path) -> Path:
        """Of a program to which CUDA_VISIBLE_DEVICES showed no card."""
        path = tmp_path / "hidden.vft"
        TraceBuilder(meta={"source": "virtual"}).finish().save(path)
        return path

    @pytest.mark.parametrize("kind", ["unused", "hidden"])
    def test_a_trace_of_nothing_keeps_no_limit(
        self, vramfit: Command, kind: str, request: pytest.FixtureRequest
    ) -> None:
        path = request.getfixturevalue(kind)
        for arguments in (("--budget", "1GiB"), ("--baseline", path)):
            found = vramfit("check", path, *arguments)
            assert found.code == 3
            assert found.out.startswith(
                f"✗ failed {path.name}\n  ✗ the program never used the card, so there"
            )
            assert "✓" not in found.out
        found = vramfit("diff", path, path)
        assert found.code == 0
        assert found.out.endswith("no difference: neither used the card\n")

    @pytest.mark.parametrize("kind", ["unused", "hidden"])
    def test_it_is_no_baseline(
        self, vramfit: Command, tmp_path: Path, kind: str, request: pytest.FixtureRequest
    ) -> None:
        path, baseline = request.getfixturevalue(kind), tmp_path / "baseline.json"
        found = vramfit("check", path, "--write-baseline", baseline)
        assert found.code == 3 and not baseline.exists()
        assert "Did not write the baseline" in found.err and "nothing was measured" in found.err
        baseline.write_text("what stood there")
        assert vramfit("check", path, "--write-baseline", baseline).code == 3
        assert baseline.read_text() == "what stood there"

    @pytest.mark.parametrize("kind", ["unused", "hidden"])
    def test_a_report_of_nothing_is_read_as_one(
        self, vramfit: Command, tmp_path: Path, kind: str, request: pytest.FixtureRequest
    ) -> None:
        path, report = request.getfixturevalue(kind), tmp_path / "report.json"
        trace = MemoryTrace.load(path)
        run = replace(RUN, trace=trace, devices=(), oom=None)
        report.write_text(json_text(run, verdict(run)))
        assert json.loads(report.read_text())["fits"] is None
        assert vramfit("check", path, "--baseline", report).code == 3
        assert "✓" not in vramfit("check", report, "--budget", "1GiB").out
        assert vramfit("diff", report, path).out.endswith("no difference: neither used the card\n")

    def test_so_does_a_program(self, vramfit: Command, runner: FakeRunner, script: Path) -> None:
        trace = TraceBuilder(meta={"source": "virtual"}).finish()
        runner.result = replace(RUN, trace=trace, devices=(), oom=None)
        found = vramfit("check", script, "--gpu", "RTX 4090", "--budget", "1GiB")
        assert found.code == 3
        assert "the program saw no card" in found.out and "✓" not in found.out

    def test_a_card_of_two_that_is_not_used_is_known(self, vramfit: Command, tmp_path: Path) -> None:
        path, baseline = tmp_path / "two.vft", tmp_path / "two.json"
        second = TraceDevice(index=1, name="RTX 4090", total_bytes=24 << 30)
        replace(RUN.trace, devices=(*RUN.trace.devices, second)).save(path)
        vramfit("check", path, "--write-baseline", baseline)
        found = vramfit("check", baseline, "--baseline", path)
        assert found.code == 0
        assert "GPU 1: peak allocated 0 B" in found.out

    def test_a_snapshot_that_holds_nothing_cannot_be_checked(self, vramfit: Command, tmp_path: Path) -> None:
        path = tmp_path / "empty.pickle"
        path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[], []]}))
        for arguments in (("check", path, "--budget", "1GiB"), ("diff", path, path)):
            found = vramfit(*arguments)
            assert found.code == 2
            assert "empty.pickle holds no memory of any device" in found.err

    def test_one_event_is_one(self, vramfit: Command, unused: Path) -> None:
        assert ": 1 event\n" in vramfit("explain", unused).out
        assert "\n1 event in " in vramfit("replay", unused).out
