"""A model over a picture or volume that does not fit the device, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from vramfit.arguments import call_argument, number_argument, path_argument, shown, whole_argument
from vramfit.errors import UsageError
from vramfit.inference.tile_progress import tile_progress
from vramfit.inference.tile_settings import Blend, Padding, Stitch, TileSettings
from vramfit.inference.tiled_inference import make_job, run_job
from vramfit.planner.tile_choice import choose_tile
from vramfit.torch_internals.layers import BatchNorm

E = TypeVar("E", Blend, Padding, Stitch)


def tiled(
    model: Callable[..., Any],
    x: Any,
    *,
    tile: int | tuple[int | None, ...] | None = None,
    tile_batch: int = 1,
    halo: int | tuple[int, ...] | None = None,
    stride: int | tuple[int, ...] | None = None,
    overlap: float | tuple[float, ...] | None = None,
    blend: Blend | str | None = None,
    sigma: float | tuple[float, ...] = 0.125,
    padding: Padding | str = Padding.ZEROS,
    stitch: Stitch | str = Stitch.HOST,
    scale: Any = None,
    reduce: Any = None,
    prepare: Callable[..., Any] | None = None,
    out: Any = None,
    dims: int | None = None,
    device: Any = None,
    journal: str | os.PathLike[str] | bool | None = None,
    budget: int | str | None = None,
    gpu: Any = None,
    seconds: float | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
) -> Any:
    """Run a model over an input that is too large for the device, tile by tile.

    >>> blur = torch.nn.Conv2d(3, 3, 5, padding=2).eval()
    >>> picture = torch.rand(3, 300, 200)
    >>> result = vramfit.tiled(blur, picture, tile=64, halo=2)
    >>> result.shape
    torch.Size([3, 300, 200])
    >>> torch.allclose(result, blur(picture[None])[0].detach(), atol=1e-6)
    True

    Without `overlap` and `blend` tiles have cores side by side, each computed with a halo that is cut off: the result
    equals the whole run's but for rounding, if the halo covers what a value of the result depends on. With them, tiles
    overlap and values there are weighted means, on the grid, with the weights and in the order of MONAI's
    ``sliding_window_inference``, bit for bit.

    The input is never on the device as a whole, nor is the result: what is complete leaves at once.

    Args:
        model: a module in evaluation mode on its device, or a function of a batch of tiles ``[b, C, *tile]``. It gives
            a tensor ``[b, ..., *spatial]``, or a tuple or dict of them, each of a length that is the tile's times a
            fixed scale.
        x: the input ``[B, C, *spatial]`` or ``[C, *spatial]`` with 1 to 3 spatial axes: a tensor, an array of NumPy or
            zarr or anything with ``shape``, ``dtype`` and ``array[slices]``, or the path of a ``.npy`` file.
        tile: what the model is given along each axis, halo included, one number or one an axis; None in a tuple is the
            whole axis. Left out, `budget` decides.
        tile_batch: tiles that the model is given at once.
        halo: steps of the input on each side that are computed and cut off; None probes the model for what it needs.
        stride: tiles begin at its multiples, as poolings and strided convolutions want it; None finds it.
        overlap: share of a tile that it has in common with its neighbour, from 0 to less than 1: a blended grid.
        blend: ``"constant"``, ``"gaussian"`` or ``"cosine"`` weights: a blended grid.
        sigma: standard deviation of Gaussian weights, as a share of the tile.
        padding: beside an input that is smaller than a blended tile: ``"zeros"``, ``"reflect"``, ``"replicate"`` or
            ``"circular"``.
        stitch: where overlapping tiles are added up: ``"host"``, or in a window on the ``"device"``.
        scale: the result's length over the input's, such as 4 or ``"1/2"``, where it is to be checked.
        reduce: what is kept, computed before it leaves: ``"argmax"``, ``"threshold=0.5"``, ``"top-k=5"``, ``"uint8"``,
            or a function of a block ``[b, C, *spatial]`` that treats each place by itself; a dict or tuple of them
            where there are several outputs.
        prepare: what a batch of tiles becomes on the device before the model gets it. Without it, floating-point
            numbers and those of pictures (8 and 16 bits) are brought to the model's dtype, their values as they are.
        out: where the result goes: an array of its shape that can be written to (a tensor of the device too), or the
            path of a ``.npy`` file, which gets its name when it is complete; a tuple or dict of them where there are
            several. None makes tensors on the CPU.
        dims: spatial axes, where they cannot be told.
        device: where the model computes; None is where it is.
        journal: a file in which tiles that are stored are noted, so that a run that was killed goes on there; True puts
            it beside the result's file.
        budget: what torch may reserve on the device, the model included, as ``"4GiB"``: the quickest tile within it is
            found on the virtual GPU, in a process of its own; None is what is free there, less 2 %.
        gpu: the card that the tile is chosen for; None is the one that is there.
        seconds: how long finding a halo, and checking by values that tiles with it give the whole run's result, may
            take each; None for 30, or what the whole run is expected to take if that is more.
        progress: called with the tiles that are done and the tiles in all; True shows a bar.

    Returns:
        the result, with the input's axes and the model's channels; a tuple or dict where the model or `reduce` gives
        one. What went into a file is mapped for reading.

    Raises:
        UsageError: the arguments contradict each other or the model, or tiles with the halo that was found would give
            another result than the whole run; nothing has been written then.
        WriteError: the result could not be written.
    """
    settings = TileSettings(
        tile=tile,
        tile_batch=whole_argument("tile_batch", tile_batch, least=1),
        halo=halo,
        stride=stride,
        overlap=overlap,
        blend=None if blend is None else _choice("blend", blend, Blend),
        sigma=sigma,
        padding=_choice("padding", padding, Padding),
        stitch=_choice("stitch", stitch, Stitch),
        scale=scale,
        reduce=reduce,
        prepare=None if prepare is None else call_argument("prepare", prepare),
    )
    if seconds is not None:
        seconds = number_argument("seconds", seconds, least=0.0, most=1e6)
    _check_mode(model)
    noted = _journal_path(journal, out)
    if tile is None:
        chosen = choose_tile(
            model, x, settings, dims=dims, device=device, budget=budget, gpu=gpu, seconds=seconds
        )
        settings = replace(settings, tile=chosen.tile, tile_batch=chosen.tile_batch)
    elif budget is not None:
        raise UsageError(
            "tile and budget are both given", "Give a budget to let the tile be chosen, or the tile itself"
        )
    job = make_job(model, x, settings, dims=dims, device=device, seconds=seconds)
    with tile_progress(progress) as told:
        return run_job(job, out=out, journal=noted, progress=told)


def _choice(name: str, given: Any, kind: type[E]) -> E:
    try:
        return given if isinstance(given, kind) else kind(given)
    except ValueError:
        names = ", ".join(repr(one.value) for one in kind)
        raise UsageError(f"{name}={shown(given)} is none of {names}", "Give one of them") from None


def _check_mode(model: Any) -> None:
    """Batch norm in training mode makes each tile another network, and changes the model."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, BatchNorm) and module.training and module.track_running_stats:
                raise UsageError(
                    "the model is in training mode, in which batch norm depends on the tile",
                    "Call model.eval()",
                )


def _journal_path(journal: Any, out: Any) -> str | None:
    if journal is None or journal is False:
        return None
    if journal is not True:
        return path_argument("journal", journal)
    if not isinstance(out, str | os.PathLike):
        raise UsageError(
            "journal=True puts the journal beside the result's file, and out is no path",
            "Give the path of the journal, or of the result",
        )
    path = Path(path_argument("out", out))
    return str(path.with_name(f"{path.name}.journal"))
