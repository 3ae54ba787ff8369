from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from facade_support import virtual_cuda
from tests import warm

from vramfit.torch_internals.releases import at_least


@pytest.fixture
def machine():
    with virtual_cuda() as machine:
        yield machine


def test_cudnn(machine):
    assert torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled
    assert torch.backends.cudnn.version() >= (91900 if at_least(2, 11) else 91002)
    assert torch.backends.cudnn.benchmark_limit == 10
    torch.backends.cudnn.benchmark_limit = 3
    assert torch.backends.cudnn.benchmark_limit == 3
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True, allow_tf32=False):
        assert torch.backends.cudnn.benchmark and torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.rnn.get_cudnn_mode("LSTM") == 2


def test_matmul_flags(machine):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not before
    assert torch.backends.cuda.matmul.allow_tf32 is not before
    torch.backends.cuda.matmul.allow_tf32 = before


def test_preferred_libraries(machine):
    linalg = torch.backends.cuda.preferred_linalg_library("cusolver")
    assert linalg == torch.backends.cuda.preferred_linalg_library() == torch._C._LinalgBackend.Cusolver
    assert torch.backends.cuda.preferred_blas_library("cublaslt") == torch._C._BlasBackend.Cublaslt


def test_attention_flags(machine):
    assert torch.backends.cuda.is_flash_attention_available()
    torch.backends.cuda.enable_flash_sdp(False)
    assert not torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


def test_the_plan_cache(machine):
    cache = torch.backends.cuda.cufft_plan_cache
    assert (cache.size, cache.max_size, cache[0].max_size) == (0, 4096, 4096)
    cache[0].max_size = 10
    assert cache.max_size == 10
    cache.clear()
    with pytest.raises(RuntimeError, match="read-only"):
        cache.size = 1


def test_workspace_sizes(machine):
    if not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        pytest.skip("this torch has no setting for it")
    assert torch.backends.cuda.cublas_workspace_size() == 8_519_680
    assert torch.backends.cuda.cublaslt_workspace_size() == 8_519_680  # the two share one since 2.12
    assert torch.backends.cuda.cublas_workspace_size(1 << 20) == 1 << 20
    assert machine.cublas_workspace_bytes == {"cublas": 1 << 20}


def test_mixed_precision_is_enabled(machine):
    assert torch.amp.GradScaler("cuda").is_enabled()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")


def test_nccl_version(machine):
    assert torch.cuda.nccl.version() >= (2, 27, 5)


FAKE_PROGRAM = """
    import os, sys, warnings
    import torch
    import torch.cuda.comm
    from facade_support import virtual_cuda
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vramfit.torch_internals import build_shim

    class Fake(FakeTensorMode):
        avoid_device_init = True

    build_shim.install()
    with virtual_cuda(count=2), Fake(allow_non_fake_inputs=True):
        x = torch.cuda.FloatTensor(2, 3)
        assert (x.shape, x.device, x.type()) == ((2, 3), torch.device("cuda:0"), "torch.cuda.FloatTensor")
        assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.HalfTensor)
        assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)
        assert torch.cuda.FloatTensor().shape == (0,)
        assert torch.cuda.HalfTensor(torch.Size([4])).dtype == torch.float16
        assert torch.cuda.FloatTensor(x).data_ptr is not None
        assert torch.ones(2).type("torch.cuda.HalfTensor").is_cuda
        assert torch.ones(2).type(torch.cuda.LongTensor).dtype == torch.int64
        assert torch.ones(2).type(torch.float16).dtype == torch.float16
        try:
            torch.cuda.HalfTensor(x)
        except TypeError:
            pass
        else:
            raise AssertionError("a tensor of another dtype was taken")

        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        assert (torch.empty(2).device.type, torch.empty(2).dtype) == ("cuda", torch.float16)
        torch.set_default_tensor_type(torch.FloatTensor)
        assert (torch.empty(2).device.type, torch.empty(2).dtype) == ("cpu", torch.float32)
        torch.set_default_device("cuda:1")
        assert torch.zeros(2).device == torch.device("cuda:1")
        torch.set_default_device(None)

        y = torch.ones(5, 2, device="cuda:0")
        halves = torch.cuda.comm.scatter(y, [0, 1])
        assert [tuple(half.shape) for half in halves] == [(3, 2), (2, 2)]
        assert [half.device.index for half in halves] == [0, 1]
        assert torch.cuda.comm.gather(halves, destination=1).device == torch.device("cuda:1")
        copies = torch.cuda.comm.broadcast_coalesced([y, y], [0, 1])
        assert [[t.device.index for t in group] for group in copies] == [[0, 0], [1, 1]]
        with torch.cuda.device_of(halves[1]):
            assert torch.cuda.current_device() == 1

        generator = torch.Generator("cuda")
        assert torch.empty(3, device="cuda").normal_(generator=generator).is_cuda
        assert torch.randn(3, device="cuda", generator=generator).is_cuda
        torch.utils.checkpoint.checkpoint(
            torch.nn.functional.relu, torch.ones(2, device="cuda", requires_grad=True), use_reentrant=False
        )
    sys.stdout.write("done")
    sys.stdout.flush()
    os._exit(0)  # autograd's threads may outlive the interpreter
"""


def test_fake_tensors_under_the_facade():
    """In a child: the shim that lets a build carry fake cuda tensors stays for the life of a process."""
    run = warm.run(
        [sys.executable, "-c", textwrap.dedent(FAKE_PROGRAM)],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent,
    )
    assert (run.returncode, run.stdout) == (0, "done"), run.stderr[-2000:]
