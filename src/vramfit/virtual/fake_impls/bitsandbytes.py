"""Ops of bitsandbytes. See NOTE [bitsandbytes] in torch_patches/libraries.py."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.capture.attribution import ProgramPhase
from vramfit.capture.ops import tensors_in
from vramfit.trace import Category
from vramfit.virtual import roofline
from vramfit.virtual.fake_impls.registry import LATE
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

_QUANTISING = {"quantize_4bit", "quantize_blockwise", "int8_vectorwise_quant"}
_KEYS = (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CompositeExplicitAutograd)


def on_card(mode: OpRunner, call: OpCall) -> Any:
    """Run the op's own Python for a card, whose allocations arrive one by one; values are not known afterwards."""
    card = next((t.device.index or 0 for t in call.tensors() if t.device.type == "cuda"), None)
    key = next(
        (k for k in _KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(call.func.name(), k)), None
    )
    if card is None or key is None:
        return mode.run(call)
    with mode:
        call.out = out = call.func._op_dk(key, *call.args, **call.kwargs)
    for tensor in (*tensors_in(out), *call.written()):
        if type(tensor) is FakeTensor:
            mode.shadows.forget(tensor)
            # Before anything runs, weights are quantised: packed, and their scales.
            if mode.meter.phases.phase is ProgramPhase.SETUP and call.func._opname in _QUANTISING:
                mode.meter.tag(tensor, Category.PARAMETERS)
    spec, rates = mode.machine.devices[card].spec, mode.machine.rates
    mode.machine.advance(1e6 * roofline.seconds(call, spec, rates), card)
    return out


LATE["bitsandbytes.*"] = on_card
