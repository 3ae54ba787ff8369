"""Programs of several ranks in a world of one: the collectives, buffers and streams are those of any world.

Every loop runs to its end without waiting for the card, as trainings do: one step of such a program is the whole loop.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from configurations import language
from configurations.optimizers import make_optimizer
from configurations.training import Program, lowered, place, tokens


def join() -> None:
    """A process group of this process alone, over NCCL."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)


class Recomputed(nn.Module):
    """A block whose activations are computed again for the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *arguments: Tensor) -> Tensor:
        return checkpoint(self.block, *arguments, use_reentrant=False)


def fsdp2(
    *,
    size: str = "llama-1b",
    layers: int | None = None,
    batch: int = 2,
    length: int = 2048,
    iterations: int = 20,
    recompute: bool = False,
    compiled: bool = False,
    float8: bool = False,
    reshard: bool = True,
    log_every: int = 10,
    precision: str,
    optimizer: str,
) -> Program:
    """Llama under FSDP2 in mixed precision, as torchtitan has it: blocks recomputed, compiled, sharded; then the root.

    Args:
        iterations: of the loop, which is one step of the program.
        log_every: iterations between two readings of the loss, at which the host waits for the card.
    """
    join()
    shape = language.SHAPES[size]
    model = place(lambda: language.Llama(shape), precision, on_card=True)
    del model.blocks[layers or shape.layers :]
    if float8:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.blocks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.blocks):
        if recompute:
            model.blocks[index] = block = Recomputed(block)
        if compiled:
            model.blocks[index] = block = torch.compile(block, fullgraph=True)
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    chosen = make_optimizer(optimizer, list(model.parameters()))
    return loop_of(model, chosen, (batch, length, shape.vocabulary), iterations, log_every, "fp32")


def ddp(
    *,
    size: str = "gpt2-small",
    batch: int = 8,
    length: int = 1024,
    iterations: int = 5,
    compiled: bool = False,
    as_views: bool = False,
    precision: str,
    optimizer: str,
) -> Program:
    """GPT-2 under DistributedDataParallel."""
    join()
    shape = language.SHAPES[size]
    model: nn.Module = place(lambda: language.GPT(shape), precision)
    model = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=as_views)
    if compiled:
        model = torch.compile(model)
    chosen = make_optimizer(optimizer, list(model.parameters()))
    return loop_of(model, chosen, (batch, length, shape.vocabulary), iterations, iterations, precision)


def loop_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sizes: tuple[int, int, int],
    iterations: int,
    log_every: int,
    precision: str,
) -> Program:
    """A training loop as one step."""
    batch, length, vocabulary = sizes
    batch_BS = tokens(batch, length, vocabulary)

    def step() -> None:
        for iteration in range(iterations):
            with lowered(precision):
                loss = language.next_token_loss(model(batch_BS), batch_BS)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (iteration + 1) % log_every == 0:
                loss.item()

    return Program(step=step, models=(model,), optimizers=(optimizer,))
