"""Runs a model over an input tile by tile: what is read, computed, sent back, joined and stored, and when.

NOTE [Order of a batch]: while the device computes one batch of tiles, the results of the one before travel to the host
and are joined there. At most one batch of results and two of inputs are in pinned memory, and on the device one batch
and what the last one has left to send (see vramfit/inference/forward_steps.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.arrays import ArrayLike, Region, read_block, torch_dtype
from vramfit.inference.forward_steps import ForwardSteps
from vramfit.inference.reductions import flattened, reduced
from vramfit.inference.stitching import BlendWindow, Released
from vramfit.inference.tile_grid import Tile, TileLayout
from vramfit.inference.tile_outputs import OutputPlan, Pack, PlanContext, plan_outputs
from vramfit.inference.tile_settings import Padding, TileSettings
from vramfit.inference.tile_stores import TileStore
from vramfit.inference.tile_transfers import Arrived, CardTransfers, InPlace, Leaving, Transfers

FLUSH_BYTES = 64 << 20
"""Bytes that are written before they are brought to the disk and noted in the journal."""

FLUSH_SECONDS = 5.0
"""The same, in time: what a crash costs at most."""

_MODES = {
    Padding.ZEROS: "constant",
    Padding.REFLECT: "reflect",
    Padding.REPLICATE: "replicate",
    Padding.CIRCULAR: "circular",
}
_NOTHING = torch.empty(0)
PICTURES = (torch.uint8, torch.int8, torch.uint16, torch.int16)
"""Dtypes that stand for brightness; other integers may be tokens, and stay."""


@dataclass(frozen=True, kw_only=True)
class TileInput:
    """What tiles are read from.

    Attributes:
        source: the array ``[B, C, *spatial]``, or ``[C, *spatial]``.
        batched: whether its first axis is the batch.
        axes: spatial axes.
    """

    source: ArrayLike
    batched: bool
    axes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's lengths."""
        return tuple(int(size) for size in self.source.shape)

    @property
    def items(self) -> int | None:
        """Examples; None without a batch axis."""
        return self.shape[0] if self.batched else None

    @property
    def dtype(self) -> torch.dtype:
        """The array's dtype."""
        return torch_dtype(self.source.dtype)

    def block(self, tile: Tile, layout: TileLayout, padding: Padding) -> torch.Tensor:
        """A tile ``[C, *spatial]``, padded where the input is smaller."""
        region: Region = tuple(
            slice(max(one.start - before, 0), min(one.stop - before, size))
            for one, (before, _), size in zip(tile.axes, layout.padding, layout.spatial, strict=True)
        )
        key = (tile.item, slice(None), *region) if self.batched else (slice(None), *region)
        found = read_block(self.source, key)
        expected = tuple(part.stop - part.start for part in region)
        if tuple(found.shape) != (self.shape[-self.axes - 1], *expected):
            raise UsageError(
                f"x gives {list(found.shape)} for slices of {list(expected)} along its spatial axes",
                "Give an array that takes slices as NumPy's do",
            )
        if any(before or after for before, after in layout.padding):
            sides = [side for pair in reversed(layout.padding) for side in pair]
            mode = _MODES[padding]
            try:
                found = F.pad(found, sides, mode=mode)
            except (RuntimeError, NotImplementedError) as error:
                raise UsageError(
                    f"an input of {list(layout.spatial)} cannot be padded by {padding.value} to a tile of "
                    f"{list(layout.tile)}: {str(error).splitlines()[0]}",
                    "Take a smaller tile, or padding by zeros",
                ) from None
        return found


@dataclass(frozen=True, kw_only=True)
class TileJob:
    """A model and an input, with everything about tiles decided.

    Attributes:
        model: a module on its device, or a function of a batch of tiles ``[b, C, *tile]``.
        given: the input.
        layout: its tiles.
        settings: how they are joined; with the halo and stride that the model needs.
        device: where the model computes.
        module: whose parts run when a model is called that is no module itself; None where they are not known.
    """

    model: Callable[..., Any]
    given: TileInput
    layout: TileLayout
    settings: TileSettings
    device: torch.device
    module: nn.Module | None = None


@dataclass(kw_only=True)
class RunObserver:
    """What is told of a run.

    Attributes:
        planned: called once with the plans of the outputs, when the first tile has shown them; opens their stores.
        flushed: called with the numbers of newly stored blocks, store by store.
        progress: called with the tiles that are done and the tiles in all.
    """

    planned: Callable[[list[OutputPlan], Pack], None]
    flushed: Callable[[dict[int, set[int]]], None] | None = None
    progress: Callable[[int, int], None] | None = None


class TileRunner:
    """One run of a model over one input.

    Args:
        job: what is to be computed.
        observer: what is told.

    Attributes:
        outputs: the plans of the model's outputs, once the first tile is computed.
    """

    def __init__(self, job: TileJob, observer: RunObserver) -> None:
        self._model, self._given, self._layout = job.model, job.given, job.layout
        self._settings, self._device, self._observer = job.settings, job.device, observer
        model, device = job.module or job.model, job.device
        self.outputs: list[OutputPlan] = []
        card = device.type == "cuda"
        self._transfers: Transfers = CardTransfers(device) if card else InPlace(device)
        self._steps = ForwardSteps(model, device) if card else None
        self._pending: tuple[Leaving, int] | None = None
        self._prepare: Callable[[torch.Tensor], torch.Tensor] = job.settings.prepare or to_model_dtype(model)
        self._done = 0
        self._hollow = False
        self._flushed_at = time.monotonic()
        self.host_bytes = 0
        """Most bytes that buffers of this run held on the host: pinned memory, windows, shards that wait."""

    def run(self, batches: int | None = None) -> None:
        """Compute all tiles, or the first batches of them with all buffers as for the whole.

        Raises:
            UsageError: the model's results cannot be put together.
            WriteError: a result could not be written.
        """
        try:
            with torch.inference_mode():
                self._run(batches)
        except BaseException:
            self._keep_what_is_done()
            raise
        self._flush()

    def _run(self, limit: int | None) -> None:
        waiting = self._wanted()
        tiles: list[Tile] | None = next(waiting)
        assert tiles is not None
        batch = self._transfers.up(self._stage(tiles))
        end: Any = None
        count = 0
        while tiles is not None:
            count += 1
            following = next(waiting, None) if count != limit else None
            staged = None if following is None else self._stage(following)
            self._transfers.wait(end)
            early: list[tuple[torch.Tensor, Any]] = []
            outputs = self._forward(batch, staged, early)
            del batch
            if not self.outputs:
                self._plan(tiles[0], outputs)
            parts = self._parts(tiles, outputs)
            del outputs
            self._send(parts, len(tiles))
            del parts
            if staged is not None:
                batch, end = early.pop() if early else (self._transfers.up(staged), None)
            tiles = following
        self._finish()

    def _wanted(self) -> Iterator[list[Tile]]:
        """The first batches, as long as nothing shows what is stored, and then those of which something is not."""
        for tiles in self._layout.batched():
            if not self.outputs or any(self._wants(tile) for tile in tiles):
                yield tiles
            else:
                self._done += len(tiles)

    def _wants(self, tile: Tile) -> bool:
        return any(store.wants(tile) for output in self.outputs for store in output.stores)

    def _stage(self, tiles: list[Tile]) -> torch.Tensor:
        padding = self._settings.padding
        return self._transfers.stage([self._given.block(one, self._layout, padding) for one in tiles])

    # -- the device --------------------------------------------------------------------------------------------------

    def _forward(
        self, batch: torch.Tensor, staged: torch.Tensor | None, early: list[tuple[torch.Tensor, Any]]
    ) -> list[torch.Tensor]:
        """The results of a batch; meanwhile the last one's go and, where there is room, the next one comes."""
        steps = self._steps
        if steps is None:
            return self._call(batch)
        held = 0 if self._pending is None else self._pending[0].nbytes
        gone = steps.last_with_room(held)
        due: list[tuple[int, Callable[[], None]]] = [(gone, self._let_go)]
        if staged is not None and staged.device.type == "cpu":
            comes = steps.first_with_room(staged.nbytes)
            if comes is not None:
                due.append((max(gone, comes), lambda: early.append(self._transfers.up_early(staged))))
        with steps.running(due):
            return self._call(batch)

    def _call(self, batch: torch.Tensor) -> list[torch.Tensor]:
        prepared = self._prepare(batch)
        try:
            made = self._model(prepared)
        except RuntimeError as error:
            if self.outputs or type(error) is not RuntimeError or not error.args:
                raise
            kind = f"{str(prepared.dtype).removeprefix('torch.')} {list(prepared.shape)}"
            raise UsageError(
                f"the model does not take tiles of {kind}: {str(error).splitlines()[0]}",
                _hint_for(prepared),
            ) from error
        results, self._pack = flattened(made)
        for result in results:
            if result.dim() < 1 or result.shape[0] != batch.shape[0]:
                raise UsageError(
                    f"the model gives {list(result.shape)} for {batch.shape[0]} tiles",
                    "Tiles need a result with the batch first",
                )
        return results

    def _let_go(self) -> None:
        if self._pending is not None:
            self._transfers.let_go(self._pending[0])

    def _plan(self, tile: Tile, outputs: list[torch.Tensor]) -> None:
        shapes: list[tuple[int, ...]] = []

        def corner(number: int) -> tuple[int, ...]:
            if not shapes:
                last = self._layout.tile_at(self._layout.per_item - 1)
                batch = self._transfers.up(self._stage([last]))
                shapes.extend(tuple(one.shape) for one in self._call(batch))
            return shapes[number]

        dtype = self._given.dtype
        context = PlanContext(
            items=self._given.items,
            sums_dtype=dtype if dtype.is_floating_point else None,
            corner=corner,
        )
        packed = self._pack(list(range(len(outputs))))
        keys: Sequence[Any] = list(packed) if isinstance(packed, dict) else list(range(len(outputs)))
        firsts = [output[:1] for output in outputs]
        pack = self._pack
        self.outputs = plan_outputs(tile, firsts, keys, self._settings, self._layout, context)
        self._observer.planned(self.outputs, pack)

    def _parts(self, tiles: list[Tile], outputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, Arrived]]:
        """What has to leave the device of a batch's results, and what takes each part."""
        if not any(self._wants(tile) for tile in tiles):
            return []
        if len(outputs) != len(self.outputs):
            raise UsageError(
                f"the model gives {len(outputs)} results for a tile, and gave {len(self.outputs)} before",
                "Tiles need a model that gives the same for each",
            )
        parts: list[tuple[torch.Tensor, Arrived]] = []
        for plan, output in zip(self.outputs, outputs, strict=True):
            for tile, block in zip(tiles, output, strict=True):
                plan.geometry.check(tile, block)
            window = plan.window
            if window is not None and window.on_host:
                parts.append((output, partial(self._join, plan, window, tiles)))
                continue
            for tile, block in zip(tiles, output, strict=True):
                if window is None:
                    core = plan.geometry.core(tile, block)
                    done = Released(tile.item, plan.geometry.kept(tile), tile.index, core)
                    parts += self._sendable(plan, done)
                else:
                    for released in window.add(tile, block):
                        self._send_released(plan, released)
        return parts

    def _sendable(self, plan: OutputPlan, released: Released) -> list[tuple[torch.Tensor, Arrived]]:
        """A complete block after its reduction, on the device, and what takes it on the host."""
        found, _ = flattened(reduced(released.block[None], plan.reduction, self._given.axes))
        parts: list[tuple[torch.Tensor, Arrived]] = []
        for store, block in zip(plan.stores, found, strict=True):
            if store.lies_on(self._device):
                store.put(released.carrying(block[0]))
            else:
                whole = block if self._device.type == "cpu" else _apart(block, plan.window)
                place = released.carrying(_NOTHING)  # which does not hold the tile's whole result
                parts.append((whole, partial(_store, store, place)))
        return parts

    def _send_released(self, plan: OutputPlan, released: Released) -> None:
        """Send complete rows of a window on the device, in pieces no larger than a batch of tiles."""
        for piece in released.pieces(self._batch_bytes):
            self._send(self._sendable(plan, piece), 0)

    @property
    def _batch_bytes(self) -> int:
        """Bytes of the largest output of a batch of tiles."""
        return max(
            self._settings.tile_batch * output.window.tile_bytes
            for output in self.outputs
            if output.window is not None
        )

    # -- the host ----------------------------------------------------------------------------------------------------

    def _send(self, parts: list[tuple[torch.Tensor, Arrived]], tiles: int) -> None:
        """Send what is complete on the device, once what was sent before has arrived: its memory is used again."""
        self._collect()
        self._pending = self._transfers.down(parts), tiles

    def _collect(self) -> None:
        """Take what has been sent, and wait for it where it is still on its way."""
        if self._pending is not None:
            (leaving, tiles), self._pending = self._pending, None
            self._transfers.let_go(leaving)
            self._transfers.collect(leaving)
            self._done += tiles
            if tiles and self._observer.progress is not None:
                self._observer.progress(self._done, self._layout.total)
        stores = [store for output in self.outputs for store in output.stores]
        held = sum(store.held_bytes for store in stores) + sum(
            output.window.nbytes
            for output in self.outputs
            if output.window is not None and output.window.on_host
        )
        self.host_bytes = max(self.host_bytes, held + self._transfers.held_bytes)
        late = time.monotonic() - self._flushed_at > FLUSH_SECONDS
        if late or sum(store.waiting_bytes for store in stores) > FLUSH_BYTES:
            self._flush()

    def _join(
        self, plan: OutputPlan, window: BlendWindow, tiles: list[Tile], blocks: torch.Tensor, hollow: bool
    ) -> None:
        """Add a batch of tiles to a window on the host, and store what they complete."""
        self._hollow = hollow
        for tile, block in zip(tiles, blocks, strict=True):
            for released in window.add(tile, block, hollow=hollow):
                self._put(plan, released, hollow=hollow)

    def _put(self, plan: OutputPlan, released: Released, *, hollow: bool) -> None:
        if hollow:
            for store in plan.stores:
                store.put(released, hollow=True)
            return
        found, _ = flattened(reduced(released.block[None], plan.reduction, self._given.axes))
        for store, block in zip(plan.stores, found, strict=True):
            store.put(released.carrying(block[0]))

    def _finish(self) -> None:
        """What the windows still hold, and what is still on its way."""
        self._let_go()
        self._collect()
        for plan in self.outputs:
            if plan.window is None:
                continue
            if plan.window.on_host:
                for released in plan.window.finish(hollow=self._hollow):
                    self._put(plan, released, hollow=self._hollow)
            else:
                for released in plan.window.finish():
                    self._send_released(plan, released)
        self._let_go()
        self._collect()

    def _flush(self) -> None:
        stored: dict[int, set[int]] = {}
        stores = [store for output in self.outputs for store in output.stores]
        for number, store in enumerate(stores):
            stored[number] = store.flush()
        if self._observer.flushed is not None:
            self._observer.flushed(stored)
        self._flushed_at = time.monotonic()

    def _keep_what_is_done(self) -> None:
        """After an error or an interrupt: what is stored whole counts, and the error is what is told."""
        with contextlib.suppress(Exception):
            self._flush()


def _store(store: TileStore, released: Released, block: torch.Tensor, hollow: bool) -> None:
    store.put(released.carrying(block[0]), hollow=hollow)


def _apart(block: torch.Tensor, window: BlendWindow | None) -> torch.Tensor:
    """A dense block that the window, which moves on while the block is sent, does not write into."""
    if window is not None and block.untyped_storage()._cdata == window.sums.untyped_storage()._cdata:
        return block.clone(memory_format=torch.contiguous_format)
    return block.contiguous()


def _hint_for(batch: torch.Tensor) -> str:
    """What helps where a model takes no tile."""
    if not batch.is_floating_point() and not batch.is_complex():
        return "Convert tiles on the device: prepare=lambda tiles: tiles.float()"
    return "Look at the input's channels and dtype, and at how many of its axes are spatial: dims="


def to_model_dtype(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Brings pictures and floating-point numbers to the dtype of a model's first floating-point parameter."""
    wanted: torch.dtype | None = None
    if isinstance(model, nn.Module):
        found = (one.dtype for one in model.parameters() if one.dtype.is_floating_point)
        wanted = next(found, None)

    def prepare(batch: torch.Tensor) -> torch.Tensor:
        if wanted is None or not (batch.dtype.is_floating_point or batch.dtype in PICTURES):
            return batch
        return batch.to(wanted)

    return prepare
