"""What others do to the same workload: uniform checkpointing, selective policies, the compiler's memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from frontier_parts.subjects import RECOMPUTED, Subject
from vramfit.techniques.support.blocks import find_blocks
from vramfit.workload import Workload

aten = torch.ops.aten

MATMULS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
    }
)
"""Products, convolutions among them."""

ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
)

EAGER, UNIFORM, SELECTIVE, COMPILER, AUTO_SAC = "eager", "uniform", "selective", "compiler", "auto-SAC"

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Which results a recomputed block keeps.

    Attributes:
        attention: those of attention.
        matmuls: one in so many of the products, from the first on; 0 for none.
    """

    attention: bool
    matmuls: int

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For one call of a block."""
        products = 0

        def choose(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            nonlocal products
            kept = self.attention and op in ATTENTION
            if op in MATMULS and self.matmuls:
                kept = products % self.matmuls == 0
                products += 1
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        found: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
            create_selective_checkpoint_contexts(choose)
        )
        return found


POLICIES = {
    "matmul and attention": Policy(attention=True, matmuls=1),
    "matmul": Policy(attention=False, matmuls=1),
    "every second matmul and attention": Policy(attention=True, matmuls=2),
    "every second matmul": Policy(attention=False, matmuls=2),
    "attention": Policy(attention=True, matmuls=0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One way of others.

    Attributes:
        kind: of the ways.
        every: blocks are recomputed one in so many; 0 for none.
        policy: what they keep, by its name; empty for nothing.
        chunks: how the loss is cut; empty for not at all.
        ratio: the compiler's memory budget; None without the compiler.
    """

    kind: str
    every: int = 0
    policy: str = ""
    chunks: str = ""
    ratio: float | None = None

    @property
    def name(self) -> str:
        """For tables."""
        told = {
            EAGER: "eager",
            UNIFORM: "all blocks" if self.every == 1 else f"every {self.every} blocks",
            SELECTIVE: f"SAC, {self.policy}",
            COMPILER: f"compiler, budget {self.ratio}",
        }[self.kind]
        return f"{told}, {self.chunks}" if self.chunks else told

    def applied(self, subject: Subject) -> Workload:
        """The workload, done that way."""
        workload = subject.chunked[self.chunks] if self.chunks else subject.workload
        if self.ratio is not None:
            return replace(workload, model=lambda: _compiled(workload.model(), self.ratio))
        if not self.every:
            return workload
        contexts = POLICIES[self.policy].contexts if self.policy else None
        return replace(workload, model=lambda: recomputed(workload.model(), self.every, contexts))


def recomputed(model: nn.Module, every: int, contexts: Contexts | None = None) -> nn.Module:
    """A model with one in so many of its blocks under `torch.utils.checkpoint`, from the first on."""
    for place in find_blocks(model)[::every]:
        block: Any = model.get_submodule(place.path)
        under(block, contexts)
    return model


def under(block: Any, contexts: Contexts | None) -> None:
    """Put a block under `torch.utils.checkpoint`, in place."""
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    block.forward = partial(
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options
    )


def _compiled(model: nn.Module, ratio: float | None) -> nn.Module:
    """A model whose graphs are cut by the compiler's partitioner and run operator by operator, without code of C++."""
    import torch._functorch.config as config

    config.activation_memory_budget = ratio  # type: ignore[assignment]
    torch._dynamo.reset()
    found: Any = torch.compile(model, backend="aot_eager_decomp_partition")
    return found  # type: ignore[no-any-return]


def peers_of(subject: Subject) -> Iterator[Peer]:
    """All ways that are tried with a subject but auto-SAC, plain losses first.

    Chunks that are recomputed are tried with none and with all blocks: torch's own take no more memory and fewer
    products.
    """
    for chunks in ("", *subject.chunked):
        yield Peer(kind=EAGER, chunks=chunks)
        if chunks == RECOMPUTED:
            yield Peer(kind=UNIFORM, every=1, chunks=chunks)
            continue
        for every in subject.every:
            yield Peer(kind=UNIFORM, every=every, chunks=chunks)
        for policy in POLICIES:
            yield Peer(kind=SELECTIVE, every=1, policy=policy, chunks=chunks)
    for ratio in subject.ratios:
        yield Peer(kind=COMPILER, ratio=ratio)
