"""Trainings with optimizers that are not torch's usual ones, some of packages, some written as libraries write them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tests.runtime.trainings import Parts, Training, classifies, pairs, rows, small, squares
from torch import nn


class MasterWeights(torch.optim.Optimizer):
    """As Apex' FusedAdam with master weights: lists of copies, moments and a step count as its own attributes."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0})
        held = [one for group in self.param_groups for one in group["params"]]
        self.masters = [one.detach().clone().double() for one in held]
        self.moments = [torch.zeros_like(one) for one in self.masters]
        self.steps = 0
        self.overflow = torch.zeros(1)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["step"] += 1
        held = [one for group in self.param_groups for one in group["params"]]
        for number, parameter in enumerate(held):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.double()
            self.moments[number].mul_(0.9).add_(gradient)
            self.masters[number] = self.masters[number] - self.param_groups[0]["lr"] * self.moments[number]
            self.overflow += (gradient.abs().max() > 100).float()
            parameter.copy_(self.masters[number])


class EightBit(torch.optim.Optimizer):
    """As bitsandbytes: moments in bytes with their scales, which each step replaces."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": [0.9, 0.99]})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state["step"], state["scale"] = 0, torch.ones(())
                    state["moment"] = torch.zeros_like(one, dtype=torch.int8)
                state["step"] += 1
                moment = state["moment"].float() * state["scale"] / 127
                moment = group["betas"][0] * moment + (1 - group["betas"][0]) * one.grad
                one.grad.mul_(0.5)  # some use gradients as scratch
                one.sub_(moment, alpha=group["lr"])
                state["scale"] = moment.abs().max().clamp(min=1e-12)
                state["moment"].copy_((moment / state["scale"] * 127).round())


class Orthogonal(torch.optim.Optimizer):
    """A Muon of one's own: matrices by Newton and Schulz, the rest by Adam, one counter in a closure's list."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.counter = [0]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.counter[0] += 1
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                state["moment"] = state.get("moment", 0) * 0.95 + one.grad
                update = state["moment"]
                if one.dim() == 2:
                    update = update / (update.norm() + 1e-7)
                    for _ in range(3):
                        square = update @ update.T
                        update = 1.5 * update - 0.5 * square @ update
                one.add_(update, alpha=-group["lr"] / math.sqrt(self.counter[0]))


def _with(make: Callable[[Iterable[nn.Parameter]], Any], kind: str = "small") -> Callable[[], Parts]:
    """A training of a small model with an optimizer."""

    def made() -> Parts:
        model = (
            small()
            if kind == "small"
            else nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False))
        )
        if kind == "wide":
            model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 3))
        optimizer = make(model.parameters())
        if hasattr(optimizer, "train"):
            optimizer.train()
        if kind == "small":
            return Parts(model=model, optimizer=optimizer, loss=classifies, batch=pairs(4, 6, 3))
        return Parts(
            model=model, optimizer=optimizer, loss=squares, batch=rows(4, 64 if kind == "wide" else 6)
        )

    return made


def _of_package(package: str, name: str, **options: Any) -> Callable[[Iterable[nn.Parameter]], Any]:
    def make(parameters: Iterable[nn.Parameter]) -> Any:
        return getattr(importlib.import_module(package), name)(parameters, **options)

    return make


def _lookahead(parameters: Iterable[nn.Parameter]) -> Any:
    """Around one of torch's, with slow weights of its own."""
    package = importlib.import_module("pytorch_optimizer")
    return package.Lookahead(torch.optim.AdamW(parameters, lr=0.02), k=2, alpha=0.5)


PACKAGES: tuple[tuple[str, str, Callable[[Iterable[nn.Parameter]], Any], str], ...] = (
    (
        "schedulefree",
        "ScheduleFree AdamW",
        _of_package("schedulefree", "AdamWScheduleFree", lr=0.02),
        "small",
    ),
    ("schedulefree", "ScheduleFree SGD", _of_package("schedulefree", "SGDScheduleFree", lr=0.02), "small"),
    ("prodigyopt", "Prodigy", _of_package("prodigyopt", "Prodigy", lr=1.0), "small"),
    ("lion_pytorch", "Lion", _of_package("lion_pytorch", "Lion", lr=0.02), "small"),
    ("pytorch_optimizer", "SOAP", _of_package("pytorch_optimizer", "SOAP", lr=0.02), "small"),
    ("pytorch_optimizer", "AdaBelief", _of_package("pytorch_optimizer", "AdaBelief", lr=0.02), "small"),
    (
        "pytorch_optimizer",
        "Ranger21",
        _of_package("pytorch_optimizer", "Ranger21", num_iterations=20, lr=0.02),
        "small",
    ),
    ("pytorch_optimizer", "DAdaptAdam", _of_package("pytorch_optimizer", "DAdaptAdam", lr=1.0), "small"),
    ("pytorch_optimizer", "Adan", _of_package("pytorch_optimizer", "Adan", lr=0.02), "small"),
    ("pytorch_optimizer", "Shampoo", _of_package("pytorch_optimizer", "ScalableShampoo", lr=0.02), "small"),
    ("pytorch_optimizer", "Lookahead of AdamW", _lookahead, "small"),
    ("torchao", "torchao AdamW8bit", _of_package("torchao.optim", "AdamW8bit", lr=0.02), "wide"),
)


def of_optimizers() -> tuple[list[Training], list[str]]:
    """The trainings, and packages that are not installed."""
    torch.compile = lambda function, **_options: function  # type: ignore[assignment]  # torchao compiles its step
    found = [
        Training("master weights in lists", _with(lambda given: MasterWeights(given, 0.02))),
        Training("moments in bytes, gradients as scratch", _with(lambda given: EightBit(given, 0.02))),
        Training("orthogonal updates, counter in a list", _with(lambda given: Orthogonal(given, 0.02))),
        Training("Muon", _with(lambda given: torch.optim.Muon(given, lr=0.02), "matrices")),
        Training("Adafactor", _with(lambda given: torch.optim.Adafactor(given, lr=0.02))),
        Training("Adadelta", _with(lambda given: torch.optim.Adadelta(given))),
        Training("ASGD", _with(lambda given: torch.optim.ASGD(given, t0=0))),
        Training("LBFGS", _with(lambda given: torch.optim.LBFGS(given))),
    ]
    missing = []
    for package, name, make, kind in PACKAGES:
        if importlib.util.find_spec(package) is None:
            missing.append(package)
        else:
            found.append(Training(name, _with(make, kind)))
    return found, sorted({*missing})
