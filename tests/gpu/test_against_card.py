"""The examples on a real card and on the virtual one of the same name: peaks within one per cent.

These tests need a card, and are skipped without one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vramfit

EXAMPLES = Path(__file__).parents[2] / "examples"
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
