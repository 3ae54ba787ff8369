"""Operators over functions that trace what they are given while the program runs: ``flex_attention`` with gradients."""

from __future__ import annotations

import importlib
from typing import Any

from vramfit.patching import PatchStack
from vramfit.virtual.compiled.outside import Outside
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, outside: Outside, patches: PatchStack) -> None:
    """Let them trace outside of the virtual GPU, as compilers do, with what they make on the card kept virtual."""
    # By its path: an operator has the name of the module.
    flex_attention = importlib.import_module("torch._higher_order_ops.flex_attention")
    original = flex_attention.create_fw_bw_graph

    def create_fw_bw_graph(*args: Any, **kwargs: Any) -> Any:
        with outside(), mode.fake:
            return original(*args, **kwargs)

    patches.set(flex_attention, "create_fw_bw_graph", create_fw_bw_graph)
