"""A chunk of logits: its product and its loss, and what their gradients add up to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

Step = tuple[str, Any]
"""What happens to logits before the loss: ``to`` a dtype, ``mul`` or ``div`` by a number, ``tanh``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """How the loss is computed.

    Attributes:
        chunk_rows: rows of logits that exist at once.
        fused: whether gradients are computed with the loss; else logits are computed again in the backward pass.
        into_grad: whether the weight's gradient is added to its ``grad`` without a detour, where that can be done.
        product: dtype in which hidden states and weight are multiplied.
        steps: what happens to the logits before the loss.
        result: dtype of the loss.
        reduction: ``mean``, ``sum`` or ``none``.
        ignore_index: the target of rows that do not count.
    """

    chunk_rows: int
    fused: bool
    product: torch.dtype
    into_grad: bool = False
    steps: tuple[Step, ...] = ()
    result: torch.dtype = torch.float32
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0


def apply_steps(logits: torch.Tensor, steps: tuple[Step, ...]) -> torch.Tensor:
    """What becomes of logits."""
    for kind, value in steps:
        if kind == "to":
            logits = logits.to(value)
        elif kind == "mul":
            logits = logits * value
        elif kind == "div":
            logits = logits / value
        else:
            logits = logits.tanh()
    return logits


class Rows:
    """The side of the loss: what rows of logits cost, and their gradients in place of them."""

    def __init__(
        self, target: torch.Tensor, class_weight: torch.Tensor | None, spec: LossSpec, classes: int
    ) -> None:
        self.dtype = torch.float64 if spec.result == torch.float64 else torch.float32
        self.classes, self.smoothing = classes, spec.label_smoothing
        valid = target != spec.ignore_index
        self.target = torch.where(valid, target, 0)
        self.valid = valid.to(self.dtype)
        self.class_weight = None if class_weight is None else class_weight.to(self.dtype)
        self.share = self.valid if self.class_weight is None else self.class_weight[self.target] * self.valid
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None

    def share_of_mean(self) -> torch.Tensor:
        """What a row's loss is multiplied with in the mean; infinite where no row counts."""
        return self.share.sum().reciprocal()

    def losses(self, logits: torch.Tensor, chunk: slice) -> torch.Tensor:
        """The loss of each row; `logits` hold their exponentials afterwards."""
        logits.sub_(logits.amax(1, keepdim=True))
        picked = logits.gather(1, self.target[chunk, None])[:, 0]
        spread = None
        if self.smoothing:
            spread = logits.sum(1) if self.class_weight is None else logits @ self.class_weight
        sums = logits.exp_().sum(1)
        self._sums = (sums, picked)
        normaliser = sums.log()
        found = self.share[chunk] * (normaliser - picked)
        if spread is None:
            return found
        smooth = self.valid[chunk] * (normaliser * self._all_classes() - spread)
        return found * (1 - self.smoothing) + smooth * (self.smoothing / self.classes)

    def gradients_(self, exponentials: torch.Tensor, chunk: slice, factor: torch.Tensor | None) -> None:
        """Turn what `losses` left into the gradients of the logits, times a factor or one of each row."""
        if self._sums is None:
            raise RuntimeError("losses come before gradients")
        sums, picked = self._sums
        hit = self.share[chunk] * (1 - self.smoothing)
        if factor is not None:
            # Rows that do not count have to stay at zero where the factor is infinite, as no row counts.
            hit = torch.where(self.valid[chunk] > 0, hit * factor, 0)
        every = hit
        smooth = None
        if self.smoothing:
            smooth = self.valid[chunk] * (self.smoothing / self.classes)
            if factor is not None:
                smooth = torch.where(self.valid[chunk] > 0, smooth * factor, 0)
            every = hit + smooth * self._all_classes()
        right = every * picked.exp() / sums - hit
        exponentials.mul_((every / sums)[:, None])
        exponentials.scatter_(1, self.target[chunk, None], right[:, None])
        if smooth is None:
            return
        if self.class_weight is None:
            exponentials.sub_(smooth[:, None])
        else:
            exponentials.addr_(smooth, self.class_weight, alpha=-1)

    def _all_classes(self) -> float | torch.Tensor:
        return float(self.classes) if self.class_weight is None else self.class_weight.sum()


class Head:
    """The side of the linear layer: logits of some rows, and the sums of gradients over all of them."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: LossSpec
    ) -> None:
        self.hidden, self.spec = hidden, spec
        self.weight_dtype = weight.dtype
        self.weight = weight.to(spec.product)
        self.bias = None if bias is None else bias.to(spec.product)
        self.rows, self.classes = hidden.shape[0], weight.shape[0]
        self.dtype = torch.float64 if spec.result == torch.float64 else torch.float32
        self.changes = any(kind != "to" for kind, _ in spec.steps)
        self.ones: dict[str, torch.Tensor] = {}
        self.of_hidden: torch.Tensor | None = None
        self.of_weight: torch.Tensor | None = None
        self.of_bias: torch.Tensor | None = None
        self.begun = False  # whether the weight's gradient holds something to add to
        self._taken: tuple[torch.Tensor, torch.Tensor] | None = None

    def chunks(self) -> Iterator[slice]:
        """The rows, some at a time."""
        step = max(1, self.spec.chunk_rows)
        for start in range(0, self.rows, step):
            yield slice(start, min(start + step, self.rows))

    def want(self, needed: tuple[bool, ...], into: torch.Tensor | None = None) -> None:
        """Make room for the gradients that are needed, of hidden states, weight and bias.

        Args:
            into: what the weight's is added to, if not to one of its own.
        """
        if needed[0]:
            self.of_hidden = torch.empty_like(
                self.hidden, dtype=self.spec.product, memory_format=torch.contiguous_format
            )
        if needed[1] and into is not None:
            self.of_weight, self.begun = into, True
        elif needed[1]:
            shape = (self.classes, self.hidden.shape[1])
            self.of_weight = torch.empty(shape, dtype=self.weight_dtype, device=self.hidden.device)
            if not self.rows:
                self.of_weight.zero_()
        if needed[2] and self.bias is not None:
            self.of_bias = torch.zeros(self.classes, dtype=self.dtype, device=self.hidden.device)

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Those of hidden states, weight and bias."""
        return self.of_hidden, self.of_weight, self.of_bias

    def logits(self, chunk: slice) -> torch.Tensor:
        """Logits of some rows as the loss takes them, in memory that may be overwritten until the next chunk."""
        rows = chunk.stop - chunk.start
        found = self._buffer("product", self.spec.product)[:rows]
        hidden = self.hidden[chunk].to(self.spec.product)
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=found)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=found)
        if self.changes:
            with torch.enable_grad():
                leaf = found.requires_grad_()
                changed = apply_steps(leaf, self.spec.steps)
            self._taken = (leaf, changed)
            return changed.detach().to(self.dtype, copy=True)
        for _, dtype in self.spec.steps:
            if dtype != self.dtype:  # which the copy below does, and without a copy of its own
                found = found.to(dtype)
        if self.spec.product == self.dtype and found.dtype == self.dtype:
            return found
        return self._buffer("loss", self.dtype)[:rows].copy_(found)

    def add(self, gradient: torch.Tensor, chunk: slice) -> None:
        """Add what the gradient of some rows of logits means for the inputs."""
        if self._taken is not None:
            leaf, changed = self._taken
            self._taken = None
            (gradient,) = torch.autograd.grad(changed, leaf, gradient.to(changed.dtype))
        if gradient.dtype != self.spec.product:
            # The product of this chunk is no longer needed: its memory takes the gradient.
            gradient = self._buffer("product", self.spec.product)[: gradient.shape[0]].copy_(gradient)
        if self.of_hidden is not None:
            torch.mm(gradient, self.weight, out=self.of_hidden[chunk])
        if self.of_weight is not None:
            self._add_to_weight(self.of_weight, gradient, chunk)
        if self.of_bias is not None:
            self.of_bias.add_(gradient.sum(0, dtype=self.dtype))

    def _add_to_weight(self, total: torch.Tensor, gradient: torch.Tensor, chunk: slice) -> None:
        hidden = self.hidden[chunk].to(self.spec.product)
        first, self.begun = not self.begun, True
        if total.dtype == self.spec.product:
            total.addmm_(gradient.t(), hidden, beta=0 if first else 1)
            return
        # The parts of a sum in the weight's own precision: some classes at a time, no more than a chunk's logits.
        step = max(1, gradient.numel() // hidden.shape[1])
        for start in range(0, self.classes, step):
            part = gradient[:, start : start + step].t() @ hidden
            some = total[start : start + step]
            if first:
                some.copy_(part)
            else:
                some.add_(part)
            del part  # before the next one is made

    def _buffer(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a chunk of logits, the same for each; its own where the chunk's graph keeps it."""
        found = self.ones.get(name)
        if found is None or (name == "product" and self.changes):
            rows = min(max(1, self.spec.chunk_rows), max(1, self.rows))
            found = torch.empty((rows, self.classes), dtype=dtype, device=self.hidden.device)
            self.ones[name] = found
        return found
