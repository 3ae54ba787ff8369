"""Activations on the host between the forward and the backward pass."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.host_lane import PINNED_ROUNDING, CudaLane, Lane
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Setting, Technique
from vramfit.techniques.support.blocks import best_blocks
from vramfit.techniques.support.saved import (
    Found,
    Kept,
    Packed,
    StoragePlace,
    StorageSpan,
    held_storages,
    in_backward,
    is_leaf_of_training,
    is_plain,
    packing,
    span,
    storage_key,
    written_in_place,
)
from vramfit.torch_internals.autograd_engine import current_graph_task_id, execution_engine
from vramfit.units import format_bytes

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationOffloadSetting(Setting):
    """Which activations, and how many bytes may be under way.

    Attributes:
        modules: names of the submodules whose saved tensors go; empty for the whole model.
        min_bytes: smaller tensors stay: a copy takes some ten microseconds however small it is.
        window: most bytes on their way to the host, and most bytes back ahead of their use. Both lie on the card, so
            that a larger window hides more of the copies and saves less. 0 makes the computation wait for each copy.
    """

    modules: tuple[str, ...] = ()
    min_bytes: int = 256 * _KIB
    window: int = 128 * _MIB


class ActivationOffload(Technique[ActivationOffloadSetting]):
    """What autograd saves goes to pinned host memory during the forward pass, and comes back before its use.

    Copies run on streams of their own, beside the computation: out while the next layers run, back while the backward
    passes of the layers behind run. A storage that several tensors view crosses once. Parameters, buffers, and what
    a module was given and nothing computed (its batch, its masks) stay: they live on anyway.

    It pays where a block computes for longer than its activations need to cross the link: large hidden sizes, long
    sequences, a fast link. A block of a transformer of width d in 16 bits does 24 d FLOPs for 34 bytes that it saves
    (Korthikanti et al. 2022, arXiv:2205.05198, with attention that saves no scores). Where the link is slower than
    that, the computation waits for it: offload some of the blocks, and recompute or keep the others. What the last
    blocks save is needed at once, so leave these out. It costs host memory, each tensor rounded up to a power of two.

    With checkpointing, what a checkpoint keeps (the inputs of its blocks) is what goes. Tensors on the CPU stay.

    See torch.autograd.graph.save_on_cpu, which copies on the stream of the computation; torchtune's
    OffloadActivations, and Rhu et al. 2016, vDNN (arXiv:1602.08124), of which the prefetching is.
    """

    name: ClassVar[str] = "activation-offload"
    summary: ClassVar[str] = "saved tensors wait for the backward pass in pinned host memory"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = ActivationOffloadSetting
    follows: ClassVar[str | None] = "activation-checkpointing"

    def describe(self, setting: ActivationOffloadSetting) -> str:
        """How many blocks, and the window."""
        count = len(setting.modules)
        which = f"{count} block{'s' * (count > 1)}" if count else "the whole model"
        return f"{which}, window {format_bytes(setting.window)}"

    def options(self, profile: Profile) -> Iterable[ActivationOffloadSetting]:
        """A quarter, half, three quarters and all of the blocks that pay, those that hide their copies best first."""
        if not (profile.trains and profile.device_type == "cuda" and profile.link_bytes_per_second > 0):
            return
        blocks = [block for block in profile.blocks[:-1] if block.kept_bytes >= _MIB]
        for part in (1, 2, 3, 4):
            count = -(-len(blocks) * part // 4)
            chosen = best_blocks(blocks, count, lambda block: block.kept_bytes, profile.link_bytes_per_second)
            if (
                not chosen
                or PINNED_ROUNDING * sum(b.kept_bytes * b.calls for b in chosen) > profile.host_bytes
            ):
                return
            yield ActivationOffloadSetting(
                modules=tuple(block.path for block in chosen),
                window=max(block.kept_bytes for block in chosen),
            )

    def attach(self, live: AttachedProgram, setting: ActivationOffloadSetting) -> None:
        """See `Technique.attach`."""
        if setting.window < 0 or setting.min_bytes < 0:
            raise UsageError("window and min_bytes of activation-offload are bytes", "Give 0 or more")
        modules = chosen_modules(live.model, setting.modules, self.name)
        ledger = Ledger(lane_of, setting.window)
        for module in modules:
            live.surround(module, Offloading(ledger, setting.min_bytes))


def lane_of(device: torch.device) -> Lane | None:
    """The lane to the host: cards have one."""
    return CudaLane(device) if device.type == "cuda" else None


def chosen_modules(model: nn.Module, names: tuple[str, ...], technique: str) -> list[nn.Module]:
    """The submodules of these names, once each; the model itself where none is given.

    Raises:
        UsageError: there is no such submodule.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in known:
            raise UsageError(
                f"{technique}: the model has no module {name!r}", "Give names as in model.named_modules()"
            )
    return list({id(known[name]): known[name] for name in names}.values()) or [model]


class Offloading:
    """Surrounds a module whose saved tensors go to the host."""

    def __init__(self, ledger: Ledger, min_bytes: int) -> None:
        self._ledger, self._min_bytes = ledger, min_bytes

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass under hooks."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        held = held_storages(module, args, kwargs)
        with packing(partial(self._take, held, in_backward())):
            return forward(*args, **kwargs)

    def _take(self, held: frozenset[int], recomputing: bool, tensor: torch.Tensor) -> Packed | None:
        lane = self._ledger.lane(tensor.device)
        if lane is None or not is_plain(tensor) or is_leaf_of_training(tensor) or storage_key(tensor) in held:
            return None
        first, last = span(tensor)
        if (last - first) * tensor.element_size() < self._min_bytes:
            return None
        # What is recomputed is needed at once.
        return Kept(tensor) if recomputing else self._ledger.send(tensor, lane)


_TIDY_AFTER = 256


class Parcel:
    """A stretch of a storage: on the card, on the host, or on its way."""

    __slots__ = (
        *("__weakref__", "index", "nbytes", "start", "stop", "there"),
        *("_coming", "_end", "_host", "_lane", "_spoiled", "_version"),
    )

    def __init__(self, stretch: StorageSpan, lane: Lane) -> None:
        flat = stretch.flat
        self.start, self.stop, self.nbytes, self.index = stretch.start, stretch.stop, flat.nbytes, 0
        self.there: torch.Tensor | None = flat  # on the card
        self._lane, self._version, self._spoiled, self._coming = lane, flat._version, False, False
        self._host, self._end = lane.out(flat)

    def let_go(self) -> None:
        """Drop what is on the card; what is computed from now on waits until the copy with it is over."""
        if self.there is None:
            return
        self._settle()
        self._look(self.there)
        self.there = None

    def call_back(self) -> None:
        """Begin the copy back onto the card."""
        (self.there,), self._end = self._lane.back([self._host])
        self._coming = True

    def arrive(self) -> torch.Tensor:
        """The stretch, on the card, for what is computed from now on.

        Raises:
            RuntimeError: it was written to after it was saved.
        """
        if self.there is None:
            self.call_back()
        if self._coming:  # one that has not left yet is used as it is, while it is copied
            self._settle()
        assert self.there is not None
        self._look(self.there)
        if self._spoiled:
            raise written_in_place(self.there, self._version)
        return self.there

    def _look(self, flat: torch.Tensor) -> None:
        """A write to what was saved, before it was out, is the program's error; nobody else has what came back."""
        self._spoiled |= not self._coming and flat._version != self._version

    def _settle(self) -> None:
        if self._end is not None:
            self._lane.wait(self._end)
            self._end = None

    def __del__(self) -> None:
        """Memory that a copy is still to be written to must not serve another before."""
        if self._coming:
            self._settle()


# -- saved tensors that are away on the host -----------------------------------------------------------------------


class Ledger:
    """All parcels of a model. Copies and pickles of it are empty.

    Args:
        lane_of: the lane to the host of a device, None where tensors stay.
        window: most bytes on their way out, and most bytes back ahead of their use.
    """

    def __init__(self, lane_of: Callable[[torch.device], Lane | None], window: int) -> None:
        self._lane_of, self._window = lane_of, window
        self._lanes: dict[torch.device, Lane | None] = {}
        self._found: Found[Parcel] = Found()
        self._order: list[weakref.ref[Parcel]] = []
        self._leaving: list[weakref.ref[Parcel]] = []
        self._ahead: list[weakref.ref[Parcel]] = []
        self._task, self._tidy_at = -1, _TIDY_AFTER

    def __reduce__(self) -> tuple[Any, ...]:
        """Streams and tensors of a step under way belong to this object alone."""
        return Ledger, (self._lane_of, self._window)

    def lane(self, device: torch.device) -> Lane | None:
        """The lane to the host of a device; None where tensors stay."""
        if device not in self._lanes:
            self._lanes[device] = self._lane_of(device)
        return self._lanes[device]

    def send(self, tensor: torch.Tensor, lane: Lane) -> Away:
        """Send a saved tensor to the host, or find that its storage was sent already."""
        first, last = span(tensor)
        parcel = self._found.of(tensor, lambda known: known.start <= first and last <= known.stop)
        if parcel is None:
            parcel = Parcel(StorageSpan(tensor), lane)
            self._note(tensor, parcel)
        return Away(self, parcel, StoragePlace(tensor))

    def _note(self, tensor: torch.Tensor, parcel: Parcel) -> None:
        if len(self._order) >= self._tidy_at:
            self._tidy()
        self._found.add(tensor, parcel)
        parcel.index = len(self._order)
        reference = weakref.ref(parcel)
        self._order.append(reference)
        # The newest is in use in any case.
        leaving = deque(
            known for ref in self._leaving if (known := ref()) is not None and known.there is not None
        )
        under_way = sum(known.nbytes for known in leaving)
        while under_way > self._window:
            first = leaving.popleft()
            first.let_go()
            under_way -= first.nbytes
        self._leaving = [*map(weakref.ref, leaving), reference]

    def fetch(self, parcel: Parcel) -> torch.Tensor:
        """A stretch on the card, and the ones that are likely to be asked for next on their way."""
        if in_backward():
            self._expect_end()
        flat = parcel.arrive()
        self._ahead = [ref for ref in self._ahead if (known := ref()) is not None and known is not parcel]
        self._call_ahead(parcel.index)
        return flat

    def _call_ahead(self, index: int) -> None:
        """Call back what was saved before: a backward pass asks for it in the opposite order."""
        ahead = sum(known.nbytes for ref in self._ahead if (known := ref()) is not None)
        for position in range(index - 1, -1, -1):
            reference = self._order[position]
            parcel = reference()
            if parcel is None or parcel.there is not None:
                continue
            if ahead + parcel.nbytes > self._window and (ahead or not self._window):
                return
            parcel.call_back()
            ahead += parcel.nbytes
            self._ahead.append(reference)

    def _expect_end(self) -> None:
        task = current_graph_task_id()
        if task != self._task:
            self._task = task
            execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """What the backward pass did not release (it may come again) goes from the card."""
        for reference in self._order:
            if (parcel := reference()) is not None:
                parcel.let_go()
        self._tidy()

    def _tidy(self) -> None:
        """Forget what the graph has released."""
        alive = [parcel for ref in self._order if (parcel := ref()) is not None]
        for index, parcel in enumerate(alive):
            parcel.index = index
        self._order = [weakref.ref(parcel) for parcel in alive]
        self._tidy_at = 2 * len(alive) + _TIDY_AFTER
        self._leaving = [ref for ref in self._leaving if (p := ref()) is not None and p.there is not None]
        self._ahead = [ref for ref in self._ahead if (p := ref()) is not None and p.there is not None]
        self._found.tidy()


class Away:
    """What the graph holds of a tensor on the host."""

    __slots__ = ("_ledger", "_parcel", "_place")

    def __init__(self, ledger: Ledger, parcel: Parcel, place: StoragePlace) -> None:
        self._ledger, self._parcel, self._place = ledger, parcel, place

    def unpack(self) -> torch.Tensor:
        """The tensor, on its device.

        Raises:
            RuntimeError: it was written to after it was saved.
        """
        flat = self._ledger.fetch(self._parcel)
        return self._place.of(flat, self._parcel.start)
