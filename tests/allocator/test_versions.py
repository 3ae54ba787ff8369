from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vramfit.allocator import alloc_conf_from_env, parse_torch_version
from vramfit.allocator.versions import ALLOC_CONF_VARIABLES


def test_the_first_variable_that_exists_decides() -> None:
    environ = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:21",
        "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:23",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:22",
    }
    assert alloc_conf_from_env(environ) == "max_split_size_mb:22"
    del environ["PYTORCH_CUDA_ALLOC_CONF"]
    assert alloc_conf_from_env(environ) == "max_split_size_mb:23"
    del environ["PYTORCH_HIP_ALLOC_CONF"]
    assert alloc_conf_from_env(environ) == "max_split_size_mb:21"
    assert alloc_conf_from_env({}) == ""


def test_an_empty_variable_counts_as_set() -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert alloc_conf_from_env(environ) == ""


def test_versions_are_read_from_torchs_own_text() -> None:
    assert parse_torch_version("2.13.0+cpu") == (2, 13)
    with pytest.raises(ValueError, match="'nightly' is not a torch version"):
        parse_torch_version("nightly")


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a CPU build has no allocator for cards")
def test_torch_itself_reads_the_first_variable_alone() -> None:
    """An unknown setting says which one was read."""
    program = (
        "import torch\n"
        "try: torch.cuda.memory._set_allocator_settings('garbage_collection_threshold:0.8')\n"
        "except Exception as error: print(error)\n"
    )
    other, first = ALLOC_CONF_VARIABLES[-1], ALLOC_CONF_VARIABLES[0]
    for settings, said in (
        ({first: "unknown_first:1", other: "unknown_other:1"}, "unknown_first"),
        ({first: "max_split_size_mb:64", other: "unknown_other:1"}, ""),
        ({first: "", other: "unknown_other:1"}, ""),
        ({other: "unknown_other:1"}, "unknown_other"),
    ):
        kept = {name: value for name, value in os.environ.items() if name not in ALLOC_CONF_VARIABLES}
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(command, env={**kept, **settings}, capture_output=True, text=True, check=True)
        assert said in done.stdout if said else not done.stdout, settings
