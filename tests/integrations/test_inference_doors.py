"""What vramfit does for inference behind the interfaces of MONAI and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vramfit.errors import UsageError


def test_an_inferer_of_monai_gives_what_sliding_windows_give() -> None:
    pytest.importorskip("monai")
    from monai.data.meta_tensor import MetaTensor
    from monai.inferers.inferer import SlidingWindowInferer

    from vramfit.integrations.monai import TiledInferer

    torch.manual_seed(0)
    net = nn.Conv2d(2, 3, 3, padding=1).eval()
    x = torch.rand(2, 2, 40, 33)
    blended = TiledInferer(tile=(16, 16), overlap=0.25, blend="gaussian")
    plain = SlidingWindowInferer((16, 16), overlap=0.25, mode="gaussian")
    with torch.no_grad():
        assert torch.equal(blended(x, net), plain(x, net))
        exact = TiledInferer(tile=16)(x, net)
        torch.testing.assert_close(exact, net(x), rtol=1e-5, atol=1e-6)
    meta = MetaTensor(x, meta={"name": "a scan"})
    found = TiledInferer(tile=16)(meta, net)
    assert isinstance(found, MetaTensor) and found.meta["name"] == "a scan"
    scaled = TiledInferer(tile=16, halo=1)(x, lambda tiles, by: net(tiles) * by, by=2.0)
    torch.testing.assert_close(scaled, 2 * exact)
    with pytest.raises(UsageError, match=r"no option of vramfit.tiled"):
        TiledInferer(size=16)
    with pytest.raises(UsageError, match="comes with the call"):
        TiledInferer(tile=16, dims=2)
    with pytest.raises(UsageError, match="mean"):
        TiledInferer(tile=16)(x, nn.Sequential(net, nn.InstanceNorm2d(3), _Centred()))


class _Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean()


def test_a_quantizer_of_transformers_loads_formats(tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    import vramfit
    from vramfit.integrations.transformers_quantizer import FormatsConfig, register

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=4, **shape)).eval()
    plain.save_pretrained(tmp_path)
    tokens = torch.arange(12).view(1, 12)
    register()
    register()  # again, nothing happens
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FormatsConfig("int8", skip=("model.layers.0",))
    ).eval()
    names = {
        name
        for name, module in loaded.named_modules()
        if "Int8" in type(getattr(module, "weight", None)).__name__
        or "Int8" in type(getattr(getattr(module, "weight", None), "data", None)).__name__
    }
    assert names and all(name.startswith("model.layers.1.") for name in names)
    with torch.no_grad():
        before = plain(tokens).logits
        live = vramfit.quantized(plain, formats=dict.fromkeys(names, "int8"))
        assert torch.equal(loaded(tokens).logits, plain(tokens).logits)
        live.undo()
        loaded.dequantize()
        assert torch.equal(loaded(tokens).logits, before)
    with pytest.raises(UsageError, match="no format of weights"):
        FormatsConfig("int3")


@pytest.fixture(scope="module")
def llama() -> Any:
    """A small language model, and three prompts padded at the left."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=50, num_attention_heads=4, eos_token_id=7, pad_token_id=0, **shape)
    return LlamaForCausalLM(config).eval()


def _prompts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(8, 50, (3, 40), generator=generator)
    tokens[1, :20] = tokens[0, :20]
    mask = torch.ones_like(tokens)
    mask[2, :15] = tokens[2, :15] = 0
    return {"input_ids": tokens, "attention_mask": mask}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_decoding_of_transformers_with_blocks_gives_the_same_tokens(llama: Any, way: str) -> None:
    from vramfit.integrations.transformers_cache import BlockCached

    asked = _prompts() | {"max_new_tokens": 12} | WAYS[way]
    torch.manual_seed(2)
    plain = llama.generate(**asked)
    blocks = BlockCached("1MiB")
    for _ in range(2):  # the second time with the same cache
        torch.manual_seed(2)
        assert torch.equal(llama.generate(**asked, custom_generate=blocks), plain)
        assert blocks.cache is not None
        assert blocks.cache.usage().sequences == 0


def test_a_decoding_with_blocks_keeps_its_cache_where_the_result_has_it(llama: Any) -> None:
    from vramfit.integrations.transformers_cache import BlockCached

    blocks = BlockCached("1MiB")
    done = llama.generate(
        **_prompts(), max_new_tokens=3, custom_generate=blocks, return_dict_in_generate=True
    )
    assert done.past_key_values is blocks.cache
    assert blocks.cache is not None
    assert blocks.cache.usage().sequences == 3
    llama.generate(**_prompts(), max_new_tokens=3, custom_generate=blocks)
    assert blocks.cache.usage().sequences == 0


def test_a_decoding_with_blocks_refuses_what_it_cannot_do(llama: Any) -> None:
    from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

    from vramfit.inference.kv_cache.block_pool import CacheFullError
    from vramfit.integrations.transformers_cache import BlockCached

    asked = _prompts()
    begun = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(**asked, past_key_values=begun)
    following = {name: torch.cat([one, one[:, -1:]], 1) for name, one in asked.items()}
    with pytest.raises(UsageError, match="holds tokens already"):
        llama.generate(
            **following, past_key_values=begun, max_new_tokens=2, custom_generate=BlockCached("1MiB")
        )
    with pytest.raises(CacheFullError):
        llama.generate(**asked, max_new_tokens=2, custom_generate=BlockCached(tokens=16))
    with pytest.raises(UsageError, match="assisted generation"):
        llama.generate(
            **asked, max_new_tokens=4, custom_generate=BlockCached("1MiB"), prompt_lookup_num_tokens=2
        )
    shape = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    encoding = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **shape)).eval()
    with pytest.raises(UsageError, match="has an encoder"):
        encoding.generate(**asked, max_new_tokens=2, custom_generate=BlockCached("1MiB"))
    with pytest.raises(UsageError, match="budget"):
        llama.generate(**asked, max_new_tokens=2, custom_generate=BlockCached())
