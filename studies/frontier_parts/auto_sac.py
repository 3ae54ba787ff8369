"""Torch's auto-SAC (torch.distributed._tools): estimates of each module, and a program of which results to discard.

Its estimator runs on fake tensors and asks a CUDA device for its rates; here it is given those of this machine's CPU,
on which the plan is measured. Bytes, the program and the choice inside a module are torch's own. What it decides is
put onto the modules with `torch.utils.checkpoint`'s selective contexts, by the number of each operation, as it numbers
them.

It needs ``pulp`` and ``pwlf`` (``pip install 'vramfit[frontier]'``).
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from frontier_parts.measuring import fake_tensors
from frontier_parts.peers import under
from vramfit.planner.devices.cpu_backend import seconds_of
from vramfit.workload import Workload

GIB = 1 << 30


class Infeasible(Exception):
    """Its solver finds nothing within the budget, or no choice inside a module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """What it decided.

    Attributes:
        policies: by module, which of its operations' results are saved.
        predicted_bytes: the peak that it expects, parameters and gradients included.
        estimate_seconds: that its estimates took.
        solve_seconds: that its programs took.
    """

    policies: Mapping[str, tuple[bool, ...]]
    predicted_bytes: int
    estimate_seconds: float
    solve_seconds: float

    def applied(self, workload: Workload) -> Workload:
        """The workload, with what was decided."""

        def model() -> nn.Module:
            made = workload.model()
            for name, saved in self.policies.items():
                under(made.get_submodule(name), Numbered(saved).contexts)
            return made

        return replace(workload, model=model)


@dataclass(frozen=True, slots=True)
class Numbered:
    """Saves operations by their number in a module.

    Attributes:
        saved: whether, for each.
    """

    saved: tuple[bool, ...]

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For one call of the module."""
        from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

        count = 0

        def choose(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            nonlocal count
            if op in OPS_TO_ALWAYS_SKIP:
                return CheckpointPolicy.PREFER_RECOMPUTE
            kept = count < len(self.saved) and self.saved[count]
            count += 1
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        found: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
            create_selective_checkpoint_contexts(choose)
        )
        return found


def solve(workload: Workload, budget: int) -> Solved:
    """Let it decide for a budget of bytes above parameters and gradients.

    Raises:
        Infeasible: it finds nothing.
        ImportError: pulp or pwlf is missing.
    """
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    began = time.perf_counter()
    tracker, runtimes, estimator, model = _estimates(workload)
    with contextlib.redirect_stdout(io.StringIO()):
        info = aggregate_stats(model, tracker, runtimes, estimator, torch.device("cpu"))
    graph = parse_module_info(info)
    estimated = time.perf_counter()
    fixed = 2 * graph.nodes[0]["param_per_module"]
    decisions, _, predicted = sac_milp(graph, memory_budget=(budget + fixed) / GIB)
    if predicted < 0:
        raise Infeasible(f"its solver finds nothing in {time.perf_counter() - estimated:.0f} s")
    policies = {}
    for name, discarded in decisions.items():
        # The names of its modules begin with that of the model's class.
        chosen = get_optimal_checkpointing_policy_per_module(estimator.sac_mod_stats[name], 1 - discarded)
        if not chosen:
            raise Infeasible(f"its solver finds no choice inside {name}")
        policies[name.partition(".")[2]] = tuple(bool(save) for save in chosen)
    return Solved(
        policies=policies,
        predicted_bytes=predicted,
        estimate_seconds=estimated - began,
        solve_seconds=time.perf_counter() - estimated,
    )


def _estimates(workload: Workload) -> tuple[Any, Any, Any, nn.Module]:
    """Its three estimators, each having watched a step on fake tensors; gradients are there from the start."""
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    tracker, runtimes, estimator = MemTracker(), RuntimeEstimator(), SACEstimator()
    with fake_tensors(), contextlib.redirect_stdout(io.StringIO()):
        state = workload.start("cpu")
        model = state.model
        tracker.track_external(model, state.optimizer)
        with tracker:
            workload.run_step(state, workload.sizes)
            tracker.reset_mod_stats()
            workload.run_step(state, workload.sizes)
        runtimes("operator-level-cost-model")
        runtimes._estimate = _estimate
        with runtimes:
            workload.run_step(state, workload.sizes)
        estimator("operator-level-cost-model")
        estimator._estimate_runtime = _estimate
        assert workload.loss is not None
        with estimator:
            workload.loss(model, workload.batch(**workload.sizes))
    return tracker, runtimes, estimator, model


def _estimate(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Results and milliseconds of an operation on this machine's CPU, by its arithmetic and its traffic."""
    kwargs = kwargs or {}
    out = func(*args, **kwargs)
    count = flop_registry.get(func._overloadpacket)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=out))
    return out, 1e3 * seconds_of(func, args, kwargs, out, flops)
