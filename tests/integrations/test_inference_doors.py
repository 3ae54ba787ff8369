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
