"""Samples of a workload that does not train, for techniques that look at more than its profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from vramfit.planner.trial_attempts import most_model_bytes, ways_to_try
from vramfit.techniques.core.forward_trace import trace_forward
from vramfit.techniques.core.samples import Found, SmallSample, TracedModel
from vramfit.techniques.micro_batching import batch_size_name
from vramfit.torch_internals.pytree import tree_map_only
from vramfit.workload import Workload, call_model

_EXAMPLES = 2
"""Examples of a sample."""

_PASSES = 40
"""Passes of a sample that a search through the modules takes, for the estimate of its seconds."""

_SECONDS = 30.0
"""Seconds that one search may take, and half of what is left."""

_PART, _MOST = 1 / 8, 1 << 31
"""The share of the machine's memory that a model's values may take, and the most bytes."""


@dataclass(slots=True)
class WorkloadSamples:
    """The samples of a workload; see `vramfit.techniques.core.samples.Samples`.

    Args:
        flops: of a step at these sizes.
        model_bytes: of the model's parameters in 32 bits.
        left: the seconds that are left of a limited search; None where it is not limited.
    """

    workload: Workload
    sizes: Mapping[str, int]
    flops: float
    model_bytes: int
    left: Callable[[], float | None] = lambda: None
    _found: dict[str, Any] = field(default_factory=dict)

    def once(self, key: str, find: Callable[[], Found]) -> Found:
        """What `find` gives, found once."""
        if key not in self._found:
            self._found[key] = find()
        return cast(Found, self._found[key])

    def traced(self) -> TracedModel | None:
        """A pass without values, on the meta device, or with values at small sizes where that fails."""
        return self.once("trace", lambda: self._traced_on_meta() or self._traced_small())

    def _traced_on_meta(self) -> TracedModel | None:
        try:
            model = self._shapes()
            if model is None:
                return None
            batch = tree_map_only(
                torch.Tensor, lambda one: one.to("meta"), self.workload.batch(**dict(self.sizes))
            )
            return TracedModel(
                model=model, trace=trace_forward(model, lambda: call_model(model, batch), batch)
            )
        except Exception:  # a model that asks for values, or an operation without a rule for shapes
            return None

    def _shapes(self) -> nn.Module | None:
        """The model without values; made with them first where it reads them while it is made, if there is room."""
        try:
            with torch.device("meta"):
                return self._made()
        except Exception:  # it reads values while it is made
            model = self.valued()
            return None if model is None else model.to("meta")

    def _traced_small(self) -> TracedModel | None:
        sample = self.small()
        if sample is None:
            return None
        model, batch = sample.model, sample.batch
        try:
            return TracedModel(
                model=model, trace=trace_forward(model, lambda: call_model(model, batch), batch)
            )
        except Exception:  # the workload's own code, at sizes that it was not written for
            return None

    def valued(self) -> nn.Module | None:
        """The model with its values, where this machine has room for it."""
        return None if self.model_bytes > most_model_bytes(_PART, _MOST) else self._made()

    def small(self) -> SmallSample | None:
        """The model itself, and a batch of two examples at sizes that take about half a minute for all passes."""
        left = self.left()
        seconds = _SECONDS if left is None else min(_SECONDS, left / 2)
        name = batch_size_name(self.sizes)
        examples = min(_EXAMPLES, self.sizes[name])
        ways = ways_to_try(
            self.workload,
            {**self.sizes, name: examples},
            flops=self.flops * examples / self.sizes[name] * _PASSES,
            seconds=seconds,
            model_bytes=self.model_bytes,
            most_bytes=most_model_bytes(_PART, _MOST),
        )
        for way in ways:
            if way.model is not None:  # a stand-in has other values, and other names
                break
            try:
                model, batch = self._made(), self.workload.batch(**dict(way.sizes))
                with torch.no_grad():
                    call_model(model, batch)
            except Exception:  # the workload's own code, at sizes that it was not written for
                continue
            words = ", ".join(f"{size} {value:,}" for size, value in way.sizes.items())
            return SmallSample(model=model, batch=batch, words=words, seconds=seconds)
        return None

    def _made(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.workload.make_model()
