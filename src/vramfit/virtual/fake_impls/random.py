"""In-place random ops: FakeTensorMode's decompositions want a CUDA generator that does not exist here."""

from __future__ import annotations

from typing import Any

from vramfit.virtual.fake_impls.registry import rule
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner


@rule(
    "aten.uniform_.default",
    "aten.normal_.default",
    "aten.bernoulli_.float",
    "aten.bernoulli_.Tensor",
    "aten.random_.default",
    "aten.random_.from",
    "aten.random_.to",
    "aten.exponential_.default",
    "aten.cauchy_.default",
    "aten.geometric_.default",
    "aten.log_normal_.default",
)
def fill_random_(mode: OpRunner, call: OpCall) -> Any:
    """Fill in place: the tensor itself comes back, and its shadow is drawn from a generator of our own."""
    mode.settle(call, call.args[0])
    return call.args[0]
