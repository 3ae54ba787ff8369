"""Optimizers by name, and an 8-bit AdamW in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 256
"""Elements that share one scale in the 8-bit states."""


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """An optimizer by name: the class, and after a dash which of its implementations."""
    return MAKERS[name](parameters, **options)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose two moments are 8-bit, one scale for each block of elements; parameters below 4096 stay in float32.

    Quantisation is linear and absolute-maximum: this is about memory, not about the best dynamic map.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float = 1e-4, weight_decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"] = compress(torch.zeros_like(parameter, dtype=torch.float32), signed=True)
            state["square"] = compress(torch.zeros_like(parameter, dtype=torch.float32), signed=False)
        state["step"] += 1
        first, second = group["betas"]
        gradient = parameter.grad.float()
        mean = expand(state["mean"], parameter).lerp_(gradient, 1 - first)
        square = (
            expand(state["square"], parameter).mul_(second).addcmul_(gradient, gradient, value=1 - second)
        )
        correction = (1 - second ** state["step"]) ** 0.5
        denominator = square.sqrt().div_(correction).add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["decay"])
        parameter.addcdiv_(mean, denominator, value=-group["lr"] / (1 - first ** state["step"]))
        state["mean"] = compress(mean, signed=True)
        state["square"] = compress(square, signed=False)


def compress(values: Tensor, *, signed: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Blocks of bytes and their scales; small or uneven tensors as they are."""
    if values.numel() < 4096 or values.numel() % BLOCK:
        return values
    blocks = values.reshape(-1, BLOCK)
    top = 127 if signed else 255
    scale = blocks.abs().amax(dim=1, keepdim=True).clamp_(min=1e-20).div_(top)
    return (blocks / scale).round_().to(torch.int8 if signed else torch.uint8), scale


def expand(held: Tensor | tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """What `compress` held, in float32 and in the shape of ``like``."""
    if isinstance(held, Tensor):
        return held
    return held[0].float().mul_(held[1]).view(like.shape)


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=1e-3, **o),
    "sgd-momentum": lambda p, **o: torch.optim.SGD(p, lr=1e-3, momentum=0.9, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, lr=1e-4, **o),
    "adamw-foreach": lambda p, **o: torch.optim.AdamW(p, lr=1e-4, foreach=True, **o),
    "adamw-fused": lambda p, **o: torch.optim.AdamW(p, lr=1e-4, fused=True, **o),
    "adamw-loop": lambda p, **o: torch.optim.AdamW(p, lr=1e-4, foreach=False, fused=False, **o),
    "adamw-8bit": lambda p, **o: AdamW8bit(p, **o),
    "adafactor": lambda p, **o: torch.optim.Adafactor(p, lr=1e-3, **o),
    "rmsprop": lambda p, **o: torch.optim.RMSprop(p, lr=1e-4, momentum=0.9, **o),
}
