"""The tensor of a pool: keys and values of all blocks, written and read by rows, one for each token and head."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from vramfit.inference.kv_cache.cache_layout import HeadShape

SCALE_BYTES = 4
"""Of a scale of int8 blocks, float32: one for each token, head, and keys or values."""


class BlockNumbers(enum.Enum):
    """What a block's numbers are."""

    MODEL = "model"
    """Those of the model, bit for bit."""
    INT8 = "int8"
    """8-bit integers with a scale for each token and head."""


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """How blocks of a pool are laid out.

    Attributes:
        tokens: of a block.
        layers: parts of a block.
        shape: of heads.
        dtype: of keys and values as the model has them.
        numbers: what a block's numbers are.
    """

    tokens: int
    layers: int
    shape: HeadShape
    dtype: torch.dtype
    numbers: BlockNumbers = BlockNumbers.MODEL

    @property
    def int8(self) -> bool:
        """Whether there are scales."""
        return self.numbers is BlockNumbers.INT8

    @property
    def rows(self) -> int:
        """Rows of a block: layer, token, head."""
        return self.layers * self.tokens * self.shape.heads

    @property
    def stored(self) -> torch.dtype:
        """The dtype of a block."""
        return torch.int8 if self.int8 else self.dtype

    @property
    def block_bytes(self) -> int:
        """Of keys, values and scales."""
        numbers = self.rows * (self.shape.key_dim + self.shape.value_dim)
        return numbers * self.stored.itemsize + (2 * self.rows * SCALE_BYTES if self.int8 else 0)


class BlockTensors:
    """Blocks on a device, or on the host.

    A block holds all layers of a group, so that it is copied as a whole: ``[layer, token, head, dim]``, keys first in
    the tensor, then values. A token's rows of a layer are ``row + layer_rows * part``, where `row` is what
    `first_row` says; the layer's offset goes into a view, so that all layers share one index.

    Args:
        form: the layout of a block.
        blocks: how many.
        device: where.
        beside: the device whose blocks are spilled here, where this is the host: memory is page-locked for a card.
    """

    def __init__(
        self, form: BlockFormat, blocks: int, device: torch.device, *, beside: torch.device | None = None
    ) -> None:
        pinned = beside is not None and beside.type == "cuda"
        self.form, self.blocks, self.device = form, blocks, device
        shape = form.shape
        keys, values = (blocks * form.rows * dim for dim in (shape.key_dim, shape.value_dim))
        # Tensors that are made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.flat = torch.zeros(keys + values, dtype=form.stored, device=device, pin_memory=pinned)
            self.scales = (
                torch.zeros(2, blocks * form.rows, dtype=torch.float32, device=device, pin_memory=pinned)
                if form.int8
                else None
            )
        self._keys = self.flat[:keys].view(-1, shape.key_dim)
        self._values = self.flat[keys:].view(-1, shape.value_dim)

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return self.blocks * self.form.block_bytes

    @property
    def layer_rows(self) -> int:
        """Rows of one layer in a block."""
        return self.form.tokens * self.form.shape.heads

    def first_row(self, block: int, offset: int) -> int:
        """The row of a token's first head in the first layer."""
        return block * self.form.rows + offset * self.form.shape.heads

    def write(self, part: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write states into a layer.

        Args:
            part: of the block: which layer of its group.
            rows: int64 ``[n]``, one for each token and head.
            keys, values: ``[n, dim]``.
        """
        for number, (plane, states) in enumerate(((self._keys, keys), (self._values, values))):
            target = plane[part * self.layer_rows :]
            if self.scales is None:
                target.index_copy_(0, rows, states)
                continue
            scale = states.abs().amax(dim=-1).float().div_(127)
            self.scales[number, part * self.layer_rows :].index_copy_(0, rows, scale)
            # A row of zeros has the scale zero, and stays zero.
            whole = states.float() / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
            target.index_copy_(0, rows, whole.round_().to(torch.int8))

    def read(self, part: int, rows: torch.Tensor, plane: int, out: torch.Tensor) -> None:
        """Read a layer's keys (plane 0) or values (1).

        Args:
            part: which layer of its group.
            rows: int32 ``[n]``.
            plane: 0 for keys, 1 for values.
            out: ``[n, dim]``, contiguous, where they go.
        """
        source = (self._keys, self._values)[plane][part * self.layer_rows :]
        if self.scales is None:
            torch.index_select(source, 0, rows, out=out)
            return
        scale = self.scales[plane, part * self.layer_rows :].index_select(0, rows)
        torch.mul(source.index_select(0, rows), scale[:, None], out=out)

    def read_blocks(self, part: int, blocks: torch.Tensor, plane: int) -> torch.Tensor:
        """Whole blocks of a layer's keys (plane 0) or values (1).

        Args:
            part: which layer of its group.
            blocks: int64 ``[n]``.
            plane: 0 for keys, 1 for values.

        Returns:
            ``[n, tokens, heads, dim]`` in the model's dtype.
        """
        form = self.form
        source = (self._keys, self._values)[plane]
        units = blocks * form.layers + part
        shape = (-1, form.tokens, form.shape.heads, source.shape[-1])
        found = source.view(self.blocks * form.layers, -1).index_select(0, units).view(shape)
        if self.scales is None:
            return found
        scale = self.scales[plane].view(self.blocks * form.layers, -1).index_select(0, units)
        return (found * scale.view(*found.shape[:-1], 1)).to(form.dtype)

    def copy_block(self, source: int, target: int, other: BlockTensors | None = None) -> None:
        """Copy a block, into another store where one is given."""
        into = self if other is None else other
        for mine, theirs in zip(self._planes(), into._planes(), strict=True):
            theirs[target].copy_(mine[source], non_blocking=True)

    def _planes(self) -> list[torch.Tensor]:
        found = [self._keys.view(self.blocks, -1), self._values.view(self.blocks, -1)]
        if self.scales is not None:
            found += [plane.view(self.blocks, -1) for plane in self.scales]
        return found
