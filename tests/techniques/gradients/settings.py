"""The settings in which techniques would be chosen for an architecture, at the size of a test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

from tests.techniques.gradients.architectures import all_architectures

from vramfit.errors import UsageError
from vramfit.planner.activation_ilp.decisions import finer_places, places, savable_ops
from vramfit.planner.devices.cpu_backend import CpuBackend
from vramfit.planner.whole_and_pieces import try_encoders, try_pieces
from vramfit.techniques import Choice, Numerics, Profile, Setting, Technique, all_techniques
from vramfit.techniques.activation_checkpointing import Checkpointing, setting_for
from vramfit.techniques.activation_offload import ActivationOffloadSetting
from vramfit.techniques.gradient_caching import GradientCachingSetting

_WIDER = 1 << 16
"""How many times the bytes of a test a model would have for which techniques are chosen."""

_NOTABLE = 20
"""One of so many bytes at the peak is of logits, where there are any: few for a large vocabulary."""

_SMALLEST = ("min_bytes", "minimal_size")
"""Settings below which tensors are too small to be worth it: those of tests all are."""


@cache
def profiles(name: str) -> tuple[Profile, Profile]:
    """An architecture's profile on the CPU, and what one of the same model, far wider, would be on a card."""
    workload = all_architectures()[name].workload()
    plain, _ = CpuBackend().profile_step(workload, dict(workload.sizes), places)
    blocks = tuple(
        replace(
            block,
            input_bytes=block.input_bytes * _WIDER,
            new_input_bytes=block.new_input_bytes * _WIDER,
            kept_bytes=block.kept_bytes * _WIDER,
            ops=tuple(replace(op, bytes=op.bytes * _WIDER) for op in block.ops),
        )
        for block in plain.blocks
    )
    peak = _WIDER * plain.peak_allocated_bytes
    wide = replace(
        plain,
        device_type="cuda",
        capability=(9, 0),
        total_bytes=2 * peak,
        host_bytes=100 * peak,
        # Rows of logits are counted from their bytes, which are those of the test: so the peak is theirs too.
        peak_allocated_bytes=_NOTABLE * plain.logits_bytes or peak,
        peak_reserved_bytes=2 * peak,
        categories={"inputs": peak // 10},
        blocks=blocks,
        link_bytes_per_second=25e9,
    )
    return plain, wide


@cache
def choices(name: str) -> tuple[Choice, ...]:
    """What could be chosen for an architecture, whatever it promises: each technique's own options, as small as tests.

    To these come what a plan's program makes for single blocks: results that are saved one by one.
    """
    found: list[Choice] = []
    for technique in all_techniques():
        for setting in itertools.chain(_options(technique, name), _solved(technique, name)):
            choice = Choice(technique=technique, setting=_small(setting))
            if choice not in found:
                found.append(choice)
    return tuple(found)


@cache
def exact_choices(name: str) -> tuple[Choice, ...]:
    """Those that promise the plain program's gradients but for rounding; compiling is looked at by itself."""
    return tuple(
        choice
        for choice in choices(name)
        if choice.promise.numerics <= Numerics.ROUNDING and choice.name != "compile"
    )


def _options(technique: Technique[Setting], name: str) -> Iterator[Setting]:
    workload = all_architectures()[name].workload()
    if technique.name == "micro-batching" and workload.loss is not None:
        try:
            try_pieces(workload)
        except UsageError:
            return  # its loss compares examples with each other: there are no pieces
    if technique.name == "gradient-caching" and workload.loss is not None:
        with suppress(UsageError):  # its layers compare examples with each other
            yield GradientCachingSetting(modules=try_encoders(workload).modules)
        return
    for profile in profiles(name):
        found = technique.options(profile)
        # On the CPU all settings of the allocator do the same: nothing.
        yield from itertools.islice(found, 1) if technique.name == "allocator-settings" else found


def _solved(technique: Technique[Setting], name: str) -> Iterator[Setting]:
    """Settings as a plan's program gives them, with a decision for each block; and what people would write."""
    profile = profiles(name)[0]
    blocks = profile.blocks
    if technique.name == "activation-offload":
        yield ActivationOffloadSetting(window=0)
    if technique.name != "activation-checkpointing" or not blocks:
        return
    for every, first in ((2, 0), (2, 1), (3, 1)):
        yield setting_for({block.path: list(savable_ops(block))[first::every] for block in blocks}, blocks)
    parts = dict.fromkeys((*(block.path for block in blocks), *finer_places(profile.model)))
    if len(parts) > len(blocks):
        yield Checkpointing(modules=tuple(parts))


def _small(setting: Setting) -> Setting:
    """A setting with its least sizes away, and with its window as wide as the tensors of a test."""
    changed: dict[str, int] = {}
    for field in dataclasses.fields(setting):
        if field.name in _SMALLEST:
            changed[field.name] = 0
        elif field.name == "window":
            changed[field.name] = getattr(setting, field.name) // _WIDER
    return replace(setting, **changed)
