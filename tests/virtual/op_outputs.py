"""A program: runs torch's own sample inputs of every op on the CPU and on the virtual GPU, and prints what differs.

torch's test helpers freeze global settings when they are imported, so this needs a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
import types
import unittest
import warnings
from typing import Any

SAMPLES_PER_OP = 2


def import_op_db() -> list[Any]:
    """torch's table of ops; its helpers want a package that only their own tests use."""
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def main() -> None:
    """Print one JSON object."""
    warnings.simplefilter("ignore")
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    from vramfit.virtual.gpu import VirtualGPU

    def facts(out: Any) -> list[list[Any]]:
        return [
            [list(t.shape), str(t.dtype), list(t.stride()), t.untyped_storage().nbytes()]
            for t in tree_leaves(out)
            if isinstance(t, torch.Tensor) and t.layout is torch.strided
        ]

    cases = []
    for op in import_op_db():
        if torch.float32 not in op.dtypes:
            continue
        for number, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=False)):
            if number == SAMPLES_PER_OP:
                break
            arguments = (sample.input, *sample.args)
            try:
                copies = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, arguments)
                cases.append((op, sample, facts(op.op(*copies, **sample.kwargs))))
            except (RuntimeError, AssertionError):
                continue  # the CPU has no such op: nothing to compare with
    compared, errors, different = 0, {}, {}

    def to_card(x: Any) -> Any:
        return x.cuda() if isinstance(x, torch.Tensor) else x

    with VirtualGPU("RTX 4090", alloc_conf=""):
        for op, sample, real in cases:
            name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
            try:
                out = op.op(
                    *tree_map(to_card, (sample.input, *sample.args)), **tree_map(to_card, sample.kwargs)
                )
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            compared += 1
            virtual = facts(out)
            if virtual != real:
                different[name] = [real, virtual]
    print(json.dumps({"compared": compared, "errors": errors, "different": different}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
