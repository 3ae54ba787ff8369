"""The scripts and styles of the page as text: what they must not do, and that they parse."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from vramfit.report.html import page

ASSETS = Path(str(resources.files("vramfit.report.html").joinpath("assets")))
SCRIPTS = sorted(ASSETS.glob("*.js"))
FORBIDDEN = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "fetch(",
    "XMLHttpRequest",
    "WebSocket",
    "sendBeacon",
    "import(",
    "http://",
    "https://",
    "localStorage",
    "console.",
    "debugger",
)
"""Ways for a name to become markup, to the network, or out of a page opened from the disk."""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_keeps_to_the_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not [word for word in FORBIDDEN if word in text]
    assert not re.search(r"\bvar\b |[^=!]==[^=]|!=[^=]|\t|[ \t]+$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 160
    assert text.startswith("// ")
    assert text.endswith("\n")


def test_every_script_is_on_the_page_once() -> None:
    own = [name for name in page._SCRIPTS if not name.startswith("vendor/")]
    assert sorted(own) == [path.name for path in SCRIPTS]
    text = page._script()
    declared = re.findall(r"^(?:async )?(?:function|class|const|let) ([A-Za-z_$]+)", text, re.MULTILINE)
    assert len(declared) == len(set(declared))


def test_the_scripts_parse(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node, which can check JavaScript, is not installed")
    path = tmp_path / "page.js"
    path.write_text(page._script(), encoding="utf-8")
    found = subprocess.run([node, "--check", path], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_what_is_not_ours_comes_with_its_licence() -> None:
    folder = ASSETS / "vendor"
    names = {path.name for path in folder.iterdir()}
    assert names == {"uPlot-1.6.32.iife.min.js", "uPlot-1.6.32.min.css", "uPlot-LICENSE"}
    assert "MIT License" in (folder / "uPlot-LICENSE").read_text()
    assert "(v1.6.32)" in (folder / "uPlot-1.6.32.iife.min.js").read_text(encoding="utf-8")[:200]


def test_no_text_of_the_page_ends_its_script_or_style() -> None:
    assert "</script" not in page._script().lower()
    for name in page._STYLES:
        assert "</style" not in page._asset(name).lower()
        assert "url(" not in page._asset(name)
        assert "@import" not in page._asset(name)
