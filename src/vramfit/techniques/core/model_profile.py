"""What techniques know of a workload from one run: its blocks, what they keep, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from vramfit.techniques.core.samples import Samples

ALWAYS = 1 << 62
"""Later than any operation or node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOp:
    """One operation of a block's forward pass, in the order in which they run.

    Attributes:
        name: the aten operation, as ``addmm``.
        bytes: of the storages that its results have of their own; 0 for a view.
        seconds: estimated, of this one.
        flops: multiplications and additions of products, convolutions and attention.
        kept: whether autograd keeps its results for the backward pass.
        random: whether it draws random numbers.
        mutated: whether a later operation of the block changes its results in place.
        parent: the block's submodule that ran it, by its name inside the block; empty for the block itself.
        own_bytes: of its results, those that autograd keeps for this block alone.
        shared: whether others keep its results too, or their memory: the next block its input.
        fixed: whether it cannot run again by itself.
        reads: numbers of the block's operations whose results it reads, and of those that change its own in place.
        part: path of the part of the model that its block counts apart; empty outside of any.
        last_read: number of the last operation of the block that reads its results; `ALWAYS` where the block returns
            them.
        last_saved: position in the block's backward pass of the first node that reads its results there, -1 where none
            does; `ALWAYS` where that is not known. Positions fall during a backward pass: they are the sequence numbers
            of autograd's nodes, from the block's first on.
    """

    name: str
    bytes: int
    seconds: float
    flops: int
    kept: bool
    random: bool = False
    mutated: bool = False
    parent: str = ""
    own_bytes: int = 0
    shared: bool = False
    fixed: bool = False
    reads: tuple[int, ...] = ()
    part: str = ""
    last_read: int = ALWAYS
    last_saved: int = ALWAYS

    def absent(self, position: int, *, backward: bool) -> bool:
        """Whether nothing needs its results at a position of its block's pass: not yet, or no more in the forward."""
        return position > (self.last_saved if backward else self.last_read)


class Saved(NamedTuple):
    """What autograd saves of a block.

    Attributes:
        bytes: of the storage.
        saved_at: seconds from the beginning of the block's forward pass.
        needed_at: seconds of computation from the beginning of its backward pass; -1 where it is never needed.
    """

    bytes: int
    saved_at: float
    needed_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBlock:
    """A part of the model that can be kept, recomputed or offloaded on its own.

    Attributes:
        path: the submodule's name in the model.
        kind: name of its class.
        index: when its forward pass runs, among the blocks.
        like: index of the first block that has the same operations and sizes; its own where there is none before.
        input_bytes: the tensors that it is called with, once each, without parameters.
        new_input_bytes: those of its inputs that nothing keeps in the plain program.
        kept_bytes: all that autograd keeps for the backward pass of a call, without parameters and without its input.
        saves: all tensors that a call saves and that something computed, its inputs too, in the order in which it saves
            them; each storage once, by whoever saves it first.
        shared_bytes: of these, what others hold as well: the next block its input, which a recomputed block holds too,
            and what follows the block its saved tensors. Computing the block again frees none of it.
        forward_seconds: of a call, estimated.
        backward_seconds: of a call, estimated.
        calls: how often its forward pass runs in a step: once for each micro-batch, and for each use in the model.
    """

    path: str
    kind: str
    index: int
    like: int
    ops: tuple[BlockOp, ...]
    input_bytes: int
    kept_bytes: int
    forward_seconds: float
    backward_seconds: float
    new_input_bytes: int = 0
    saves: tuple[Saved, ...] = ()
    shared_bytes: int = 0
    calls: int = 1

    def __hash__(self) -> int:
        """Of a few of its values: it is asked for often, and there may be thousands of operations."""
        return hash((self.path, self.index, self.kept_bytes, len(self.ops)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What the planner knows of a workload on a device.

    Attributes:
        model: the model, to look at its structure; on the virtual GPU its tensors hold no values.
        optimizer: the optimizer, or None.
        trains: whether a step changes the model.
        own_step: whether the workload owns its whole step, so that batches cannot be split and losses not be scaled.
        device_type: ``cuda`` or ``cpu``.
        capability: the card's compute capability, (0, 0) on the CPU.
        host_bytes: memory of the host that a plan may spend.
        peak_allocated_bytes: of a plain step.
        peak_reserved_bytes: of a plain step.
        setup_bytes: most bytes that tensors held before the observed step, where its peak does not show them.
        outside_bytes: memory of the device outside torch: the CUDA context.
        step_seconds: estimated, of a plain step.
        step_flops: of a plain step, forward and backward.
        categories: bytes at the peak, by category: ``parameters``, ``gradients``, ``activations``, and so on.
        logits_bytes: the input of the loss's cross-entropy, 0 where the model has none.
        blocks: parts of the model in the order in which they run.
        link_bytes_per_second: between the host's pinned memory and the card.
        host_peak_bytes: most bytes that were pinned on the host, and what else techniques hold there.
        samples: models and batches to try, where the workload does not train; None where nobody gives any.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    sizes: Mapping[str, int]
    trains: bool
    own_step: bool = False
    device_type: str = "cuda"
    capability: tuple[int, int] = (8, 9)
    total_bytes: int = 0
    host_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    setup_bytes: int = 0
    outside_bytes: int = 0
    step_seconds: float = 0.0
    step_flops: int = 0
    categories: Mapping[str, int] = field(default_factory=dict)
    logits_bytes: int = 0
    blocks: tuple[ModelBlock, ...] = ()
    link_bytes_per_second: float = 0.0
    host_peak_bytes: int = 0
    samples: Samples | None = None
