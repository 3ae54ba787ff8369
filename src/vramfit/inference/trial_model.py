"""A model as the check of its tiles calls it: a copy in float64 on the CPU, or itself where a copy is too slow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vramfit.inference.probe_subject import CallWatch, float64_copy, kept_buffers
from vramfit.inference.tile_runner import PICTURES, to_model_dtype
from vramfit.torch_internals.dispatch import disable_current_modes
from vramfit.torch_internals.layers import compiled_from
from vramfit.workload.containers import tensors_in

_FLOAT64_BAR = 1e-9
_OWN_BARS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TF32_BAR = 5e-3


@dataclass(frozen=True, kw_only=True)
class TrialModel:
    """One way to call a model.

    Attributes:
        call: the model, or its copy.
        module: whose buffers are put back after each call; None for a function.
        prepare: what an input becomes before `call` gets it.
        device: where inputs go.
        exact: whether everything is in float64.
    """

    call: Callable[..., Any]
    module: nn.Module | None
    prepare: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device
    exact: bool

    def run(self, given: torch.Tensor, *, seed: int = 0, watch: TorchFunctionMode | None = None) -> Any:
        """The outputs, as the model gives them, without gradients; random numbers and buffers stay as they were.

        Args:
            given: a batch ``[b, C, *spatial]``, on the CPU.
            seed: of torch's random numbers.
            watch: sees every call of a torch function.

        Raises:
            Exception: whatever the model raises for this size.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(disable_current_modes())
            stack.enter_context(torch.inference_mode())
            devices = [self.device] if self.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            torch.manual_seed(seed)
            if self.module is not None:
                stack.enter_context(kept_buffers(self.module))
            if self.exact:
                stack.enter_context(CallWatch(set(), norms=True))
            if watch is not None:
                stack.enter_context(watch)
            return self.call(self.prepare(given.clone().to(self.device)))

    def outputs(self, given: torch.Tensor, *, seed: int = 0) -> list[torch.Tensor]:
        """The output's tensors, on the CPU."""
        return [one.detach().cpu() for one in tensors_in(self.run(given, seed=seed))]

    def bar(self, output: torch.Tensor) -> float:
        """How far results for inputs of two sizes may differ by rounding, as a share of the largest value."""
        if self.exact:
            return _FLOAT64_BAR
        dtype = next(
            (
                one.dtype
                for one in (self.module.parameters() if self.module else ())
                if one.is_floating_point()
            ),
            output.dtype,
        )
        lower = self.device.type == "cuda" and torch.backends.cudnn.allow_tf32
        bar = _OWN_BARS.get(dtype, _OWN_BARS[torch.float32])
        return max(bar, _TF32_BAR) if lower and dtype is torch.float32 else bar


def exact_model(model: Callable[..., Any], prepare: Callable[..., Any] | None) -> TrialModel:
    """A copy of a module in float64 on the CPU; a function as it is, with inputs in float64.

    Raises:
        ProbeStoppedError: it cannot be copied.
    """
    device = torch.device("cpu")
    owner = getattr(model, "__self__", model)
    call: Callable[..., Any] = model
    module: nn.Module | None = None
    if isinstance(owner, nn.Module):
        with disable_current_modes():
            module = float64_copy(compiled_from(owner), device)
        call = module if owner is model else getattr(module, model.__name__)

    def in_float64(batch: torch.Tensor) -> torch.Tensor:
        made = batch if prepare is None else prepare(batch)
        known = made.dtype in PICTURES if prepare is None else False
        return made.to(torch.float64) if made.is_floating_point() or known else made

    return TrialModel(call=call, module=module, prepare=in_float64, device=device, exact=True)


def own_model(
    model: Callable[..., Any], prepare: Callable[..., Any] | None, device: torch.device
) -> TrialModel:
    """The model itself, on its device and in its own dtype."""
    owner = getattr(model, "__self__", model)
    module = compiled_from(owner) if isinstance(owner, nn.Module) else None
    call = module if module is not None and owner is model else model
    return TrialModel(
        call=call,
        module=module,
        prepare=prepare or to_model_dtype(module or model),
        device=device,
        exact=False,
    )
