"""Copies between the host and the card, and between types and layouts on the card."""

from __future__ import annotations

from functools import partial

import torch

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, channels_last, forward, rand


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.HOST)
    for pinned in (True, False):
        for dtype in (torch.float32, torch.uint8):
            name = f"{'pinned' if pinned else 'pageable'}/{str(dtype)[6:]}"
            grid.add(f"to card/{name}", partial(_to_card, pinned, dtype), Flag.UNTIMED)
    grid.add("to card/pinned/other type", partial(_copy_other_type, True), Flag.UNTIMED)
    grid.add("to card/pageable/other type", partial(_copy_other_type, False), Flag.UNTIMED)
    grid.add("to card/strided", lambda: partial(_host(False, torch.float32).t().to, "cuda"), Flag.UNTIMED)
    grid.add("to host/pageable", lambda: rand(1000, 1000).cpu, Flag.UNTIMED)
    grid.add("to host/pinned", _to_pinned, Flag.UNTIMED)
    grid.add("to host/strided", _strided_to_host, Flag.UNTIMED)
    grid.add("on card/fp32 to bf16", lambda: forward(rand(2000, 2000).to, torch.bfloat16))
    grid.add("on card/clone", lambda: forward(torch.clone, rand(2000, 2000)))
    grid.add("on card/transposed", lambda: forward(lambda x: x.t().contiguous(), rand(2000, 1000)))
    grid.add("on card/to channels last", lambda: forward(channels_last, rand(8, 64, 56, 56)))
    grid.add("on card/cat", lambda: forward(torch.cat, [rand(100 + n, 64) for n in range(40)]))
    grid.add("on card/stack", lambda: forward(torch.stack, [rand(100, 64) for _ in range(40)]))
    return grid.cases


def _host(pinned: bool, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1000, 1000, dtype=dtype, pin_memory=pinned)


def _to_card(pinned: bool, dtype: torch.dtype) -> Run:
    source = _host(pinned, dtype)
    return lambda: source.to("cuda", non_blocking=pinned)


def _copy_other_type(pinned: bool) -> Run:
    source, target = _host(pinned, torch.uint8), rand(1000, 1000)
    return forward(target.copy_, source)


def _to_pinned() -> Run:
    source, target = rand(1000, 1000), _host(True, torch.float32)
    return lambda: target.copy_(source, non_blocking=True)


def _strided_to_host() -> Run:
    source, target = rand(1000, 1000).t(), torch.zeros(1000, 1000)
    return lambda: target.copy_(source)
