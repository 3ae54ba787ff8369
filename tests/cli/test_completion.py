"""What shells complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Invocation
from vramfit.cli.options import gpu_names
from vramfit.gpus import catalogue, find_gpu

Command = Callable[..., Invocation]
Complete = Callable[..., list[str]]


@pytest.fixture
def complete(vramfit: Command, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """The last of these words completed, as bash asks for it."""

    def ask(*words: str) -> list[str]:
        monkeypatch.setenv("_VRAMFIT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("vramfit", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        found = vramfit()
        assert (found.code, found.err) == (0, "")
        return found.out.split()

    return ask


class TestCards:
    def test_every_name_that_is_offered_is_that_card(self) -> None:
        for typed in ("", "R", "rtx", *"0123456789", "40"):
            for name, memory in gpu_names(typed):
                assert name.startswith(typed)
                assert " " not in name
                spec = find_gpu(name)
                assert memory.split()[0] == f"{spec.total_bytes / (1 << 30):.2f}"
        assert [find_gpu(name) for name, _ in gpu_names("")] == list(catalogue())

    @pytest.mark.parametrize(
        ("typed", "names"),
        [
            ("RTX-409", ["RTX-4090", "RTX-4090-D", "RTX-4090-Laptop"]),
            ("rtx-409", ["rtx-4090", "rtx-4090-D", "rtx-4090-Laptop"]),
            ("409", ["4090", "4090-D", "4090-Laptop"]),
            ("l40", ["l40", "l40S"]),
            ("RTX 3090", ["RTX 3090", "RTX 3090-Ti"]),
            ("24GiB", []),
            ("mycard.toml", []),
        ],
    )
    def test_they_begin_as_they_were_typed(self, typed: str, names: list[str]) -> None:
        assert [name for name, _ in gpu_names(typed)] == names

    @pytest.mark.parametrize(
        "before",
        [
            ("run", "--gpu"),
            ("check", "train.py", "--gpu"),
            ("stress", "w.py:w", "--gpu"),
            ("plan", "--gpu"),
            ("fit", "--gpu"),
            ("verify", "plan.toml", "--gpu"),
            ("calibrate", "--gpu"),
            ("gpus",),
        ],
        ids=lambda words: words[0],
    )
    def test_every_verb_offers_them(self, complete: Complete, before: tuple[str, ...]) -> None:
        assert complete(*before, "h100") == ["h100-PCIe", "h100-SXM", "h100-NVL"]


def test_verbs_and_options(complete: Complete) -> None:
    assert complete("re") == ["replay"]
    assert complete("run", "--wr") == ["--writes", "--writes-through"]
    assert complete("run", "--assume", "") == ["upper", "typical"]


def test_what_stands_behind_the_program_is_its_own(complete: Complete) -> None:
    assert complete("run", "--gpu", "RTX-4090", "train.py", "--") == []
    assert complete("run", "-m", "package", "--") == []
    assert complete("run", "--gpu", "RTX-4090", "--st") == ["--steps"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_in_bash(tmp_path: Path) -> None:
    """Installed as documented, in a home of its own, and asked as bash asks."""
    program = tmp_path / "bin" / "vramfit"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m vramfit "$@"\n')
    program.chmod(0o755)
    script = """
        vramfit --install-completion
        source ~/.bashrc
        COMP_WORDS=(vramfit run --gpu rtx-309) COMP_CWORD=3
        _vramfit_completion vramfit
        echo "${COMPREPLY[*]}"
    """
    found = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bash completion installed in " in found.stdout
    assert found.stdout.splitlines()[-1] == "rtx-3090 rtx-3090-Ti"


def test_a_shell_without_completion_is_told(vramfit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("tcsh", ""):
        monkeypatch.setattr("shellingham.detect_shell", lambda shell=shell: (shell, f"/bin/{shell}"))
        found = vramfit("--show-completion")
        assert found.code == 2
        assert "there is no completion for this shell" in found.err and "bash, zsh, fish" in found.err


def test_a_home_that_cannot_be_written_to_is_told(
    vramfit: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    monkeypatch.setenv("HOME", str(home))
    found = vramfit("--install-completion")
    assert found.code == 2
    assert f"cannot write {home}" in found.err
    assert "Traceback" not in found.err
