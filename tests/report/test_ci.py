"""What continuous integration is told: annotations, a step summary, JUnit XML."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.synthetic import TRAIN, Recorder, gpt_training, oom_run
from report.golden_files import check_golden
from vramfit.analysis import (
    PeakState,
    Tolerance,
    baseline_gates,
    budget_gates,
    card_gates,
    diff,
    state_from_trace,
    used_gates,
)
from vramfit.analysis._states import Holding
from vramfit.report import Check
from vramfit.report.ci import (
    Annotation,
    Level,
    annotations_of,
    failure_annotation,
    render_failure_summary,
    render_junit,
    render_junit_failure,
    render_summary,
)
from vramfit.trace import Category, Frame, MemoryTrace

PROJECT = Path(TRAIN).parent
_COMMAND = re.compile(r"::(?P<name>[a-z]+) (?P<properties>[^\r\n]*?)::(?P<data>[^\r\n]*)")


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as GitHub's runner reads it (actions/runner, ActionCommand.cs, TryParseV2)."""
    found = _COMMAND.fullmatch(line)
    assert found is not None, line
    properties = {}
    for pair in found["properties"].split(","):
        name, _, value = pair.partition("=")
        for code, sign in (("%3A", ":"), ("%2C", ","), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
            value = value.replace(code, sign)
        properties[name] = value
    data = found["data"].replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    return found["name"], properties, data


def gpt(layers: int) -> MemoryTrace:
    recorder = Recorder()
    gpt_training(recorder, layers=layers, iterations=2)
    return recorder.finish()


@pytest.fixture(scope="module")
def grown() -> Check:
    """Within its budget, above its baseline."""
    before = [state_from_trace(gpt(12), name="baseline.json")]
    after = [state_from_trace(gpt(13), name="train.py")]
    gates = (*budget_gates(after, 8 << 30), *baseline_gates(after, before, Tolerance.parse("1%")))
    return Check(target="train.py", gates=gates, diffs=[diff(before[0], after[0])], states=after)


@pytest.fixture(scope="module")
def over(grown: Check) -> Check:
    """Above its budget."""
    return Check(target="train.py --steps 3", gates=budget_gates(grown.states, 6 << 30), states=grown.states)


@pytest.fixture(scope="module")
def ran_out() -> Check:
    run = oom_run()
    states = [state_from_trace(run.trace, name="train.py")]
    return Check(target="train.py", gates=card_gates(states), states=states, oom=run.oom)


class TestAnnotations:
    @given(st.text(), st.text(), st.text(min_size=1), st.integers(1, 10**6))
    def test_the_runner_reads_what_was_meant(self, title: str, message: str, file: str, line: int) -> None:
        made = Annotation(level=Level.ERROR, title=title, message=message, file=file, line=line)
        name, properties, data = parsed(made.command())
        assert name == "error"
        assert data == message
        assert properties == {**({"title": title} if title else {}), "file": file, "line": str(line)}

    def test_it_is_escaped_as_documented(self) -> None:
        made = Annotation(
            level=Level.NOTICE, title="a: b, 1 %", message="1 %\r\n2: 3, 4", file="a,b.py", line=7
        )
        expected = "::notice title=a%3A b%2C 1 %25,file=a%2Cb.py,line=7::1 %25%0D%0A2: 3, 4"
        assert made.command() == expected

    def test_above_a_budget_the_line_that_holds_most_is_named(self, tmp_path: Path) -> None:
        model = tmp_path / "nets" / "gpt.py"
        model.parent.mkdir()
        model.write_text("\n" * 50)
        check = self.holding(Frame(str(model), 40, "forward"))
        [found] = annotations_of(check, repository=tmp_path)
        assert (found.file, found.line) == ("nets/gpt.py", 40)
        assert found.title == "GPU memory over its budget"
        assert found.message == (
            "train.py: peak use 3.00 GiB (budget 2.00 GiB): 1.00 GiB over\n"
            "What this line makes holds most at the peak, 2.50 GiB."
        )

    def test_a_file_outside_the_repository_is_named_in_the_message(self, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere.py"
        elsewhere.write_text("")
        for name in (str(elsewhere), str(tmp_path / "repository" / "gone.py"), "<stdin>"):
            (tmp_path / "repository").mkdir(exist_ok=True)
            check = self.holding(Frame(name, 40, "forward"))
            [found] = annotations_of(check, repository=tmp_path / "repository")
            assert (found.file, found.line) == ("", 0)
            assert f"{Path(name).name}:40)" in found.message
            assert "file=" not in found.command()

    def holding(self, frame: Frame) -> Check:
        def held(size: int, line: Frame) -> Holding:
            return Holding(
                category=Category.ACTIVATIONS,
                op="",
                module="",
                tensor="",
                line=line,
                stack=(line,),
                count=1,
                total_bytes=size,
            )

        other = Frame("other.py", 1, "f")
        holdings = (held(1 << 30, other), held(1 << 30, frame), held(3 << 29, frame))
        states = [PeakState(name="train.py", device=0, reserved=3 << 30, outside=0, holdings=holdings)]
        return Check(target="train.py", gates=budget_gates(states, 2 << 30), states=states)

    def test_above_a_baseline_the_line_that_grew_most_is_named(self, grown: Check) -> None:
        found = list(annotations_of(grown, repository=PROJECT))
        assert [one.title for one in found] == ["GPU memory above its baseline"] * 2
        # 48 + 18 + 6 MiB of gpt.py:40, which is more than the 54 MiB of train.py:35.
        assert "What this line makes grew most, by 72.00 MiB (nets/gpt.py:40)." in found[0].message

    def test_out_of_memory_the_request_is_named(self, ran_out: Check) -> None:
        [found] = annotations_of(ran_out, repository=PROJECT)
        assert found.title == "GPU out of memory"
        assert ran_out.oom is not None and ran_out.oom.user_line is not None
        where = f"project/train.py:{ran_out.oom.user_line.line}"
        assert f"512.00 MiB were asked for here ({where})." in found.message

    def test_a_baseline_that_could_be_lower_is_a_notice(self) -> None:
        now, before = (
            [PeakState(name=name, device=0, reserved=size, allocated=size)]
            for name, size in (("train.py", 1 << 30), ("baseline.json", 2 << 30))
        )
        check = Check(target="train.py", gates=baseline_gates(now, before, Tolerance.parse("1%")), states=now)
        found = list(annotations_of(check, repository=PROJECT))
        assert [one.level for one in found] == [Level.NOTICE] * 2
        assert "write it again" in found[0].message

    def test_what_passes_is_not_annotated(self, grown: Check) -> None:
        check = Check(target="t", gates=budget_gates(grown.states, 1 << 40), states=grown.states)
        assert not list(annotations_of(check, repository=PROJECT))

    def test_what_was_not_checked(self) -> None:
        line = failure_annotation("train.py", "the program failed: 100 %\nmore").command()
        assert parsed(line) == (
            "error",
            {"title": "GPU memory not checked"},
            "train.py: the program failed: 100 %\nmore",
        )


class TestSummary:
    def test_it_reads_as_agreed(self, grown: Check, over: Check, ran_out: Check) -> None:
        text = "".join(render_summary(check, root=PROJECT) for check in (over, grown, ran_out))
        check_golden("check-summary.md", text)

    def test_one_that_passes_is_short(self, grown: Check) -> None:
        check = Check(target="t", gates=budget_gates(grown.states, 1 << 40), states=grown.states)
        assert render_summary(check).count("\n") == 6

    def test_nothing_breaks_out_of_it(self) -> None:
        states = [PeakState(name="x", device=0, gpu="a|b<script>", reserved=2, outside=0)]
        check = Check(target="*x*|`y`\n# <img>", gates=budget_gates(states, 1), states=states)
        text = render_summary(check)
        assert r"\*x\*\|\`y\` \# \<img\>" in text
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {7}
        assert r"a\|b\<script\>" in rows[-1]
        assert "\\<b\\>" in render_failure_summary("t", "<b>")

    def test_a_card_that_was_not_used(self) -> None:
        states = [PeakState(name="x", device=0, reserved=0, allocated=0, outside=0)]
        assert "| ✗ | 0 |  | not used |  |  |" in render_summary(
            Check(target="t", gates=used_gates(states), states=states)
        )


class TestJunit:
    def test_each_gate_is_a_case_with_its_bytes(self, grown: Check) -> None:
        root = ElementTree.fromstring(render_junit(grown, seconds=1.5).encode())
        assert root.tag == "testsuites"
        [suite] = root
        assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")} == {
            "tests": "4",
            "failures": "2",
            "errors": "0",
            "skipped": "0",
            "time": "1.500",
        }
        cases = list(suite)
        assert [case.get("name") for case in cases] == [
            "train.py: runs",
            "train.py: peak use of GPU 0 within its budget",
            "train.py: peak reserved of GPU 0 within its baseline",
            "train.py: peak allocated of GPU 0 within its baseline",
        ]
        assert [case.find("failure") is not None for case in cases] == [False, False, True, True]
        failure = cases[2].find("failure")
        assert failure is not None and failure.text is not None
        assert "313.56 MiB over" in (failure.get("message") or "")
        assert "What changed" in failure.text
        gate = grown.gates[1]
        properties = {one.get("name"): one.get("value") for one in cases[2].iter("property")}
        assert properties == {
            "actual_bytes": str(gate.actual),
            "limit_bytes": str(gate.limit),
            "baseline_bytes": str(gate.baseline),
        }

    def test_running_out_and_never_using_the_card_are_failures(self, ran_out: Check) -> None:
        assert '"train.py: fits GPU 0"' in render_junit(ran_out)
        states = [PeakState(name="x", device=0, reserved=0, allocated=0, outside=0)]
        text = render_junit(Check(target="t", gates=used_gates(states), states=states))
        assert '"t: uses the card"' in text and 'failures="1"' in text

    def test_what_was_not_checked_is_an_error(self) -> None:
        [suite] = ElementTree.fromstring(render_junit_failure("train.py", "it failed").encode())
        assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "1")
        error = suite.find("testcase/error")
        assert error is not None and error.get("message") == "it failed"

    @given(st.text(st.characters()))
    def test_any_text_makes_xml(self, text: str) -> None:
        made = render_junit_failure(text, f"{text}\x1b[31m\x00\ud800")
        message = next(ElementTree.fromstring(made.encode()).iter("error")).get("message")
        assert message is not None and message.endswith("�[31m��")
