"""Weights with zeros: the smallest values, or two of four; what a card keeps of them in fewer bytes, and what not."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from vramfit.arguments import number_argument
from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.quantization.weight_formats import quantisable

_TILES = {torch.float16: (32, 64), torch.bfloat16: (32, 64), torch.int8: (32, 128)}
"""Rows and columns that a weight has to be a multiple of (torch/sparse/semi_structured.py, CUTLASS)."""

_CAPABILITY = (8, 0)
"""CUDA C++ Programming Guide: sparse tensor cores from 8.0 on."""


def zero_smallest(model: nn.Module, *, share: float = 0.5) -> AttachedProgram:
    """Set the smallest values of each linear layer's weight to zero, in place.

    It saves no bytes: a dense tensor has room for its zeros. Kept as a sparse tensor (CSR), a value of 2 bytes has an
    index of 4 or 8 beside it, so that it is smaller only where more than two thirds, or four fifths, are zeros.

    Args:
        share: of each weight's values.

    Returns:
        the live program, whose ``undo()`` puts the values back.

    Raises:
        UsageError: there is no linear layer.
    """
    number_argument("share", share, least=0.0, most=1.0, inside=True)

    def mask(weight: torch.Tensor) -> torch.Tensor:
        count = round(weight.numel() * share)
        smallest = weight.abs().flatten().argsort()[:count]
        kept = torch.ones(weight.numel(), dtype=torch.bool, device=weight.device)
        kept[smallest] = False
        return kept.view(weight.shape)

    return _masked(model, mask)


def two_of_four(model: nn.Module, *, packed: bool | None = None) -> AttachedProgram:
    """Keep the two largest of every four values in a row of each linear layer's weight, in place.

    On a card of compute capability 8.0 or more, weights in 16 bits are then kept by torch's
    ``SparseSemiStructuredTensor``: two values of four and two bits for the place of each, nine sixteenths of the bytes.
    Layers whose sizes no kernel takes stay dense, with their zeros, and so do weights that others hold too, such as an
    embedding's. On the CPU all do.

    Args:
        packed: whether weights are packed; None packs them where the device is a card.

    Returns:
        the live program, whose ``undo()`` puts the values back.

    Raises:
        UsageError: the card has no such kernels, or there is no linear layer.
    """
    layers = _layers(model)
    device = layers[0].weight.device
    packs = device.type == "cuda" if packed is None else packed
    if packs and (device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise UsageError(
            f"{name} has no kernels for two of four values: that needs compute capability 8.0",
            "Give packed=False, which saves nothing",
        )

    def mask(weight: torch.Tensor) -> torch.Tensor:
        fours = weight.abs().reshape(-1, 4)
        kept = torch.zeros_like(fours, dtype=torch.bool)
        return kept.scatter_(1, fours.topk(2, dim=1).indices, value=True).view(weight.shape)

    live = _masked(model, mask, lambda layer: layer.weight.shape[1] % 4 == 0)
    if packs:
        try:
            held = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
            for layer in layers:
                if _packs(layer.weight) and held[id(layer.weight)] == 1:
                    _pack(live, layer)
        except BaseException:
            live.undo()
            raise
    return live


def _packs(weight: torch.Tensor) -> bool:
    tiles = _TILES.get(weight.dtype)
    return tiles is not None and not any(size % tile for size, tile in zip(weight.shape, tiles, strict=True))


def _pack(live: AttachedProgram, layer: nn.Linear) -> None:
    from torch.sparse import to_sparse_semi_structured

    own = layer.weight
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor", UserWarning)
        packed = to_sparse_semi_structured(own.detach())
    layer.weight = nn.Parameter(packed, requires_grad=False)
    own.data = own.data.cpu()

    def put_back() -> None:
        where = layer.weight.device
        layer.weight = own  # first: where the card has no room for it, it is on the host
        own.data = own.data.to(where)

    live.on_undo(put_back)


def _masked(
    model: nn.Module,
    mask: Callable[[torch.Tensor], torch.Tensor],
    takes: Callable[[nn.Linear], bool] = lambda _layer: True,
) -> AttachedProgram:
    live = AttachedProgram(model, None)
    for weight in _weights([layer for layer in _layers(model) if takes(layer)]):
        before = weight.detach().clone().cpu()  # the values of before wait on the host
        with torch.no_grad():
            weight.mul_(mask(weight.detach()))
        live.on_undo(partial(_put_back, weight, before))
    return live


def _put_back(weight: torch.Tensor, before: torch.Tensor) -> None:
    weight.data.copy_(before)


def _layers(model: nn.Module) -> list[nn.Linear]:
    found = list(quantisable(model).values())
    if not found:
        raise UsageError(
            "the model has no linear layers whose weights could be pruned", "It is for torch.nn.Linear"
        )
    return found


def _weights(layers: Sequence[nn.Linear]) -> Iterator[torch.Tensor]:
    yield from {id(layer.weight): layer.weight for layer in layers}.values()
