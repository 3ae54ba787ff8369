"""Ctrl-C before the program begins, at whatever is being imported then: a line says so, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX"),
    pytest.mark.usefixtures("interruptible"),
]

INTERRUPTING = """
    import os, signal, sys

    class Interrupting:
        def find_spec(name, path=None, target=None):
            if name == os.environ["INTERRUPT_AT"]:
                sys.meta_path.remove(Interrupting)
                os.killpg(0, signal.SIGINT)  # as a terminal does

    sys.meta_path.insert(0, Interrupting)
"""
"""Run by each interpreter as it starts."""


@pytest.mark.parametrize(
    "module",
    [
        "vramfit.cli",
        "typer",
        "vramfit.virtual.virtual_run",
        "vramfit.files.namespace.entry",
        "vramfit.virtual.virtual_child",
        "torch",
        "vramfit.virtual.gpu",
    ],
)
def test_an_interrupt_while_something_is_imported_is_one_line(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(INTERRUPTING))
    (tmp_path / "train.py").write_text("print('it runs')\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "vramfit", "run", "--gpu", "24GiB", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "INTERRUPT_AT": module, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        start_new_session=True,
    )
    assert (done.returncode, done.stderr, done.stdout) == (
        130,
        "error: interrupted before the program began\n",
        "",
    )
    assert not list(temporary.iterdir())
