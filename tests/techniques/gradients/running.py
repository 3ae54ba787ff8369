"""Runs a workload for some steps, notes all that a technique could have changed, and compares it with the plain run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tests.techniques.gradients.architectures import all_architectures
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vramfit.planner.verification import judge_gradients
from vramfit.techniques import Choice, Numerics, live_of, with_choices
from vramfit.techniques.support.no_dropout import silence_dropout
from vramfit.workload import State, Workload

Tensors = Mapping[str, torch.Tensor]


@dataclass(kw_only=True)
class Outcome:
    """What some steps left behind.

    Attributes:
        losses: of each step.
        gradients: of each step, as the optimizer sees them; a name that comes again in a step gets a number.
        draws: the state of the random generator after each step.
        parameters: after the last step.
        buffers: after the last step, those that are not saved too.
        states: of the optimizer, after the last step.
        left: names of parameters that still have a gradient after the last step.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    draws: list[torch.Tensor] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def run(workload: Workload, *, steps: int, drops: bool = True) -> Outcome:
    """Start a workload on the CPU and take some steps, each with a seed of its own."""
    torch.manual_seed(0)
    state = workload.start("cpu")
    try:
        return _run(workload, state, steps, drops)
    finally:
        if (live := live_of(state)) is not None:
            live.undo()  # what techniques changed beyond the model must not reach the next run


def _run(workload: Workload, state: State, steps: int, drops: bool) -> Outcome:
    found = Outcome()
    if not drops:
        silence_dropout(state.model)
    for step in range(steps):
        torch.manual_seed(5 + step)
        with _gradients(state) as gradients:
            loss = workload.run_step(state, workload.sizes)
        found.losses.append(loss.detach().double())
        found.gradients.append(gradients)
        found.draws.append(torch.get_rng_state())
    named = dict(state.model.named_parameters())
    found.parameters = {name: value.detach().double() for name, value in named.items()}
    found.buffers = {name: value.detach().double() for name, value in state.model.named_buffers()}
    found.left = [name for name, value in named.items() if value.grad is not None]
    if state.optimizer is not None:
        for name, parameter in named.items():
            for key, value in state.optimizer.state.get(parameter, {}).items():
                found.states[f"{name} {key}"] = torch.as_tensor(value).detach().double()
    return found


@contextmanager
def _gradients(state: State) -> Iterator[dict[str, torch.Tensor]]:
    """Gradients of parameters at each step of any optimizer."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    found: dict[str, torch.Tensor] = {}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    name = names[id(parameter)]
                    while name in found:
                        name += "'"
                    found[name] = parameter.grad.detach().double()

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


@cache
def plain(name: str, dtype: torch.dtype, steps: int, drops: bool) -> Outcome:
    """The plain program's outcome."""
    return run(all_architectures()[name].workload(dtype), steps=steps, drops=drops)


def draws_alike(choices: tuple[Choice, ...]) -> bool:
    """Whether random layers draw what they draw in the plain program: pieces of a batch draw each for itself."""
    return not any(choice.technique.redraws for choice in choices)


def numerics_of(choices: tuple[Choice, ...]) -> Numerics:
    """The most that any of them may change."""
    return max(choice.promise.numerics for choice in choices)


def faults(name: str, choices: tuple[Choice, ...], *, steps: int, dtype: torch.dtype) -> list[str]:
    """How a program with techniques breaks their promise, beside the plain one; empty where it does not.

    Bitwise promises hold for all that there is after all steps. Others hold for the first step's gradients and loss,
    and in float64 for those of all steps, and for buffers: in fewer bits Adam makes whole steps of what is rounding in
    gradients near zero.

    Raises:
        UsageError: they cannot be combined.
    """
    drops, numerics = draws_alike(choices), numerics_of(choices)
    workload = with_choices(all_architectures()[name].workload(dtype), choices)
    ours, theirs = run(workload, steps=steps, drops=drops), plain(name, dtype, steps, drops)
    found = [f"{parameter} keeps its gradient" for parameter in ours.left]
    found += [
        f"draws differ after step {step}"
        for step, (mine, other) in enumerate(zip(ours.draws, theirs.draws, strict=True))
        if drops and not torch.equal(mine, other)
    ]
    exact = numerics is Numerics.BITWISE
    last = steps if exact or dtype is torch.float64 else 1
    for step in range(last):
        found += _unlike(
            f"gradients of step {step}", theirs.gradients[step], ours.gradients[step], numerics, dtype
        )
        losses = {"loss": theirs.losses[step]}, {"loss": ours.losses[step]}
        found += _unlike(f"loss of step {step}", *losses, numerics, dtype)
    if last == steps:
        found += _unlike("buffers", theirs.buffers, ours.buffers, numerics, dtype)
    if exact:
        found += _unlike("parameters", theirs.parameters, ours.parameters, numerics, dtype)
        found += _unlike("states", theirs.states, ours.states, numerics, dtype)
    return found


def _unlike(what: str, plain: Tensors, ours: Tensors, numerics: Numerics, dtype: torch.dtype) -> list[str]:
    judged = judge_gradients(plain, ours, numerics, dict.fromkeys(plain, dtype))
    if judged.passes:
        return []
    more = sorted(set(plain) ^ set(ours))
    return [
        f"{what}: {judged.worst_name} differs by {judged.worst:.2g}, allowed {judged.allowed}"
        + (f", not in both {more[:3]}" if more else "")
    ]
