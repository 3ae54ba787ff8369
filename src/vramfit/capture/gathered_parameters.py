"""Tells what FSDP gathers from what it keeps: gather buffers, unsharded parameters, and what is gathered ahead.

NOTE [What FSDP holds beside its shards]
FSDP2 (``_fsdp_param_group.py``) gathers the shards of a group into one buffer, on a stream of its own, and copies it
out into the unsharded parameters when the group's module runs; the buffer lives until the next one is copied out. FSDP1
(``_flat_param.py``) gathers into the unsharded flat parameter itself. Both reduce gradients from a padded copy.

A gather that begins while another module computes (backward prefetch, ``set_modules_to_forward_prefetch``,
``forward_prefetch=True``, ``unshard()`` called by the program) is prefetch until the module that it is for runs. Then
FSDP2's buffer counts as communication like any other, and FSDP1's flat parameter as unsharded parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vramfit.capture.communication_buffers import allocating
from vramfit.capture.storages import StorageMeter
from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.names import change_after_import
from vramfit.trace import Category


def install(meter: StorageMeter[Any], patches: PatchStack) -> None:
    """Let what FSDP gathers count as what it is, until the patches are undone."""
    first, second = _FlatParameters(meter), _ParameterGroups(meter)
    changes = {
        distributed.FSDP2_GROUPS: second.groups,
        distributed.FSDP2_PARAMETERS: second.parameters,
        distributed.FSDP1_HANDLES: first.handles,
        distributed.FSDP1_RUNTIME: first.runtime,
    }
    change_after_import(distributed.FSDP, changes, patches)


class _Followed:
    """A meter that is to see what FSDP does."""

    def __init__(self, meter: StorageMeter[Any]) -> None:
        self._meter = meter
        self._communicating = allocating(meter, Category.COMMUNICATION_BUFFERS)
        self._unsharding = allocating(meter, Category.UNSHARDED_PARAMETERS)
        self._reducing = allocating(meter, Category.GRADIENTS)

    @staticmethod
    def _wrap(
        patches: PatchStack, owner: Any, name: str, change: Callable[[Callable[..., Any]], Any]
    ) -> None:
        """Replace a function of a class or module, if this torch has it."""
        original = vars(owner).get(name)
        if original is not None:
            static = isinstance(original, staticmethod)
            changed = change(original.__func__ if static else original)
            patches.set(owner, name, staticmethod(changed) if static else changed)


class _ParameterGroups(_Followed):
    """FSDP2."""

    def __init__(self, meter: StorageMeter[Any]) -> None:
        super().__init__(meter)
        self._entering: list[Any] = []  # groups whose modules are about to run, or to go backward

    def groups(self, module: ModuleType, patches: PatchStack) -> None:
        """``FSDPParamGroup``, and the collectives that it imports."""
        group = module.FSDPParamGroup
        for name in ("pre_forward", "pre_backward"):
            self._wrap(patches, group, name, self._enter)
        self._wrap(patches, group, "unshard", self._gather)
        self._wrap(patches, group, "wait_for_unshard", self._use)
        self._wrap(patches, module, "foreach_all_gather_copy_out", self._communicating)
        self._wrap(patches, group, "post_backward", self._reduce)
        self._wrap(patches, module, "foreach_reduce", self._communicating)

    def parameters(self, module: ModuleType, patches: PatchStack) -> None:
        """``FSDPParam``: what modules compute with."""
        parameter = module.FSDPParam
        for name in (
            "init_all_gather_outputs",
            "alloc_all_gather_outputs",
            "init_unsharded_param",
            "to_sharded_post_forward",
        ):
            self._wrap(patches, parameter, name, self._unsharding)
        self._wrap(patches, parameter, "to_accumulated_grad_if_needed", self._reducing)

    def _enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._entering.append(group)
            try:
                return original(group, *args, **kwargs)
            finally:
                self._entering.pop()

        return enter

    def _gather(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = distributed.gather_result(group)
            with self._meter.allocating(Category.COMMUNICATION_BUFFERS):
                found = original(group, *args, **kwargs)
            result = distributed.gather_result(group)
            ahead = not self._entering or self._entering[-1] is not group
            if result is not None and result is not before and ahead:
                self._meter.tag(result.all_gather_output, Category.PREFETCH)
            return found

        return unshard

    def _use(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(group: Any, *args: Any, **kwargs: Any) -> Any:
            if (result := distributed.gather_result(group)) is not None:
                self._meter.turn(result.all_gather_output, Category.PREFETCH, Category.COMMUNICATION_BUFFERS)
            with self._meter.allocating(Category.COMMUNICATION_BUFFERS):
                return original(group, *args, **kwargs)

        return wait

    def _reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def post_backward(group: Any, *args: Any, **kwargs: Any) -> Any:
            for parameter in group.fsdp_params:
                self._gradient(distributed.unsharded_parameter(parameter))
            found = original(group, *args, **kwargs)
            for parameter in group.fsdp_params:
                self._gradient(parameter.sharded_param)
            return found

        return post_backward

    def _gradient(self, parameter: Any) -> None:
        if parameter is not None and parameter.grad is not None:
            self._meter.tag(parameter.grad, Category.GRADIENTS)


class _FlatParameters(_Followed):
    """FSDP1."""

    def __init__(self, meter: StorageMeter[Any]) -> None:
        super().__init__(meter)
        self._ahead = False

    def handles(self, module: ModuleType, patches: PatchStack) -> None:
        """``FlatParamHandle``."""
        handle = module.FlatParamHandle
        self._wrap(patches, handle, distributed.FLAT_GATHER, self._gather)
        self._wrap(patches, handle, distributed.FLAT_LOWER, self._lower)
        # A shard on the host that is about to be gathered.
        self._wrap(patches, handle, "flat_param_to", self._communicating)

    def runtime(self, module: ModuleType, patches: PatchStack) -> None:
        """What runs before and after modules."""
        self._wrap(patches, module, distributed.FLAT_PREFETCH, self._prefetch)
        self._wrap(patches, module, distributed.FLAT_REDUCE, self._reduce)
        self._wrap(patches, module, distributed.FLAT_ACCUMULATE, self._accumulate)

    def _gather(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def allocate(handle: Any) -> Any:
            category = Category.PREFETCH if self._ahead else Category.UNSHARDED_PARAMETERS
            with self._meter.allocating(category):
                return original(handle)

        return allocate

    def _lower(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def use(handle: Any) -> Any:
            # Without sharding modules compute with it.
            sharded = handle.uses_sharded_strategy
            kind = Category.COMMUNICATION_BUFFERS if sharded else Category.UNSHARDED_PARAMETERS
            with self._meter.allocating(kind):
                return original(handle)

        return use

    def _prefetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prefetch(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            # It is called for the handle whose module is about to run, to gather that of another one.
            for name in distributed.FLAT_PARAMETERS if handle else ():
                if (gathered := getattr(handle.flat_param, name, None)) is not None:
                    self._meter.turn(gathered, Category.PREFETCH, Category.UNSHARDED_PARAMETERS)
            before, self._ahead = self._ahead, True
            try:
                return original(state, handle, *args, **kwargs)
            finally:
                self._ahead = before

        return prefetch

    def _reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def post_backward(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            if handle.flat_param.grad is not None:
                self._meter.tag(handle.flat_param.grad, Category.GRADIENTS)
            with self._meter.allocating(Category.COMMUNICATION_BUFFERS):
                return original(state, handle, *args, **kwargs)

        return post_backward

    def _accumulate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def accumulate(state: Any, handle: Any, sharded: Any) -> Any:
            kept = original(state, handle, sharded)
            self._meter.tag(kept, Category.GRADIENTS)
            return kept

        return accumulate
