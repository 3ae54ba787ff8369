"""A cache of blocks beside transformers' own: the same tokens and the same logits, in less memory."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    ResNetConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    XLNetConfig,
)

import vramfit
from vramfit.errors import CacheFullError, UsageError
from vramfit.inference.kv_cache.block_attention import block_attention
from vramfit.inference.kv_cache.encoder_decoder import block_cache_pair
from vramfit.inference.kv_cache.prompts import PaddingSide, lay_prompts

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GREEDY: dict[str, Any] = {
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}
NEW = 10


def made(kind: str) -> Any:
    torch.manual_seed(0)
    models: dict[str, Any] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=20)),
        "gemma": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **SHAPE | {"num_hidden_layers": 3},
                sliding_window=20,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            )
        ),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
        ),
    }
    return models[kind]().eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return made("llama")


def drawn(lengths: Sequence[int], seed: int = 0, common: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    start = [draw.randrange(3, 128) for _ in range(common)]
    return [start + [draw.randrange(3, 128) for _ in range(length)] for length in lengths]


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    return lay_prompts(prompts, 0, 0, PaddingSide.LEFT).tensors("cpu")


def same(found: Any, reference: Any) -> bool:
    """Tokens and logits, bit for bit."""
    return torch.equal(found.sequences, reference.sequences) and all(
        torch.equal(a, b) for a, b in zip(found.logits, reference.logits, strict=True)
    )


def furthest(found: Any, reference: Any) -> float:
    pairs = zip(found.logits, reference.logits, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_gathered_cache_is_dynamic_cache_bit_for_bit(kind: str, attention: str) -> None:
    model = made(kind)
    model.set_attn_implementation(attention)
    inputs = left_padded(drawn([3, 40, 17]))
    reference = model.generate(**inputs, max_new_tokens=NEW, **GREEDY)
    for told in (False, True):
        cache = vramfit.BlockCache(model, tokens=400)
        if told:
            cache.expect(**inputs)
        found = model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, **GREEDY)
        assert same(found, reference)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma", "gpt2"])
def test_block_attention_differs_by_rounding(kind: str) -> None:
    model = made(kind)
    inputs = left_padded(drawn([3, 40, 17]))
    reference = model.generate(**inputs, max_new_tokens=NEW, **GREEDY)
    for told in (False, True):
        cache = vramfit.BlockCache(model, tokens=400)
        if told:
            cache.expect(**inputs)
        with block_attention(model):
            found = model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, **GREEDY)
        assert torch.equal(found.sequences, reference.sequences)
        assert furthest(found, reference) < 1e-6  # measured: 4.8e-7
        assert cache.usage().scratch_bytes == 0
    assert model.config._attn_implementation == "sdpa"


def test_a_common_beginning_is_computed_and_stored_once(llama: Any) -> None:
    prompts = drawn([5, 30, 12], common=37)
    cache = vramfit.BlockCache(llama, tokens=400)
    inputs = cache.begin(prompts, model=llama, max_new_tokens=NEW)
    assert cache.get_seq_length() == 37
    assert cache.usage().slots == 48
    found = llama.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, **GREEDY)
    # DynamicCache with the same beginning, computed once and then repeated
    plain = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(input_ids=torch.tensor([prompts[0][:37]]), past_key_values=plain)
    plain.batch_repeat_interleave(3)
    reference = llama.generate(**inputs, past_key_values=plain, max_new_tokens=NEW, **GREEDY)
    assert same(found, reference)
    used = cache.usage()
    assert used.tokens == 32 + sum(5 + len(one) - 37 + NEW - 1 for one in prompts)
    # Two shared blocks; each row goes on in a copy of the third, which was begun.
    assert used.blocks - used.blocks_free == 2 + 1 + sum(-(-(5 + n + NEW - 1) // 16) for n in (5, 30, 12))


def test_block_attention_over_several_new_tokens_and_a_common_beginning(llama: Any) -> None:
    prompts = drawn([5, 30, 12], common=37)
    plain = vramfit.BlockCache(llama, tokens=400)
    inputs = plain.begin(prompts, model=llama)
    reference = llama.generate(**inputs, past_key_values=plain, max_new_tokens=NEW, **GREEDY)
    cache = vramfit.BlockCache(llama, tokens=400)
    with block_attention(llama):
        inputs = cache.begin(prompts, model=llama)
        found = llama.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, **GREEDY)
    assert torch.equal(found.sequences, reference.sequences)
    assert furthest(found, reference) < 1e-6


def test_what_was_kept_is_found_by_its_tokens_and_spilled_when_there_is_no_room(llama: Any) -> None:
    prompts = drawn([5, 9], common=64)
    cache = vramfit.BlockCache(llama, tokens=192, host="1MiB")
    first = llama.generate(
        **cache.begin(prompts, model=llama), past_key_values=cache, max_new_tokens=4, **GREEDY
    )
    other = cache.begin(drawn([180], seed=1))
    llama.generate(**other, past_key_values=cache, max_new_tokens=4, **GREEDY)
    assert (
        cache.usage().host_bytes == 4 * 2 * 2 * 16 * 2 * 8 * 4
    )  # blocks, layers, keys and values, of 2 heads of 8
    inputs = cache.begin(prompts)  # no model: nothing is computed here
    assert cache.get_seq_length() == 64
    assert cache.usage().host_bytes == 0
    again = llama.generate(**inputs, past_key_values=cache, max_new_tokens=4, **GREEDY)
    assert same(again, first)


def test_a_batch_waits_on_the_host_and_goes_on(llama: Any) -> None:
    cache = vramfit.BlockCache(llama, tokens=200, host="1MiB")
    inputs = cache.begin(drawn([20, 40]))
    half = llama.generate(**inputs, past_key_values=cache, max_new_tokens=5, **GREEDY)
    waiting = cache.park()
    assert cache.usage().blocks_free == cache.usage().blocks
    llama.generate(**cache.begin(drawn([100])), past_key_values=cache, max_new_tokens=2, **GREEDY)
    with pytest.raises(UsageError, match="holds sequences already"):
        cache.resume(waiting)
    cache.reset()
    cache.resume(waiting)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 5, dtype=torch.int64)], dim=1)
    rest = llama.generate(
        input_ids=half.sequences, attention_mask=mask, past_key_values=cache, max_new_tokens=5, **GREEDY
    )
    whole = llama.generate(**inputs, max_new_tokens=10, **GREEDY)
    assert torch.equal(rest.sequences, whole.sequences)
    assert cache.usage().host_bytes == 0
    with pytest.raises(UsageError, match="brought back already"):
        cache.kept.resume(waiting)


def test_a_batch_is_resumed_by_the_cache_that_parked_it(llama: Any) -> None:
    inputs = left_padded(drawn([20, 40]))
    cache, other = (vramfit.BlockCache(llama, tokens=200, host="1MiB") for _ in range(2))
    for one in (cache, other):
        llama.generate(**inputs, past_key_values=one, max_new_tokens=2, **GREEDY)
    parked, others = cache.park(), other.park()
    with pytest.raises(UsageError, match="not on the host for this cache"):
        cache.resume(others)
    cache.resume(parked)
    other.free()
    with pytest.raises(UsageError, match="not on the host for this cache"):
        other.resume(others)


def test_blocks_of_8_bits_count_their_scales_and_stay_close(llama: Any) -> None:
    inputs = left_padded(drawn([20, 40]))
    reference = llama.generate(**inputs, max_new_tokens=NEW, **GREEDY)
    for around in (nullcontext(), block_attention(llama)):
        cache = vramfit.BlockCache(llama, tokens=160, numbers="int8")
        with around:
            found = llama.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, **GREEDY)
        assert torch.equal(found.sequences, reference.sequences)
        assert 0 < furthest(found, reference) < 2e-3
        # 160 tokens, 2 layers, keys and values of 2 heads: 8 bytes and a scale of 4
        assert cache.usage().pool_bytes == 160 * 2 * 2 * 2 * (8 + 4)


def test_a_window_on_full_attention_is_that_of_mistral() -> None:
    model = made("mistral")
    full = made("llama")
    full.load_state_dict(model.state_dict())
    prompts = drawn([6, 9])
    inputs = left_padded(prompts)
    reference = model.generate(**inputs, max_new_tokens=40, **GREEDY)
    cache = vramfit.BlockCache(full, tokens=400, window=20)
    cache.expect(**inputs)
    found = full.generate(**inputs, past_key_values=cache, max_new_tokens=40, **GREEDY)
    assert torch.equal(found.sequences, reference.sequences)
    assert furthest(found, reference) < 1e-6
    # Of 48 tokens 19 are seen by the next: they lie in the last two blocks, whose first is at 16.
    used = cache.usage()
    assert used.blocks - used.blocks_free == 2 * 2


def test_sinks_are_seen_beside_the_window(llama: Any) -> None:
    """Beside a mask that hides the same tokens from a cache that keeps all."""
    prompt = torch.tensor(drawn([12]))
    cache = vramfit.BlockCache(llama, tokens=200, window=8, sinks=3)
    plain = DynamicCache(config=llama.config)
    tokens = prompt
    with torch.no_grad():
        for _ in range(20):
            new = tokens if tokens.shape[1] == 12 else tokens[:, -1:]
            width = tokens.shape[1]
            places = torch.arange(width - new.shape[1], width)[None]
            mask = torch.ones(1, 1, new.shape[1], width, dtype=torch.bool).tril(width - new.shape[1])
            if new.shape[1] == 1:
                mask[..., 3 : max(3, width - 8)] = False
                if width - 1 - 10 > 3:
                    mask[..., :3] = True
            seen = llama(input_ids=new, position_ids=places, past_key_values=cache).logits[:, -1]
            reference = llama(
                input_ids=new, position_ids=places, past_key_values=plain, attention_mask=mask
            ).logits[:, -1]
            assert (seen - reference).abs().max() < 1e-6
            tokens = torch.cat([tokens, seen.argmax(-1, keepdim=True)], dim=1)
    with block_attention(llama):
        blocks = vramfit.BlockCache(llama, tokens=200, window=8, sinks=3)
        found = llama.generate(prompt, past_key_values=blocks, max_new_tokens=20, **GREEDY)
    assert torch.equal(found.sequences, tokens)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_beams_assisted_decoding_and_chunks_of_the_prompt(kind: str) -> None:
    model = made(kind)
    inputs = left_padded(drawn([3, 30]))
    ways: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = [
        (inputs, {"num_beams": 3}),
        (inputs, {"prefill_chunk_size": 8}),
        ({"input_ids": torch.tensor(drawn([12])).repeat(1, 3)}, {"prompt_lookup_num_tokens": 3}),
    ]
    for given, way in ways:
        options = GREEDY | way | {"max_new_tokens": 24}
        cache = vramfit.BlockCache(model, tokens=800)
        found = model.generate(**given, past_key_values=cache, **options)
        reference = model.generate(**given, **options)
        assert torch.equal(found.sequences, reference.sequences), way
        cache.reset()
        assert cache.usage().blocks_free == cache.usage().blocks


@pytest.mark.parametrize(
    "way",
    [
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"num_beams": 2, "num_return_sequences": 2},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_batch_begun_goes_on_with_beams_and_several_returned_sequences(
    kind: str, way: dict[str, Any]
) -> None:
    model = made(kind)
    prompts = [[*range(5, 45), 9], [*range(5, 45), 7, 8, 6]]  # what both begin with is computed in advance
    options = GREEDY | way | {"max_new_tokens": 12}
    cache = vramfit.BlockCache(model, tokens=1600)
    inputs = cache.begin(prompts, model=model)
    torch.manual_seed(3)
    found = model.generate(**inputs, past_key_values=cache, **options).sequences
    torch.manual_seed(3)
    assert torch.equal(found, model.generate(**inputs, **options).sequences)


@pytest.mark.parametrize(
    "way", [{"multi_query": True}, {"multi_query": False}, {"new_decoder_architecture": True}]
)
def test_falcon_keeps_what_its_attention_caches(way: dict[str, bool]) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if "new_decoder_architecture" in way:
        shape["num_kv_heads"] = 2
    model = FalconForCausalLM(FalconConfig(**shape, **way, bos_token_id=1, eos_token_id=None)).eval()
    for given in (model, model.config):
        cache = vramfit.BlockCache(given, tokens=200)
        inputs = cache.begin([[5, 6, 7], [5, 6, 7, 8, 9]])
        found = model.generate(**inputs, past_key_values=cache, **GREEDY, max_new_tokens=6).sequences
        assert torch.equal(found, model.generate(**inputs, **GREEDY, max_new_tokens=6).sequences)


def test_a_model_that_caches_nothing_is_refused_when_the_cache_is_made(llama: Any) -> None:
    class Forgetful(type(llama)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **rest: Any) -> Any:
            return super().forward(input_ids=input_ids, **(rest | {"past_key_values": DynamicCache()}))

    with pytest.raises(UsageError, match="layer 0 of the model puts no keys and values"):
        vramfit.BlockCache(Forgetful(llama.config), tokens=100)

    class Without(type(llama)):  # type: ignore[misc]
        def forward(self, input_ids: Any) -> Any:
            return super().forward(input_ids=input_ids)

    with pytest.raises(UsageError, match="takes no past_key_values"):
        vramfit.BlockCache(Without(llama.config), tokens=100)


@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_decoders(beams: int) -> None:
    torch.manual_seed(0)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )
    bart = BartForConditionalGeneration(
        BartConfig(
            vocab_size=128,
            d_model=32,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
        )
    )
    inputs = left_padded(drawn([3, 30]))
    options = {"num_beams": beams, "max_new_tokens": 8, "eos_token_id": None, "forced_eos_token_id": None}
    for model in (t5.eval(), bart.eval()):
        reference = model.generate(**inputs, **options, decoder_start_token_id=0, pad_token_id=0)
        cache = block_cache_pair(model, tokens=300)
        cache.expect(inputs["attention_mask"], copies=beams)
        found = model.generate(
            **inputs, past_key_values=cache, **options, decoder_start_token_id=0, pad_token_id=0
        )
        assert torch.equal(found, reference)
        assert cache.cross_attention_cache.usage().tokens == 33  # no padding, and once for all beams


def test_what_is_finished_is_free_at_once_and_others_go_on(llama: Any) -> None:
    inputs = left_padded(drawn([20, 40]))
    cache = vramfit.BlockCache(llama, tokens=200)
    cache.expect(**inputs)
    first = llama.generate(**inputs, past_key_values=cache, max_new_tokens=4, **GREEDY)
    before = cache.usage().blocks_free
    cache.finish(0)
    assert cache.usage().blocks_free == before + 2
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 4, dtype=torch.int64)], dim=1)
    rest = llama.generate(
        input_ids=first.sequences, attention_mask=mask, past_key_values=cache, max_new_tokens=4, **GREEDY
    )
    whole = llama.generate(**inputs, max_new_tokens=8, **GREEDY)
    assert torch.equal(rest.sequences[1], whole.sequences[1])
    assert cache.usage().sequences == 1


def test_what_ends_is_freed_while_others_go_on(llama: Any) -> None:
    inputs = left_padded(drawn([20, 40]))
    plain = llama.generate(**inputs, max_new_tokens=8, **GREEDY).sequences[:, 40:].tolist()
    end = next(token for token in plain[0] if token not in plain[1])
    options = {**GREEDY, "max_new_tokens": 8, "eos_token_id": end, "pad_token_id": 0}
    expected = llama.generate(**inputs, **options).sequences
    cache = vramfit.BlockCache(llama, tokens=200)
    cache.expect(**inputs)
    found = llama.generate(
        **inputs, past_key_values=cache, stopping_criteria=[cache.finish_at(end)], **options
    ).sequences
    assert torch.equal(found, expected)
    assert cache.usage().sequences == 1
    assert cache.usage().tokens == 47  # the last token of the other is not read any more
    with pytest.raises(UsageError, match="end="):
        cache.finish_at(-1)


@pytest.mark.parametrize("way", [{"num_return_sequences": 3, "do_sample": True}, {"num_beams": 3}])
def test_what_ends_is_freed_for_each_returned_sequence_and_not_for_beams(
    llama: Any, way: dict[str, Any]
) -> None:
    inputs = left_padded(drawn([20, 40]))
    options = GREEDY | {"max_new_tokens": 12, "eos_token_id": list(range(3, 8))} | way
    cache = vramfit.BlockCache(llama, tokens=800)
    criteria = [cache.finish_at(*range(3, 8))]
    if "num_beams" in way:
        with pytest.raises(UsageError, match="finish_at is asked about"):
            llama.generate(**inputs, past_key_values=cache, stopping_criteria=criteria, **options)
        return
    torch.manual_seed(1)
    expected = llama.generate(**inputs, **options).sequences
    torch.manual_seed(1)
    found = llama.generate(**inputs, past_key_values=cache, stopping_criteria=criteria, **options).sequences
    assert torch.equal(found, expected)
    ended = sum(any(3 <= token < 8 for token in row[40:]) for row in expected.tolist())
    assert 0 < ended < 6
    assert cache.usage().sequences == 6 - ended


def test_block_attention_refuses_what_it_would_leave_out(llama: Any) -> None:
    """In the prompt already, whose keys no cache has yet."""
    shape = SHAPE | {"num_local_experts": 2, "num_experts_per_tok": 1}
    sinks = GptOssForCausalLM(GptOssConfig(**shape)).eval()
    capped = Gemma2ForCausalLM(Gemma2Config(**SHAPE)).eval()
    for model, part in ((sinks, "s_aux"), (capped, "softcap")):
        before = model.config._attn_implementation
        cache = vramfit.BlockCache(model, tokens=64)
        with pytest.raises(UsageError, match=f"has {part}"), block_attention(model), torch.no_grad():
            model(input_ids=torch.ones(1, 2, dtype=torch.int64), past_key_values=cache)
        assert model.config._attn_implementation == before


def test_parts_of_a_model_attend_as_before_after_block_attention() -> None:
    sight = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**SHAPE),
        vision_config=sight | {"image_size": 32, "patch_size": 16},
        mm_tokens_per_image=4,
    )
    ways = {"vision_config": "eager", "text_config": "sdpa"}
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation=ways)
    with block_attention(model):
        assert model.config.text_config._attn_implementation == "vramfit_blocks"
    assert {name: getattr(model.config, name)._attn_implementation for name in ways} == ways


def test_memory_is_shared_by_caches_of_one_layout(llama: Any) -> None:
    cache = vramfit.BlockCache(llama, tokens=128)
    other = vramfit.BlockCache(llama, memory=cache.memory)
    for one in (cache, other):
        llama.generate(**left_padded(drawn([20])), past_key_values=one, max_new_tokens=2, **GREEDY)
    assert cache.usage().blocks_free == cache.usage().blocks - 4
    with pytest.raises(UsageError, match="another layout"):
        vramfit.BlockCache(LlamaConfig(**SHAPE | {"head_dim": 16}), memory=cache.memory)


def test_a_full_cache_says_so_and_holds_what_it_held(llama: Any) -> None:
    cache = vramfit.BlockCache(llama, tokens=64)
    inputs = left_padded(drawn([30]))
    with pytest.raises(CacheFullError, match=r"1 blocks are needed, 0 of 4 are free"):
        llama.generate(**inputs, past_key_values=cache, max_new_tokens=60, **GREEDY)
    assert cache.usage().tokens == 64


def test_nothing_of_the_model_is_changed(llama: Any) -> None:
    """States are left as they are when blocks hold 8 bits, and random numbers are not drawn."""
    states = torch.randn(1, 2, 5, 8)
    before, random_state = states.clone(), torch.get_rng_state()
    cache = vramfit.BlockCache(llama, tokens=64, numbers="int8")
    cache.update(states, states, 0)
    assert torch.equal(states, before)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_cache_that_is_dropped_gives_its_memory_back_without_the_collector(llama: Any) -> None:
    cache = vramfit.BlockCache(llama, tokens=64)
    llama.generate(**left_padded(drawn([9])), past_key_values=cache, max_new_tokens=3, **GREEDY)
    pool = weakref.ref(cache.batch.store(0).flat)
    del cache
    assert pool() is None


def test_bad_input_is_refused_in_one_line(llama: Any) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (MambaConfig(num_hidden_layers=1), {"budget": "1GiB"}, "keeps a LinearAttentionLayer"),
        (ViTConfig(), {"budget": "1GiB"}, "keeps no keys and values from call to call"),
        (BertConfig(), {"budget": "1GiB"}, "keeps no keys and values from call to call"),
        (XLNetConfig(), {"budget": "1GiB"}, "keeps no keys and values from call to call"),
        (ResNetConfig(), {"budget": "1GiB"}, "keeps no keys and values from call to call"),
        (object(), {"budget": "1GiB"}, "no model of transformers"),
        (T5Config(), {"budget": "1GiB"}, "has an encoder"),
        (llama, {}, "needs a budget in bytes or a number of tokens"),
        (llama, {"tokens": 16, "numbers": "int4"}, "none that blocks hold"),
        (llama, {"tokens": 16, "sinks": 4}, "sinks are kept beside a window"),
        (MistralConfig(sliding_window=8), {"tokens": 16, "window": 4}, "windows of their own"),
    ]
    for model, options, message in cases:
        with pytest.raises(UsageError, match=message) as caught:
            vramfit.BlockCache(model, **options)
        assert "\n" not in str(caught.value)
    small = vramfit.BlockCache(llama, budget=100)
    with pytest.raises(UsageError, match="holds no block of 16 tokens for every layer"), torch.no_grad():
        llama(input_ids=torch.ones(1, 2, dtype=torch.int64), past_key_values=small)
    with pytest.raises(UsageError, match="gradients"):
        llama(
            input_ids=torch.ones(1, 2, dtype=torch.int64),
            past_key_values=vramfit.BlockCache(llama, tokens=64),
        )
    cache = vramfit.BlockCache(llama, tokens=64)
    cache.begin(drawn([3, 4]))
    with pytest.raises(UsageError, match="expects 2 prompts of 4 columns"), torch.no_grad():
        llama(input_ids=torch.ones(1, 2, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(UsageError, match=r"crop\(3\)"):
        cache.crop(3)
    with pytest.raises(UsageError, match="one token or more"):
        cache.begin([[]])
