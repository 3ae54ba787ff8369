"""What the program's own first import of Dynamo keeps alive until the garbage collector comes by."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo

from vramfit.gpus import find_gpu
from vramfit.options.run_options import RunOptions
from vramfit.patching import PatchStack
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.lazy_dynamo import forget_dynamo
from vramfit.virtual.virtual_run import run_in_child

DYNAMO = torch._dynamo


class Held:
    """Something that a variable names."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def importing() -> weakref.ref[Held]:
    held = Held()
    import torch._dynamo.config  # noqa: F401

    return weakref.ref(held)


def test_the_first_import_keeps_the_variables_of_those_who_called(no_collection: None) -> None:
    seed, package = torch.manual_seed, {**vars(DYNAMO)}
    with PatchStack() as patches:
        forget_dynamo(patches)
        assert "torch._dynamo" not in sys.modules and "torch._dynamo.config" not in sys.modules
        assert torch.manual_seed is torch.random.manual_seed
        first, second = importing(), importing()
        assert first() is not None and second() is None
        gc.collect()
        assert first() is None
        assert sys.modules["torch._dynamo"] is torch._dynamo is DYNAMO and torch.manual_seed is seed
    assert vars(DYNAMO) == package


def test_a_program_that_never_imports_it_leaves_everything_as_it_was() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("torch")}
    finders, seed = list(sys.meta_path), torch.manual_seed
    with PatchStack() as patches:
        forget_dynamo(patches)
    assert {name: module for name, module in sys.modules.items() if name.startswith("torch")} == before
    assert sys.meta_path == finders and torch.manual_seed is seed
    assert torch._dynamo is DYNAMO


def test_an_attribute_of_torch_imports_it_too() -> None:
    with PatchStack() as patches:
        forget_dynamo(patches)
        assert torch._dynamo is DYNAMO
        assert sys.modules["torch._dynamo"] is DYNAMO


def test_describing_an_op_does_not_count(gpu: VirtualGPU, no_collection: None) -> None:
    with PatchStack() as patches:
        forget_dynamo(patches)
        values = torch.empty(3, 5, device="cuda")
        values.sinh()  # torch/_refs describes it, and imports Dynamo
        values.logcumsumexp(0)  # a meta kernel of C++, under fake tensors
        assert "torch._dynamo" not in sys.modules
        held = importing()
        assert held() is not None
        assert sys.modules["torch._dynamo"] is DYNAMO


SHARDED = """
import gc, socket
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

gc.collect()
gc.disable()
with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
dist.init_process_group("nccl", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
with torch.device("cuda"):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)])
held = [torch.cuda.memory_allocated() >> 20]
for layer in model:
    fully_shard(layer)
    held.append(torch.cuda.memory_allocated() >> 20)
gc.collect()
print(*held, torch.cuda.memory_allocated() >> 20)
"""


def test_the_first_block_of_fsdp2_keeps_its_whole_parameters(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    run = run_in_child([str(script)], RunOptions(gpu=find_gpu("H200")))
    assert not run.exit_code
    assert capfd.readouterr().out.split() == ["12", "16", "16", "16", "12"]


PLAIN = """
import gc, sys, weakref
import torch

class Held:
    pass

def importing():
    held = Held()
    import torch._dynamo
    return weakref.ref(held)

assert "torch._dynamo" not in sys.modules
gc.collect()
gc.disable()
before, held = torch.manual_seed, importing()
print(held() is not None, before is torch.random.manual_seed)
gc.collect()
print(held() is None)
"""


def test_torch_itself_leaves_such_a_circle() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PLAIN)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["True", "True", "True"]
