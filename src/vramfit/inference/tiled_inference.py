"""A model over an input that is larger than the device: tile by tile, from an array into an array."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vramfit.arguments import call_argument, shown
from vramfit.errors import UsageError
from vramfit.inference.arrays import Blank, NpyFile, as_source, has_values, is_private, torch_dtype
from vramfit.inference.checked_runs import check_once
from vramfit.inference.fingerprints import (
    block_fingerprint,
    described,
    model_fingerprint,
    values_fingerprint,
)
from vramfit.inference.tile_grid import make_layout
from vramfit.inference.tile_needs import convolution_axes, probe_needs, strides_by_modules
from vramfit.inference.tile_outputs import OutputPlan, Pack
from vramfit.inference.tile_results import TileResults
from vramfit.inference.tile_runner import RunObserver, TileInput, TileJob, TileRunner
from vramfit.inference.tile_settings import TileSettings
from vramfit.inference.tile_stores import make_store
from vramfit.inference.trial_ways import CheckedRun


def make_job(
    model: Callable[..., Any],
    x: Any,
    settings: TileSettings,
    *,
    dims: int | None = None,
    device: torch.device | str | None = None,
    seconds: float | None = None,
) -> TileJob:
    """Decide what a run of a model over an input comes to.

    Args:
        model: a module on its device, or a function of a batch of tiles.
        x: the input ``[B, C, *spatial]`` or ``[C, *spatial]``: an array, or the path of a ``.npy`` file.
        settings: how tiles are cut and joined. An exact grid without a halo takes what the model is probed to need.
        dims: spatial axes, 1 to 3; None finds them from the settings, the model's convolutions or the input.
        device: where the model computes; None is where it is.
        seconds: how long finding a halo and checking it by values may take; None for 30, or what the run is
            expected to take if that is more.

    Raises:
        UsageError: the input, the settings and the model do not fit together; or tiles with the halo that was found
            would give another result than the whole run.
    """
    settings.check()
    call_argument("model", model)
    source = as_source("x", x)
    where = device_of(model, source, device)
    axes = spatial_axes(model, source, settings, dims)
    job = _job_of(model, None, source, settings, axes, where, seconds)
    if not settings.blended and settings.halo is None:
        owner = getattr(model, "__self__", model)
        _check(job, owner if isinstance(owner, nn.Module) else None, seconds)
    return job


def _check(job: TileJob, module: nn.Module | None, seconds: float | None = None) -> None:
    """Compare tiles with the whole by values, where there are some.

    Raises:
        UsageError: tiles would give another result than the whole run.
    """
    if _computes(module, job.given.source):
        run = CheckedRun(
            model=job.model,
            given=job.given,
            layout=job.layout,
            prepare=job.settings.prepare,
            device=job.device,
        )
        check_once(run, module, seconds)


def _computes(module: nn.Module | None, source: Any) -> bool:
    """Whether there are values to compare: not on the virtual GPU."""
    tensors = [source] if isinstance(source, torch.Tensor) else []
    if module is not None:
        tensors += [*module.parameters(), *module.buffers()]
    blank = isinstance(source, Blank)
    return not blank and all(has_values(tensor) and not tensor.is_meta for tensor in tensors)


def job_of_module(
    module: nn.Module, call: Callable[..., Any], x: torch.Tensor, settings: TileSettings, device: torch.device
) -> TileJob:
    """The same for a function that calls a module with more than the tile.

    Args:
        module: whose forward pass it is.
        call: gives the result for a batch of tiles.
        x: the input ``[B, C, *spatial]``.
        settings: with the halo and stride, or an overlap; its tile has one length a spatial axis.
        device: where the module computes.

    Raises:
        UsageError: the input and the settings do not fit together; or tiles with the settings' halo would give another
            result than the whole run.
    """
    job = _job_of(call, module, x, settings, x.dim() - 2, _with_index(device))
    if not settings.blended:
        _check(job, module)
    return job


def _job_of(
    model: Callable[..., Any],
    module: nn.Module | None,
    source: Any,
    settings: TileSettings,
    axes: int,
    where: torch.device,
    seconds: float | None = None,
) -> TileJob:
    settings, given = settled(module or model, source, settings, axes, where, seconds)
    layout = make_layout(given.shape, axes, given.batched, settings)
    return TileJob(model=model, given=given, layout=layout, settings=settings, device=where, module=module)


def settled(
    model: Any,
    source: Any,
    settings: TileSettings,
    axes: int,
    device: torch.device,
    seconds: float | None = None,
) -> tuple[TileSettings, TileInput]:
    """The settings with what the model needs of an exact grid, and the input with its axes told apart.

    Args:
        axes: spatial axes.
        seconds: how long finding what the model needs may take.

    Raises:
        UsageError: the input has another number of axes, or the model needs its whole input.
    """
    count = len(tuple(source.shape))
    if count not in (axes + 1, axes + 2):
        raise UsageError(
            f"an input of {count} axes is neither [C, *spatial] nor [B, C, *spatial] with {axes} spatial axes",
            "Add or take away axes, or say how many are spatial: dims=",
        )
    given = TileInput(source=source, batched=count == axes + 2, axes=axes)
    torch_dtype(source.dtype)  # one that torch has not is told before anything is read
    if not settings.blended and (settings.halo is None or settings.stride is None):
        settings = _with_needs(model, given, settings, device, seconds)
    return settings, given


def run_job(
    job: TileJob,
    *,
    out: Any = None,
    journal: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Compute all tiles; see `vramfit.tiled`.

    Raises:
        UsageError: the results cannot be put together, or not into `out`; or the journal is another run's.
        WriteError: a result could not be written.
    """
    results = TileResults(out, journal, lambda: _facts(job, out))
    if results.finished:
        return results.take_up()
    if job.layout.blended or any(job.layout.halo):
        results.check_apart(job.given.source)
    observer = RunObserver(planned=results.open, flushed=results.note, progress=progress)
    try:
        runner = TileRunner(job, observer)
        runner.run()
    except BaseException:
        results.abandon()
        raise
    return results.finish()


@dataclass(frozen=True, kw_only=True, slots=True)
class TileRehearsal:
    """What the first batches of a run took.

    Attributes:
        batches: that were computed.
        host_bytes: most bytes that buffers held on the host: pinned memory, windows, shards that wait.
    """

    batches: int
    host_bytes: int


def rehearse(job: TileJob, batches: int) -> TileRehearsal:
    """Compute the first batches of tiles with all buffers as for the whole, and drop the results.

    Under the virtual GPU this finds the peak of a layout in a moment: every batch of the same size takes the same. The
    window of a blended grid is emptied at the end, so that what leaves it is counted too.

    Args:
        job: with any input; `vramfit.inference.arrays.Blank` stands for one of zeros that takes no memory.
        batches: how many; 3 have all that there is in a run.
    """

    def drop(plans: list[OutputPlan], pack: Pack) -> None:
        del pack
        for plan in plans:
            plan.stores = [
                make_store(Blank(shape.shape, shape.dtype), shape, plan.geometry) for shape in plan.results
            ]

    count = min(batches, job.layout.batches)
    runner = TileRunner(job, RunObserver(planned=drop))
    runner.run(count)
    return TileRehearsal(batches=count, host_bytes=runner.host_bytes)


# -- What is not said is found ---------------------------------------------------------------------------------------


def device_of(model: Any, source: Any, device: torch.device | str | None) -> torch.device:
    """Where a model computes.

    Raises:
        UsageError: a device was given, and the model is elsewhere.
    """
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    found = tensors[0].device if tensors else None
    if device is None:
        if found is not None:
            return found
        where = source.device if isinstance(source, torch.Tensor | Blank) else torch.device("cpu")
        return _with_index(torch.device(where))
    try:
        wanted = _with_index(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"device={shown(device)} is no device: {str(error).splitlines()[0]}", 'Give "cuda" or "cpu"'
        ) from None
    if found is not None and _with_index(found) != wanted:
        raise UsageError(f"the model is on {found}, not on {wanted}", "Move it there: model.to(device)")
    return wanted


def _with_index(device: torch.device) -> torch.device:
    # A device without a number has None for it, which torch's stubs do not say.
    number: int | None = device.index
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device.type == "cuda" and number is None
        else device
    )


def spatial_axes(model: Any, source: Any, settings: TileSettings, dims: int | None) -> int:
    """How many axes are spatial: as given, as many as the settings have numbers, or as the first convolution has.

    Raises:
        UsageError: nothing says it, or it is not 1 to 3.
    """
    if dims is not None:
        if type(dims) is not int or dims not in (1, 2, 3):
            raise UsageError(f"dims={dims!r} is not 1, 2 or 3", "Give the number of spatial axes")
        return dims
    for name in ("tile", "halo", "stride", "overlap"):
        value = getattr(settings, name)
        if isinstance(value, tuple | list):
            if not 1 <= len(value) <= 3:
                raise UsageError(
                    f"{name}={value!r} has {len(value)} numbers", "Give 1 to 3, one a spatial axis"
                )
            return len(value)
    if axes := convolution_axes(model):
        return axes
    known = {2: 1, 3: 2, 5: 3}.get(len(tuple(source.shape)))
    if known is None:
        raise UsageError(
            f"an input of shape {list(source.shape)} can be read in two ways",
            "Say how many axes are spatial: dims=",
        )
    return known


def _with_needs(
    model: Any, given: TileInput, settings: TileSettings, device: torch.device, seconds: float | None
) -> TileSettings:
    """The settings with the halo and the stride that the model needs, as far as they are not given."""
    if settings.halo is not None:
        return replace(settings, stride=strides_by_modules(model, given.axes))
    channels = given.shape[len(given.shape) - given.axes - 1]
    needs = probe_needs(model, channels, given.axes, device, seconds=seconds)
    return replace(settings, halo=needs.halo, stride=settings.stride or needs.stride)


# -- What a run depends on -------------------------------------------------------------------------------------------


def _facts(job: TileJob, out: Any) -> dict[str, Any]:
    layout, settings = job.layout, job.settings
    padding = settings.padding
    first, last = layout.tile_at(0), layout.tile_at(layout.total - 1)
    plain = {
        field.name: repr(getattr(settings, field.name))
        for field in fields(TileSettings)
        if field.name not in ("reduce", "prepare")
    }
    return {
        "shape of the input": [list(job.given.shape), str(job.given.dtype)],
        "settings": {
            **plain,
            "reduce": described(settings.reduce),
            "prepare": described(settings.prepare),
            "axes": job.given.axes,
        },
        "model": model_fingerprint(job.model),
        "input": [
            _identity(job.given.source),
            *(block_fingerprint(job.given.block(tile, layout, padding)) for tile in (first, last)),
        ],
        "result": _place(out),
        "device": job.device.type,
        "version of torch": torch.__version__,
    }


def _identity(source: Any) -> dict[str, Any]:
    if isinstance(source, NpyFile):
        return source.identity()
    mapped = isinstance(source, np.memmap) and not is_private(source)
    name = getattr(source, "filename", None) if mapped else None
    if name is not None:
        found = Path(name).stat()
        return {"path": str(name), "bytes": found.st_size, "modified": found.st_mtime_ns}
    on_host = isinstance(source, torch.Tensor) and source.device.type == "cpu" and has_values(source)
    if on_host or isinstance(source, np.ndarray):
        return {"values": values_fingerprint(source)}
    return {}


def _place(out: Any) -> Any:
    if isinstance(out, dict):
        return {str(name): _place(one) for name, one in out.items()}
    if isinstance(out, tuple | list):
        return [_place(one) for one in out]
    if isinstance(out, str | os.PathLike):
        return os.path.abspath(os.fspath(out))
    return [type(out).__name__, list(getattr(out, "shape", ()))]
