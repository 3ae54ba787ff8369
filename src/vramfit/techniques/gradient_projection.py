"""Adam's averages of matrices in a subspace of their gradients (GaLore)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.techniques.support.optimizer_exchange import (
    States,
    adam_of,
    carried_groups,
    exchange,
    is_adam,
    others_excluded,
    parameters_of,
)

_SMALLEST_RANK = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientProjectionSetting(Setting):
    """The subspace.

    Attributes:
        rank: its dimensions; matrices whose shorter side is not longer keep Adam's full averages.
        update_interval: steps after which it is chosen anew.
        scale: what the update of projected matrices is multiplied with; 1 suits the learning rate that AdamW had, the
            paper's scripts have 0.25 with a larger rate of 0.01.
    """

    rank: int = 128
    update_interval: int = 200
    scale: float = 1.0


class GradientProjection(Technique[GradientProjectionSetting]):
    """Keep Adam's averages of a matrix for the ``rank`` strongest directions of its gradient alone.

    GaLore (Zhao et al., https://arxiv.org/abs/2403.03507): every ``update_interval`` steps the singular vectors of the
    gradient's shorter side give a basis; the gradient is projected onto it, Adam works there, and the update is
    projected back and scaled. A matrix m x n with m <= n keeps ``m r + 2 r n`` numbers instead of ``2 m n``. Embeddings
    and everything that is no matrix keep full averages, as in the paper.

    It pays for large matrices. It costs two matrix products a step, and at each update of the basis the eigenvectors of
    an m x m matrix, in float32. A model trained so differs from one trained with Adam; ``scale`` and the learning rate
    want tuning. Measured over 100 steps of a language model of width 64, whose loss is 4.8 at first and with AdamW 0.06
    at last: 0.37 with rank 16 and scale 1, 2.4 with rank 8 and scale 0.25. Over 40 steps of nine small models, with a
    quarter of the shorter side, losses ended above AdamW's by 3 to 49 % of its fall. Projected averages begin anew
    where the program's optimizer has states already; others are taken over.
    """

    name: ClassVar[str] = "gradient-projection"
    summary: ClassVar[str] = "keep Adam's states in a low-rank subspace of the gradient"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[AttachStage] = AttachStage.OPTIMIZER
    setting_type = GradientProjectionSetting
    follows: ClassVar[str | None] = "lean-optimizer"
    excludes: ClassVar[dict[str, str]] = others_excluded("gradient-projection")

    def options(self, profile: Profile) -> Iterable[GradientProjectionSetting]:
        """A quarter, then an eighth of the shorter side that most of the matrices' elements have."""
        if not is_adam(profile.optimizer):
            return
        trained = {id(parameter) for parameter in parameters_of(profile.optimizer)}
        elements: dict[int, int] = {}
        for parameter in _matrices(profile.model):
            if id(parameter) in trained:
                side = min(parameter.shape)
                elements[side] = elements.get(side, 0) + parameter.numel()
        if not elements:
            return
        usual = max(elements, key=lambda side: (elements[side], side))
        for part in (4, 8):
            if usual // part >= _SMALLEST_RANK:
                yield GradientProjectionSetting(rank=usual // part)

    def promise(self, setting: GradientProjectionSetting) -> Promise:
        """Other mathematics."""
        return Promise(self.numerics, f"matrices are updated in {setting.rank} directions of their gradients")

    def attach(self, live: AttachedProgram, setting: GradientProjectionSetting) -> None:
        """Exchange the optimizer."""
        old = adam_of(live, self.name)
        _check(setting)
        if any(group.get("amsgrad") for group in old.param_groups):
            raise UsageError(f"{self.name} cannot take over amsgrad=True", "Leave one of them out")
        projected = {id(p) for p in _matrices(live.model) if min(p.shape) > setting.rank}
        if not any(id(parameter) in projected for parameter in parameters_of(old)):
            raise UsageError(
                f"no matrix of the model has a shorter side above the rank of {setting.rank}",
                "Give a smaller rank, or leave gradient-projection out",
            )
        groups = carried_groups(old, ("betas", "eps", "weight_decay", "decoupled_weight_decay"))
        for new, group in zip(groups, old.param_groups, strict=True):
            new["each_projected"] = [id(parameter) in projected for parameter in group["params"]]
        made = ProjectedAdam(
            groups, rank=setting.rank, update_interval=setting.update_interval, scale=setting.scale
        )

        def move(parameter: torch.Tensor, states: States) -> States | None:
            if id(parameter) in projected or "exp_avg" not in states:
                return None
            kept: dict[str, Any] = {name: states[name].clone() for name in ("exp_avg", "exp_avg_sq")}
            return kept | {"step": int(states["step"])}

        exchange(live, made, move=move)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of a model, without those of embeddings, tied ones included."""
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    return [
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 2
        and parameter.requires_grad
        and parameter.is_floating_point()
        and id(parameter) not in tables
    ]


def _check(setting: GradientProjectionSetting) -> None:
    if setting.rank < 1 or setting.update_interval < 1 or setting.scale <= 0:
        raise UsageError(
            f"a projection of rank {setting.rank}, every {setting.update_interval} steps, times {setting.scale:g}",
            "Give whole numbers of at least 1, and a scale above 0",
        )


# -- the optimizer -------------------------------------------------------------------------------------------------


class ProjectedAdam(torch.optim.Optimizer):
    """Adam or AdamW, with the matrices that ``each_projected`` marks in a subspace (https://arxiv.org/abs/2403.03507).

    The basis is made of the gradient's singular vectors on its shorter side, found as eigenvectors of the gradient
    times its transpose: a square matrix of that side is all that this needs besides. The averages keep their
    coordinates when the basis changes, as in the paper.

    Args:
        params: groups with ``each_projected``, a list of one bool for each parameter; without it none is projected.
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
