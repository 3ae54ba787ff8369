"""A cache in blocks as a way of transformers to generate: ``model.generate(..., custom_generate=BlockCached("2GiB"))``.

transformers has no register of caches: a decoding of one's own is the nearest that it takes, in ``generate`` and in the
calls of a pipeline.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.inference.kv_cache.block_cache import BlockCache

try:
    from transformers.generation.configuration_utils import GenerationMode
    from transformers.generation.utils import GENERATION_MODES_MAPPING
except ImportError as error:
    raise UsageError(
        "a cache for transformers needs transformers, which is not installed",
        'Install it: pip install "vramfit[transformers]"',
    ) from error

_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


class BlockCached:
    """Generates with a `vramfit.BlockCache`, which is made at the first call and kept for those that follow.

    Example::

        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        pipe(prompts, batch_size=64, max_new_tokens=64, custom_generate=BlockCached("2GiB"))

    Padding takes no blocks, and prompts that begin alike share whole ones. Tokens are those of ``generate`` without it,
    but for a `window` or ``numbers="int8"``. transformers passes no streamer to a decoding of one's own.

    Args:
        budget: bytes of the pool, e.g. ``"2GiB"``.
        settings: others of `vramfit.BlockCache`, e.g. `tokens`, `numbers`, `window`.

    Attributes:
        cache: of the last model that generated; None before.
    """

    def __init__(self, budget: int | str | None = None, **settings: Any) -> None:
        self._settings = {"budget": budget, **settings}
        self._model: weakref.ref[Any] | None = None
        self.cache: BlockCache | None = None

    def __call__(self, model: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        """What ``generate`` does after its preparations.

        Args:
            input_ids: ``[batch, columns]``, each prompt as often as it is generated from.
            given: what transformers hands to its own decodings.

        Raises:
            UsageError: the decoding must be greedy search, sampling or beams, and is not; the model has an encoder, or
                caches something other than keys and values; or the cache passed in already holds tokens.
            CacheFullError: the pool is too small for the sequences.
        """
        config = given["generation_config"]
        mode = config.get_generation_mode()
        if mode not in _MODES:
            raise UsageError(
                f"BlockCached does not decode by {mode.value.replace('_', ' ')}",
                "Use greedy search, sampling or beams; or pass a vramfit.BlockCache as past_key_values",
            )
        before = given.get("past_key_values")
        if before is not None and before.get_seq_length():
            raise UsageError(
                "the cache that was passed as past_key_values holds tokens already",
                "Leave past_key_values out, or custom_generate",
            )
        cache = self._cache_of(model)
        cache.reset()
        mask = given.get("attention_mask")
        cache.expect(input_ids, torch.ones_like(input_ids) if mask is None else mask)
        try:
            return getattr(model, GENERATION_MODES_MAPPING[mode])(
                input_ids, **given | {"past_key_values": cache}
            )
        finally:
            if not config.return_dict_in_generate:  # whose result has the cache
                cache.reset()

    def _cache_of(self, model: Any) -> BlockCache:
        if self.cache is None or self._model is None or self._model() is not model:
            if self.cache is not None:
                self.cache.free()
            self.cache, self._model = BlockCache(model, **self._settings), weakref.ref(model)
        return self.cache
