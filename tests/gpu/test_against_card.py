"""Programs on a real card and on the virtual one of the same name: peaks within one per cent.

The examples run as they are; configurations of the benchmarks are recorded and compared request by request, of which
`benchmarks/record.py` and `benchmarks/accuracy.py` do all. These tests need a card, and are skipped without one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vramfit

EXAMPLES = Path(__file__).parents[2] / "examples"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONFIGURATIONS = ("gpt2-small-fp32", "llama-1b-expandable", "resnet18-fp32")
PROGRAMS = (
    ("gpt2_train.py", ()),
    ("resnet_train.py", ("--amp", "--channels-last")),
    ("bert_large_finetune.py", ("--batch-size", "8")),
    ("vit_inference.py", ()),
    ("gan_train.py", ()),
    ("lstm_lm.py", ()),
)
# Runs the program as python would, then tells the peaks; torch's own figures, read in the same process.
REAL = """
import json, runpy, sys, torch
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps({
    "name": torch.cuda.get_device_name(),
    "allocated": torch.cuda.max_memory_allocated(),
    "reserved": torch.cuda.max_memory_reserved(),
}))
"""


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card on this machine"),
]


@pytest.mark.parametrize(("script", "arguments"), PROGRAMS, ids=[script for script, _ in PROGRAMS])
def test_peaks_are_those_of_the_card(script: str, arguments: tuple[str, ...]) -> None:
    program = [str(EXAMPLES / script), *arguments]
    done = subprocess.run(
        [sys.executable, "-c", REAL, *program], capture_output=True, text=True, check=True, cwd=EXAMPLES
    )
    real = json.loads(done.stdout.splitlines()[-1])
    report = vramfit.run(*program, gpu=real["name"], cwd=EXAMPLES)
    assert report.exit_code == 0
    assert report.peak_allocated_bytes == pytest.approx(real["allocated"], rel=0.01)
    assert report.peak_reserved_bytes == pytest.approx(real["reserved"], rel=0.01)


def test_recorded_configurations_are_predicted(tmp_path: Path) -> None:
    folder, figures = tmp_path / "recordings", tmp_path / "figures.json"
    only = ["--only", *CONFIGURATIONS]
    commands = (
        ["record.py", *only, "--output", folder],
        [
            "accuracy.py",
            *only,
            "--recordings",
            folder,
            "--no-peers",
            "--results",
            tmp_path / "results",
            "--json",
            figures,
        ],
    )
    for script, *arguments in commands:
        subprocess.run([sys.executable, BENCHMARKS / str(script), *arguments], check=True)
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    here = [row for row in rows if row["name"] in CONFIGURATIONS and row["torch"] == torch.__version__]
    assert {row["name"] for row in here} == set(CONFIGURATIONS)
    for row in here:
        ours = row["figures"]["vramfit"]
        assert ours["reason"] is None and row["origin"] == "card"
        assert ours["allocated"] == pytest.approx(row["allocated"], rel=0.01)
        assert ours["reserved"] == pytest.approx(row["reserved"], rel=0.01)
