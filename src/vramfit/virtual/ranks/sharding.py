"""What DTensor and FSDP do beside the program's work, kept from the dispatch mode or shown to it."""

from __future__ import annotations

import functools
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed, names
from vramfit.torch_internals.dispatch import disable_current_modes
from vramfit.virtual.describe import VirtualFakeMode


def _look_once(module: ModuleType, patches: PatchStack) -> None:
    """Let DTensor look once through the tensors of a ``_foreach_`` op for what it asks of all of them.

    It looks through all for each of them, a third of the processor's time of an optimizer's first step over 7 billion
    parameters. It asks whether any is strided, and whether those agree (``_propagate_use_strided_shard_flag``); one of
    each kind says as much.
    """
    if not distributed.strided_flag.exists:  # not in every torch
        return
    original = distributed.strided_flag.get()
    # The schema of last time, which is asked about once for each of its tensors, and its kinds.
    seen: list[Any] = [None, None]

    def propagate_flag(strategy: Any, schema: Any) -> None:
        if seen[0] is not schema:
            strided = (
                spec
                for spec in schema.args_spec
                if any(
                    isinstance(placement, distributed.strided_shard.get()) for placement in spec.placements
                )
            )
            kinds = {spec.use_strided_shard_as_shard_order: spec for spec in strided}
            seen[:] = schema, SimpleNamespace(args_spec=tuple(kinds.values()))
        if seen[1].args_spec:
            original(strategy, seen[1])

    distributed.strided_flag.replace(patches, propagate_flag)


_BY_ELEMENT = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")


def _expand_once(module: ModuleType, patches: PatchStack) -> None:
    """Let DTensor work out once how equal tensors of a ``_foreach_`` op may be sharded.

    Its strategies of such an op are those of its elements, each worked out anew: of 405 billion parameters that is more
    than half of the processor's time of a first step. Layers are alike, so of 1,100 tensors there are a dozen kinds.
    """
    if not distributed.expanded_strategy.exists:  # not in every torch
        return
    original = distributed.expanded_strategy.get()
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

    distributed.expanded_strategy.replace(patches, expand)


def install(patches: PatchStack) -> None:
    """Keep from the mode how DTensor works out shapes, and show it which streams FSDP names."""

    def propagate_apart(module: ModuleType, patches: PatchStack) -> None:
        """DTensor runs each op once on fake tensors of its own to learn the global shape: no work of the program."""
        quiet = VirtualFakeMode()
        patches.set(module, "FakeTensorMode", lambda: quiet)
        if hasattr(module, "detect_fake_mode"):
            patches.set(module, "detect_fake_mode", lambda *args, **kwargs: None)
        inner = distributed.propagated_meta.get()

        def propagate(self: Any, schema: Any) -> Any:
            if not schema.op._schema.returns:  # an optimizer's ``_foreach_`` ops: nothing has a shape
                return None
            with disable_current_modes():
                return inner(self, schema)

        distributed.propagated_meta.replace(patches, propagate)
        _look_once(module, patches)
        _expand_once(module, patches)

    run = time.monotonic_ns()

    def own_mesh(module: ModuleType, patches: PatchStack) -> None:
        """Meshes of one run are no others' equals: DTensor keeps what it worked out by mesh, in each thread.

        Another virtual GPU of this process may be another rank, with other groups under the same names.
        """
        mesh = module.DeviceMesh
        original = mesh.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            setattr(self, distributed.MESH_THREAD, run)

        patches.set(mesh, "__init__", init)

    def seen_stream(module: ModuleType, patches: PatchStack) -> None:
        """FSDP1 names a stream below the dispatcher, where a CPU build has no kernel for it."""
        if distributed.RECORD_STREAM in vars(module):
            patches.set(
                module, distributed.RECORD_STREAM, lambda tensor, stream: tensor.record_stream(stream)
            )

    names.change_after_import(
        distributed.DTENSOR,
        {"torch.distributed.device_mesh": own_mesh, distributed.PROPAGATION: propagate_apart},
        patches,
    )
    names.change_after_import(
        distributed.FSDP, dict.fromkeys(distributed.STREAM_RECORDERS, seen_stream), patches
    )
