"""Ranks that agree before each collective, so that none waits for one that ran out of memory.

NOTE [Votes]: a rank that runs out in its forward or backward pass never comes to the reduction that the others wait in.
So gradients stay on their rank until all have said, on a group of CPU tensors with a timeout, that they have them and
the buffer to reduce them with; if one has not, all begin the step anew, on the same rung. What a rank allocates after
the reduction is voted on once more. The optimizer's step needs no vote: it always ends. Buffers are synchronised
between two steps, and not inside of the forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError, VramfitError

BUCKET_BYTES = 25 << 20
"""Of gradients that are reduced together, as in torch's DistributedDataParallel (bucket_cap_mb)."""


class RankVotes:
    """The ranks of a training.

    Args:
        model: wrapped by DistributedDataParallel.
        timeout: seconds that a rank waits for the others' votes.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel, timeout: float) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._wrapper = model
        self._group = model.process_group
        ranks = dist.get_process_group_ranks(self._group)
        self.size = len(ranks)
        self._source = ranks[0]
        self._votes = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout))
        self._timeout = timeout
        self._bucket: torch.Tensor | None = None
        self._absent: set[nn.Parameter] = set()
        self._buffers_due = True
        self._left = False

    def most(self, *values: int) -> tuple[int, ...]:
        """The largest of what each rank says, for each value.

        Raises:
            VramfitError: a rank does not answer in time, or has left.
        """
        told = torch.tensor(values, dtype=torch.int64, device="cpu")
        try:
            self._dist.all_reduce(told, op=self._dist.ReduceOp.MAX, group=self._votes)
        except RuntimeError as error:
            raise VramfitError(
                f"a rank did not vote within {self._timeout:g} s: {str(error).splitlines()[0]}",
                "Look at the other ranks' logs: one has ended or hangs",
            ) from error
        return tuple(int(value) for value in told)

    def begin_step(self) -> None:
        """Make sure that all ranks begin a step.

        Raises:
            VramfitError: one has left, or does not answer in time.
        """
        (left,) = self.most(0)
        if left:
            self._left = True
            raise VramfitError(
                "another rank has left the training before this step: it had fewer batches, or failed",
                "Give all ranks as many batches (drop_last=True, or a DistributedSampler), or look at its log",
            )

    def synchronise_buffers(self) -> None:
        """Give all ranks the first one's buffers after a reduction, before the attempts of a step.

        DistributedDataParallel does it inside of its forward pass, where a rank that begins anew would wait for others
        that do not. It is kept from that until `close`. It is done in place: nothing is allocated.
        """
        wrapper = self._wrapper
        wrapper.require_forward_param_sync = True
        if self._buffers_due and wrapper.will_sync_module_buffers():
            with torch.no_grad():
                for buffer in wrapper.modules_buffers:
                    whole = buffer.contiguous()
                    plain = whole.view(torch.uint8) if whole.dtype is torch.bool else whole
                    self._dist.broadcast(plain, src=self._source, group=self._group)
                    if whole is not buffer:
                        buffer.copy_(whole)
        self._buffers_due = False
        wrapper.require_forward_param_sync = False

    def fail(self) -> None:
        """This rank ends with an error, somewhere inside of a step: others find out when it does not vote."""
        self._left = True

    def close(self) -> None:
        """Let the wrapper synchronise by itself again, and tell ranks that go on that this one does not."""
        self._wrapper.require_forward_param_sync = True
        if self._left or not self._dist.is_initialized():
            return
        self._left = True
        with contextlib.suppress(VramfitError):
            self.most(1)

    def prepare(self, model: nn.Module) -> None:
        """Have the buffer of the reduction before the vote, and a place for gradients that only other ranks have.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        self._absent = set()
        for parameter in model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                    self._absent.add(parameter)
                elements = max(parameter.numel(), BUCKET_BYTES // parameter.element_size())
                elements = min(elements, sum(p.numel() for p in model.parameters()))
                if self._bucket is None or self._bucket.numel() < elements:
                    self._bucket = torch.empty(elements, dtype=torch.float32, device=parameter.device)

    def reduce(self, model: nn.Module) -> None:
        """Average the gradients over the ranks, in the prepared buffer.

        A parameter without a gradient on this rank counts as nothing and gets what the others have, as in torch's
        DistributedDataParallel with ``find_unused_parameters``; one that no rank has a gradient for keeps none.
        """
        assert self._bucket is not None
        self._buffers_due = True
        for part in self._buckets(model):
            flat = self._bucket[: sum(parameter.numel() for parameter in part)]
            start = 0
            for parameter in part:
                assert parameter.grad is not None
                flat[start : start + parameter.numel()].copy_(parameter.grad.reshape(-1))
                start += parameter.numel()
            flat.div_(self.size)
            self._dist.all_reduce(flat, group=self._group)
            start = 0
            for parameter in part:
                assert parameter.grad is not None
                parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        had = self.most(*(int(parameter not in self._absent) for parameter in trained))
        for parameter, anywhere in zip(trained, had, strict=True):
            if not anywhere:
                parameter.grad = None

    def spread_parameters(self, model: nn.Module) -> None:
        """Give all ranks the first one's parameters: what stepped on a host is rounded otherwise."""
        with torch.no_grad():
            for parameter in model.parameters():
                self._dist.broadcast(parameter, src=self._source, group=self._group)

    def _buckets(self, model: nn.Module) -> Iterator[list[nn.Parameter]]:
        assert self._bucket is not None
        held: list[nn.Parameter] = []
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if held and sum(p.numel() for p in held) + parameter.numel() > self._bucket.numel():
                yield held
                held = []
            held.append(parameter)
        if held:
            yield held


def votes_for(model: nn.Module, timeout: float) -> RankVotes | None:
    """The ranks that a wrapped model trains on; None for one process.

    Raises:
        UsageError: the wrapper's own state does not outlive an attempt that failed.
    """
    for module in model.modules():
        kind = type(module)
        if any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in kind.__mro__):
            raise UsageError(
                f"{kind.__name__} is sharded: which of its parameters are gathered is not known after a shortage",
                "Keep checkpoints and restart, or train with DistributedDataParallel",
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return RankVotes(model, timeout)
    return None


def unsynchronised(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Without the wrapper's own reduction."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        found: contextlib.AbstractContextManager[Any] = model.no_sync()
        return found
    return contextlib.nullcontext()
