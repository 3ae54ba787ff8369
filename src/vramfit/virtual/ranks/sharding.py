"""What DTensor and FSDP do beside the program's work, kept from the dispatch mode or shown to it."""

from __future__ import annotations

import functools
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from vramfit.patching import PatchStack, after_import
from vramfit.virtual.describe import VirtualFakeMode


def _look_once(module: ModuleType, patches: PatchStack) -> None:
    """Let DTensor look once through the tensors of a ``_foreach_`` op for what it asks of all of them.

    It looks through all for each of them, a third of the processor's time of an optimizer's first step over 7 billion
    parameters. It asks whether any is strided, and whether those agree (``_propagate_use_strided_shard_flag``); one of
    each kind says as much.
    """
    original = vars(module).get("_propagate_use_strided_shard_flag")
    if original is None:
        return
    # The schema of last time, which is asked about once for each of its tensors, and its kinds.
    seen: list[Any] = [None, None]

    def propagate_flag(strategy: Any, schema: Any) -> None:
        if seen[0] is not schema:
            strided = (
                spec
                for spec in schema.args_spec
                if any(isinstance(placement, module._StridedShard) for placement in spec.placements)
            )
            kinds = {spec.use_strided_shard_as_shard_order: spec for spec in strided}
            seen[:] = schema, SimpleNamespace(args_spec=tuple(kinds.values()))
        if seen[1].args_spec:
            original(strategy, seen[1])

    patches.set(module, "_propagate_use_strided_shard_flag", propagate_flag)


_BY_ELEMENT = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")


def _expand_once(module: ModuleType, patches: PatchStack) -> None:
    """Let DTensor work out once how equal tensors of a ``_foreach_`` op may be sharded.

    Its strategies of such an op are those of its elements, each worked out anew: of 405 billion parameters that is more
    than half of the processor's time of a first step. Layers are alike, so of 1,100 tensors there are a dozen kinds.
    """
    original = vars(module).get("_expand_single_dim_strategy_to_mesh")  # not in every torch
    if original is None:
        return
    several, one = module.TupleStrategy, module.OpStrategy

    def expand(mesh: Any, schema: Any, info: Any, metas: Any) -> Any:
        lists = [arg.children for arg in schema.args_schema if isinstance(arg, several)]
        if not schema.op.name().startswith(_BY_ELEMENT) or len({len(children) for children in lists}) != 1:
            return original(mesh, schema, info, metas)
        children = [child for row in lists for child in row]
        if not all(isinstance(child, one) and len(child.strategies) == 1 for child in children):
            return original(mesh, schema, info, metas)
        kinds = [
            (*(child.strategies[0].output_spec for child in row), None if metas is None else metas[at])
            for at, row in enumerate(zip(*lists, strict=True))
        ]
        try:
            numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        except TypeError:  # shapes that are symbols have no hash
            return original(mesh, schema, info, metas)
        first = [kinds.index(kind) for kind in numbers]
        few = type(schema)(
            op=schema.op,
            args_schema=tuple(
                several([arg.children[at] for at in first]) if isinstance(arg, several) else arg
                for arg in schema.args_schema
            ),
            kwargs_schema=schema.kwargs_schema,
            schema_info=schema.schema_info,
        )
        expanded = original(mesh, few, info, None if metas is None else [metas[at] for at in first])

        def strategies(*args: Any) -> Any:
            found = expanded(*args).children
            return several([found[numbers[kind]] for kind in kinds])

        return strategies

    patches.set(module, "_expand_single_dim_strategy_to_mesh", expand)


def install(patches: PatchStack) -> None:
    """Keep from the mode how DTensor works out shapes, and show it which streams FSDP names."""

    def propagate_apart(module: ModuleType) -> None:
        """DTensor runs each op once on fake tensors of its own to learn the global shape: no work of the program."""
        quiet = VirtualFakeMode()
        patches.set(module, "FakeTensorMode", lambda: quiet)
        if hasattr(module, "detect_fake_mode"):
            patches.set(module, "detect_fake_mode", lambda *args, **kwargs: None)
        inner = module.ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate(self: Any, schema: Any) -> Any:
            if not schema.op._schema.returns:  # an optimizer's ``_foreach_`` ops: nothing has a shape
                return None
            with _disable_current_modes():
                return inner(self, schema)

        patches.set(module.ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)
        _look_once(module, patches)
        _expand_once(module, patches)

    run = time.monotonic_ns()

    def own_mesh(module: ModuleType) -> None:
        """Meshes of one run are no others' equals: DTensor keeps what it worked out by mesh, in each thread.

        Another virtual GPU of this process may be another rank, with other groups under the same names.
        """
        mesh = module.DeviceMesh
        original = mesh.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self._thread_id = run  # part of what makes meshes equal, and of no other use

        patches.set(mesh, "__init__", init)

    def seen_stream(module: ModuleType) -> None:
        """FSDP1 names a stream below the dispatcher, where a CPU build has no kernel for it."""
        if "_no_dispatch_record_stream" in vars(module):
            patches.set(
                module, "_no_dispatch_record_stream", lambda tensor, stream: tensor.record_stream(stream)
            )

    after_import(
        {
            "torch.distributed.device_mesh": own_mesh,
            "torch.distributed.tensor._sharding_prop": propagate_apart,
            "torch.distributed.fsdp._common_utils": seen_stream,
            "torch.distributed.fsdp._flat_param": seen_stream,
            "torch.distributed.fsdp._runtime_utils": seen_stream,
        },
        patches,
    )
