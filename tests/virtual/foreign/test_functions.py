"""Stand-ins for compiled functions, whose modules are there, are not there, or cannot be loaded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import vramfit
from vramfit.errors import UsageError
from vramfit.virtual.foreign import fake_kernels
from vramfit.virtual.foreign.fake_kernels import KERNELS, KERNELS_VARIABLE
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules; what is imported and registered in a test is forgotten after it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    kernels, modules = dict(KERNELS), set(sys.modules)
    yield tmp_path
    KERNELS.clear()
    KERNELS.update(kernels)
    for name in set(sys.modules) - modules:
        if name.startswith("vramfit_test"):
            del sys.modules[name]


def register(name: str) -> None:
    @vramfit.fake_kernel(name, writes=["out"])
    def forward(x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        scratch = torch.empty(2 * MIB, dtype=torch.uint8, device=x.device)
        return [torch.empty_like(x), torch.empty(scratch.numel() // MIB, device=x.device)]


def run(forward: object) -> None:
    given, out = torch.zeros(MIB, device="cuda"), torch.ones(3, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = forward(given, out=out)  # type: ignore[operator]
    assert [tuple(tensor.shape) for tensor in made] == [(MIB,), (2,)]
    assert torch.cuda.memory_allocated() - before == given.nbytes + 512
    assert torch.cuda.max_memory_allocated() - before == given.nbytes + 512 + 2 * MIB


def test_a_module_that_is_not_installed_is_stood_in_for(gpu: VirtualGPU) -> None:
    register("vramfit_test_absent.forward")
    import vramfit_test_absent  # type: ignore[import-not-found]

    run(vramfit_test_absent.forward)
    assert [w.location for w in gpu.run.warnings if w.code == "kernel-not-run"] == [
        "vramfit_test_absent.forward"
    ]


def test_a_compiled_module_that_cannot_be_loaded_is_stood_in_for(gpu: VirtualGPU, own_modules: Path) -> None:
    (own_modules / f"vramfit_test_broken{EXTENSION_SUFFIXES[0]}").write_bytes(b"wants libcudart.so")
    register("vramfit_test_broken.forward")
    run(importlib.import_module("vramfit_test_broken").forward)


def test_a_function_is_replaced_also_where_it_was_imported_by_name(
    gpu: VirtualGPU, own_modules: Path
) -> None:
    (own_modules / "vramfit_test_kernel.py").write_text(
        "def forward(x, out):\n    raise SystemError('needs a card')\n"
    )
    (own_modules / "vramfit_test_user.py").write_text("from vramfit_test_kernel import forward\n")
    user = importlib.import_module("vramfit_test_user")
    register("vramfit_test_kernel.forward")  # a script may do so after its imports
    run(user.forward)


def test_real_tensors_still_go_to_the_function_itself(gpu: VirtualGPU, own_modules: Path) -> None:
    (own_modules / "vramfit_test_kernel.py").write_text("def forward(x, out):\n    return x + out\n")
    register("vramfit_test_kernel.forward")
    forward = importlib.import_module("vramfit_test_kernel").forward
    assert forward(torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]


def test_what_a_kernel_writes_is_unknown_afterwards(gpu: VirtualGPU) -> None:
    register("vramfit_test_absent.forward")
    kept, out = torch.full((2,), 5.0, device="cuda"), torch.full((2,), 5.0, device="cuda")
    importlib.import_module("vramfit_test_absent").forward(kept, out)
    assert kept.tolist() == [5.0, 5.0]
    assert not any(warning.code == "guessed-value" for warning in gpu.run.warnings)
    out.tolist()
    assert any(warning.code == "guessed-value" for warning in gpu.run.warnings)


def test_nothing_is_left_of_it_afterwards() -> None:
    finders = list(sys.meta_path)
    with VirtualGPU("RTX 4090", alloc_conf=""):
        register("vramfit_test_absent.forward")
        importlib.import_module("vramfit_test_absent")
    assert sys.meta_path == finders
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vramfit_test_absent")


def test_a_file_of_stand_ins_is_run_first(own_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = own_modules / "kernels.py"
    file.write_text(
        "import torch, vramfit\n"
        "@vramfit.fake_kernel('vramfit_test_absent.forward')\n"
        "def forward(x): return torch.empty_like(x)\n"
    )
    monkeypatch.setenv(KERNELS_VARIABLE, str(file))
    with VirtualGPU("RTX 4090", alloc_conf=""):
        forward = importlib.import_module("vramfit_test_absent").forward
        assert forward(torch.zeros(3, device="cuda")).shape == (3,)


def test_a_file_that_fails_is_told_with_its_line(own_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = own_modules / "kernels.py"
    file.write_text("import torch\nimport no_such_module\n")
    monkeypatch.setenv(KERNELS_VARIABLE, str(file))
    with pytest.raises(UsageError, match=r"kernels\.py, line 2: ModuleNotFoundError"):
        fake_kernels.load()
    monkeypatch.setenv(KERNELS_VARIABLE, str(own_modules / "absent.py"))
    with pytest.raises(UsageError, match="there is no file"):
        fake_kernels.load()
