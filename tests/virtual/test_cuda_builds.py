"""A CUDA build of torch, with a card or without: nothing that a program does on a virtual card reaches the driver."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import driver_calls
import pytest
import torch

from vramfit.torch_internals import real_tensors
from vramfit.torch_internals.cuda_device import has_cuda as CUDA_BUILD
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.torch_cuda.rng import VirtualGenerator
from vramfit.virtual.torch_patches import card_routes

C: Any = torch._C
PROGRAM = Path(driver_calls.__file__)

OF_CUDA_BUILDS = pytest.mark.skipif(not CUDA_BUILD, reason="a CPU build has no way to the driver")
OF_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="LD_DEBUG is glibc's")

LIBRARIES = ("libcuda.so", "libnvidia-ml.so")
SOUGHT = re.compile(r"find library=(\S+)")
MARK = re.compile(re.escape(driver_calls.MARK).replace(r"\{\}", r"(\w+)"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], set[str]]:
    """The errors of all calls, and the calls during which the driver was looked for."""
    folder = tmp_path_factory.mktemp("driver")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM],
        env={**os.environ, "LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(folder / "log")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    during, sought = "import", set()
    (log,) = (path for path in folder.iterdir() if "mark-entering" in path.read_text(errors="replace"))
    for library in SOUGHT.findall(log.read_text(errors="replace")):
        if (mark := MARK.fullmatch(library)) is not None:
            during = mark[1]
        elif library.startswith(LIBRARIES):
            sought.add(during)
    errors: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return errors, sought - {"import"}  # libraries beside torch look for it when they are loaded


def test_every_call_is_answered_or_refused_by_name(run: tuple[dict[str, str], set[str]]) -> None:
    errors, _ = run
    assert errors.keys() == driver_calls.REFUSED.keys(), errors
    for name, said in driver_calls.REFUSED.items():
        assert said in errors[name], name


@OF_CUDA_BUILDS
@OF_GLIBC
def test_no_call_looks_for_the_driver(run: tuple[dict[str, str], set[str]]) -> None:
    # The last one does (see `driver_calls.profilers`), so that the trap is known to work.
    assert run[1] == {driver_calls.LAST}


# -- what torch has of CUDA ----------------------------------------------------------------------------------------

OF_CUDA = re.compile(
    "_(cuda|cudnn|cusparselt|nccl|gds|accelerator|nvtx|MemPool|graph_pool|host_empty|broadcast|scatter|gather|can_use_)"
    "|_.*([Cc]uda|CUDA|nccl|cudnn)"
    "|_CU"
)
LEFT = {
    "_CUDAPluggableAllocator|_cuda_CUDAAllocator(_AllocatorState)?": "classes, whose objects none of ours takes",
    "_CUuuid": "a class of bytes",
    "_cuda_(busy_wait_for|clear)_flag": "of 2.10 alone: kernels that wait, for torch's own tests",
    "_(Static|Fast)CudaLauncher": "launch the compiler's kernels, which the virtual card does not load",
    "_acceleratorGraph": "says by itself that there is none for cuda",
    "_construct_CUDA_Tensor_From_Storage_And_Metadata": "lays a tensor over a storage that is there",
    "_(cudnn|cusparselt)": "say versions; cuDNN's is replaced where the card is too old for the build's own",
    "_ensureCUDADeviceGuardSet": "puts torch's empty device guard in place, for us",
    "_jit_.*_te_cuda_pointwise_.*": "settings of TorchScript's fuser",
    "_has_.*": "how torch was built",
    "_nccl_version(_suffix)?": "say the version of the build's own NCCL",
    "_(set|get|is)_(cudnn|sdp)_.*|_set_sdp_use_cudnn": "settings of ATen/Context.h",
}
"""What stays torch's own, as patterns, each with the reason."""


@OF_CUDA_BUILDS
def test_every_function_for_cuda_is_replaced_or_left_for_a_reason() -> None:
    before = {name: getattr(C, name) for name in dir(C) if OF_CUDA.match(name)}
    with VirtualGPU("RTX 4090", alloc_conf=""):
        same = {name for name, value in before.items() if getattr(C, name) is value}
    assert same == {name for name in same if any(re.fullmatch(pattern, name) for pattern in LEFT)}
    assert len(before) > 150


STAND_INS = ("_CUDAGraph", "_MemPool", "_CudaStreamBase", "_CudaEventBase", "_CudaDeviceProperties")


def test_stand_ins_have_all_that_the_classes_of_c_have() -> None:
    if not CUDA_BUILD:
        pytest.skip("a CPU build has no such classes")
    before = {name: set(dir(getattr(C, name))) for name in STAND_INS}
    generator = set(dir(torch.Generator))
    with VirtualGPU("RTX 4090", alloc_conf=""):
        graph = C._CUDAGraph()  # some of its attributes are those of the object
        after = {
            name: {*dir(getattr(C, name)), *(dir(graph) if name == "_CUDAGraph" else ())}
            for name in STAND_INS
        }
    for name in STAND_INS:
        assert before[name] - after[name] <= {"_pybind11_conduit_v1_"}, name
    inherited = {name for name in generator if name.startswith("__")} | {"_cdata"}
    assert generator - vars(VirtualGenerator).keys() <= inherited


@OF_CUDA_BUILDS
def test_ops_that_a_cpu_build_takes_apart_are_known() -> None:
    """A kernel for CUDA wins over a composite one: both builds are to give the mode the same ops."""
    composite, cuda = (
        set(C._dispatch_get_registrations_for_dispatch_key(key))
        for key in ("CompositeImplicitAutograd", "CUDA")
    )
    assert composite & cuda <= {f"aten::{name}" for name in card_routes._WHOLE_ON_CARD}


# -- real tensors --------------------------------------------------------------------------------------------------


def without_tensors(name: str) -> bool:
    """Whether an op makes a tensor and is given none."""
    namespace, rest = name.split("::")
    packet, _, overload = rest.partition(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")._schema
    given = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return not given and any("Tensor" in str(result.type) for result in schema.returns)


@OF_CUDA_BUILDS
def test_every_op_that_makes_a_tensor_of_a_card_by_itself_is_refused() -> None:
    names = (
        name for name in C._dispatch_get_registrations_for_dispatch_key("CUDA") if name.startswith("aten::")
    )
    assert {name.removeprefix("aten::") for name in names if without_tensors(name)} == set(
        real_tensors.FACTORIES
    )


def test_real_tensors_are_refused_until_the_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    undo = real_tensors.refuse_real_tensors()
    try:
        for make in (torch.empty, torch.zeros):
            with pytest.raises(NotImplementedError, match=r"Could not run 'aten::empty"):
                make(3, device="cuda")
    finally:
        undo()
    if CUDA_BUILD and not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="driver"):
            torch.empty(3, device="cuda")


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a CPU build keeps no such preference")
def test_preferred_libraries_are_as_before_afterwards() -> None:
    before = torch._C._get_blas_preferred_backend(), torch._C._get_linalg_preferred_backend()
    with VirtualGPU("RTX 4090"):
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.preferred_linalg_library("cusolver")
    assert (torch._C._get_blas_preferred_backend(), torch._C._get_linalg_preferred_backend()) == before
