"""Planted leaks are found with their owners, and clean programs raise none, on the virtual GPU and on metered CPU."""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from vramfit import VirtualGPU, check_leaks
from vramfit.analysis import LeakVerdict, Release

HERE = Path(__file__).parent
PLANTED = sorted(file.stem for file in (HERE / "planted").glob("*.py"))
CLEAN = sorted(file.stem for file in (HERE / "clean").glob("*.py"))


@pytest.fixture
def load() -> Iterator[Callable[[str, str], ModuleType]]:
    """Import a program anew, under its own name; afterwards nothing is left of it."""
    loaded: list[str] = []

    def from_file(folder: str, name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, HERE / folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    # Searches pass over the whole heap, and that of a test process is large: what there is already is set aside.
    gc.freeze()
    yield from_file
    gc.enable()
    for name in loaded:
        vars(sys.modules.pop(name)).clear()
    gc.collect()
    gc.unfreeze()


@pytest.fixture(scope="module", params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A virtual GPU, entered once for all, and the CPU without one."""
    with VirtualGPU("RTX 4090", alloc_conf="") if request.param == "cuda" else nullcontext():
        yield request.param


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_leak_is_found_with_its_owner(
    load: Callable[[str, str], ModuleType], name: str, device: str
) -> None:
    module = load("planted", name)
    if name == "finalizer":  # its owner is one of Python's own objects
        gc.unfreeze()
    found = check_leaks(module.program(device), owners=2)
    texts = [owner.text for stack in found.growing for owner in stack.owners]
    assert found.verdict is LeakVerdict.GROWING
    assert found.bytes_per_step >= 512
    assert any(re.search(module.OWNER, text) for text in texts), texts
    dead = name == "reference_cycle"
    assert all((stack.release is Release.COLLECTOR) == dead for stack in found.growing)
    lines = {stack.place.line.filename for stack in found.growing if stack.place.line is not None}
    assert str(HERE / "planted" / f"{name}.py") in lines


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_program_raises_nothing(
    load: Callable[[str, str], ModuleType], name: str, device: str
) -> None:
    module = load("clean", name)
    found = check_leaks(module.program(device), owners=0)
    assert found.verdict is LeakVerdict.STEADY
    assert found.growing == ()


def test_there_are_enough_of_both() -> None:
    assert len(PLANTED) >= 12
    assert len(CLEAN) >= 12
