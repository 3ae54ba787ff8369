"""What lies around the kernels: the CUDA context, what libraries keep, and the speed of the card and of its link.

The steps are run in a fresh process, in this order, since a library is loaded once. Outside torch's allocator the
card's own account is asked (``cudaMemGetInfo``) before and after; within it, torch's memory history.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vramfit.calibrate.measure import CaseMeter
from vramfit.calibrate.records import BlockKind, OpRecord, Take
from vramfit.gpus.measured_profile import Rates

_RATE_BYTES = 256 << 20
_RUNS = 5
_PRODUCT = 8192
_SLOW_PRODUCT = 4096
_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tf32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstUse:
    """What the first use of something takes and keeps. Sizes are bytes.

    Attributes:
        name: ``context``, or a library.
        outside: on the card outside torch's allocator.
        kept: in torch's allocator, after everything that the step made has gone; of the context, all that it holds.
    """

    name: str
    outside: int
    kept: int


def make_context(device: int) -> FirstUse:
    """Use the card for the first time in this process."""
    torch.empty(1, device=f"cuda:{device}")
    return FirstUse(name="context", outside=_outside(device), kept=torch.cuda.memory_reserved(device))


def first_uses(device: int) -> Iterator[FirstUse]:
    """Use one library after the other for the first time in this process, which has a context already."""
    meter = CaseMeter(device)
    outside = _outside(device)
    for name, use in _steps():
        requested = _requested(device)
        records = meter.watch(use)
        # Dropout's states are a tensor that torch holds; what other libraries keep belongs to no tensor.
        kept = _requested(device) - requested if name == "cudnn_dropout" else _kept(records)
        now = _outside(device)
        yield FirstUse(name=name, outside=max(0, now - outside), kept=kept)
        outside = now


def _outside(device: int) -> int:
    """Bytes of the card that torch's allocator does not hold."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _kept(records: list[OpRecord]) -> int:
    """Bytes of the blocks that ops took and did not give back, without their results."""
    takes = (step for record in records for step in record.steps if isinstance(step, Take))
    return sum(take.nbytes for take in takes if take.kind is BlockKind.KEPT)


def _requested(device: int) -> int:
    return int(torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0))


def _steps() -> list[tuple[str, Callable[[], None]]]:
    return [
        ("kernels", _kernels),
        ("cublas", _cublas),
        ("cublas_backward", _cublas_backward),
        ("cublaslt", _cublaslt),
        ("cudnn", _cudnn),
        ("cudnn_dropout", _cudnn_dropout),
        ("cufft", lambda: _drop(torch.fft.fft(_ones(64, 1000)))),
        ("cusolver", lambda: _drop(torch.linalg.eigh(_ones(64, 64)))),
    ]


def _ones(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda").requires_grad_(grad)


def _drop(result: object) -> None:
    del result


def _kernels() -> None:
    x = _ones(1000)
    _drop(((x + 1).sum(), x.sort(), torch.rand_like(x)))


def _cublas() -> None:
    _drop(_ones(64, 64) @ _ones(64, 64))


def _cublas_backward() -> None:
    left = _ones(64, 64, grad=True)
    _drop(torch.autograd.grad((left @ _ones(64, 64)).sum(), left))


def _cublaslt() -> None:
    half = torch.float16
    _drop(torch.addmm(_ones(512, dtype=half), _ones(512, 512, dtype=half), _ones(512, 512, dtype=half)))


def _cudnn() -> None:
    with torch.no_grad():
        _drop(torch.nn.functional.conv2d(_ones(4, 16, 32, 32), _ones(16, 16, 3, 3)))


def _cudnn_dropout() -> None:
    layer = torch.nn.LSTM(16, 16, 2, dropout=0.5, device="cuda")
    with torch.no_grad():
        _drop(layer(_ones(4, 4, 16)))


# -- speeds --------------------------------------------------------------------------------------------------


def rates(device: int) -> Rates:
    """How fast the card computes, reads and writes, starts kernels, and copies from and to the host."""
    flops = {name: _product_rate(name, dtype) for name, dtype in _DTYPES.items() if _has(name)}
    target = _ones(_RATE_BYTES // 4)
    bandwidth = 2 * _RATE_BYTES / _seconds(lambda: target + 1.0)
    small = _ones(1)
    launch = _seconds(lambda: [small.add_(1) for _ in range(100)]) / 100
    to_card, to_host = {}, {}
    for kind in ("pinned", "pageable"):
        host = torch.zeros(_RATE_BYTES // 4, pin_memory=kind == "pinned")
        to_card[kind] = _RATE_BYTES / _seconds(_copying(target, host))
        to_host[kind] = _RATE_BYTES / _seconds(_copying(host, target))
        del host
    torch.cuda.synchronize(device)
    return Rates(flops=flops, bandwidth=bandwidth, launch_seconds=launch, to_card=to_card, to_host=to_host)


def _copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _has(name: str) -> bool:
    major, _ = torch.cuda.get_device_capability()
    return major >= 8 or name not in ("tf32", "bfloat16")


def _product_rate(name: str, dtype: torch.dtype) -> float:
    """FLOP/s of a square product of random matrices."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    size = _PRODUCT if dtype.itemsize == 2 or name == "tf32" else _SLOW_PRODUCT
    left, right = (torch.rand(size, size, device="cuda").to(dtype) for _ in range(2))
    try:
        matmul.allow_tf32 = name == "tf32"
        return 2 * size**3 / _seconds(lambda: left @ right)
    finally:
        matmul.allow_tf32 = before


def _seconds(run: Callable[[], object]) -> float:
    """Median seconds between two events of the card, warm."""
    run()
    torch.cuda.synchronize()
    found = []
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(found))
