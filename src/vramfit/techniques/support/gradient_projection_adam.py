"""Adam whose averages of chosen matrices live in a subspace of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class ProjectedAdam(torch.optim.Optimizer):
    """Adam or AdamW, with the matrices that ``each_projected`` marks in a subspace (https://arxiv.org/abs/2403.03507).

    The basis is made of the gradient's singular vectors on its shorter side, found as eigenvectors of the gradient
    times its transpose: a square matrix of that side is all that this needs besides. The averages keep their
    coordinates when the basis changes, as in the paper.

    Args:
        params: groups with ``each_projected``, a list of one bool for each parameter; without it none is projected.
        lr: learning rate.
        betas: of the two averages.
        eps: added to the root of the second.
        weight_decay: of the parameters.
        rank: dimensions of the subspace.
        update_interval: steps after which it is chosen anew.
        scale: what projected updates are multiplied with.
        decoupled_weight_decay: as AdamW; else the decay is added to the gradient, as Adam does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rank: int = 128,
        update_interval: int = 200,
        scale: float = 0.25,
        decoupled_weight_decay: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "rank": rank,
                "update_interval": update_interval,
                "scale": scale,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            marks = group.get("each_projected") or [False] * len(group["params"])
            for parameter, projected in zip(group["params"], marks, strict=True):
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group, projected=projected)
        return loss


def _update(
    parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any], *, projected: bool
) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise RuntimeError(
            "ProjectedAdam does not support sparse gradients, please consider SparseAdam instead"
        )
    rate, decay = group["lr"], group["weight_decay"]
    if decay and group["decoupled_weight_decay"]:
        parameter.mul_(1 - rate * decay)
    elif decay:
        gradient = gradient.add(parameter, alpha=decay)
    step = state.get("step", 0)
    rows, columns = parameter.shape if projected else (0, 0)
    left = rows <= columns
    if projected:
        if step % group["update_interval"] == 0:
            state["basis"] = _basis(gradient, group["rank"], left=left)
        basis: torch.Tensor = state["basis"]
        gradient = basis.T @ gradient if left else gradient @ basis
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    state["step"] = step = step + 1
    first, second = state["exp_avg"], state["exp_avg_sq"]
    beta1, beta2 = group["betas"]
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    del gradient
    size = rate / (1 - beta1**step)
    root = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    if not projected:
        parameter.addcdiv_(first, root, value=-size)
        return
    direction = torch.div(first, root, out=root)
    # The product is added in place: no tensor of the parameter's size is made.
    factors = (basis, direction) if left else (direction, basis.T)
    parameter.addmm_(*factors, alpha=-size * group["scale"])


def _basis(gradient: torch.Tensor, rank: int, *, left: bool) -> torch.Tensor:
    """The strongest singular vectors of the shorter side, as columns."""
    dense = gradient.float()
    square = dense @ dense.T if left else dense.T @ dense
    _, vectors = torch.linalg.eigh(square)  # eigenvalues rise
    strongest: torch.Tensor = vectors[:, -rank:]
    return strongest.to(gradient.dtype).contiguous()
