"""Small networks that are run tile by tile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def plain(axes: int, channels: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two convolutions; a value sees 3 steps to each side."""
    torch.manual_seed(0)
    conv = CONV[axes]
    return (
        nn.Sequential(conv(channels, 4, 3, padding=1), nn.GELU(), conv(4, 3, 5, padding=2)).eval().to(dtype)
    )


class HourGlass(nn.Module):
    """Down by four and up again, with a skip; a value sees fewer than 24 steps to each side."""

    def __init__(self, axes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(1)
        conv = CONV[axes]
        self.first = conv(2, 4, 3, padding=1)
        self.down = nn.Sequential(
            conv(4, 6, 3, stride=2, padding=1), nn.ReLU(inplace=True), conv(6, 6, 3, padding=1), POOL[axes](2)
        )
        self.up = nn.Upsample(scale_factor=4)
        self.last = conv(10, 2, 3, padding=1)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.last(torch.cat([first, self.up(self.down(first))], 1))


class Several(nn.Module):
    """A map of the input's size, one of half of it, and one that is larger, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.same, self.smaller = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(2, 1, 2, stride=2)
        self.larger = nn.Sequential(nn.Conv2d(2, 12, 3, padding=1), nn.PixelShuffle(2))
        self.eval()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"same": self.same(x), "half": self.smaller(x)[:, 0], "larger": self.larger(x)}


def whole(model: nn.Module, x: torch.Tensor) -> Any:
    """What a model gives for the whole input ``[B, C, *spatial]`` or ``[C, *spatial]``."""
    batched = (
        x if x.dim() == next(m for m in model.modules() if hasattr(m, "weight")).weight.dim() else x[None]
    )
    with torch.no_grad():
        found = model(batched)
    if batched is x:
        return found
    return {name: one[0] for name, one in found.items()} if isinstance(found, dict) else found[0]
