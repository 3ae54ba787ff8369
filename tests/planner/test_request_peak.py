"""What a request takes beyond weights, and that a pool that is told so stays within its budget."""

from __future__ import annotations

import pytest
import torch
from tests.virtual.conftest import fit_interpreter
from torch import nn

from vramfit.errors import UnknownGpuError, UsageError
from vramfit.gpus import find_gpu
from vramfit.inference.residency.model_pool import ModelPool
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.request_peak import RequestQuestion, measured_request, request_peak
from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU

__all__ = ["fit_interpreter"]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)).eval()


@pytest.mark.parametrize("rows", [16, 4096])
def test_a_pool_with_that_figure_stays_within_its_budget(rows: int, fit_interpreter: None) -> None:
    device = VirtualBackend(find_gpu("RTX 4090"), alloc_conf="", host_bytes=1 << 34)
    question = RequestQuestion(arguments=(torch.zeros(rows, 2048),), keywords={})
    found = measured_request(device, network, question)
    hidden = rows * 8192 * 4
    assert found.bytes >= 2 * hidden  # before and after the activation function
    with VirtualGPU("RTX 4090", alloc_conf=""):
        one = network()
        weights = -(-sum(-(-p.nbytes // 512) * 512 for p in one.parameters()) // (2 * MIB)) * 2 * MIB
        budget = weights + found.bytes
        pool = ModelPool({"one": one}, budget=budget, request_bytes=found.bytes)
        with pool.use("one") as model, torch.no_grad():
            model(torch.zeros(rows, 2048, device="cuda"))
            model(torch.zeros(rows, 2048, device="cuda"))
        # A tensor of the question's own may take a small segment more.
        assert budget - 2 * MIB <= torch.cuda.max_memory_reserved() <= budget


def test_bad_input_is_one_line() -> None:
    with pytest.raises(UsageError, match="a request is looked at for a module"):
        request_peak(len, torch.zeros(1), gpu="RTX 4090")  # type: ignore[arg-type]
    with pytest.raises(UnknownGpuError, match="no GPU is called 'RTX 4900'"):
        request_peak(network(), torch.zeros(1), gpu="RTX 4900")


@pytest.mark.slow
def test_a_live_model_is_looked_at_in_another_process() -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    assert request_peak(model, torch.ones(512, 1024), gpu="RTX 4090").bytes == 44_040_192
