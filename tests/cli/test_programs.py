"""Real programs in a real child interpreter, as a user would run them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests import warm

SCRIPT = """
import argparse, sys
from pathlib import Path
import torch
from helper import scale

parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("--code", type=int, default=0)
options = parser.parse_args()
width = int(Path("width.txt").read_text())
tensor = torch.zeros(width, 1024, 1024, device="cuda") * scale
print("argv", sys.argv[1:], "name", __name__, options.json)
sys.exit(options.code)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in a folder of its own: a script, a module beside it, a package and a data file."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("")
    (tmp_path / "app" / "train.py").write_text(SCRIPT)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("scale = 2.0\n")
    (tmp_path / "width.txt").write_text("64\n")
    return tmp_path


def vramfit(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vramfit", *arguments]
    return warm.run(command, cwd=project, capture_output=True, text=True, timeout=120)


def test_a_script_keeps_its_imports_paths_arguments_and_exit_code(project: Path) -> None:
    done = vramfit(
        project, "run", "--gpu", "RTX 4090", "--json", "out.json", "train.py", "--json", "mine", "--code", "7"
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("argv ['--json', 'mine', '--code', '7'] name __main__ mine\n")
    report = json.loads((project / "out.json").read_text())
    assert report["exit_code"] == 7
    assert report["peak"]["allocated_bytes"] == 512 << 20
    assert report["tensors"][0]["tensor"] == "float32[64, 1024, 1024]"
    assert Path(report["tensors"][0]["line"]["file"]).name == "train.py"
    assert not (project / "mine").exists()


def test_a_module_runs_as_under_python(project: Path) -> None:
    done = vramfit(project, "run", "--gpu", "RTX 4090", "-m", "app.train", "--json", "mine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("argv ['--json', 'mine'] name __main__ mine\n")
    assert "✓ fits RTX 4090" in done.stdout


def test_running_out_ends_with_three_and_names_the_line(project: Path) -> None:
    (project / "width.txt").write_text("4096\n")
    done = vramfit(project, "run", "--gpu", "RTX 4090", "train.py")
    assert done.returncode == 3
    line = SCRIPT.splitlines().index('tensor = torch.zeros(width, 1024, 1024, device="cuda") * scale') + 1
    headline = " ".join(done.stdout.split())
    assert f"✗ does not fit RTX 4090: ran out of memory at train.py:{line}" in headline
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr


def test_a_missing_module_is_told_without_a_report_of_an_empty_card(project: Path) -> None:
    done = vramfit(project, "run", "--gpu", "RTX 4090", "-m", "nomodule")
    assert done.returncode == 1
    assert done.stderr == f"{sys.executable}: No module named nomodule\n"
    assert done.stdout == "! the program failed (exit code 1) before it used a card\n"


def test_a_program_without_cuda_gets_a_short_report(project: Path) -> None:
    (project / "train.py").write_text("import torch\nprint(torch.ones(3).sum().item())\n")
    done = vramfit(project, "run", "--gpu", "RTX 4090", "train.py")
    assert done.returncode == 0
    first, verdict, *why, _, footer = done.stdout.splitlines()
    assert (first, verdict) == ("3.0", "! the program never used the card RTX 4090")
    assert "Either it chose the CPU" in why[0]
    assert "torch" in footer


def test_a_syntax_error_is_told_in_a_line(project: Path) -> None:
    (project / "train.py").write_text("x = 1\ndef broken(:\n")
    done = vramfit(project, "run", "--gpu", "RTX 4090", "train.py")
    assert (done.returncode, done.stdout) == (1, "")
    first, following = done.stderr.splitlines()
    assert first == "error: train.py line 2: invalid syntax"
    assert "python -m py_compile train.py" in following


def test_a_syntax_error_in_an_import_is_reported_as_by_python(project: Path) -> None:
    (project / "helper.py").write_text("def broken(:\n")
    done = vramfit(project, "run", "--gpu", "RTX 4090", "train.py")
    assert done.returncode == 1
    assert "SyntaxError: invalid syntax" in done.stderr
    assert "vramfit" not in done.stderr, "no frame of ours in the program's own error"


FAILING = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset

class Labels(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise ValueError("label file 17 is empty")

torch.zeros(8, device="cuda")
if sys.argv[1:]:
    sys.exit(f"no data in {sys.argv[1]}")
for batch in DataLoader(Labels(), batch_size=2, num_workers=1):
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "ValueError: label file 17 is empty (in DataLoader worker process 0)"),
        (["./data"], "no data in ./data"),
    ],
    ids=["worker", "sys.exit"],
)
def test_the_verdict_says_why_a_program_failed(project: Path, arguments: list[str], why: str) -> None:
    (project / "failing.py").write_text(FAILING)
    done = vramfit(project, "run", "--gpu", "24GiB", "--json", "out.json", "failing.py", *arguments)
    assert done.returncode == 1
    assert f"! the program failed (exit code 1): {why}" in " ".join(done.stdout.split())
    assert json.loads((project / "out.json").read_text())["error"] == why
