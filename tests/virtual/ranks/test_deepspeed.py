"""DeepSpeed's ZeRO on virtual ranks: model states as its paper counts them, and what its sources keep besides.

ZeRO (arXiv 1910.02054, section 3.1 and figure 1): a parameter has 2 bytes, its gradient 2, and Adam's float32 copy and
two moments 12; stage 1 divides the 12 by the ranks, stage 2 the gradient too, stage 3 all.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import warm

from vramfit.patching import PatchStack
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.ranks import deepspeed_checks

WORLD = 8
LAYER = 512 * 512
PARAMETERS = 8 * LAYER
BUCKET = 2 * LAYER
"""Bytes of a bucket of bfloat16 gradients (zero_program.py: ``BUCKET``)."""
NORM = FLAG = 512
"""Blocks of two scalars that an engine keeps: ``_global_grad_norm`` and, under stage 3, ``inf_or_nan_tracker``."""
TO_HOST = {"device": "cpu", "pin_memory": True}
ANY_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False}  # DeepSpeedCPUAdam is compiled C++
CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 2, "offload_optimizer": TO_HOST, "else": ANY_OPTIMIZER},
    {"stage": 3, "offload_optimizer": TO_HOST, "offload_param": TO_HOST, "else": ANY_OPTIMIZER},
]


@pytest.fixture(scope="module", params=[0, 3, 7])
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: docs/distributed.md says how")
    cases = tmp_path_factory.mktemp("zero") / "cases.json"
    cases.write_text(json.dumps(CASES), encoding="utf-8")
    program = Path(__file__).with_name("zero_program.py")
    line = [sys.executable, str(program), str(request.param), str(WORLD), str(cases)]
    done = warm.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["codes"]) <= {"guessed-value", "nccl-estimated"}
    steps: list[dict[str, int]] = found["held"]
    return steps


@pytest.mark.slow
def test_model_states_are_those_of_the_paper(held: list[dict[str, int]]) -> None:
    plain, one, two, three = held[:4]
    assert plain["backward"] == (2 + 2 + 12) * PARAMETERS
    for stage in (one, two):  # DeepSpeed lets go of others' gradients in stage 1 too, once they are reduced
        assert stage["backward"] == 2 * PARAMETERS + (2 + 12) * PARAMETERS // WORLD + NORM
        assert stage["stepped"] == 2 * PARAMETERS + 12 * PARAMETERS // WORLD + NORM
    assert three["built"] == 2 * PARAMETERS // WORLD
    assert three["stepped"] == (2 + 2 + 12) * PARAMETERS // WORLD + BUCKET + NORM + FLAG


@pytest.mark.slow
def test_what_offloading_leaves_on_the_card(held: list[dict[str, int]]) -> None:
    states, everything = held[4:]
    # Parameters, and a buffer for the largest gradient on its way (stage_1_and_2.py: temp_grad_buffer_for_gpu_offload).
    assert states["stepped"] == 2 * PARAMETERS + 2 * LAYER
    assert everything["stepped"] == BUCKET


@pytest.mark.parametrize("numbers", [[5, 3, 5], []])
def test_checks_between_ranks_take_this_ranks_numbers(
    numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module with the functions by which DeepSpeed compares ranks; all but the first rank would fail."""
    module = ModuleType("deepspeed.runtime.zero.utils")
    module.dist = dist  # type: ignore[attr-defined]
    module.get_accelerator = lambda: SimpleNamespace(device_name="cuda:{}".format)  # type: ignore[attr-defined]
    module.get_lst_from_rank0 = theirs = list  # type: ignore[attr-defined]
    module.assert_lst_len_same_as_other_ranks = len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with VirtualGPU("H100", rank=7, world_size=WORLD) as gpu:
        dist.init_process_group("nccl")
        ops = gpu.mode.meter.ops
        assert module.assert_lst_len_same_as_other_ranks(numbers) is None
        assert module.get_lst_from_rank0(numbers) == numbers
        assert gpu.mode.meter.ops == ops + 4  # each copies to the card, and broadcasts
        assert torch.cuda.max_memory_allocated(7) == 512
    assert module.get_lst_from_rank0 is theirs and module.assert_lst_len_same_as_other_ranks is len


def test_older_versions_have_no_such_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deepspeed.runtime.zero.utils")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with PatchStack() as patches:
        deepspeed_checks.install(patches)
        assert not hasattr(module, "get_lst_from_rank0")
