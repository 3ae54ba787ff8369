"""A model's weights in a store, for inference: each module's are on the device while it runs.

Where a model is trained, its graph holds the weights until the backward pass; the technique ``parameter-offload`` of a
plan brings them twice instead. Here gradients are refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.patching import PatchStack
from vramfit.runtime.tiers.store import Store


class StoredWeights:
    """Keeps the parameters of a model in a store until `undo`; buffers stay where they are.

    Args:
        module: a model that computes without gradients, its parameters on any device.
        store: on the device where the model computes.
        prefix: keys are ``(prefix, name of the parameter)``; of one that several modules share, its first name.

    Raises:
        StoreFull: there is no room; the model is as it was.
    """

    def __init__(self, module: nn.Module, store: Store, prefix: str = "weights") -> None:
        self._store, self._patches = store, PatchStack()
        self._keys: dict[nn.Parameter, tuple[str, str]] = {}
        self._homes: dict[nn.Parameter, torch.device] = {}
        self._open: list[tuple[nn.Module, contextlib.ExitStack]] = []
        try:
            for name, parameter in module.named_parameters():
                self._take(parameter, (prefix, name))
            for part in module.modules():
                if part._parameters:
                    self._hook(part)
            self._patches.call(module.register_state_dict_pre_hook(_refuse_state_dict).remove)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Give the model its parameters back, where they were before."""
        self._patches.undo()
        for parameter, key in list(self._keys.items()):
            parameter.data = self._store.on_host(key).to(self._homes[parameter])
            del self._keys[parameter], self._homes[parameter], self._store[key]

    # -- within --------------------------------------------------------------------------------------------------

    def _take(self, parameter: nn.Parameter, key: tuple[str, str]) -> None:
        self._store.put(key, parameter.data)
        self._keys[parameter], self._homes[parameter] = key, parameter.device
        parameter.data = self._away(parameter)

    def _away(self, parameter: nn.Parameter) -> torch.Tensor:
        return torch.empty(0, dtype=parameter.dtype, device=self._store.device)

    def _hook(self, part: nn.Module) -> None:
        parameters = list(dict.fromkeys(one for one in part._parameters.values() if one is not None))

        def before(*_: Any) -> None:
            if torch.is_grad_enabled() and any(one.requires_grad for one in parameters):
                raise UsageError(
                    "weights in a store are for inference, and gradients are on",
                    "Call the model under torch.no_grad(), or train with the technique parameter-offload of a plan",
                )
            lease = contextlib.ExitStack()
            given = lease.enter_context(self._store.reading(*(self._keys[one] for one in parameters)))
            for parameter, tensor in zip(parameters, given, strict=True):
                parameter.data = tensor
            self._open.append((part, lease))

        def after(*_: Any) -> None:
            if not self._open or self._open[-1][0] is not part:
                return  # it did not begin: this is called after errors too
            for parameter in parameters:
                parameter.data = self._away(parameter)
            self._open.pop()[1].close()
            self._store.done(*(self._keys[one] for one in parameters))  # a model is gone through in a circle

        self._patches.call(part.register_forward_pre_hook(before).remove)
        self._patches.call(part.register_forward_hook(after, always_call=True).remove)


def _refuse_state_dict(*_: Any) -> None:
    raise UsageError("the weights are in a store, not in the model", "Call undo() first, then state_dict()")
