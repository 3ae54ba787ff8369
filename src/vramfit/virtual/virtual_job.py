"""The job of the virtual GPU's child. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from vramfit.gpus import GpuKind, GpuSpec, Price
from vramfit.launch.job import Job

MOST_GPUS = 8
"""Virtual GPUs of one process (c10/core/impl/FakeGuardImpl.h: kFakeGuardImplMaxDevices)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualJob(Job):
    """What a child runs on virtual GPUs.

    Attributes:
        gpu: the card, as `plain_spec` gives it.
        gpus: how many.
        assume: what is taken for sizes that depend on data.
        profile: ``auto``, ``none`` or the full path of a file.
        files: what happens to what it writes, as `FilePolicy.plain` gives it.
    """

    gpu: dict[str, Any]
    gpus: int
    files: dict[str, Any]
    assume: str = "upper"
    profile: str = "auto"


def plain_spec(spec: GpuSpec) -> dict[str, Any]:
    """A card as plain values that JSON can hold."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    values["kind"] = spec.kind.value
    values["peak_flops"] = dict(spec.peak_flops)
    values["price"] = None if spec.price is None else dataclasses.asdict(spec.price)
    return values


def spec_from_plain(values: dict[str, Any]) -> GpuSpec:
    """The card that `plain_spec` described."""
    price = values["price"]
    return GpuSpec(
        **values
        | {
            "kind": GpuKind(values["kind"]),
            "aliases": tuple(values["aliases"]),
            "compute_capability": tuple(values["compute_capability"]),
            "price": None if price is None else Price(**price),
        }
    )
