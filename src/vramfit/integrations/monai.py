"""Tiles in MONAI: `TiledInferer` is an `Inferer`, wherever one is taken (evaluators, bundles, loops of your own)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.api.tiling_api import tiled
from vramfit.arguments import call_argument
from vramfit.errors import UsageError

try:
    from monai.data.meta_tensor import MetaTensor
    from monai.inferers.inferer import Inferer
    from monai.utils.type_conversion import convert_to_dst_type
except ImportError as error:
    raise UsageError(
        "an Inferer is MONAI's, which is not installed", 'Install it: pip install "vramfit[monai]"'
    ) from error

_TAKEN_FROM_CALL = ("x", "model", "out", "dims", "journal")


class TiledInferer(Inferer):
    """Runs a network tile by tile, as `vramfit.tiled` does, behind MONAI's interface.

    Example::

        inferer = TiledInferer(tile=(96, 96, 96), tile_batch=4, overlap=0.25, blend="gaussian")
        labels = inferer(volume, network)

    With an `overlap`, results are those of MONAI's ``SlidingWindowInferer`` bit for bit, and only a batch of windows is
    on the device. Without one, tiles have the halo that the network needs, and results are the whole run's; a network
    for which there is no such halo is refused.

    Args:
        options: of `vramfit.tiled`: ``tile`` or ``budget``, ``overlap``, ``blend``, ``reduce`` and others. Where the
            result goes is MONAI's choice: the device of the input.

    Raises:
        UsageError: `vramfit.tiled` has no such option, or MONAI passes it with the call.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name in _TAKEN_FROM_CALL:
            if name in options:
                raise UsageError(f"{name} of a TiledInferer comes with the call", "Leave it out")
        unknown = set(options) - set(tiled.__kwdefaults__ or {})
        if unknown:
            raise UsageError(
                f"{', '.join(sorted(unknown))} is no option of vramfit.tiled", "See help(vramfit.tiled)"
            )
        self.options = options

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The network's result for ``inputs`` ``[B, C, *spatial]``, on their device.

        Args:
            args, kwargs: passed to the network with every batch of tiles.

        Raises:
            UsageError: tiles of this network would give another result, or the options do not fit the input.
        """
        call_argument("network", network)
        plain = inputs.as_tensor() if isinstance(inputs, MetaTensor) else inputs
        call = (lambda tiles: network(tiles, *args, **kwargs)) if args or kwargs else network
        device = self.options.get("device")
        if device is None:
            parameter = next(iter(getattr(network, "parameters", lambda: ())()), plain)
            device = parameter.device
        found = tiled(call, plain, dims=plain.dim() - 2, **{**self.options, "device": device})
        return _placed(found, inputs)


def _placed(found: Any, inputs: torch.Tensor) -> Any:
    """Results on the input's device, with its metadata where it has some."""
    if isinstance(found, dict):
        return {name: _placed(one, inputs) for name, one in found.items()}
    if isinstance(found, tuple | list):
        return tuple(_placed(one, inputs) for one in found)
    there = found.to(inputs.device)
    return (
        convert_to_dst_type(there, inputs, dtype=there.dtype)[0] if isinstance(inputs, MetaTensor) else there
    )
