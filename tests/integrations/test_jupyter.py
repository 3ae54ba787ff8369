"""The extension for IPython: what shows itself, and the cell magic. IPython itself where it is installed."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm

import vramfit
from analysis.synthetic import fitting_run
from vramfit.api.programs import Report
from vramfit.integrations import jupyter
from vramfit.integrations.cell_program import cell_program
from vramfit.trace import MemoryTrace, Run
from vramfit.trace.tried_remedies import TriedRemedies, TriedRemedy

_NOTEBOOK = ["text/plain", "text/html"]


class Formatter(dict[type, Any]):
    """What IPython's formatter does with the functions that it is given, as its documentation says."""

    for_type = dict.__setitem__


class Compiler:
    """``IPython.core.compilerop.CachingCompiler``: names the lines of cells, and compiles them."""

    def cache(self, source: str) -> str:
        name = f"<ipython-input-{len(linecache.cache)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        return name

    def ast_parse(self, source: str, filename: str) -> ast.Module:
        return ast.parse(source, filename)

    def __call__(self, tree: Any, filename: str, mode: str) -> Any:
        return compile(tree, filename, mode)


class Shell:
    """The parts of ``IPython.InteractiveShell`` that extensions may use."""

    execution_count = 7

    def __init__(self, active_types: list[str] = _NOTEBOOK) -> None:
        self.display_formatter = self
        self.formatters = {"text/html": Formatter()}
        self.active_types = active_types
        self.display_pub = self
        self.published: list[dict[str, str]] = []
        self.magics_manager = self
        self.magics: dict[str, dict[str, Callable[..., Any]]] = {"cell": {}, "line": {}}
        self.compile = Compiler()
        self.user_ns: dict[str, Any] = {}
        self.user_global_ns = self.user_ns

    def transform_cell(self, cell: str) -> str:
        return cell

    def transform_ast(self, tree: ast.Module) -> ast.Module:
        return tree

    def format(self, value: Any) -> tuple[dict[str, str], dict[str, str]]:
        return {"text/plain": repr(value), "text/html": value._repr_html_()}, {}

    def publish(self, data: dict[str, str], metadata: dict[str, str]) -> None:
        self.published.append(data)

    def register_magic_function(self, function: Callable[..., Any], magic_kind: str, magic_name: str) -> None:
        self.magics[magic_kind][magic_name] = function

    def run(self, line: str, *cell: str) -> Any:
        return self.magics["cell"]["vram"](line, "\n".join(cell) + "\n")


@pytest.fixture
def shell() -> Shell:
    made = Shell()
    vramfit.load_ipython_extension(made)
    return made


def shown(shell: Any, value: object) -> str | None:
    show = shell.display_formatter.formatters["text/html"].get(type(value))
    return None if show is None else str(show(value))


class TestExtension:
    def test_traces_and_runs_show_themselves_while_it_is_loaded(self, shell: Shell) -> None:
        run = fitting_run()
        for value in (run, run.trace):
            text = shown(shell, value)
            assert text is not None
            assert "fits RTX 4090" in text
            assert text.count("<svg") == 1
            assert "<script" not in text
        vramfit.unload_ipython_extension(shell)
        assert shown(shell, run) is None
        assert set(shell.formatters["text/html"]) & {MemoryTrace, Run} == set()

    def test_the_magic_comes_and_goes_with_it(self, shell: Shell) -> None:
        assert list(shell.magics["cell"]) == ["vram"]
        vramfit.load_ipython_extension(shell)
        vramfit.unload_ipython_extension(shell)
        assert not shell.magics["cell"]
        vramfit.unload_ipython_extension(shell)

    def test_its_module_can_be_loaded_by_its_own_name(self) -> None:
        shell = Shell()
        jupyter.load_ipython_extension(shell)
        assert "vram" in shell.magics["cell"]


class TestMagic:
    def test_a_cell_runs_and_one_output_tells_of_it(self, shell: Shell) -> None:
        shell.user_ns["torch"] = torch
        value = shell.run("--device cpu -o report", "kept = torch.ones(1 << 20)", "len(kept)")
        assert value == 1 << 20 and shell.user_ns["kept"].sum() == 1 << 20
        [data] = shell.published
        assert set(data) == set(_NOTEBOOK)
        assert data["text/html"].count("<svg") == 1
        assert len(data["text/plain"]) < 120 and "\n" not in data["text/plain"]
        report = shell.user_ns["report"]
        assert isinstance(report, Report) and report.run.program == ("In [7]",)
        assert report.peak_allocated_bytes == 4 << 20

    def test_lines_of_the_cell_are_named(self, shell: Shell) -> None:
        shell.run("--device cpu -o report", "import torch", "", "kept = torch.ones(1 << 20)")
        trace = shell.user_ns["report"].trace
        lines = {(frame.filename.startswith("<ipython-input-"), frame.line) for frame in trace.frames}
        assert (True, 3) in lines

    def test_without_a_value_there_is_none(self, shell: Shell) -> None:
        assert shell.run("--device cpu", "a = 1") is None
        assert shell.run("--device cpu", "") is None

    def test_what_the_cell_raises_goes_its_way_after_the_report(self, shell: Shell) -> None:
        with pytest.raises(ZeroDivisionError):
            shell.run("--device cpu", "import torch", "kept = torch.ones(4)", "1 / 0")
        assert "ZeroDivisionError" in shell.published[0]["text/plain"]
        with pytest.raises(torch.OutOfMemoryError):
            shell.run("--device cpu --budget 10MiB", "import torch", "torch.ones(1 << 24)")
        assert "does not fit" in shell.published[1]["text/plain"]

    def test_a_terminal_shows_the_report(self, capsys: pytest.CaptureFixture[str]) -> None:
        shell = Shell(active_types=["text/plain"])
        vramfit.load_ipython_extension(shell)
        shell.run("--device cpu", "import torch", "kept = torch.ones(4)")
        assert not shell.published
        assert "At the peak" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("--gpu", "expected one argument"),
            ('--gpu "RTX 4090', "closing quotation"),
            ("--gpu 'RTX 9999'", "RTX 9999"),
            ("--gpu 24GiB --device cpu", "for a virtual GPU"),
            ("--gpu 24GiB --budget 1GiB", "for a virtual GPU"),
            ("--gpus 2", "--gpus is for a virtual GPU"),
            ("--device tpu", "tpu"),
            ("--budget much", "much"),
            ("--what", "--what"),
            ("--gpu 24GiB --assume much", "much"),
            ("--writes keep", "--writes is for a virtual GPU"),
            ("-o a.b", "not the name of a variable"),
            ("--remedies 60", "--remedies 60 is not possible here"),
            ("--gpu 24GiB --remedies -1", "--remedies -1 is not possible here"),
        ],
    )
    def test_what_cannot_be_read_is_told_in_a_line(self, shell: Shell, line: str, reason: str) -> None:
        with pytest.raises(Exception) as caught:  # IPython's own class where it is installed
            shell.run(line, "ran = True")
        assert type(caught.value).__name__ in ("UsageError", "UnknownGpuError")
        assert reason in str(caught.value)
        assert "ran" not in shell.user_ns and not shell.published

    def test_a_cell_that_awaits_is_refused(self, shell: Shell) -> None:
        with pytest.raises(Exception, match="runs no cell that awaits"):
            shell.run("--device cpu", "import asyncio", "await asyncio.sleep(0)")
        with pytest.raises(SyntaxError):
            shell.run("--device cpu", "x = (")


_ON_A_VIRTUAL_GPU = """
from integrations.test_jupyter import Shell
import vramfit
shell = Shell()
vramfit.load_ipython_extension(shell)
shell.run('--gpu "RTX 4090" -o report', "import torch", "kept = torch.ones(1 << 20, device='cuda')")
print(shell.user_ns["report"], type(shell.user_ns["kept"]).__name__)
report = shell.user_ns["report"]
print(report.fits, report.peak_allocated_bytes, shell.published[0]["text/plain"])
"""


def test_on_a_virtual_gpu() -> None:
    """In a process of its own, as a notebook's kernel is one."""
    found = warm.run(
        [sys.executable, "-c", _ON_A_VIRTUAL_GPU],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "True 4194304 <Report: fits RTX 4090: " in found.stdout


_WITH_REMEDIES = """
from integrations.test_jupyter import Shell
import vramfit
shell = Shell()
vramfit.load_ipython_extension(shell)
before = ["import torch\\nfrom torch import nn", "print('never again')", "def width():\\n    return 1024"]
for cell in before:
    exec(cell, shell.user_ns)
body = [
    "net = nn.Sequential(*(nn.Linear(width(), width()) for _ in range(24))).to('cuda')",
    "x = torch.ones(16384, width(), device='cuda')",
    "out = net(x)",
]
shell.user_ns["In"] = ["", *before, "%%vram\\n" + "\\n".join(body)]
try:
    shell.run('--gpu 1GiB --remedies 60 -o report', *body)
except Exception as error:
    print(type(error).__name__)
tried = shell.user_ns["report"].run.remedies
print([row.how for row in tried.rows if row.name == "no gradients"], tried.cheapest is not None, tried.why_not)
print("No gradients" in shell.published[0]["text/html"] or "no gradients" in shell.published[0]["text/html"])
"""


def test_a_cell_that_does_not_fit_is_followed_by_remedies_in_its_own_lines() -> None:
    found = warm.run(
        [sys.executable, "-c", _WITH_REMEDIES],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "OutOfMemoryError" in found.stdout and found.stdout.count("never again") == 1
    assert "[('put In [7]:3 into  with torch.no_grad():',)] True" in found.stdout
    assert found.stdout.endswith("True\n")


class TestCellProgram:
    def test_it_has_what_the_cell_needs_of_earlier_ones_and_nothing_else(self) -> None:
        earlier = [
            (1, "import torch\nimport os\nfrom torch import nn as layers"),
            (2, "@torch.no_grad()\ndef made(n, m=1):\n    k = n\n    return layers.Linear(k, m)\nmade(3)"),
            (3, "x = ("),
            (4, "size = 8\nsize += 1\nother = size"),
        ]
        program = cell_program(earlier, 5, "net = made(size)\ny = [q for q in net(x)]", before="first")
        assert program.source.split("\n") == [
            "first",
            "import torch",
            "from torch import nn as layers",
            "@torch.no_grad()",
            "def made(n, m=1):",
            "    k = n",
            "    return layers.Linear(k, m)",
            "size = 8",
            "size += 1",
            "net = made(size)",
            "y = [q for q in net(x)]",
            "",
        ]
        assert program.missing == ("x",)
        told = program.told(
            TriedRemedies(
                rows=(TriedRemedy(name="a", how=("put cell.py:10-11 into b", "cell.py:9", "cell.py:1")),)
            )
        )
        assert told.rows[0].how == ("put In [5]:1-2 into b", "In [4]:2", "cell.py:1")


def test_a_report_is_printed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook makes an output of each write, and rich of each line where it believes to be in one."""
    written: list[str] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: written.append("as HTML"))
    monkeypatch.setattr(sys.stdout, "write", written.append)
    run = fitting_run()
    vramfit.Report(run=run, verdict=vramfit.analysis.verdict(run)).print()
    [text] = written
    assert "At the peak" in text


class TestIPython:
    """The same with IPython itself."""

    def test_it_shows_traces(self) -> None:
        core = pytest.importorskip("IPython.core.formatters", reason="IPython is not installed")
        formatter = core.DisplayFormatter()

        class Real(Shell):
            display_formatter = formatter

            def __init__(self) -> None:
                super().__init__()
                self.display_formatter = formatter

        shell = Real()
        jupyter.load_ipython_extension(shell)
        data, _ = formatter.format(fitting_run().trace)
        assert "<svg" in data["text/html"]
        jupyter.unload_ipython_extension(shell)
        data, _ = formatter.format(fitting_run().trace)
        assert "text/html" not in data

    def test_it_runs_cells(self, capsys: pytest.CaptureFixture[str]) -> None:
        core = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
        shell = core.InteractiveShell()
        shell.run_line_magic("load_ext", "vramfit")
        found = shell.run_cell(
            "%%vram --device cpu -o report\nimport torch\nkept = torch.ones(1 << 20)\n'value'"
        )
        assert found.success and found.result == "value"
        assert shell.user_ns["report"].peak_allocated_bytes == 4 << 20
        assert "<Report: fits CPU" in capsys.readouterr().out
        found = shell.run_cell("%%vram --gpu 'RTX 9999'\n1")
        assert not found.success and "RTX 9999" in str(found.error_in_exec)
        shell.run_line_magic("unload_ext", "vramfit")
        assert "vram" not in shell.magics_manager.magics["cell"]
