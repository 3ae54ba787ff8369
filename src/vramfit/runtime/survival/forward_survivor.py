"""Inference that outlives a long input: the call again in cleaned memory, then in smaller and smaller parts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.input_chunks import ChunkSettings, call_in_chunks, find_input_cut
from vramfit.runtime.survival.ladder import Rung, SurvivalEvent
from vramfit.runtime.survival.leftovers import Recovery, memory_now

_log = logging.getLogger("vramfit.survive")


class ForwardSurvivor:
    """Calls of a model without gradients that outlive running out of memory.

    A call that runs out is made again in cleaned memory. If it runs out again, its inputs are cut along the batch, in
    halves, quarters and so on, and the outputs joined on the host. That is refused where entries of outputs depend on
    others (see `vramfit.chunked`), and the shortage is passed on. Each call begins whole.

    Args:
        model: as the service has it.
        function: what is called; None calls the model.
        on_event: called with what was done; it is logged too.
        enabled: False calls once, and passes on what it raises.

    Attributes:
        events: what was done so far.
        calls: that ended well.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[..., Any] | None = None,
        on_event: Callable[[SurvivalEvent], None] | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self.model, self._function, self._on_event = model, function, on_event
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self._recovery = Recovery(device)
        self.events: list[SurvivalEvent] = []
        self.calls = 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function of tensors, such as the one that a service answers requests with."""
        guarded = ForwardSurvivor(self.model, function, self._on_event, enabled=self._enabled)

        @functools.wraps(function)
        def call(*inputs: Any, **named: Any) -> Any:
            return guarded.run(*inputs, **named)

        call.survivor = guarded  # type: ignore[attr-defined]
        return call

    def __enter__(self) -> ForwardSurvivor:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, *inputs: Any, **named: Any) -> Any:
        """One call.

        Returns:
            the outputs, as the whole call gives them; on the host where it was made in parts.

        Raises:
            torch.OutOfMemoryError: single entries do not fit, or the outputs cannot be joined.
            BaseException: what the model raises.
        """
        function = self.model if self._function is None else self._function
        call = (inputs, dict(named))
        if not self._enabled:
            with torch.no_grad():
                return function(*inputs, **named)
        parts = 0
        while True:
            done, found = self._attempt(function, call, parts)
            if done:
                self.calls += 1
                return found
            self._recovery.release()
            parts = self._next(call, parts)

    def _attempt(self, function: Callable[..., Any], call: Any, parts: int) -> tuple[bool, Any]:
        """Whether a call fits in so many parts (0 and 1: whole), and what it gives."""
        try:
            with torch.no_grad():
                if parts < 2:
                    return True, function(*call[0], **call[1])
                size = -(-find_input_cut(call, ChunkSettings(size=1)).extent // parts)
                settings = ChunkSettings(
                    size=size, device=self._recovery.device, output_device=torch.device("cpu")
                )
                return True, call_in_chunks(function, call, settings)
        except BaseException as error:
            if not self._recovery.noted(error):
                raise
            return False, None

    def _next(self, call: Any, parts: int) -> int:
        """How many parts the next attempt has.

        Raises:
            torch.OutOfMemoryError: there are no more.
        """
        shortage = self._recovery.last
        assert shortage is not None
        if parts == 0:
            self._tell("retry", Rung.AGAIN, 1)
            return 1
        why = "single entries do not fit"
        try:
            most = find_input_cut(call, ChunkSettings(size=1)).extent
        except UsageError as error:
            most, why = 1, error.message
        if parts >= most:
            self._tell("given-up", Rung.MICRO_BATCHES, parts)
            raise torch.OutOfMemoryError(f"{shortage.message} ({why})")
        parts = min(2 * parts, most)
        self._tell("up", Rung.MICRO_BATCHES, parts)
        return parts

    def _tell(self, kind: str, rung: Rung, pieces: int) -> None:
        now, shortage = memory_now(self._recovery.device), self._recovery.last
        event = SurvivalEvent(
            step=self.calls,
            kind=kind,
            rung=rung,
            cause="" if shortage is None else shortage.message,
            evidence="" if now is None else f"at the next attempt {now}",
            pieces=pieces,
        )
        self.events.append(event)
        _log.warning("%s", event)
        if self._on_event is not None:
            self._on_event(event)
