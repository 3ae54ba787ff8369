"""`--help` at 80 columns: whole words, flowing paragraphs, verbs in groups."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import typer

from cli.conftest import Invocation
from vramfit.cli import app

Command = Callable[..., Invocation]
GROUP: Any = typer.main.get_command(app)
VERBS = sorted(GROUP.commands)
_FRAME = "│╭╮╰╯─"


@pytest.fixture
def help_of(vramfit: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def show(*verb: str) -> str:
        monkeypatch.setenv("COLUMNS", "80")
        found = vramfit(*verb, "--help")
        assert found.code == 0
        return found.out

    return show


def cells(text: str) -> str:
    """What stands in the panels and around them, without their frames."""
    return " ".join(line.strip(_FRAME + " ") for line in text.splitlines())


@pytest.mark.parametrize("verb", VERBS)
def test_it_is_80_columns_wide_and_cuts_no_word(help_of: Callable[..., str], verb: str) -> None:
    text = help_of(verb)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    shown = set(text.replace("│", " ").split())
    command = GROUP.commands[verb]
    for parameter in command.params:
        for told in (parameter.help or "", parameter.metavar or "", " ".join(parameter.opts)):
            missing = {word for word in told.split() if word not in shown}
            assert parameter.param_type_name == "argument" or not missing, (parameter.name, missing)
    assert set(command.help.split()) <= shown


@pytest.mark.parametrize("verb", VERBS)
def test_its_paragraphs_flow(help_of: Callable[..., str], verb: str) -> None:
    """No line ends where the source's did: the first word of the next would not have had room."""
    before = help_of(verb).split("╭", 1)[0].splitlines()
    start = next(index for index, line in enumerate(before) if "Usage:" in line)
    end = next(index for index in range(start, len(before)) if not before[index].strip())
    lines = [line.strip() for line in before[end:]]
    for line, following in pairwise(lines):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 78, (line, following)
    paragraphs = inspect.cleandoc(GROUP.commands[verb].callback.__doc__).split("\n\n")
    assert " ".join(lines).split() == " ".join(paragraphs).split()


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_of_python_or_of_typer_shows_through(help_of: Callable[..., str], verb: str) -> None:
    text = help_of(verb)
    assert not re.search(r"<(?:bool|str|path|int|float|list)|\[default: \(|[{}]", text)
    assert re.search(r"Example: vramfit " + verb, text)


def test_verbs_are_in_groups(help_of: Callable[..., str]) -> None:
    text = help_of()
    assert max(len(line) for line in text.splitlines()) <= 80
    panels = re.findall(r"╭─ (.+?) ─+╮(.*?)╰", text, re.S)
    groups = {title: re.findall(r"^│ (\w+)  ", body, re.M) for title, body in panels}
    del groups["Options"]
    assert groups == {
        "See what a program takes": ["run", "check", "together", "watch", "stress"],
        "Make it fit": ["plan", "fit", "verify"],
        "Look into what was recorded": ["explain", "diff", "export", "tune", "replay"],
        "Cards and machines": ["gpus", "doctor", "calibrate"],
    }
    assert "<bool>" not in text


def test_defaults_in_words_are_part_of_the_sentence(help_of: Callable[..., str]) -> None:
    assert "By default: if it is the same card." in cells(help_of("fit"))
    assert 'baseline, "1%" or "50MiB". By default: 1%.' in " ".join(cells(help_of("check")).split())


def test_options_of_a_long_list_are_in_groups(help_of: Callable[..., str]) -> None:
    titles = re.findall(r"╭─ (.+?) ─+╮", help_of("run"))
    assert titles == [
        "Arguments",
        "Options",
        "Several cards",
        "What is assumed",
        "When it ends, and the files that it writes",
        "What is written",
        "A plan",
        "A real run to compare with",
    ]
