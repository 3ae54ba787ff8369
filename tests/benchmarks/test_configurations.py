"""The list of programs that are recorded on a card."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest
from configurations import ALL, CONFIGURATIONS, Configuration, Precision
from configurations.optimizers import MAKERS, compress, expand

FOLDER = Path(__file__).parents[2] / "benchmarks" / "configurations"


def test_the_list_has_every_kind_that_a_comparison_needs() -> None:
    listed = list(CONFIGURATIONS.values())
    assert len(listed) >= 40
    assert {c.precision for c in listed} == set(Precision)
    assert {c.optimizer for c in listed} - {None} == set(MAKERS)
    assert {c.options.get("recompute") for c in listed} >= {"reentrant", "non-reentrant"}
    assert {c.options.get("attention") for c in listed} >= {"flash", "efficient", "cudnn", "math"}
    assert sum("expandable" in c.alloc_conf for c in listed) >= 4
    assert any(c.optimizer is None for c in listed) and any(c.memory_bytes for c in listed)


def test_one_of_each_family_comes_first() -> None:
    first = {c.build for c in list(CONFIGURATIONS.values())[:14]}
    assert first >= {
        "language:gpt",
        "language:llama",
        "language:bert",
        "language:t5",
        "language:moe",
        "language:generate",
        "vision:classifier",
        "vision:volume",
        "vision:diffusion",
        "vision:gan",
        "recurrent:recurrent",
    }


@pytest.mark.parametrize("configuration", ALL.values(), ids=ALL)
def test_every_option_is_one_that_the_program_takes(configuration: Configuration) -> None:
    module, _, name = configuration.build.partition(":")
    if any(importlib.util.find_spec(package) is None for package in configuration.packages):
        pytest.skip(f"needs {configuration.packages}")
    function = getattr(importlib.import_module(f"configurations.{module}"), name)
    options = {"precision": configuration.precision.value, **configuration.options}
    if configuration.optimizer is not None:
        options["optimizer"] = configuration.optimizer
    signature = inspect.signature(function)
    bound = signature.bind(**options)
    rest = set(bound.arguments.get("loop", {}))
    assert rest <= {"micro_batches", "clip", "optimizer_options"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_the_programs_know_nothing_of_vramfit(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.split(".")[0] in ("vramfit", "recording", "comparing")]


def test_eight_bit_states_keep_what_they_hold_to_their_precision() -> None:
    import torch

    values = torch.linspace(-3, 3, 8192)
    assert (expand(compress(values, signed=True), values) - values).abs().max() <= 3 / 127
    held = compress(values, signed=True)
    assert isinstance(held, tuple) and held[0].dtype == torch.int8
    assert compress(values[:10], signed=True) is not None and expand(values[:10], values[:10]).equal(
        values[:10]
    )
