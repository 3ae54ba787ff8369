"""The page of common sayings holds what its command finds."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests import warm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "claims.md"


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    sys.path.insert(0, str(ROOT / "studies"))
    try:
        import claims
    finally:
        sys.path.remove(str(ROOT / "studies"))
    return claims


def test_every_saying_has_its_section_and_command(claims: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(claims.SAYINGS) == 23
    for saying in claims.SAYINGS:
        assert f"[{saying.text}](#{saying.name})" in text and f'<a id="{saying.name}">' in text
        assert f"    python studies/claims.py {saying.name}\n" in text


def test_the_page_holds_what_the_command_finds_and_nothing_older(tmp_path: Path) -> None:
    stale = tmp_path / "claims.md"
    stale.write_text(PAGE.read_text(encoding="utf-8").replace("4,000,256", "8,000,000"), encoding="utf-8")
    names = ["randn", "empty-cache"]
    command = [sys.executable, ROOT / "studies" / "claims.py", "--check", stale, *names]
    checked = warm.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 3, checked.stderr
    assert checked.stdout.splitlines() == [f"{stale} is out of date: randn"]


def test_usage_errors_are_told(claims: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["perpetual-motion"], "perpetual-motion"),
        (["--write", "x.md", "randn"], "leave out names"),
        (["--check", "there-is-none.md"], "there-is-none.md"),
    ):
        with pytest.raises(SystemExit) as stop:
            claims.main(arguments)
        assert stop.value.code == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["perpetual-motion", "--list"])
def test_nothing_heavy_is_imported_before_the_command_line_is_read(argument: str) -> None:
    code = (
        "import sys, claims\n"
        f"try:\n    claims.main([{argument!r}])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'torchvision', 'numpy'} & set(sys.modules)))"
    )
    folder = ROOT / "studies"
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_without_a_file_the_page_itself_is_checked(
    claims: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    monkeypatch.setattr(claims, "SAYINGS", [one for one in claims.SAYINGS if one.name == "empty-cache"])
    assert claims.main(["--check"]) == 0
    assert capsys.readouterr().out.strip() == ""


def test_every_check_is_there(claims: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    for saying in claims.SAYINGS:
        module, _, function = saying.check.partition(".")
        assert callable(getattr(importlib.import_module(f"folklore.{module}"), function))


def test_speeds_of_copies_are_not_passed_off_as_measured(claims: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = text[text.index('<a id="pinned">') : text.index('<a id="lazy-to">')]
    assert "**Not measured here.**" in found
    for kind in ("pinned", "pageable"):
        for direction in ("host to card", "card to host"):
            assert f"| {kind}, {direction} | 1,073,741,824 | not measured |" in found
