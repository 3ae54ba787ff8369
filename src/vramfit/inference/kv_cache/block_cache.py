"""`BlockCache`: keys and values of a transformers model in blocks, for ``generate(past_key_values=...)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.arguments import shown, size_argument, whole_argument
from vramfit.errors import UsageError
from vramfit.inference.kv_cache.block_store import BlockNumbers
from vramfit.inference.kv_cache.cache_layout import (
    CacheLayout,
    HeadShape,
    LayerKind,
    decoder_config,
    observed_heads,
    read_layout,
)
from vramfit.inference.kv_cache.cache_memory import CacheMemory, CacheSettings
from vramfit.inference.kv_cache.cached_batch import CachedBatch, Reading
from vramfit.inference.kv_cache.kept_sequences import KeptSequences, ParkedSequences
from vramfit.inference.kv_cache.prompts import LaidPrompts, PaddingSide, common_prefix, lay_prompts

try:
    from transformers.cache_utils import Cache, DummyLayer

    from vramfit.inference.kv_cache.block_layer import BlockLayer
except ImportError:
    raise UsageError(
        "a BlockCache is a cache of transformers, which is not installed",
        'Install it: pip install "vramfit[transformers]"',
    ) from None

BLOCK_ATTENTION = "vramfit_blocks"
"""The name under which transformers knows attention block by block (`block_attention`)."""


@dataclass(frozen=True, kw_only=True)
class CacheUsage:
    """What a cache holds.

    Attributes:
        sequences: of the batch that hold blocks.
        tokens: of different content that are stored, in the layers that keep most.
        slots: places of the blocks that hold them.
        blocks, blocks_free: of all pools.
        blocks_most: most that were held at once.
        pool_bytes, scratch_bytes: on the device.
        host_bytes: of blocks that are on the host.
    """

    sequences: int
    tokens: int
    slots: int
    blocks: int
    blocks_free: int
    blocks_most: int
    pool_bytes: int
    scratch_bytes: int
    host_bytes: int

    @property
    def waste(self) -> float:
        """Places without a token, as a share of the tokens."""
        return self.slots / self.tokens - 1 if self.tokens else 0.0


class BlockCache(Cache):
    """A cache of keys and values in blocks of 16 tokens, all from one pool.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=100, eos_token_id=None, **shape)).eval()
    >>> cache = vramfit.BlockCache(model, budget="1MiB")
    >>> inputs = cache.begin([[5, 6, 7], [5, 6, 7, 8, 9]])
    >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=4, pad_token_id=0).shape
    torch.Size([2, 9])
    >>> cache
    BlockCache(2 sequences, 2 of 128 blocks)

    Nothing is copied when sequences grow, padding takes no blocks, sequences with the same beginning share it until
    they differ, and what is done is free at once. A layer's keys and values are gathered into one scratch, which all
    layers share: attention gets what `transformers.DynamicCache` would give it, bit for bit. Within
    `block_attention(model)` they are read block by block instead, without a scratch; sums are then rounded otherwise.

    Args:
        model: a decoder-only model of transformers, or its configuration; `block_cache_pair` is for encoder-decoders.
        budget: bytes of the pool, such as ``"2GiB"``.
        tokens: what the pool holds, in place of bytes.
        block_tokens: tokens of a block.
        numbers: ``"model"``, or ``"int8"`` for 8-bit blocks with a scale for each token and head.
        window: columns that layers with full attention see; what is older is dropped, and its blocks are freed.
        sinks: first tokens of each sequence that are kept beside such a window.
        host: bytes of pinned host memory that sequences are spilled to which nobody reads now.
        memory: of another cache, to share its pool.

    Raises:
        UsageError: an argument cannot be used, or the model keeps something else than keys and values.
    """

    def __init__(
        self,
        model: Any,
        *,
        budget: int | str | None = None,
        tokens: int | None = None,
        block_tokens: int = 16,
        numbers: BlockNumbers | str = BlockNumbers.MODEL,
        window: int | None = None,
        sinks: int = 0,
        host: int | str = 0,
        memory: CacheMemory | None = None,
    ) -> None:
        self._config = decoder_config(model)
        whole = getattr(model, "config", model)
        if memory is None and getattr(whole, "is_encoder_decoder", False):
            raise UsageError(
                f"{type(whole).__name__} has an encoder, whose states need a cache of their own",
                "Use vramfit.inference.kv_cache.encoder_decoder.block_cache_pair(model, ...)",
            )
        layout = checked_layout(self._config, window, sinks, observed_heads(model))
        if memory is None:
            settings = checked_settings(budget, tokens, block_tokens, numbers, host)
            memory = CacheMemory(settings, [layout])
        elif layout not in memory.layouts:
            raise UsageError(
                "the memory given is that of a cache with another layout",
                "Share it among caches of one model and one window, or give a budget",
            )
        self.memory = memory
        self.batch = CachedBatch(layout, memory)
        self.kept = KeptSequences(self.batch)
        self._unread: int | None = None
        own = {layer for group in layout.groups for layer in group.layers}
        layers: list[Any] = [
            BlockLayer(self.batch, layer, self) if layer in own else _no_layer()
            for layer in range(layout.layers)
        ]
        super().__init__(layers=layers)

    def __repr__(self) -> str:
        used = self.usage()
        return f"BlockCache({used.sequences} sequences, {used.blocks - used.blocks_free} of {used.blocks} blocks)"

    # What transformers asks of a cache

    def update_layer(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's new states, and all that its queries see; see `CachedBatch.update`."""
        if self._unread is not None:
            unread, self._unread = self._unread, None
            raise UsageError(
                f"the model changed the keys of layer {unread} between cache and attention",
                "Use it without block_attention: the cache then gathers",
            )
        by_blocks = getattr(self._config, "_attn_implementation", None) == BLOCK_ATTENTION
        found = self.batch.update(layer, keys, values, Reading.BLOCKS if by_blocks else Reading.GATHERED)
        if by_blocks and self.batch.width > keys.shape[-2]:
            self._unread = layer
            found[0].vramfit_layer = (self, layer)  # type: ignore[attr-defined]  # attention finds its blocks by it
        return found

    def read_by_blocks(self) -> None:
        """Attention says that it has found the blocks."""
        self._unread = None

    def reset(self) -> None:
        """Drop the sequences; the pool stays, and what was kept by `keep`."""
        self.batch.clear()
        self._unread = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows become those of the chosen beams: blocks are shared, and copied when one of them goes on."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows alone."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.batch.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row as many times, one beside the other, over the same blocks."""
        self.batch.select([row for row in range(len(self.batch.rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Take columns back, given as a negative number, as assisted decoding does.

        Raises:
            UsageError: they cannot be taken back: a window has passed over them.
        """
        batch = self.batch
        if tokens_to_remove > 0:
            raise UsageError(
                f"crop({tokens_to_remove}) is no number of tokens to remove",
                f"Write crop({-tokens_to_remove}) to remove {tokens_to_remove}",
            )
        if -tokens_to_remove > batch.width:
            raise UsageError(
                f"crop({tokens_to_remove}) removes more than the {batch.width} columns there are"
            )
        after = batch.width + tokens_to_remove
        if tokens_to_remove and (batch.earliest is None or after < batch.earliest):
            for group in batch.layout.groups:
                if group.window is not None and batch.width >= group.window:
                    raise UsageError(
                        f"{-tokens_to_remove} tokens cannot be removed: a window of {group.window} has passed over "
                        "what would be seen again",
                        "Call activate_past_recording() before the tokens come",
                    )
        batch.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Keep what leaves a window until `crop` says how many tokens stay."""
        if self.batch.layout.windowed:
            self.batch.earliest = self.batch.width

    # What it can beyond that

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        pad: int = 0,
        model: Any = None,
        max_new_tokens: int = 0,
        device: Any = None,
    ) -> dict[str, torch.Tensor]:
        """Start a batch of prompts of any lengths, whose padding takes no blocks.

        What all prompts have in common at their beginning stands first, then the padding, then the rest, so that it is
        computed once and shared: taken from what was kept (`keep`), or computed by `model`. Prompts that agree in more
        than that share whole blocks. With layers that have a window, padding stands at the left, as a window counts
        columns, and nothing is computed in advance unless all prompts have one length.

        Args:
            prompts: token ids of each.
            pad: the token that fills shorter prompts up.
            model: computes the common beginning in advance; None leaves it to ``generate``.
            max_new_tokens: what is to be generated, so that the scratch is made once.
            device: of the tensors returned; that of `model`, or the CPU, without it.

        ``generate`` may repeat each prompt, for beams or several returned sequences: the copies share its blocks.

        Returns:
            ``input_ids`` and ``attention_mask``, for ``generate``, of `input_ids.shape[1]` columns: what is generated
            stands behind them.

        Raises:
            UsageError: there are no prompts, or one is empty.
            CacheFullError: there are no blocks for the common beginning.
        """
        checked = _checked_prompts(prompts)
        self.reset()
        prefix = common_prefix(checked)
        ragged = len({len(one) for one in checked}) > 1
        aligned = not (ragged and self.batch.layout.windowed)
        if not aligned or prefix < self.memory.settings.block_tokens:
            prefix = 0  # nothing that is worth a pass of its own
        if prefix:
            self._begin_with(checked[0][:prefix], len(checked), model)
        laid = lay_prompts(checked, prefix, pad, PaddingSide.MIDDLE if aligned else PaddingSide.LEFT)
        self.batch.expect(laid.prompt(room=laid.width + max_new_tokens if max_new_tokens else 0))
        return laid.tensors(device if device is not None else getattr(model, "device", "cpu"))

    def expect(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
        """Say which columns of the next prompt are padding, where `begin` did not lay it out.

        Args:
            input_ids: ``[batch, columns]``; prompts that begin alike share whole blocks: the first one's states.
            attention_mask: ``[batch, columns]``, 0 where there is padding.

        Raises:
            UsageError: the shapes differ, or there are sequences already.
        """
        if input_ids.shape != attention_mask.shape or input_ids.dim() != 2:
            raise UsageError(
                f"input_ids {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)} differ in shape"
            )
        if self.batch.rows:
            raise UsageError("the cache holds sequences already", "Call reset() before another batch")
        laid = LaidPrompts.from_mask(input_ids.tolist(), attention_mask.tolist())
        self.batch.expect(laid.prompt())

    def keep(self, tokens: Sequence[int], row: int = 0) -> None:
        """Keep a row's beginning for later calls, found by its token ids; `reset` does not drop it.

        Args:
            tokens: what the row's tokens are, from its first on, or its beginning.
            row: of the batch.

        Raises:
            UsageError: the row has fewer tokens.
        """
        self.kept.keep(tuple(tokens), row)

    def finish(self, row: int) -> None:
        """Free a sequence's blocks; ``generate`` may go on with the others."""
        whole_argument("row", row, least=0, most=len(self.batch.rows) - 1)
        if not self.batch.rows[row].finished:
            self.batch.finish(row)

    def finish_at(self, *ends: int) -> Any:
        """A stopping criterion that frees each sequence's blocks as soon as it ends; not for beams, which change rows.

        ``model.generate(..., past_key_values=cache, stopping_criteria=[cache.finish_at(model.config.eos_token_id)])``

        Args:
            ends: tokens after which a sequence gets no more.
        """
        from vramfit.inference.kv_cache.finish_at_end import FinishAtEnd

        asked = frozenset(whole_argument("end", end, least=0) for end in ends)
        return FinishAtEnd(asked, rows=lambda: len(self.batch.rows), finish=self.finish)

    def park(self) -> ParkedSequences:
        """Take the batch out of the cache and its blocks to the host.

        Returns:
            what `resume` brings back.

        Raises:
            CacheFullError: the host's share (`host`) has no room; nothing has changed then.
        """
        return self.kept.park()

    def resume(self, parked: ParkedSequences) -> None:
        """Make a batch that was parked the one of the cache; it must hold none then.

        Raises:
            UsageError: the cache holds sequences, or these were not parked by it, or were given back by `free`.
            CacheFullError: the pool has no room; it stays parked then.
        """
        if self.batch.rows:
            raise UsageError("the cache holds sequences already", "park() them, or call reset()")
        self.kept.resume(parked)

    def usage(self) -> CacheUsage:
        """What it holds now."""
        memory, batch = self.memory, self.batch
        widest: dict[int, int] = {}
        if batch.rows and memory.made:
            # Layers with a window hold less; all others hold the same.
            groups = range(len(batch.layout.groups))
            widest = max((batch.filled(group) for group in groups), key=lambda one: sum(one.values()))
        pools = memory.pools.values()
        return CacheUsage(
            sequences=sum(not row.finished for row in batch.rows),
            tokens=sum(widest.values()),
            slots=len(widest) * memory.settings.block_tokens,
            blocks=sum(pool.blocks for pool in pools),
            blocks_free=sum(pool.free for pool in pools),
            blocks_most=sum(pool.most_used for pool in pools),
            pool_bytes=memory.pool_bytes,
            scratch_bytes=memory.scratch.bytes,
            host_bytes=memory.host_bytes,
        )

    def free(self) -> None:
        """Give all memory back, that of what was kept too; the cache can be used again."""
        self.batch.clear()
        self.kept.clear()
        self.memory.free()
        self.batch = CachedBatch(self.batch.layout, self.memory)
        self.kept = KeptSequences(self.batch)
        for layer in self.layers:
            if isinstance(layer, BlockLayer):
                layer.move_to(self.batch)

    def _begin_with(self, prefix: Sequence[int], rows: int, model: Any) -> None:
        """Rows that begin with what was kept, or with what a model computes now."""
        found = self.kept.find(tuple(prefix))
        if found < len(prefix) and model is not None:
            given = torch.tensor([list(prefix)], device=getattr(model, "device", None))
            # Nobody reads the logits, and those of a long beginning would be large.
            few = getattr(model, "_supports_logits_to_keep", lambda: False)()
            with torch.inference_mode():
                model(
                    input_ids=given[:, found:],
                    attention_mask=torch.ones_like(given),
                    past_key_values=self,
                    **({"logits_to_keep": 1} if few else {}),
                )
            self.kept.keep(tuple(prefix), 0)
        if self.batch.rows:
            self.batch.select([0] * rows)


def checked_layout(
    config: Any, window: Any, sinks: Any, heads: Mapping[int, HeadShape] | None = None
) -> CacheLayout:
    """The layout of a decoder with a user's window.

    Raises:
        UsageError: the window or the sinks cannot be used.
    """
    if window is not None:
        whole_argument("window", window, least=2)
    whole_argument("sinks", sinks, least=0)
    if sinks and window is None:
        raise UsageError(
            "sinks are kept beside a window, and window is None", "Give window=1024, for example"
        )
    layout = read_layout(config, window=window, sinks=sinks, heads=heads)
    if window is not None and not any(group.kind is LayerKind.FORGETTING for group in layout.groups):
        raise UsageError("the model's layers have windows of their own", "Leave window out")
    return layout


def checked_settings(budget: Any, tokens: Any, block_tokens: Any, numbers: Any, host: Any) -> CacheSettings:
    """What a cache may take.

    Raises:
        UsageError: an argument cannot be used.
    """
    if (budget is None) == (tokens is None):
        raise UsageError(
            "a cache needs a budget in bytes or a number of tokens, one of them", 'Give budget="2GiB"'
        )
    try:
        kind = BlockNumbers(numbers)
    except ValueError:
        names = " or ".join(repr(one.value) for one in BlockNumbers)
        raise UsageError(f"numbers={shown(numbers)} is none that blocks hold", f"Give {names}") from None
    return CacheSettings(
        budget=None if budget is None else size_argument("budget", budget),
        tokens=None if tokens is None else whole_argument("tokens", tokens, least=1),
        block_tokens=whole_argument("block_tokens", block_tokens, least=1, most=1024),
        numbers=kind,
        host=size_argument("host", host, least=0),
    )


def _no_layer() -> Any:
    make: Any = DummyLayer
    return make()


def _checked_prompts(prompts: Any) -> list[list[int]]:
    found = [[int(token) for token in one] for one in prompts]
    if not found or not all(found):
        raise UsageError("a batch needs prompts of one token or more", "Give lists of token ids")
    return found
