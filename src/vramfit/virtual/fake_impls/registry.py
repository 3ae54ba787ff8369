"""The table of rules, from op overload to handler, and how a rule ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.data_dependent.assume import Extent
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner

AnyHandler = TypeVar("AnyHandler", bound=Handler)

RULES: dict[OpOverload, Handler] = {}
LATE: dict[str, Handler] = {}
"""Handlers by full name (``torchvision.nms.default``) of ops that exist only once the module that defines them is
imported, or for all ops of a library (``bitsandbytes.*``)."""


def rule(
    *overloads: str, on_host: bool = False, hands_on: bool = False
) -> Callable[[AnyHandler], AnyHandler]:
    """Register a handler for overloads named like ``aten._to_copy.default``.

    Overloads that this torch does not have are passed over: versions differ.

    Args:
        overloads: full names.
        on_host: the handler also wants calls that touch no fake tensor and no ``cuda`` device.
        hands_on: the handler passes some calls to `VirtualMode.run` unchanged, and the key of a call decides which: a
            remembered call need not go through the handler again.
    """

    def register(handler: AnyHandler) -> AnyHandler:
        handler.on_host = on_host  # type: ignore[attr-defined]
        handler.hands_on = hands_on  # type: ignore[attr-defined]
        for name in overloads:
            overload = find_overload(name)
            if overload is not None:
                RULES[overload] = handler
            elif not name.startswith("aten."):
                LATE[name] = handler
        return handler

    return register


def finish(mode: OpRunner, call: OpCall, out: Any, extent: Extent | None = None) -> Any:
    """Place a result, which may rest on an assumed size, and return it."""
    mode.settle(call, out, extents=() if extent is None else (extent,))
    return out


def find_overload(name: str) -> Any:
    """The overload of that full name; None where this torch lacks it."""
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(found, overload, None)
