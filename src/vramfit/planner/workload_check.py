"""Looks at a workload before anything is run: what is wrong with its batches is said in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.planner.candidates import Candidates
from vramfit.planner.plans import Plan, PlanFigures, PlanTarget
from vramfit.planner.request import NothingFits
from vramfit.techniques import find_technique
from vramfit.units import format_bytes
from vramfit.workload import Workload


def check_workload(
    workload: Workload, sizes: Mapping[str, int], progress: Callable[[str], None] = lambda _text: None
) -> None:
    """Make sure that a workload's batches follow its sizes and lie on the CPU.

    Its model and loss are looked at where they first run: `vramfit.techniques.AttachedProgram.weighted` refuses a loss
        that is no
    scalar, for plain workloads too.

    Raises:
        UsageError: the batch function fails, ignores a size, or makes its batch on a card.
    """
    progress("the workload's batches")
    batch = _made(workload, sizes)
    for tensor in tensors_of(batch):
        if tensor.device.type != "cpu":
            raise UsageError(
                f"batch makes a tensor on {tensor.device}",
                "Make batches on the CPU: they are moved to the device",
            )
    shapes = _shapes(batch)
    for name, value in sizes.items():
        other = _made(workload, {**sizes, name: value + 1})
        if _shapes(other) == shapes:
            raise UsageError(
                f"batch ignores its size {name}: {value} and {value + 1} give the same shapes {_words(shapes)}",
                f"Use {name} in batch, or take it out of sizes",
            )


def _made(workload: Workload, sizes: Mapping[str, int]) -> Any:
    words = ", ".join(f"{name}={value}" for name, value in sizes.items())
    try:
        batch = workload.batch(**sizes)
    except TypeError as error:
        raise UsageError(
            f"batch({words}) fails: {error}", "Let its arguments be the names in sizes"
        ) from error
    if next(tensors_of(batch), None) is None:
        raise UsageError(
            f"batch({words}) gives no tensor but {type(batch).__name__}",
            "Let it return a tensor, or a tuple or dict",
        )
    return batch


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from tensors_of(getattr(batch, field.name))


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def _words(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


_LIGHTER = ("parameter-offload", "low-precision-training", "parameter-sharing")
"""Techniques with which parameters take less of the device."""


def check_budget(candidates: Candidates) -> None:
    """Make sure that the budget has room for what every plan of this request takes.

    Raises:
        NothingFits: it has none; the plan is that without techniques.
    """
    request, plain = candidates.request, candidates.plain
    context = plain.profile.outside_bytes
    parameters = sum(one.numel() * one.element_size() for one in plain.profile.model.parameters())
    lighter = any(
        request.may(technique) and technique.numerics <= request.numerics
        for technique in map(find_technique, _LIGHTER)
    )
    limit = format_bytes(request.limit)
    if context >= request.limit:
        message = f"nothing fits {limit}: the CUDA context alone takes {format_bytes(context)}"
        hint = "Give a larger budget: the context counts"
    elif not lighter and context + parameters > request.limit:
        beside = f", and the CUDA context {format_bytes(context)}" if context else ""
        message = f"nothing fits {limit}: the parameters alone take {format_bytes(parameters)}{beside}"
        hint = (
            "Allow parameter-offload or lower precision, take a larger card, or shard the model over several"
        )
    else:
        return
    profile = plain.profile
    figures = PlanFigures(
        peak_allocated_bytes=profile.peak_allocated_bytes,
        peak_reserved_bytes=profile.peak_reserved_bytes,
        total_bytes=profile.peak_reserved_bytes + context,
        host_bytes=profile.host_peak_bytes,
        step_seconds=plain.step.seconds,
        step_flops=plain.step.flops,
    )
    aim = PlanTarget(
        device=candidates.device.name,
        budget_bytes=request.budget_bytes,
        margin_bytes=request.margin_bytes,
        host_budget_bytes=request.host_bytes,
        numerics=request.numerics,
        objective=request.objective,
        sizes=dict(request.sizes),
        target=request.target,
    )
    raise NothingFits(message, hint, Plan(entries=(), aim=aim, before=figures, after=figures))
