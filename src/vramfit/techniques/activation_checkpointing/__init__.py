"""Activation checkpointing: blocks keep their input, and run again for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.activation_checkpointing.op_facts import PRESETS, check_specs, keeps, op_specs
from vramfit.techniques.activation_checkpointing.region import Recomputed
from vramfit.techniques.activation_checkpointing.rematerialization import Apart, Rematerialized
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import ModelBlock, Profile
from vramfit.techniques.core.surround import Around
from vramfit.techniques.core.technique import Numerics, Setting, Technique
from vramfit.techniques.support.blocks import checked_module, find_blocks, refused_blocks

EVERYWHERE = "*"


class Mode(Enum):
    """Which of the blocks are recomputed, and how.

    Attributes:
        NONE: none.
        WHOLE: each by itself: it keeps its input.
        EVERY: every k-th by itself.
        SEGMENTS: runs of blocks together: the first of a run keeps its input.
        SELECTIVE: each by itself, but for the results of some ops, which are kept.
        LAZY: each result by its own op, when the backward pass reads it, but for those that are kept. What nothing
            needs is not computed again, and a block never holds all its activations again.
    """

    NONE = "none"
    WHOLE = "whole"
    EVERY = "every"
    SEGMENTS = "segments"
    SELECTIVE = "selective"
    LAZY = "lazy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing(Setting):
    """Which blocks are recomputed, and what of them is kept.

    Attributes:
        mode: which of the blocks, and how.
        modules: names of the blocks, in the order in which they run; none: those that `find_blocks` finds. A block and
            a part of it may both be named: then the part is recomputed by itself while the block is. The empty name is
            the model itself.
        every: with ``every``: the first of so many blocks is recomputed.
        segments: with ``segments``: how many; 0: about the square root of the number of blocks.
        nested: with ``segments``: each block of a segment is checkpointed by itself, too. The segment runs again to
            find the inputs of its blocks, then each block to find its activations.
        save: ops whose results are kept, by the block's name, or ``*`` for all others: an aten op (``addmm``), its
            n-th call in the block from 0 on (``addmm#2``), a pattern, or a preset (``matmuls``, ``convolutions``,
            ``attention``, ``expensive``). Views need not be named: they cost nothing. With ``lazy``, a module inside a
            block may be named too: then its ops are counted apart, so that what runs around it does not matter.
    """

    mode: Mode = Mode.WHOLE
    modules: tuple[str, ...] = ()
    every: int = 2
    segments: int = 0
    nested: bool = False
    save: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class ActivationCheckpointing(Technique[Checkpointing]):
    """Blocks keep their input in place of their activations, and run again when the backward pass gets to them.

    It pays wherever activations are most of the peak: long sequences, large images, large batches, deep models. It does
    not where parameters, gradients and the optimizer are (large models at batch 1), nor for logits and losses, which
    belong to no block. A block that is recomputed holds all its activations again during its own backward pass: where
    that is the peak, name its parts too, and they are recomputed one by one.

    Memory: n blocks hold n inputs, and the activations of one block at a time (Chen et al. 2016, arXiv:1604.06174).
    With segments of k blocks it is n/k inputs and the activations of k blocks, which pays for many thin blocks; nested,
    n/k + k inputs and the activations of one block.

    Cost: one more forward pass of what is recomputed, which ends with the last result that the backward pass reads; a
    whole block's is about a third of its step. Nested segments cost two. Kept results spare their op: with products,
    convolutions and attention kept, no floating-point work of note is done twice, but for each of these its output is
    held. The state of the random generators is kept and set again, about 0.1 ms of the host for each block.

    Results are the same bit for bit, with dropout, autocast, tied or frozen parameters; running statistics of norm
    layers are updated once. In ``eval()`` and without gradients nothing is done. What cannot run twice is refused: a
    block that changes its input or its buffers in place. Key-value caches are not filled in training (transformers
    does the same when it checkpoints); what is in them already is attended to.

    With ``lazy`` nothing runs again as a whole: each result that is not kept is computed by its own op when the
    backward pass reads it, so that a block never holds all its activations, and what nothing needs is not computed.
    Each op of a forward pass is noted, some 10 us of the host; hooks around it do not see what the block keeps.

    The other modes are torch's own: ``torch.utils.checkpoint.checkpoint(use_reentrant=False)`` and
    ``create_selective_checkpoint_contexts``; with results kept, only one backward pass can go through a graph.
    """

    name: ClassVar[str] = "activation-checkpointing"
    summary: ClassVar[str] = "blocks keep their input and run again in the backward pass"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    phase: ClassVar[AttachStage] = AttachStage.FORWARD
    setting_type = Checkpointing
    follows: ClassVar[str | None] = "allocator-settings"

    def options(self, profile: Profile) -> Iterable[Checkpointing]:
        """Settings for all blocks alike, those that recompute least first."""
        if not profile.trains:
            return ()
        paths = tuple(block.path for block in profile.blocks)
        count = len(paths or find_blocks(profile.model))
        if not count:
            return ()
        return sorted(_uniform(profile.blocks, count), key=lambda setting: _cost(setting, profile.blocks))

    def describe(self, setting: Checkpointing) -> str:
        """How many blocks, and how much of them is kept: their names would fill a table."""
        words = [setting.mode.value]
        if setting.modules:
            words.append(f"{len(setting.modules)} block{'s' * (len(setting.modules) > 1)}")
        if setting.mode is Mode.EVERY:
            words.append(f"every {setting.every}")
        if setting.segments:
            words.append(f"{setting.segments} segments")
        if setting.nested:
            words.append("nested")
        if setting.save:
            kept = sum(len(specs) for specs in setting.save.values())
            words.append(f"{kept} results kept")
        return ", ".join(words)

    def attach(self, live: AttachedProgram, setting: Checkpointing) -> None:
        """Surround the blocks.

        Raises:
            UsageError: there are no blocks, a name is unknown, a number is too small, or a block cannot be recomputed.
        """
        surroundings = list(_surroundings(live.model, setting))
        for path, around in surroundings:
            live.surround(live.model.get_submodule(path), around)


def setting_for(
    decisions: Mapping[str, Iterable[int] | None], blocks: Sequence[ModelBlock] = ()
) -> Checkpointing:
    """The setting in which each block has a decision of its own.

    Args:
        decisions: by the block's path: None keeps everything; else indices into the block's ``ops`` whose results are
            kept while the block is recomputed, none of them for the whole block.
        blocks: of the profile; needed for the blocks of which something is kept.
    """
    known = {block.path: block for block in blocks}
    modules = []
    save: dict[str, tuple[str, ...]] = {}
    for path, kept in decisions.items():
        if kept is None:
            continue
        modules.append(path)
        save |= _specs_by_part(known[path], sorted(set(kept))) if path in known else {}
    if not modules:
        return Checkpointing(mode=Mode.NONE)
    return Checkpointing(mode=Mode.LAZY, modules=tuple(modules), save=save)


def _specs_by_part(block: ModelBlock, kept: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """The operations of a block whose results are kept, under the names of the parts that are counted apart."""
    parts: dict[str, list[int]] = {}
    for number, op in enumerate(block.ops):
        parts.setdefault(op.part or block.path, []).append(number)
    found = {}
    for path, numbers in parts.items():
        specs = op_specs(block.ops[number].name for number in numbers)
        chosen = tuple(spec for number, spec in zip(numbers, specs, strict=True) if number in set(kept))
        if chosen or path != block.path:
            found[path] = chosen
    return found


# -- what is put around what ---------------------------------------------------------------------------------------


def _surroundings(model: nn.Module, setting: Checkpointing) -> Iterator[tuple[str, Around]]:
    _check(setting)
    paths = _paths(model, setting)
    for path in setting.save:
        if path == EVERYWHERE or path in paths:
            continue
        if setting.mode is Mode.LAZY and any(_inside(path, outer) for outer in paths):
            checked_module(model, path)
            yield path, Apart(path, keep=setting.save[path])
        else:
            raise UsageError(
                f"{path} is to keep results but is not recomputed",
                "Add it to modules, or leave it out of save",
            )
    if setting.mode is Mode.SEGMENTS:
        yield from _segments(paths, setting)
        return
    for path in paths:
        keep = _kept(setting, path)
        lazy = setting.mode is Mode.LAZY
        yield path, Rematerialized(path, keep=keep) if lazy else Recomputed(path, keep=keep)


def _inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def _check(setting: Checkpointing) -> None:
    if setting.every < 1:
        raise UsageError(f"every of activation-checkpointing is {setting.every}", "Give 1 or more")
    if setting.segments < 0:
        raise UsageError(f"segments of activation-checkpointing is {setting.segments}", "Give 1 or more")
    if setting.nested and (setting.mode is not Mode.SEGMENTS or setting.save):
        raise UsageError(
            "nested of activation-checkpointing belongs to segments without save", "Leave it out"
        )
    for specs in setting.save.values():
        check_specs(specs)


def _paths(model: nn.Module, setting: Checkpointing) -> tuple[str, ...]:
    """The blocks that are recomputed."""
    if setting.mode is Mode.NONE:
        return ()
    paths = setting.modules
    if not paths:
        paths = tuple(place.path for place in find_blocks(model))
        if not paths:
            refused = refused_blocks(model)
            why = f": {refused[0].path} cannot be recomputed, {refused[0].reason}" if refused else ""
            raise UsageError(f"no blocks were found in {type(model).__name__}{why}", "Name some in modules")
    seen: dict[int, str] = {}
    for path in paths:
        module = checked_module(model, path)
        if id(module) in seen:
            raise UsageError(f"{path} is the same module as {seen[id(module)]}", "Name it once")
        seen[id(module)] = path
    return paths[:: setting.every] if setting.mode is Mode.EVERY else paths


def _kept(setting: Checkpointing, path: str) -> tuple[str, ...]:
    if setting.mode is Mode.SELECTIVE and not setting.save:
        return ("expensive",)
    return tuple(setting.save.get(path, setting.save.get(EVERYWHERE, ())))


def _segments(paths: tuple[str, ...], setting: Checkpointing) -> Iterator[tuple[str, Recomputed]]:
    count = min(setting.segments or round(math.sqrt(len(paths))), len(paths))
    for number in range(count):
        # Lengths that differ by one at most, the shorter ones at the end, whose backward pass is at the peak.
        start = -(-number * len(paths) // count)
        segment = paths[start : -(-(number + 1) * len(paths) // count)]
        for index, path in enumerate(segment):
            keep = _kept(setting, path)
            if setting.nested and len(segment) > 1:
                yield path, Recomputed(path)
            yield (
                path,
                Recomputed(
                    path,
                    keep=keep,
                    segment=str(number),
                    first=index == 0,
                    last=index == len(segment) - 1,
                ),
            )


# -- what could pay ------------------------------------------------------------------------------------------------


def _uniform(blocks: tuple[ModelBlock, ...], count: int) -> Iterator[Checkpointing]:
    names = {op.name for block in blocks for op in block.ops}
    seen: set[frozenset[str]] = set()
    for preset in ("expensive", "matmuls", "convolutions", "attention"):
        here = frozenset(name for name in names if keeps((preset,), (name,))[0])
        if (here and here not in seen) or (not names and preset == "expensive"):
            seen.add(here)
            yield Checkpointing(mode=Mode.SELECTIVE, save={EVERYWHERE: (preset,)})
    if count > 2:
        yield Checkpointing(mode=Mode.EVERY, every=3)
    if count > 1:
        yield Checkpointing(mode=Mode.EVERY, every=2)
    yield Checkpointing(mode=Mode.WHOLE)
    if count > 3:
        yield Checkpointing(mode=Mode.SEGMENTS)
        yield Checkpointing(mode=Mode.SEGMENTS, nested=True)


def _cost(setting: Checkpointing, blocks: tuple[ModelBlock, ...]) -> tuple[float, int]:
    """Seconds that a setting for all blocks adds to a step; where nothing is known, its place among the modes."""
    modes = (Mode.SELECTIVE, Mode.EVERY, Mode.WHOLE, Mode.SEGMENTS)
    place = 2 * modes.index(setting.mode) + setting.nested
    specs = _kept(setting, EVERYWHERE)
    chosen = blocks[:: setting.every] if setting.mode is Mode.EVERY else blocks
    seconds = 0.0
    for block in chosen:
        kept = keeps(specs, (op.name for op in block.ops))
        spared = sum(op.seconds for op, is_kept in zip(block.ops, kept, strict=True) if is_kept)
        seconds += (1 + setting.nested) * block.calls * (block.forward_seconds - spared)
    return seconds, place


__all__ = ["PRESETS", "ActivationCheckpointing", "Checkpointing", "Mode", "setting_for"]
