"""The study of torch's releases: rows, interpreters, what is installed, what pytest reports, table and exit code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import versions
from torch_rows import environments, libraries, pythons, subset
from torch_rows.environments import CannotBuild, Environment, Wanted, of_month, of_row, sources
from torch_rows.libraries import EXAMPLES, MONTHS, Month, MonthOutcome, Ran, examples
from torch_rows.outcome import Outcome, load, save
from torch_rows.pythons import NoPython, interpreter
from torch_rows.rows import DEVELOPED, ROWS, Build, Row, chosen
from torch_rows.table import BEGIN, END, LIBRARIES_BEGIN, libraries_markdown, markdown, notes, write

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
CUDA = Row(release=DEVELOPED.release, build=Build.CUDA, python=HERE)


def test_rows_are_chosen_by_release_or_name() -> None:
    assert chosen([]) == list(ROWS) == chosen([""])
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert [row.name for row in chosen(["2.15.0, 2.14.1"])] == [
        "2.14.1-cuda-py3.11",
        *(f"2.15.0-cuda-py3.{minor}" for minor in (11, 12, 13, 14)),
    ]
    assert chosen(["2.13.0-cpu-py3.11"]) == [DEVELOPED]
    with pytest.raises(ValueError, match=r"no row 2\.15: name a release or one of 2\.13\.0-cpu-py3\.11, "):
        chosen(["2.15", "2.14.1"])


def test_what_is_supported_is_what_pip_would_install() -> None:
    assert DEVELOPED.supported
    assert not replace(DEVELOPED, release="2.5.0").supported
    assert not replace(DEVELOPED, python="3.9").supported


class TestInterpreter:
    def test_ours_is_found(self) -> None:
        assert interpreter(HERE, {}) == Path(sys.executable)

    def test_a_variable_comes_first(self, tmp_path: Path) -> None:
        link = tmp_path / "python"
        link.symlink_to(sys.executable)
        variable = f"PYTHON_{HERE.replace('.', '_')}"
        assert interpreter(HERE, {variable: str(link)}) == link
        with pytest.raises(NoPython, match=f"PYTHON_3_8={link} is Python {HERE}"):
            interpreter("3.8", {"PYTHON_3_8": str(link)})
        with pytest.raises(NoPython, match="PYTHON_3_8=/nowhere is no Python that starts"):
            interpreter("3.8", {"PYTHON_3_8": "/nowhere"})

    def test_one_that_is_not_here_is_asked_for(self) -> None:
        with pytest.raises(
            NoPython, match=r"3\.99 is not here: give one by PYTHON_3_99=/path/to/python3\.99"
        ):
            interpreter("3.99", {"PATH": ""})

    def test_a_command_that_does_not_start_is_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """pyenv has a command on PATH for each version, which starts only the one chosen at the moment."""
        for folder, text in (("shims", "exit 127"), ("versions/3.98.2/bin", "echo 3.98")):
            name = "python3.98" if folder == "shims" else "python3"
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True)
            file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            file.chmod(0o755)
        environ = {"PATH": str(tmp_path / "shims"), "PYENV_ROOT": str(tmp_path)}
        assert interpreter("3.98", environ) == tmp_path / "versions" / "3.98.2" / "bin" / "python3"


class TestPackages:
    def test_torch_is_the_rows_and_all_else_is_pinned(self) -> None:
        wanted = of_row(CUDA)
        assert wanted.packages[0] == f"torch=={CUDA.release}"
        assert not [one for one in wanted.packages[1:] if one.startswith("torch>")]
        assert any(one.startswith("pytest>") for one in wanted.packages)
        assert not [pin for pin in wanted.pins if pin.startswith(("torch==", "setuptools=="))]
        assert any(pin.startswith("transformers==") for pin in wanted.pins)

    def test_a_month_has_its_libraries_and_no_pins(self) -> None:
        wanted = of_month(MONTHS[0], DEVELOPED)
        assert wanted.name == f"libraries-{MONTHS[0].name}" and not wanted.pins
        assert wanted.packages[0].startswith(f"torch=={DEVELOPED.release}")
        assert f"transformers=={MONTHS[0].versions['transformers']}" in wanted.packages
        assert any(one.startswith("msgspec>") for one in wanted.packages)

    def test_the_cpu_build_comes_from_where_it_is(self, tmp_path: Path) -> None:
        assert sources(CUDA, {"PIP_ARGS": "--find-links /wheels"}) == []
        assert sources(DEVELOPED, {"PIP_ARGS": "--find-links '/my wheels'"}) == ["--find-links", "/my wheels"]
        index = ["--extra-index-url", environments.CPU_WHEELS]
        assert sources(DEVELOPED, {"PIP_FIND_LINKS": str(tmp_path)}) == index
        (tmp_path / f"torch-{DEVELOPED.release}+cpu-cp311-cp311-linux.whl").touch()
        assert sources(DEVELOPED, {"PIP_FIND_LINKS": f"/nowhere {tmp_path}"}) == [
            "--find-links",
            str(tmp_path),
        ]

    @pytest.mark.parametrize(
        ("said", "told"), [("error: no such thing", "no such thing"), ("", "exit code 7")]
    )
    def test_what_cannot_be_installed_is_told_in_a_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, told: str
    ) -> None:
        python = _script(
            tmp_path / "python", f"echo 'Resolving'\necho {said!r} >&2" if said else "", "exit 7"
        )
        monkeypatch.setattr(environments, "_uv", lambda: None)
        with pytest.raises(CannotBuild, match=told):
            environments.environment(of_row(CUDA), python, tmp_path / "rows")

    def test_pip_is_asked_where_uv_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        uv = _script(tmp_path / "uv", 'mkdir -p "$5" && touch "$5/left"', "exit 7")
        python = _script(tmp_path / "python", "echo error: venv of pip >&2", "exit 1")
        monkeypatch.setattr(environments, "_uv", lambda: str(uv))
        with pytest.raises(CannotBuild, match="venv of pip"):
            environments.environment(of_row(CUDA), python, tmp_path / "rows")
        assert not (tmp_path / "rows" / CUDA.name).exists(), "what uv had begun is gone"

    def test_another_build_than_the_rows_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A package index may offer the CPU build alone: on a Mac, or where a folder of wheels comes first."""
        made: list[str] = []

        def install(wanted: Wanted, interpreter: Path, place: Path, *_: object) -> None:
            made.append(wanted.name)
            python = place / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text(f"#!/bin/sh\necho {wanted.row.release}+cpu None\n", encoding="utf-8")
            python.chmod(0o755)

        monkeypatch.setattr(environments, "_install", install)
        with pytest.raises(CannotBuild, match=r"gives torch 2\.13\.0\+cpu, which is not the CUDA build"):
            environments.environment(of_row(CUDA), Path(sys.executable), tmp_path)
        first = environments.environment(of_row(DEVELOPED), Path(sys.executable), tmp_path)
        assert first.torch == "2.13.0+cpu" and first.python == tmp_path / DEVELOPED.name / "bin" / "python"
        assert (
            environments.environment(of_row(DEVELOPED), Path(sys.executable), tmp_path).torch == first.torch
        )
        assert made == [CUDA.name, DEVELOPED.name], "one that is there is used again"


def _script(file: Path, *lines: str) -> Path:
    """A command of the shell."""
    file.write_text("\n".join(["#!/bin/sh", *lines]) + "\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def test_files_with_marked_tests_are_found() -> None:
    found = subset.marked()
    assert {"tests/virtual", "tests/torch_versions/test_known_programs.py"} <= set(found)
    assert not [one for one in found if one.startswith("tests/virtual/")]
    assert not [one for one in found if one.startswith("tests/allocator")]


def test_what_pytest_reports_is_read(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise OSError('no disk')\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        f"def test_place(): raise OSError('{subset.ROOT}/src/a.py and /tmp/some/where.txt')\n"
        "def test_error(broken): pass\n"
        "def test_skipped(): pytest.skip('not here')\n",
        encoding="utf-8",
    )
    (tmp_path / "test_other.py").write_text("import nowhere\n", encoding="utf-8")
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        ".",
    ]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    outcome = subset.read(report, 3.0)
    assert (outcome.passed, outcome.skipped, outcome.seconds, outcome.good) == (1, 1, 3.0, False)
    failed = {"test_other", "test_some::test_bad", "test_some::test_error", "test_some::test_place"}
    assert outcome.failures.keys() == failed
    told = notes({DEVELOPED: outcome}, outcome.sources)
    assert "  - `test_some::test_place`: OSError: src/a.py and .../where.txt" in told
    assert outcome.failures["test_other"] == "ModuleNotFoundError: No module named 'nowhere'"
    assert "assert 1 == 2" in outcome.failures["test_some::test_bad"]
    assert "no disk" in outcome.failures["test_some::test_error"]


def test_a_run_that_leaves_no_report_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho '.... [ 42%]'; echo 'No module named pytest'; exit 1\n", encoding="utf-8"
    )
    python.chmod(0o755)
    seen: list[int] = []
    outcome = subset.run(python, tmp_path / "row.xml", 1, seen.append)
    assert outcome.reason == "pytest ended with exit code 1: No module named pytest" and not outcome.good
    assert seen == [42]
    assert "42%" in (tmp_path / "row.log").read_text(encoding="utf-8")


PASSED = Outcome(torch="2.13.0", passed=2_200, skipped=3, seconds=100, built=10, sources="now")
FAILED = replace(PASSED, failures={"tests.a::test_b": "x | <y>"})


def test_a_refusal_is_the_line_of_the_error(tmp_path: Path) -> None:
    def python(*lines: str) -> Path:
        return _script(tmp_path / "python", *lines)

    assert subset.refusal(python("echo error: torch is too old >&2", "exit 2")) == "torch is too old"
    assert subset.refusal(python("echo error: out of memory >&2", "exit 1")) is None
    assert subset.refusal(python("exit 0")) is None


def test_outcomes_are_kept(tmp_path: Path) -> None:
    save(tmp_path, CUDA, FAILED)
    assert load(tmp_path, (DEVELOPED, CUDA)) == {CUDA: FAILED}


def test_the_table_has_every_row_and_the_names_of_failures() -> None:
    absent = Row(release="2.13.0", build=Build.CUDA, python="3.99")
    found = {DEVELOPED: replace(PASSED, sources="before"), CUDA: FAILED, absent: Outcome(reason="no Python")}
    text = markdown((DEVELOPED, CUDA, absent, ROWS[-1]), found, "now")
    lines = text.splitlines()
    assert lines[0] == BEGIN and lines[-1] == END
    assert "| 2.13.0 | CPU | 3.11 | yes | 2,200 * | 0 | 3 | 100 | 10 |" in lines
    assert f"| 2.13.0 | CUDA | {HERE} | yes | 2,200 | 1 | 3 | 100 | 10 |" in lines
    assert "| 2.13.0 | CUDA | 3.99 | no | - | - | - |  |  |" in lines
    assert any(line.startswith("| 2.15.0 | CUDA | 3.14 |") and "not run" in line for line in lines)
    assert "- 2.13.0, CUDA build, Python 3.99: no Python" in lines
    assert "  - `tests.a::test_b`: x \\| \\<y>" in lines
    assert "- \\* from an earlier state of the sources" in lines
    assert notes({DEVELOPED: PASSED}, "now") == []


def test_a_page_keeps_what_stands_around_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write(page, markdown((DEVELOPED,), {DEVELOPED: PASSED}, "now"))
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n") and "old" not in text


class TestCommand:
    @pytest.fixture
    def tried(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
        """Runs the command for one row whose environment and tests end as told."""

        def run(row: Row, outcome: Outcome | Exception) -> int:
            def environment(*_: object) -> Environment:
                if isinstance(outcome, Exception):
                    raise outcome
                return Environment(python=Path(sys.executable), torch=row.release, seconds=1.0)

            monkeypatch.setattr(versions, "interpreter", lambda _: Path(sys.executable))
            monkeypatch.setattr(versions, "environment", environment)
            monkeypatch.setattr(subset, "run", lambda *_: outcome)
            return versions.main(["--rows", row.name, "--folder", str(tmp_path)])

        return run

    def test_a_failure_of_a_supported_row_is_the_exit_code(self, tried: Callable[..., int]) -> None:
        assert tried(DEVELOPED, PASSED) == 0
        assert tried(DEVELOPED, FAILED) == 1
        assert tried(DEVELOPED, CannotBuild("no network")) == 1
        assert tried(DEVELOPED, NoPython("none")) == 0

    def test_other_rows_are_told_alone(
        self, tried: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(Row, "supported", False)
        monkeypatch.setattr(subset, "refusal", lambda _: None)
        assert tried(DEVELOPED, FAILED) == 0
        assert "tests.a::test_b" in capsys.readouterr().out

    def test_a_release_that_vramfit_refuses_runs_no_tests(
        self, tried: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(Row, "supported", False)
        monkeypatch.setattr(subset, "refusal", lambda _: "torch 2.9.1 is too old")
        assert tried(DEVELOPED, FAILED) == 0
        out = capsys.readouterr().out
        assert "refused: torch 2.9.1 is too old" in out and "tests.a::test_b" not in out

    def test_a_row_that_is_not_there_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            versions.main(["--rows", "2.99.0"])
        assert "no row 2.99.0" in capsys.readouterr().err

    def test_the_page_is_written_with_what_is_known(self, tmp_path: Path, tried: Callable[..., int]) -> None:
        assert tried(DEVELOPED, PASSED) == 0
        page = ROOT / "docs" / "versions.md"
        copy = tmp_path / "page.md"
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
        options = ["--rows", DEVELOPED.name, "--folder", str(tmp_path), "--write", str(copy)]
        assert versions.main(options) == 0
        assert "| 2.13.0 | CPU | 3.11 | yes | 2,200 |" in copy.read_text(encoding="utf-8")


def test_pyenv_is_where_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / ".pyenv" / "versions" / "3.97.0" / "bin").mkdir(parents=True)
    (tmp_path / ".pyenv" / "versions" / "3.97.0" / "bin" / "python3").symlink_to(sys.executable)
    assert list(pythons._candidates("3.97", {"PATH": ""}))[1:] == [
        tmp_path / ".pyenv" / "versions" / "3.97.0" / "bin" / "python3"
    ]


class TestLibraries:
    def test_every_example_has_its_case(self) -> None:
        for month in MONTHS:
            for name in examples(month):
                case = libraries._case(name)
                assert Path(case["script"]).is_file() and case["name"] == name
        assert "generate" in examples(MONTHS[-1]) and "generate" not in examples(MONTHS[0])
        assert EXAMPLES.keys() == set(libraries.LIBRARIES)

    def test_an_example_that_ends_the_interpreter_does_not_end_the_others(self, tmp_path: Path) -> None:
        """A stand-in for the interpreter: it leaves reports until it comes to an example that ends it."""
        python = tmp_path / "python"
        python.write_text(
            f"#!{sys.executable}\n"
            "import json, os, sys\n"
            "for case in json.load(open(sys.argv[2])):\n"
            "    name = case['name']\n"
            "    if name == 'lora':\n"
            "        print('terminate called', file=sys.stderr, flush=True)\n"
            "        os.abort()\n"
            "    told = 'Traceback:\\n  File x\\nOSError: a\\nadvice' if name == 'sft' else None\n"
            "    peak = {'allocated_bytes': 1 << 20, 'reserved_bytes': 2 << 20}\n"
            "    json.dump({'traceback': told, 'peak': peak}, open(f'{sys.argv[3]}/{name}.json', 'w'))\n",
            encoding="utf-8",
        )
        python.chmod(0o755)
        seen: list[int] = []
        found = libraries.run(MONTHS[-1], python, tmp_path / "reports", seen.append)
        assert list(found) == examples(MONTHS[-1])
        assert found["lora"] == Ran(error="the interpreter ended with exit code -6: terminate called")
        assert found["sft"] == Ran(allocated=1 << 20, reserved=2 << 20, error="OSError: a")
        assert found["dora"] == Ran(allocated=1 << 20, reserved=2 << 20)
        assert seen[-1] == 100 and len(seen) == 2

    @staticmethod
    def outcome(month: Month, **errors: str) -> MonthOutcome:
        ran = {name: Ran(reserved=3 << 20, error=errors.get(name, "")) for name in examples(month)}
        return MonthOutcome(torch="2.13.0", examples=ran)

    def test_the_table_has_versions_peaks_and_reasons(self, tmp_path: Path) -> None:
        first, second, *_, last = MONTHS
        found = {
            first.name: self.outcome(first, lora="OSError: no | such", dora="OSError: no | such"),
            second.name: MonthOutcome(reason="no network"),
            last.name: self.outcome(last),
        }
        for month in (first, second, last):
            libraries.save(tmp_path, month, found[month.name])
        assert libraries.load(tmp_path) == found
        lines = libraries_markdown(found).splitlines()
        assert lines[0] == LIBRARIES_BEGIN
        assert any(line.startswith(f"| **peft** | **{first.versions['peft']}** |") for line in lines)
        assert (
            "| lora | fails (1) | - |  |  |  | 3 |" in lines
            and "| dora | fails (1) | - |  |  |  | 3 |" in lines
        )
        assert "| full | 3 | - |  |  |  | 3 |" in lines and "| generate | - | - |  |  |  | 3 |" in lines
        assert "- (1) OSError: no \\| such" in lines and f"- {second.name}: no network" in lines
        assert "- generate asks for transformers 5.23 or newer" in lines

    def test_the_command_tries_every_month(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def environment(wanted: Wanted, *_: object) -> Environment:
            return Environment(python=Path(wanted.name), torch="2.13.0", seconds=1.0)

        errors: dict[str, str] = {}
        monkeypatch.setattr(versions, "interpreter", lambda _: Path(sys.executable))
        monkeypatch.setattr(versions, "environment", environment)
        monkeypatch.setattr(libraries, "run", lambda month, *_: self.outcome(month, **errors).examples)
        page = tmp_path / "page.md"
        page.write_text((ROOT / "docs" / "versions.md").read_text(encoding="utf-8"), encoding="utf-8")
        command = ["--libraries", "--folder", str(tmp_path), "--write", str(page)]
        assert versions.main(command) == 0
        assert "| full | 3 | 3 | 3 | 3 | 3 | 3 |" in page.read_text(encoding="utf-8")
        errors["full"] = "OSError: x"
        assert versions.main(command) == 1
        assert BEGIN in page.read_text(encoding="utf-8")
