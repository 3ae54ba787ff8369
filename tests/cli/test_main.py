import subprocess
import sys
from collections.abc import Callable

import pytest

from cli.conftest import Invocation
from vramfit import __version__

Command = Callable[..., Invocation]


def test_alone_it_prints_help(vramfit: Command) -> None:
    found = vramfit()
    assert found.code == 0
    assert all(verb in found.out for verb in ("run", "gpus", "replay", "Usage"))


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("verb", [[], ["run"], ["gpus"], ["replay"]])
def test_help(vramfit: Command, verb: list[str], flag: str) -> None:
    found = vramfit(*verb, flag)
    assert found.code == 0
    assert "Usage" in found.out


def test_help_of_run_names_every_option(vramfit: Command) -> None:
    text = vramfit("run", "--help").out
    for option in ("--gpu", "--gpus", "--alloc-conf", "--json", "--trace", "--snapshot", "-m", "SCRIPT"):
        assert option in text


def test_version(vramfit: Command) -> None:
    found = vramfit("--version")
    assert found.code == 0
    assert found.out.startswith(f"vramfit {__version__} (torch 2.")


def test_an_unknown_verb_is_a_usage_error(vramfit: Command) -> None:
    found = vramfit("rnu")
    assert found.code == 2
    assert "rnu" in found.err


def test_the_command_line_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, vramfit.cli; print(sorted({'torch', 'numpy', 'scipy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
