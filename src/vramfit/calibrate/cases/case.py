"""A case of the grid: a piece of code that runs one op, or a few, on the card."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch

Run = Callable[[], object]


class OpFamily(Enum):
    """Families of ops; the value is the name on the command line."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONVOLUTION = "conv"
    NORM = "norm"
    EMBEDDING = "embedding"
    INDEXING = "indexing"
    SORTING = "sorting"
    REDUCTION = "reduction"
    LOSS = "loss"
    RANDOM = "random"
    RNN = "rnn"
    RESAMPLING = "resampling"
    OPTIMIZER = "optimizer"
    FFT = "fft"
    LINALG = "linalg"
    HOST = "host"


class Flag(Enum):
    """How a case wants to be run."""

    SEARCHES = "cuDNN's benchmark mode: the first run is recorded as well"
    DETERMINISTIC = "torch.use_deterministic_algorithms(True)"
    TF32 = "TF32 for products of float32 matrices"
    NO_TF32 = "no TF32 in cuDNN either"
    NO_CUDNN = "cuDNN switched off"
    UNTIMED = "its time says nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A case of the grid.

    Attributes:
        name: unique, and telling: family, op, shape, type.
        build: makes the inputs on the current device and returns what is run, again and again.
        flags: how it is run.
        priority: 0 before 1 before 2; within one, families take turns.
    """

    name: str
    family: OpFamily
    build: Callable[[], Run]
    flags: frozenset[Flag] = field(default=frozenset())
    priority: int = 1

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """Set torch's switches as the case wants them, and set them back."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = (cudnn.enabled, cudnn.benchmark, matmul.allow_tf32, cudnn.allow_tf32)
        always = torch.are_deterministic_algorithms_enabled()
        try:
            torch.manual_seed(0)
            cudnn.enabled = Flag.NO_CUDNN not in self.flags
            cudnn.benchmark = Flag.SEARCHES in self.flags
            matmul.allow_tf32 = Flag.TF32 in self.flags
            cudnn.allow_tf32 = Flag.NO_TF32 not in self.flags
            if Flag.DETERMINISTIC in self.flags:
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            cudnn.enabled, cudnn.benchmark, matmul.allow_tf32, cudnn.allow_tf32 = before
            torch.use_deterministic_algorithms(always)


class Grid:
    """Collects the cases of one family."""

    def __init__(self, family: OpFamily) -> None:
        self.family = family
        self.cases: list[Case] = []

    def add(self, name: str, build: Callable[[], Run], *flags: Flag, priority: int = 1) -> None:
        """Add a case; the family's name is put before its own."""
        self.cases.append(
            Case(
                name=f"{self.family.value}/{name}",
                family=self.family,
                build=build,
                flags=frozenset(flags),
                priority=priority,
            )
        )


def rand(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """A tensor of normal numbers on the card."""
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype).requires_grad_(grad)


def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Whole numbers below a bound, on the card: each as often as any other, in no order."""
    return ((torch.arange(math.prod(shape), device="cuda") * 7919) % high).to(dtype).reshape(shape)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """The same images with channels last."""
    return x.contiguous(memory_format=torch.channels_last)


def forward(op: Callable[..., Any], *inputs: Any, **options: Any) -> Run:
    """Run an op without autograd."""

    def run() -> object:
        with torch.no_grad():
            return op(*inputs, **options)

    return run


def both(op: Callable[..., Any], *inputs: Any, **options: Any) -> Run:
    """Run an op forward, and backward to every input that wants a gradient."""
    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    return partial(_trained, op, inputs, options, wanted)


def module(layer: torch.nn.Module, *inputs: torch.Tensor) -> Run:
    """Run a layer forward, and backward to its parameters and inputs."""
    wanted = [x for x in (*inputs, *layer.parameters()) if x.requires_grad]
    return partial(_trained, layer, inputs, {}, wanted)


def _trained(
    op: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any], wanted: list[torch.Tensor]
) -> object:
    out = op(*inputs, **options)
    first = out[0] if isinstance(out, (tuple, list)) else out
    return torch.autograd.grad(first, wanted, torch.ones_like(first))


def short(dtype: torch.dtype) -> str:
    """``bf16`` of ``torch.bfloat16``."""
    return _SHORT.get(dtype, str(dtype)[6:])


_SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.complex64: "c64",
}
