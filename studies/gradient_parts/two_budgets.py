"""Plans for each kind at two budgets, held to their promises by a loop of its own.

Nothing here is shared with the planner's comparison: the plan is applied to a model and its optimizer as in anyone's
loop, one step is taken at the full batch, and what the step left is compared value by value: the gradients of all
parameters, the buffers, the frozen parameters, the numbers in attributes and the states of generators.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import vramfit
from gradient_parts.kinds import KINDS
from vramfit.gpus import find_gpu
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.gradient_check import promised_plan
from vramfit.planner.plans import NothingFits, Plan, PlanRequest
from vramfit.planner.search_cache import Runs
from vramfit.techniques import Numerics
from vramfit.workload import Workload

CARD = "RTX 4090"

TECHNIQUES = (
    "micro-batching",
    "gradient-caching",
    "activation-checkpointing",
    "chunked-loss",
    "in-place-activations",
)
"""Those that change how gradients come about, or when a forward pass runs."""

SAVED = (0.3, 0.6)
"""Parts of the plain program's activations that have to be saved."""

_STATES, _WORKSPACE = 4, 9 << 20
"""Copies of the parameters that a step of AdamW holds, and bytes of cuBLAS's workspace with some room."""

ALLOWED = {"bitwise": 0.0, "rounding": 1e-4}
"""Parts of a value's norm by which it may differ."""

TINY = 1e-6
"""Part of the largest gradient's norm below which one is rounding itself, and is measured by the largest."""

SECONDS = 60.0
"""Of a search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetRow:
    """A plan for one kind at one budget, and what its step came to.

    Attributes:
        part: of the plain program's activations that the budget has no room for.
        techniques: of the plan; empty for none.
        promise: of the plan; empty where nothing fits.
        compared: whether the planner says that it compared the plan.
        worst: the largest difference of a gradient, as a part of its norm.
        state: the largest difference of what the step wrote beside; infinite for what is not there.
        worst_state: its name.
        passes: whether the promise is kept.
        note: what the plan says of micro-batches.
    """

    kind: str
    part: float
    techniques: tuple[str, ...]
    promise: str
    compared: bool
    worst: float
    state: float
    worst_state: str
    passes: bool
    note: str
    seconds: float


def rows_of(kind: str) -> Iterator[BudgetRow]:
    """Plans for a kind at both budgets."""
    device = VirtualBackend(find_gpu(CARD), alloc_conf="expandable_segments:True", host_bytes=1 << 34)
    workload = KINDS[kind]()
    plain = device.step_cost(workload, dict(workload.sizes))
    gc.collect()
    gc.freeze()  # a virtual run collects garbage after each step, and need not look at torch's own objects
    kept = Runs()
    parameters = sum(one.nbytes for one in workload.model().parameters() if one.requires_grad)
    activations = plain.peak_allocated_bytes - _STATES * parameters - _WORKSPACE
    for part in SAVED:
        began = time.perf_counter()
        request = PlanRequest(
            workload=KINDS[kind](),
            sizes=workload.sizes,
            budget_bytes=plain.total_bytes - round(activations * part),
            numerics=Numerics.ROUNDING,
            allowed=frozenset(TECHNIQUES),
            time_limit=2.0,
            entries=False,
            search_seconds=SECONDS,
        )
        try:
            _, plan = promised_plan(device, request, lambda _text: None, kept=kept)
        except NothingFits as error:
            yield _nothing(kind, part, error, time.perf_counter() - began)
            continue
        yield _row(kind, part, plan, time.perf_counter() - began)


def _nothing(kind: str, part: float, error: NothingFits, seconds: float) -> BudgetRow:
    return BudgetRow(
        kind=kind,
        part=part,
        techniques=(),
        promise="",
        compared=False,
        worst=0.0,
        state=0.0,
        worst_state="",
        passes=True,
        note=f"{error.message}. {_note(error.plan)}".strip(),
        seconds=seconds,
    )


def _row(kind: str, part: float, plan: Plan, seconds: float) -> BudgetRow:
    redraws = any(choice.name in ("micro-batching", "gradient-caching") for choice in plan.choices)
    plain, planned = (
        _step(KINDS[kind](), None, dropout=not redraws),
        _step(KINDS[kind](), plan, dropout=not redraws),
    )
    worst = _worst_gradient(plain.gradients, planned.gradients)
    state, name = _worst_state(plain.states, planned.states)
    allowed = ALLOWED.get(plan.numerics.value, math.inf)
    return BudgetRow(
        kind=kind,
        part=part,
        techniques=tuple(choice.name for choice in plan.choices),
        promise=plan.numerics.value,
        compared=not plan.choices or any("compared with" in note for note in plan.notes),
        worst=worst,
        state=state,
        worst_state=name if state else "",
        passes=worst <= allowed and state <= allowed,
        note=_note(plan),
        seconds=seconds,
    )


def _note(plan: Plan) -> str:
    return next((note for note in plan.notes if "micro-batching" in note), "")


@dataclass(frozen=True, slots=True)
class _Left:
    """What a step left: gradients and other values, by name."""

    gradients: Mapping[str, torch.Tensor]
    states: Mapping[str, Any]


def _step(workload: Workload, plan: vramfit.Plan | None, *, dropout: bool) -> _Left:
    """One step at the full batch, up to the optimizer's."""
    random.seed(3)
    torch.manual_seed(3)
    batch = workload.batch(**workload.sizes)
    model = workload.model()
    assert workload.optimizer is not None
    assert workload.loss is not None
    optimizer: Any = workload.optimizer(model.parameters())
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    torch.manual_seed(4)
    if plan is None:
        workload.loss(model, batch).backward()
    else:
        model, optimizer = plan.apply(model, optimizer)
        for piece in plan.split(batch):
            plan.backward(workload.loss(model, piece))
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    states: dict[str, Any] = {n: b.clone() for n, b in model.named_buffers()}
    states |= {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not name.startswith("_"):
                states[f"{path}.{name}"] = value
            if isinstance(value, torch.Generator):
                states[f"{path}.{name}"] = value.get_state()
            if name == "history":
                states[f"{path}.{name}"] = len(value)
    if plan is not None:
        plan.undo(model)
    return _Left(gradients, states)


def _worst_gradient(plain: Mapping[str, torch.Tensor], planned: Mapping[str, torch.Tensor]) -> float:
    if plain.keys() != planned.keys():
        return math.inf
    largest = max(float(one.double().norm()) for one in plain.values())
    worst = 0.0
    for name, one in plain.items():
        off, norm = float((one.double() - planned[name].double()).norm()), float(one.double().norm())
        if off:
            worst = max(worst, off / (norm if norm > TINY * largest else largest))
    return worst


def _worst_state(plain: Mapping[str, Any], planned: Mapping[str, Any]) -> tuple[float, str]:
    worst = (0.0, "")
    for name, one in plain.items():
        other = planned.get(name)
        if isinstance(one, torch.Tensor):
            if not isinstance(other, torch.Tensor) or other.shape != one.shape:
                off = math.inf
            else:
                off = float((one.double() - other.double()).norm()) / (float(one.double().norm()) or 1.0)
        else:
            off = (
                0.0 if one == other else abs(one - other) / (abs(one) or 1) if other is not None else math.inf
            )
        worst = max(worst, (off, name))
    return worst


HEADS = ("kind", "saved", "techniques", "promised", "worst gradient", "worst state")


def cells(rows: Sequence[BudgetRow]) -> Iterator[tuple[str, ...]]:
    """A table's rows."""
    for row in rows:
        fits = bool(row.promise)
        yield (
            row.kind + ("" if row.passes else " ✗"),
            f"{row.part:.0%}",
            (", ".join(row.techniques) or "none needed") if fits else "nothing fits",
            row.promise or "-",
            _number(row.worst) if fits else "-",
            f"{_number(row.state)}{f' ({row.worst_state})' if row.state else ''}" if fits else "-",
        )


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"
