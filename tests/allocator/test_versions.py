from __future__ import annotations

import pytest

from vramfit.allocator import alloc_conf_from_env, parse_torch_version


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


def test_until_2_11_the_general_variable_came_first() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "a", "PYTORCH_HIP_ALLOC_CONF": "c", "PYTORCH_CUDA_ALLOC_CONF": "b"}
    assert alloc_conf_from_env(environ, (2, 11)) == "a"
    assert alloc_conf_from_env(environ, (2, 12)) == "b"
    del environ["PYTORCH_ALLOC_CONF"]
    assert alloc_conf_from_env(environ, (2, 11)) == "b"


def test_an_empty_variable_counts_as_set() -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert alloc_conf_from_env(environ) == ""


def test_versions_are_read_from_torchs_own_text() -> None:
    assert parse_torch_version("2.13.0+cpu") == (2, 13)
    with pytest.raises(ValueError, match="'nightly' is not a torch version"):
        parse_torch_version("nightly")
