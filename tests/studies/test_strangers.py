"""The study of strangers' scripts: manifest, makers, how outcomes are judged, one run from clone to table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import strangers
from stranger_runs import environments, manifest, running
from stranger_runs.makers import MAKERS
from stranger_runs.manifest import REQUIREMENTS, ManifestError, read
from stranger_runs.outcome import Ending, Outcome, judge, load, save, share, summary, table
from tests import warm

ROOT = Path(__file__).parents[2]


def test_the_manifest_names_a_hundred_scripts_and_all_that_they_need() -> None:
    scripts = read()
    assert len(scripts) >= 100
    assert len({script.name for script in scripts}) == len(scripts)
    for script in scripts:
        assert (REQUIREMENTS / f"{script.group}.txt").is_file(), script.name
        assert {made.maker for made in script.data} <= set(MAKERS), script.name
        assert script.repository == "package" or len(script.commit) == 40, script.name
        assert script.command, script.name


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    entry = '[[script]]\nname = "a"\nrepository = "o/r"\ncommand = "x.py"\ngroup = "plain"\n'
    path = tmp_path / "manifest.toml"

    def refusal(text: str) -> str:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ManifestError) as caught:
            read(path)
        return str(caught.value)

    known = '[repositories]\n"o/r" = "abc"\n'
    assert "a: no commit of o/r" in refusal("[repositories]\n" + entry)
    assert "named twice: a" in refusal(known + entry + entry)
    assert "unknown keys colour" in refusal(known + entry + 'colour = "red"\n')
    assert "maker arguments -> destination" in refusal(known + entry + 'data = ["mnist"]\n')
    assert "no stand-in nonesuch" in refusal(known + entry + 'stand_ins = ["nonesuch"]\n')


def _report(**values: Any) -> dict[str, Any]:
    peak = {"reserved_bytes": 3 << 20}
    common = {
        "fits": True,
        "peak": peak,
        "outside_pytorch_bytes": 1 << 20,
        "ops": 7,
        "warnings": [],
        "error": None,
    }
    return common | values


def _judged(code: int, report: dict[str, Any] | None, printed: str = "", stopped: bool = False) -> Outcome:
    return judge("x", "x.py", code, 1.0, report, printed, stopped)


def test_only_exit_codes_0_and_3_with_a_verdict_count() -> None:
    fine = _judged(0, _report())
    assert fine.ending is Ending.ITSELF and fine.has_verdict and fine.used_bytes == 4 << 20
    assert _judged(3, _report(fits=False)).ending is Ending.ITSELF
    assert _judged(0, _report(end="steps")).ending is Ending.STEPS
    by_time = _judged(0, _report(end="time"))
    assert by_time.ending is Ending.TIME and by_time.counts and not by_time.has_verdict
    failed = _judged(1, _report(fits=None, error="ValueError: no"))
    assert failed.ending is Ending.FAILED and failed.cause == "ValueError: no"
    assert _judged(130, _report(), stopped=True).ending is Ending.LIMIT
    assert _judged(0, _report(fits=None, outcome="unused")).ending is Ending.NO_CARD
    assert _judged(0, _report(), "✓ fits RTX 4090: the program did not use the card").ending is Ending.NO_CARD
    crashed = _judged(-11, None, "one\nSomeError: two\nthree")
    assert crashed.ending is Ending.FAILED and crashed.cause == "SomeError: two"


def test_the_share_counts_what_installs_and_failures_are_named(tmp_path: Path) -> None:
    outcomes = [
        Outcome(name="a", ending=Ending.ITSELF, fits=True, used_bytes=5 << 20, exit_code=0),
        Outcome(name="b", ending=Ending.STEPS, fits=False, used_bytes=6 << 20, exit_code=3),
        Outcome(name="c", ending=Ending.FAILED, cause="KeyError: | pipes", exit_code=1),
        Outcome(name="d", ending=Ending.NOT_INSTALLED, cause="no wheel"),
        Outcome(name="e", ending=Ending.NO_CARD, exit_code=0),
        Outcome(name="f", ending=Ending.NOT_PREPARED, cause="no data"),
    ]
    assert share(outcomes) == 0.5
    said = summary(outcomes)
    assert "2 of 4 scripts (50.0%) ended with a verdict: 1 by themselves, 1 by --steps" in said
    assert "- c, failed: KeyError: | pipes" in said and "- f, not prepared: no data" in said
    assert "1 have packages that do not install here: d." in said
    assert "| b | does not fit | 6 | 3 | 0.0 | by --steps |  |" in table(outcomes)
    assert "KeyError: \\| pipes" in table(outcomes)
    for outcome in outcomes:
        save(tmp_path, outcome)
    assert list(load(tmp_path).values()) == outcomes


SCRIPT = """
import pathlib
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
words = pathlib.Path("words.txt").read_text().split()
for word in words[:4]:
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(
        ["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manifest of two scripts of one small repository, and an environment that is this one."""
    repository = tmp_path / "mirrors" / "some+body" / "repo"
    (repository / "deep").mkdir(parents=True)
    (repository / "deep" / "train.py").write_text(SCRIPT, encoding="utf-8")
    (repository / "deep" / "broken.py").write_text("raise ValueError('my own')\n", encoding="utf-8")
    _git(repository, "init", "--quiet")
    _git(repository, "add", ".")
    _git(repository, "commit", "--quiet", "-m", "begin")
    commit = _git(repository, "rev-parse", "HEAD")
    path = tmp_path / "manifest.toml"
    entries = "".join(
        f'[[script]]\nname = "{name}"\nrepository = "some/body"\nfolder = "deep"\ncommand = "{name}.py"\n'
        'group = "plain"\ndata = ["text 400 -> words.txt"]\n'
        for name in ("train", "broken")
    )
    path.write_text(f'[repositories]\n"some/body" = "{commit}"\n{entries}', encoding="utf-8")
    monkeypatch.setattr(running, "python_of", lambda group, root: Path(sys.executable))
    return path


def forked(start: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Starts ``vramfit`` with everything imported; all else, which finds the study by a variable, as it is told to."""

    def run(command: list[str | Path], *, env: dict[str, str], **options: Any) -> Any:
        if "vramfit" not in command:
            return plain(command, env=env, **options)
        assert env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT / "src")
        given = {name: value for name, value in env.items() if not name.startswith(warm._READ_AT_START)}
        return start(command, env=given | warm._STARTED_WITH, **options)

    return run


def test_a_script_runs_from_its_repository_to_the_table(
    stranger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = SimpleNamespace(**vars(subprocess))
    stand_in.run = forked(warm.run, subprocess.run)
    stand_in.Popen = forked(warm.Popen, subprocess.Popen)
    monkeypatch.setattr(running, "subprocess", stand_in)
    work = tmp_path / "work"
    command = ["--work", str(work), "--mirrors", str(tmp_path / "mirrors"), "--manifest", str(stranger)]
    assert strangers.main(command) == 3  # one of two is below the goal
    printed = capsys.readouterr().out
    assert "| train | fits |" in printed
    assert "1 of 2 scripts (50.0%) ended with a verdict" in printed
    assert "- broken, failed: ValueError: my own" in printed
    kept = json.loads((work / "results" / "train.outcome.json").read_text(encoding="utf-8"))
    assert kept["ops"] > 0 and kept["exit_code"] == 0
    assert not (work / "runs" / "train").exists()
    assert (stranger.parent / "mirrors" / "some+body" / "repo" / "deep").is_dir()
    assert strangers.main([*command, "--table"]) == 3 and "| train | fits |" in capsys.readouterr().out
    assert strangers.main([*command, "--only", "nonesuch"]) == 2


def test_a_group_that_does_not_install_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Looked up by its folder: importing pip, or searching for its spec, takes setuptools' distutils out of the process,
    # and Inductor then meets the standard library's, which is deprecated.
    if not (Path(sysconfig.get_path("purelib")) / "pip").is_dir():
        pytest.skip("this environment was made without pip")
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "odd.txt").write_text(f"{tmp_path / 'missing.whl'}\n", encoding="utf-8")
    monkeypatch.setattr(environments, "REQUIREMENTS", requirements)
    asked: list[list[Any]] = []

    def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[Any]:
        """An environment is made; its interpreter is this one, which has pip: taking pip along takes seconds."""
        asked.append(command)
        if command[1:3] == ["-m", "venv"]:
            return subprocess.CompletedProcess(command, 0, command[3].mkdir(parents=True))
        assert command[0] == tmp_path / "environments" / "odd" / "bin" / "python"
        return subprocess.run([sys.executable, *command[1:]], **options)

    monkeypatch.setattr(environments, "subprocess", SimpleNamespace(run=run))
    for _ in range(2):
        with pytest.raises(environments.EnvironmentFailed, match=r"missing\.whl"):
            environments.python_of("odd", tmp_path / "environments")
    assert [command[2] for command in asked] == ["venv", "pip"]


def test_a_script_may_have_packages_of_its_own_versions(
    stranger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger.write_text(
        stranger.read_text(encoding="utf-8").replace(
            'group = "plain"', 'group = "plain"\npackages = ["other==1"]'
        ),
        encoding="utf-8",
    )
    asked: list[list[str]] = []

    def install(place: Path, python: Path, what: list[str], stamp: str) -> None:
        asked.append(what)

    monkeypatch.setattr(environments, "python_of", running.python_of)
    monkeypatch.setattr(environments, "_install", install)
    script, _ = read(stranger)
    bench = running.Bench(
        work=tmp_path / "work", environments=tmp_path / "environments", results=tmp_path, source=ROOT / "src"
    )
    tmp_path.joinpath("run").mkdir()
    found = [bench._environment(script, tmp_path / "run")["PYTHONPATH"].split(":")[-1] for _ in range(2)]
    place = str(tmp_path / "environments" / "plain+other==1")
    assert found == [place] * 2
    assert asked == [["--no-deps", "--upgrade", "--target", place, "other==1"]]


def test_a_corpus_has_the_vocabulary_that_is_asked_for(tmp_path: Path) -> None:
    MAKERS["corpus"](tmp_path / "corpus", "2000", "1500")
    text = " ".join(path.read_text(encoding="utf-8") for path in (tmp_path / "corpus").iterdir())
    assert len({"<eos>", *text.split()}) == 1500 and "meaning" in text.split()


def test_strangers_code_never_lies_in_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    assert strangers.main(["--work", str(ROOT / "build")]) == 2
    assert "outside the repository" in capsys.readouterr().err
    assert manifest.MANIFEST.is_file()


def test_makers_make_the_same_twice(tmp_path: Path) -> None:
    for name in ("mnist", "nanogpt_tokens", "ljspeech", "tu_graphs", "coco"):
        for copy in ("first", "second"):
            MAKERS[name](tmp_path / copy / name)
        first, second = (
            {
                path.relative_to(tmp_path / copy): path.read_bytes()
                for path in (tmp_path / copy / name).rglob("*")
                if path.is_file()
            }
            for copy in ("first", "second")
        )
        assert first == second != {}
