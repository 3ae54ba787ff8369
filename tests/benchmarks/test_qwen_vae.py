"""Qwen-Image's VAE beside the figures of others: the same network, their peaks, and diffusers' norm as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from measured_programs.qwen_vae import COMFYUI, INVOKEAI, Network, comfyui, invokeai, main, normalized

from vramfit.units import GIB, MIB

SHOWN = 0.05 * MIB
"""Their figures have one decimal."""


def test_the_network_is_as_large_as_theirs() -> None:
    with torch.device("meta"):
        size = 2 * sum(parameter.numel() for parameter in Network().parameters())
    assert size == 2 * 126_892_531  # of qwen_image_vae.safetensors
    assert round(size / MIB) == 242  # what the pull request gives for the weights


@pytest.mark.parametrize(("operation", "pixels"), [("decode", 1024), ("encode", 1024), ("decode", 256)])
def test_peaks_are_those_that_comfyui_shows(operation: str, pixels: int) -> None:
    assert comfyui(operation, pixels) == pytest.approx(COMFYUI[operation, pixels] * MIB, abs=SHOWN)


def test_the_peak_of_encoding_is_one_convolution_without_cudnn() -> None:
    pixels, wide = 512 * 512, 96 * 2
    features, columns, image, filters = 3 * wide * pixels, 9 * wide * pixels, 3 * 2 * pixels, 9 * 96 * wide
    assert comfyui("encode", 512) == features + columns + image + filters


def test_a_row_of_invokeai_lies_within_its_bar() -> None:
    pytest.importorskip("diffusers")
    allocated, growth = INVOKEAI["encode", 512, 512]
    found = invokeai("encode", 512, 512)
    assert found.allocated / GIB == pytest.approx(allocated, abs=0.001)
    assert found.growth / GIB == pytest.approx(growth, rel=0.02)  # 14 % with a norm in float32
    assert found.growth - found.below <= growth * GIB <= found.growth + found.above


def test_the_norm_is_the_one_that_diffusers_had() -> None:
    module = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_qwenimage")
    norm = module.QwenImageRMS_norm(4, images=False)
    torch.nn.init.uniform_(norm.gamma)
    image = torch.rand(1, 4, 1, 2, 2)
    torch.testing.assert_close(normalized(norm, image), norm(image))
    assert normalized(norm.half(), image.half()).dtype is torch.float16


def test_small_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert main(["--only", "comfyui", "--longest", "256", "--json", str(file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].startswith("| decode | 256 | 258.8 | 258.8 |")
    assert len(shown) == 4
    assert '"operation": "encode"' in file.read_text()
