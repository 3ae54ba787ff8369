"""`vramfit.streamed`: the plain model's tokens from pinned memory and from disk, and what cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import vramfit
from vramfit.errors import UsageError, VramfitError
from vramfit.inference.streaming.weight_placement import LayerPlace, PlacedLayer, WeightPlacement

CARD = "RTX 4090"


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)  # its embedding and head are tied
    ).eval()


def generated(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 15).view(2, 6)
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=1
    )


def placed(*names: str, slots: int = 2) -> WeightPlacement:
    """A placement that nobody looked for."""
    layers = tuple(PlacedLayer(name=name, nbytes=1, place=LayerPlace.HOST, calls=1) for name in names)
    return WeightPlacement(
        card=CARD,
        budget_bytes=1,
        slots=slots,
        slot_bytes=1,
        layers=layers,
        other_bytes=0,
        peak_reserved_bytes=1,
        peak_allocated_bytes=1,
        carried_bytes=1,
        transfer_seconds=1.0,
        seconds=1.0,
        runs=1,
    )


LLAMA = placed(*(f"model.layers.{number}" for number in range(5)), "lm_head")
T5 = placed(*(f"{side}.block.{number}" for side in ("encoder", "decoder") for number in range(3)))


@pytest.mark.parametrize(("make", "placement"), [(llama, LLAMA), (t5, T5)], ids=["llama", "t5"])
@pytest.mark.parametrize("where", ["memory", "folder", "safetensors", "npy"])
def test_tokens_are_the_plain_models(make: Any, placement: Any, where: str, tmp_path: Path) -> None:
    model = make()
    wanted = generated(model)
    options: dict[str, Any] = {}
    if where == "folder":
        options["folder"] = tmp_path
    elif where == "safetensors":
        save_file({name: one.detach() for name, one in model.named_parameters()}, tmp_path / "w.safetensors")
        options["weights"] = tmp_path / "w.safetensors"
    elif where == "npy":
        for name, one in model.named_parameters():
            np.save(tmp_path / f"{name}.npy", one.detach().numpy())
        options["weights"] = tmp_path
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with vramfit.streamed(model, placement=placement, device="cpu", **options) as streaming:
        assert streaming.model is model
        assert torch.equal(generated(model), wanted)
        assert torch.equal(generated(model), wanted)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert streaming.counts.calls[0] > 1
    assert torch.equal(generated(model), wanted)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if where == "folder":
        assert not list(tmp_path.iterdir())


def test_a_model_without_memory_reads_its_weights_from_files(tmp_path: Path) -> None:
    model = llama()
    wanted = generated(model)
    save_file({name: one.detach() for name, one in model.named_parameters()}, tmp_path / "w.safetensors")
    bare = llama()
    for module in bare.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    with vramfit.streamed(bare, placement=LLAMA, device="cpu", weights=tmp_path):
        assert torch.equal(generated(bare), wanted)
    assert all(parameter.is_meta for parameter in bare.parameters())
    with pytest.raises(UsageError, match="made without values"):
        vramfit.streamed(bare, placement=LLAMA, device="cpu")


def test_weights_on_disk_take_three_buffers_of_the_host(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(12))).eval()
    x = torch.rand(2, 512)
    wanted = model(x)
    names = tuple(str(number) for number in range(12))
    with vramfit.streamed(model, placement=placed(*names), device="cpu", folder=tmp_path) as streaming:
        assert torch.equal(model(x), wanted)
        assert streaming._stream._source.held_bytes == 3 * 512 * 512 * 4
        assert len(list(tmp_path.iterdir())) == 12


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what is resident")
def test_what_is_resident_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1536, 1536, bias=False) for _ in range(16))).eval()

    def resident() -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssFile")))

    save_file({name: one.detach() for name, one in layers().named_parameters()}, tmp_path / "w.safetensors")
    with torch.device("meta"):
        model = layers()
    x, each, before = torch.rand(2, 1536), 1536 * 1536 * 4, resident()
    names = tuple(str(number) for number in range(16))
    with vramfit.streamed(model, placement=placed(*names), device="cpu", weights=tmp_path):
        for _ in range(3):
            model(x)
        grown = resident() - before
    assert grown < 7 * each  # three buffers and two slots, and what else the process took


def test_a_placement_is_found_kept_as_json_and_holds_on_the_virtual_card(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).eval()
    x = torch.rand(4, 2048)
    wanted = model(x)
    with vramfit.streamed(model, x, budget="100MiB", gpu=CARD, device="cpu") as streaming:
        found = streaming.placement
        assert torch.equal(model(x), wanted)
    assert 0 < len(found.streamed) < 8
    assert found.peak_reserved_bytes <= 100 << 20
    assert WeightPlacement.from_json(found.to_json()) == found
    file = tmp_path / "placement.json"
    file.write_text(found.to_json())
    with vramfit.VirtualGPU(CARD) as gpu:
        twin = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).eval()
        with vramfit.streamed(twin, placement=file):
            assert next(twin.parameters()).device.type == "cuda"
            for _ in range(2):
                twin(torch.rand(4, 2048).cuda())
        assert next(twin.parameters()).device.type == "cpu"
    assert gpu.run.devices[0].peak_reserved_bytes == found.peak_reserved_bytes


def refused(model: nn.Module, *args: Any, **options: Any) -> str:
    """The one line that is said."""
    state = [(id(one), one.device) for one in model.parameters()]
    with pytest.raises(VramfitError) as error:
        vramfit.streamed(model, *args, **options)
    assert [(id(one), one.device) for one in model.parameters()] == state
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    model = llama()
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no header at all, but longer than eight bytes")
    cut = tmp_path / "cut.safetensors"
    save_file({name: one.detach() for name, one in model.named_parameters()}, cut)
    cut.write_bytes(cut.read_bytes()[:-100])
    options = {"placement": LLAMA, "device": "cpu"}
    assert "cannot be read: it is no safetensors" in refused(model, weights=bad, **options)
    assert "is cut off" in refused(model, weights=cut, **options)
    assert "No such file" in refused(model, weights=tmp_path / "none.safetensors", **options)
    (tmp_path / "empty").mkdir()
    assert "no .safetensors and no .npy" in refused(model, weights=tmp_path / "empty", **options)
    other = tmp_path / "other.safetensors"
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(3)}, other)
    assert "float32 of [3]" in refused(model, weights=other, **options)
    some = tmp_path / "some.safetensors"
    save_file({"model.embed_tokens.weight": model.model.embed_tokens.weight.detach()}, some)
    assert "has no weights named" in refused(model, weights=some, **options)
    assert "Create the folder first" in refused(model, folder=tmp_path / "nowhere", **options)
    assert "a file" in refused(model, folder=other, **options)
    assert "both given" in refused(model, folder=tmp_path, weights=other, **options)
    assert "nothing says" in refused(model, device="cpu")
    assert "no such method" in refused(model, torch.zeros(1), method="write", device="cpu")
    assert "offload='later'" in refused(model, torch.zeros(1), offload="later", device="cpu")
    assert "not a placement" in refused(model, placement=json.dumps({"format": "x"}), device="cpu")
    assert "no module" in refused(model, placement=placed("model.layers.9"), device="cpu")
    assert "is not a module" in refused_argument()


def refused_argument() -> str:
    with pytest.raises(UsageError) as error:
        vramfit.streamed(len, torch.zeros(1))
    return str(error.value)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "may write to" in refused(llama(), placement=LLAMA, device="cpu", folder=tmp_path)


@pytest.mark.parametrize("when", ["before a call", "after a call"])
def test_what_is_written_to_a_model_on_disk_is_brought(when: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))).eval() for _ in range(2))
    x = torch.rand(2, 8)
    wanted = other(x)
    with vramfit.streamed(model, placement=placed(*"01234"), device="cpu", folder=tmp_path):
        if when == "after a call":  # some layers are in slots and in buffers then
            assert not torch.equal(model(x), wanted)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(x), wanted)
        assert torch.equal(model(x), wanted)
    assert torch.equal(model(x), wanted)


def test_files_that_are_in_a_folder_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, two = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval() for _ in range(2))
    x = torch.rand(2, 8)
    wanted = one(x)
    with vramfit.streamed(one, placement=placed("0", "1"), device="cpu", folder=tmp_path):
        files = {file: file.read_bytes() for file in tmp_path.iterdir()}
        assert "a folder of its own" in refused(
            two, placement=placed("0", "1"), device="cpu", folder=tmp_path
        )
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files
        assert torch.equal(one(x), wanted)


def test_a_file_that_goes_leaves_the_model_its_parameters(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).eval()
    x = torch.rand(2, 8)
    wanted, own = model(x), list(model.parameters())
    with vramfit.streamed(model, placement=placed(*"0123"), device="cpu", folder=tmp_path) as streaming:
        file = tmp_path / "layer-0002.safetensors"
        file.rename(tmp_path / "away")
        source = streaming._stream._source
        ready = source.ready
        source.ready = lambda layer: ready(layer) or source._of(layer) is not None  # it is read at once
        for _ in range(3):
            with pytest.raises(UsageError, match="cannot be read"):
                model(x)
            assert all(seen is one for seen, one in zip(model.parameters(), own, strict=True))
            assert not any(slot.users for slot in streaming._stream._slots)
        (tmp_path / "away").rename(file)
        assert torch.equal(model(x), wanted)
    assert torch.equal(model(x), wanted)
