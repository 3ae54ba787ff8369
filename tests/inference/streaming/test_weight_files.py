"""Files of weights: safetensors' own library reads ours, and we read its and NumPy's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vramfit.errors import UsageError, WriteError
from vramfit.inference.streaming.weight_files import store, stored_tensors

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {str(dtype): (torch.rand(3, 5) * 9).to(dtype) for dtype in DTYPES}
    return {**made, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.rand(4, 6).T}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    made = tensors()
    store(tmp_path / "ours.safetensors", made)
    read = load_file(tmp_path / "ours.safetensors")
    assert {name: (one.dtype, one.shape, bits(one)) for name, one in read.items()} == {
        name: (one.dtype, one.shape, bits(one)) for name, one in made.items()
    }


def test_we_read_what_safetensors_and_numpy_write(tmp_path: Path) -> None:
    made = {name: one.contiguous() for name, one in tensors().items()}
    save_file(made, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    for name, one in stored_tensors(tmp_path / "theirs.safetensors").items():
        assert (one.dtype, one.shape, bits(one.mapped())) == (
            made[name].dtype,
            made[name].shape,
            bits(made[name]),
        )
    folder = tmp_path / "arrays"
    folder.mkdir()
    plain = {name: one for name, one in made.items() if one.dtype in (torch.float32, torch.int16, torch.bool)}
    for name, one in plain.items():
        np.save(folder / f"{name}.npy", one.numpy())
    found = stored_tensors(folder)
    assert {name: bits(one.mapped()) for name, one in found.items()} == {
        name: bits(one) for name, one in plain.items()
    }


def test_several_files_are_read_together(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    assert set(stored_tensors(tmp_path)) == {"a", "b"}


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "turned.npy", np.asfortranarray(np.ones((2, 3))))
    with pytest.raises(UsageError, match="not in C order"):
        stored_tensors(tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        store(tmp_path / "x.safetensors", {"x": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(WriteError):
        store(tmp_path / "none" / "x.safetensors", {"x": torch.zeros(2)})
    assert not (tmp_path / "x.safetensors").exists()
