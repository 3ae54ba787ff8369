"""Pickles and copies of virtual tensors: whole within the run, true in size, shape and type for others."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vramfit.trace import ChangeKind
from vramfit.virtual.gpu import VirtualGPU

Carrier = Callable[[Any], Any]


def _by_pickle(sent: Any) -> Any:
    return pickle.loads(pickle.dumps(sent))


def _by_pipe(sent: Any) -> Any:
    return _through(multiprocessing.Pipe(), sent)


def _through(pipe: Any, sent: Any) -> Any:
    one, other = pipe
    sender = threading.Thread(target=one.send, args=(sent,))  # a pipe holds 64 KiB
    sender.start()
    got = other.recv()
    sender.join()
    return got


def _by_queue(sent: Any) -> Any:
    queue: Any = multiprocessing.get_context("fork").Queue()
    queue.put(sent)
    got = queue.get(timeout=60)
    queue.close()
    queue.join_thread()
    return got


def _by_python_pickler(sent: Any) -> Any:
    """By a pickler in Python, as joblib's and cloudpickle's are."""
    buffer = io.BytesIO()
    pickle._Pickler(buffer, protocol=4).dump(sent)
    return pickle._Unpickler(io.BytesIO(buffer.getvalue())).load()


def _by_torch_pipe(sent: Any) -> Any:
    return _through(torch.multiprocessing.Pipe(), sent)


CARRIERS: tuple[Carrier, ...] = (
    _by_pickle,
    _by_pipe,
    _by_queue,
    _by_python_pickler,
    _by_torch_pipe,
    copy.deepcopy,
)


@pytest.mark.parametrize("carried", CARRIERS, ids=lambda carrier: carrier.__name__.strip("_"))
def test_a_model_comes_back_virtual_with_its_values_and_attributes(gpu: VirtualGPU, carried: Carrier) -> None:
    model = nn.Sequential(nn.Linear(2000, 30), nn.Linear(30, 4)).cuda()
    model[1].weight.requires_grad_(False)
    model[1].bias.role = "head"
    before = torch.cuda.memory_allocated()
    again = carried(model)
    assert torch.cuda.memory_allocated() == 2 * before
    assert [p.device.type for p in again.parameters()] == ["cuda"] * 4
    assert [p.requires_grad for p in again.parameters()] == [True, True, False, True]
    assert again[1].bias.tolist() == model[1].bias.tolist() and again[1].bias.role == "head"
    assert all(isinstance(p, nn.Parameter) for p in again.parameters())
    again(torch.ones(2, 2000, device="cuda")).sum().backward()
    assert again[0].weight.grad.shape == (30, 2000)


@pytest.mark.parametrize("carried", CARRIERS, ids=lambda carrier: carrier.__name__.strip("_"))
def test_tensors_keep_what_they_are(gpu: VirtualGPU, carried: Carrier) -> None:
    counted = torch.arange(6, device="cuda").reshape(2, 3)
    sent = {
        "whole": counted,
        "row": counted[1],
        "turned": counted.t(),
        "empty": torch.empty(0, 3, device="cuda"),
        "half": torch.full((3,), 0.5, device="cuda", dtype=torch.bfloat16),
        "float8": torch.ones(4, device="cuda").to(torch.float8_e4m3fn),
        "twice": (counted, counted),
        "number": 3,
    }
    got = carried(sent)
    for name in ("whole", "row", "turned", "empty", "half"):
        assert (got[name].tolist(), got[name].stride()) == (sent[name].tolist(), sent[name].stride()), name
        assert (got[name].dtype, got[name].device) == (sent[name].dtype, sent[name].device), name
    assert got["float8"].dtype == torch.float8_e4m3fn and got["float8"].is_cuda
    assert got["twice"][0] is got["twice"][1] and got["number"] == 3


def test_a_shallow_copy_lies_on_the_same_storage(gpu: VirtualGPU) -> None:
    weight = nn.Linear(2000, 2000, device="cuda").weight
    weight.role = "weight"
    before = torch.cuda.memory_allocated()
    again = copy.copy(weight)
    assert torch.cuda.memory_allocated() == before
    assert isinstance(again, nn.Parameter) and again.role == "weight"
    assert again.data_ptr() == weight.data_ptr()


def test_a_pickled_file_has_its_size_and_nothing_real_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(b"the user's own")
    with VirtualGPU("RTX 4090") as gpu:
        model = nn.Linear(1000, 100).cuda()
        with path.open("wb") as file:
            pickle.dump(model, file)
        with path.open("rb") as file:
            assert pickle.load(file).weight.is_cuda
    assert path.read_bytes() == b"the user's own"
    assert gpu.run.files is not None
    (change,) = [one for one in gpu.run.files.entries if one.path == str(path)]
    assert change.kind is ChangeKind.REPLACED and 401_000 < change.size_bytes < 406_000
    assert not gpu.run.warnings


def test_torch_alone_reads_true_shapes_and_types_and_zeros() -> None:
    with VirtualGPU("RTX 4090"):
        model = nn.Linear(1000, 100).cuda()
        on_card = pickle.dumps(model)
        on_host = pickle.dumps(model.cpu())
    again = pickle.loads(on_host)
    assert type(again.weight) is nn.Parameter and again.weight.shape == (100, 1000)
    assert not again.weight.any() and not again.bias.any()
    with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
        pickle.loads(on_card)  # as of any pickle of a card


def test_where_files_are_real_only_the_run_can_read_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    with VirtualGPU("RTX 4090", writes="real") as gpu:
        model = nn.Linear(1000, 100).cuda()
        path.write_bytes(pickle.dumps(model))
        again = pickle.loads(path.read_bytes())
        assert again.weight.is_cuda and again.bias.tolist() == model.bias.tolist()
    (warning,) = gpu.run.warnings
    assert warning.code == "pickled-short" and "only this run can read it" in warning.message
    assert path.stat().st_size < 10_000
    with pytest.raises(AttributeError):
        pickle.loads(path.read_bytes())


def test_large_pickles_do_not_fill_the_memory_of_this_machine(gpu: VirtualGPU) -> None:
    large = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    data = pickle.dumps(large)
    assert len(data) < 10_000
    del large
    again = pickle.loads(data)
    assert again.shape == (3 << 30,) and torch.cuda.memory_allocated() == 3 << 30
    assert {warning.code for warning in gpu.run.warnings} == {"pickled-short"}


def test_a_pickle_made_on_a_card_is_read_to_the_card() -> None:
    with VirtualGPU("RTX 4090"):
        data = pickle.dumps(torch.arange(5000.0, device="cuda"))
    data = data.replace(
        b"vramfit:storage", b"another storage"
    )  # what a machine with a card writes has no such note
    with VirtualGPU("RTX 4090") as gpu:
        assert pickle.loads(data).is_cuda
        assert gpu.peak_allocated_bytes == 20_480
