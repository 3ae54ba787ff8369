"""Several real models on one device: the one that is asked for is there, others leave when it needs their room."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from vramfit.arguments import shown, size_argument
from vramfit.errors import UsageError
from vramfit.inference.residency.eviction import CheapestReturn, EvictionPolicy
from vramfit.inference.residency.hosted_model import HostedModel
from vramfit.inference.residency.placement import SizedModel, too_large
from vramfit.workload.given_device import device_argument

_MARGIN = 0.02
"""Part of the card that is left free where no budget is given, as the planner leaves."""


class ModelPool:
    """Keeps models in pinned host memory and brings the ones that are used to a device, within a budget.

    >>> small, large = torch.nn.Linear(256, 256), torch.nn.Linear(2048, 2048)
    >>> with vramfit.ModelPool({"small": small, "large": large}, device="cpu", budget="20MiB") as pool:
    ...     with pool.use("large") as model:
    ...         result = model(torch.ones(1, 2048))
    ...     pool.resident
    ('large',)

    As long as all fit, none leaves. Where one needs room, those leave whose return is the cheapest (bytes times the
    likelihood that they are asked for); one in use never does, and who finds no room waits until one is given back.
    Weights are not copied back, unless they were written to. A move that fails is undone: the models that left for it
    come back. Safe to use from several threads; two threads may use one model at the same time.

    What the budget counts is what torch reserves: for each model on the device a segment for its weights, and
    ``request_bytes`` for each use under way. The CUDA context is outside of it. Before weights come the allocator's
    cache is given back, so that they get a segment of their own.

    Args:
        models: by name, all on the CPU. Their tensors are moved into pinned memory; that is where `close` leaves them.
        device: where they are used; None for the current CUDA device.
        budget: bytes that torch may reserve for them, or ``"20GiB"``; None for what is free on the card, less 2 %.
        request_bytes: what one use takes beyond weights at its peak: one figure, or one for each model. `vramfit.run`
            or `VirtualGPU` measure it.
        policy: who leaves; by default `CheapestReturn`.
        pinned: whether host memory is page-locked; None for where there is a card.

    Raises:
        UsageError: there are no models, two share a tensor, one is not on the CPU, one fits not even alone, or another
            argument is none.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        *,
        device: torch.device | str | None = None,
        budget: str | float | None = None,
        request_bytes: str | float | Mapping[str, str | float] = 0,
        policy: EvictionPolicy | None = None,
        pinned: bool | None = None,
    ) -> None:
        _check_models(models)
        self._device = device_argument("device", "cuda" if device is None else device)
        on_card = self._device.type == "cuda"
        self._budget = _budget(budget, self._device)
        requests = _requests(request_bytes, tuple(models))
        self._policy = _checked_policy(policy)
        self._changed = threading.Condition(threading.RLock())
        self._in_use: Counter[str] = Counter()
        self._holders: Counter[int] = Counter()
        self._waiting: set[int] = set()
        self._ends: dict[str, list[Any]] = {}
        self._come: dict[str, Any] = {}
        self._closed = False
        self.moved_bytes = 0
        self.written_back_bytes = 0
        self.loads = 0
        self.evictions = 0
        self._hosted = {
            name: HostedModel(name, model, self._device, pinned=on_card if pinned is None else pinned)
            for name, model in models.items()
        }
        self._sized = {
            name: SizedModel(name=name, weight_bytes=one.device_bytes, request_bytes=requests[name])
            for name, one in self._hosted.items()
        }
        _check_apart(models)
        for size in self._sized.values():
            if size.weight_bytes + size.request_bytes > self._budget:
                raise too_large(size, self._budget)
        for one in self._hosted.values():  # nothing was touched before all was found to be right
            one.take_over()

    @property
    def budget(self) -> int:
        """Bytes that torch may reserve for the models and their uses."""
        return self._budget

    @property
    def sizes(self) -> dict[str, SizedModel]:
        """What each model takes."""
        return dict(self._sized)

    @property
    def resident(self) -> tuple[str, ...]:
        """Names of the models on the device, in the order in which they were given."""
        return tuple(name for name, one in self._hosted.items() if one.is_visiting)

    @contextmanager
    def use(self, name: str) -> Iterator[nn.Module]:
        """The model on the device; it stays there until the block ends.

        Raises:
            UsageError: there is no such model, the pool is closed, or no room can come free, since every thread that
                uses a model waits for another.
            torch.OutOfMemoryError: the device has less room than the budget says; who had to leave is back.
        """
        me = threading.get_ident()
        with self._changed:
            self._known(name)
            self._policy.requested(self._sized[name])
            self._make_room(name, me)
            self._in_use[name] += 1
            self._holders[me] += 1
            self._wait_for_copy(name)
        try:
            yield self._hosted[name].model
        finally:
            with self._changed:
                self._note_end(name)
                self._in_use[name] -= 1
                self._holders[me] -= 1
                self._wake()

    def evict(self, name: str) -> None:
        """Drop a model from the device now.

        Raises:
            UsageError: there is no such model, the pool is closed, or the model is in use.
        """
        with self._changed:
            self._known(name)
            if self._in_use[name]:
                raise UsageError(f"the model {name} is in use", "Let its use end first")
            self._drop(name)
            self._give_cache_back()
            self._wake()

    def close(self) -> None:
        """Bring all models back to the host, where they stay with their values.

        Raises:
            UsageError: one is in use.
        """
        with self._changed:
            if self._closed:
                return
            if used := [name for name, count in self._in_use.items() if count]:
                raise UsageError(f"the model {used[0]} is in use", "Close the pool when all uses have ended")
            for name in self._hosted:
                self._drop(name)
            self._give_cache_back()
            self._closed = True
            self._wake()

    def __enter__(self) -> ModelPool:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        there = ", ".join(self.resident) or "none"
        return f"<ModelPool of {len(self._hosted)} models on {self._device}: {there} there>"

    # -- under the lock --------------------------------------------------------------------------------------

    def _known(self, name: str) -> None:
        if self._closed:
            raise UsageError("the pool is closed", "Make a new one")
        if name not in self._hosted:
            raise UsageError(f"there is no model {shown(name)}", f"There are {', '.join(self._hosted)}")

    def _wake(self) -> None:
        """Let those who wait look again; none of them counts as waiting until it has."""
        self._waiting.clear()
        self._changed.notify_all()

    def _missing(self, name: str) -> int:
        """Bytes that lack for one more use of a model."""
        weights = sum(self._sized[one].weight_bytes for one in {*self.resident, name})
        requests = sum(self._sized[one].request_bytes * count for one, count in self._in_use.items())
        return weights + requests + self._sized[name].request_bytes - self._budget

    def _make_room(self, name: str, me: int) -> None:
        """Bring a model, after others have left; waits while only models in use could."""
        while True:
            missing = self._missing(name)
            idle = [self._sized[one] for one in self.resident if one != name and not self._in_use[one]]
            leaving = self._policy.leaving(idle, missing) if missing > 0 else ()
            if missing <= 0 or sum(one.weight_bytes for one in leaving) >= missing:
                self._exchange(name, [one.name for one in leaving])
                return
            busy = {holder for holder, count in self._holders.items() if count}
            if busy <= self._waiting | {me}:
                raise UsageError(
                    f"no room can come free for the model {name}: every thread that uses a model waits for another",
                    "Use one model at a time in a thread, or give more budget",
                )
            self._waiting.add(me)
            try:
                self._changed.wait()
            finally:
                self._waiting.discard(me)
            self._known(name)

    def _exchange(self, name: str, leaving: list[str]) -> None:
        """Let models leave and one come; if that fails, all is as before."""
        hosted = self._hosted[name]
        if hosted.is_visiting and not leaving:
            return
        gone: list[str] = []
        try:
            for one in leaving:
                self._drop(one)
                gone.append(one)
            if not hosted.is_visiting:
                self._give_cache_back()
                self._bring(name)
        except BaseException:
            self._give_cache_back()
            for one in gone:
                with suppress(torch.OutOfMemoryError):  # somebody else took its room: it stays on the host
                    self._bring(one)
            raise
        self.evictions += len(gone)

    def _bring(self, name: str) -> None:
        hosted = self._hosted[name]
        hosted.load()
        self.moved_bytes += hosted.nbytes
        self.loads += 1
        if self._device.type == "cuda":
            self._come[name] = torch.cuda.current_stream(self._device).record_event()

    def _drop(self, name: str) -> None:
        """Let a model leave when the device has done with it."""
        for end in [*self._ends.pop(name, ()), *([self._come.pop(name)] if name in self._come else [])]:
            end.synchronize()
        self.written_back_bytes += self._hosted[name].unload()

    def _give_cache_back(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _wait_for_copy(self, name: str) -> None:
        """Let what this thread computes come after the weights have."""
        if name in self._come:
            torch.cuda.current_stream(self._device).wait_event(self._come[name])

    def _note_end(self, name: str) -> None:
        """Remember up to where this thread's stream may read the weights; of ends that have come none is kept."""
        if self._device.type != "cuda":
            return
        ends = [end for end in self._ends.get(name, ()) if not end.query()]
        self._ends[name] = [*ends, torch.cuda.current_stream(self._device).record_event()]


def _check_models(models: Any) -> None:
    """Make sure that there are models.

    Raises:
        UsageError: there are none, or one is none.
    """
    if not isinstance(models, Mapping) or not models:
        raise UsageError("there are no models", 'Give a dict of them: {"name": model}')
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise UsageError(f"{name} is of type {type(model).__name__}, no model", "Give a torch.nn.Module")


def _check_apart(models: Mapping[str, nn.Module]) -> None:
    """Make sure that no memory is in two models.

    Raises:
        UsageError: one moved with the other.
    """
    owners: dict[int, str] = {}
    for name, model in models.items():
        for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
            owner = owners.setdefault(tensor.untyped_storage()._cdata, name)
            if owner != name and tensor.numel():
                raise UsageError(
                    f"the models {owner} and {name} share memory: {path}",
                    "Give one model that holds both, or a copy (copy.deepcopy)",
                )


def _checked_policy(given: Any) -> EvictionPolicy:
    """Who decides who leaves.

    Raises:
        UsageError: it cannot.
    """
    if given is None:
        return CheapestReturn()
    if isinstance(given, type) or not isinstance(given, EvictionPolicy):
        raise UsageError(f"policy={shown(given)} does not say who leaves", "Give such as CheapestReturn()")
    return given


def _budget(given: str | float | None, device: torch.device) -> int:
    """Bytes that torch may reserve.

    Raises:
        UsageError: none was given for a device that does not say what is free.
    """
    if given is not None:
        return size_argument("budget", given)
    if device.type != "cuda":
        raise UsageError("nothing says how much the models may take", 'Give a budget such as budget="2GiB"')
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, free + held - round(_MARGIN * total))


def _requests(given: str | float | Mapping[str, str | float], names: Sequence[str]) -> dict[str, int]:
    """What a use of each model takes.

    Raises:
        UsageError: a figure is none, one is missing, or it is of no model here.
    """
    found = {name: _request(given, name) for name in names}
    if isinstance(given, Mapping) and (others := [name for name in given if name not in found]):
        raise UsageError(
            f"request_bytes names {shown(others[0])}, which is no model here", f"There are {', '.join(names)}"
        )
    return found


def _request(given: str | float | Mapping[str, str | float], name: str) -> int:
    if not isinstance(given, Mapping):
        return size_argument("request_bytes", given, least=0)
    if name not in given:
        raise UsageError(f"request_bytes has nothing for the model {name}", "Give a figure for each model")
    return size_argument(f"request_bytes[{name!r}]", given[name], least=0)
