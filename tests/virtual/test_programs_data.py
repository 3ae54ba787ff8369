"""Data, values and files: what stays real on the host, what is true on the card, and what is only assumed."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from vramfit.trace import ChangeKind
from vramfit.virtual.gpu import VirtualGPU

# From Python 3.12 on, a fork beside other threads warns; that is what worker processes are.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def codes(gpu: VirtualGPU) -> set[str]:
    return {warning.code for warning in gpu.run.warnings}


# -- the host stays real -------------------------------------------------------------------------------------------


def test_cpu_work_is_computed_exactly(gpu: VirtualGPU) -> None:
    left, right = torch.randn(200, 300), torch.randn(300, 200)
    product = left @ right
    assert type(product) is Tensor
    assert np.allclose(product.numpy(), left.numpy() @ right.numpy(), atol=1e-3)
    weight = torch.randn(5, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * 5
    assert torch.tensor(3).item() == 3
    assert gpu.run.ops == 0 and torch.cuda.memory_allocated() == 0


def test_cpu_random_numbers_are_those_of_a_run_without_a_card() -> None:
    torch.manual_seed(7)
    without = [torch.rand(3).tolist(), torch.randperm(10).tolist(), torch.randn(2).tolist()]
    with VirtualGPU("RTX 4090"):
        torch.manual_seed(7)
        torch.randn(4, device="cuda")
        F.dropout(torch.ones(8, device="cuda"), 0.5)
        within = [torch.rand(3).tolist(), torch.randperm(10).tolist(), torch.randn(2).tolist()]
    assert within == without


def test_loops_on_the_host_end_by_their_own_values(gpu: VirtualGPU) -> None:
    value, steps = torch.tensor(1.0), 0
    while value < 1000:
        value = value * 2
        steps += 1
    assert steps == 10
    queue, seen = torch.arange(5), []
    while len(queue):
        seen.append(int(queue[0]))
        queue = queue[1:]
    assert seen == [0, 1, 2, 3, 4]
    assert not gpu.run.warnings


# -- data loading --------------------------------------------------------------------------------------------------


OF_2_10 = pytest.mark.filterwarnings("ignore:.*argument .device. of Tensor.pin_memory:DeprecationWarning")
"""Its own loader passes what it warns of."""


def numbered(count: int = 64) -> TensorDataset:
    index = torch.arange(count)
    return TensorDataset(index.float().view(-1, 1).repeat(1, 8), index % 10)


@FORKS
@OF_2_10
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_data_loader_gives_every_sample_once_with_its_values(
    gpu: VirtualGPU, workers: int, pinned: bool
) -> None:
    loader = DataLoader(numbered(), batch_size=10, shuffle=True, num_workers=workers, pin_memory=pinned)
    for _ in range(2):
        seen: list[int] = []
        for inputs, labels in loader:
            assert type(inputs) is Tensor and inputs.is_pinned() == pinned
            assert [int(v) % 10 for v in inputs[:, 0]] == labels.tolist()
            moved = inputs.cuda(non_blocking=True)
            assert moved.is_cuda and moved.shape == inputs.shape
            assert moved.tolist() == inputs.tolist(), "a small batch keeps its values on the card"
            seen += [int(v) for v in inputs[:, 0]]
        assert sorted(seen) == list(range(64))
        assert seen != list(range(64))


@FORKS
@OF_2_10
def test_workers_prefetch_after_a_backward_pass(gpu: VirtualGPU) -> None:
    model = nn.Linear(8, 10).cuda()
    loader = DataLoader(numbered(32), batch_size=8, num_workers=1, pin_memory=True, persistent_workers=True)
    losses = []
    for _ in range(2):
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
            loss.backward()
            losses.append(loss.item())
    assert len(losses) == 8 and all(loss > 0 for loss in losses)
    del loader


def test_samplers_draw_real_indices(gpu: VirtualGPU) -> None:
    data = numbered(20)
    assert list(SequentialSampler(data)) == list(range(20))
    assert sorted(RandomSampler(data)) == list(range(20))
    weighted = list(WeightedRandomSampler([0.0] * 10 + [1.0] * 10, 50))
    assert len(weighted) == 50 and min(weighted) >= 10 and len(set(weighted)) > 3
    batches = list(BatchSampler(RandomSampler(data), 6, drop_last=True))
    assert [len(b) for b in batches] == [6, 6, 6]
    first, second = random_split(data, [15, 5], generator=torch.Generator().manual_seed(1))
    assert sorted([*first.indices, *second.indices]) == list(range(20))


def test_iterable_and_dictionary_datasets(gpu: VirtualGPU) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(5))

    class Rows(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"pixels": np.full((2, 2), index, dtype=np.float32), "name": f"row {index}"}

    assert [batch.tolist() for batch in DataLoader(Stream(), batch_size=2)] == [[0, 1], [2, 3], [4]]
    (batch,) = DataLoader(Rows(), batch_size=3)
    assert batch["name"] == ["row 0", "row 1", "row 2"]
    assert batch["pixels"].cuda().shape == (3, 2, 2)
    assert batch["pixels"][:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_numpy_both_ways(gpu: VirtualGPU) -> None:
    array = np.random.default_rng(0).random((3, 4))
    real = torch.from_numpy(array)
    assert real.numpy() is not None and np.shares_memory(real.numpy(), array)
    moved = real.cuda()
    assert np.array_equal(moved.cpu().numpy(), array)
    assert np.array_equal(np.asarray(moved.detach().cpu()), array)
    with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy.*Tensor.cpu\(\)"):
        moved.numpy()
    parameter = nn.Parameter(torch.ones(3))
    assert parameter.detach().numpy().tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match="requires grad"):
        parameter.numpy()
    large = torch.zeros(5000, 2, device="cuda").cpu()
    assert type(large) is Tensor and large.numpy().shape == (5000, 2)


def test_an_image_pipeline_runs_for_real(gpu: VirtualGPU) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = image.new("RGB", (16, 8), (255, 128, 0)).resize((8, 8))
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    mean = torch.tensor([0.5, 0.5, 0.5])[:, None, None]
    normalised = (pixels - mean) / mean
    assert normalised[:, 0, 0].tolist() == pytest.approx([1.0, 2 * 128 / 255 - 1, -1.0], abs=1e-6)
    batch = torch.stack([normalised, normalised.flip(2)]).cuda()
    assert batch.shape == (2, 3, 8, 8) and torch.cuda.memory_allocated() == 2 * 3 * 64 * 4


def test_pinned_memory_is_counted_on_the_host_and_not_on_the_card(gpu: VirtualGPU) -> None:
    plain = torch.arange(1024, dtype=torch.float32)
    pinned = plain.pin_memory()
    assert pinned.is_pinned() and not plain.is_pinned() and pinned.tolist() == plain.tolist()
    made = torch.empty(1024, pin_memory=True)
    assert made.is_pinned() and torch.cuda.memory_allocated() == 0
    stats = torch.cuda.host_memory_stats()
    assert stats["allocated_bytes.current"] == 2 * 4096
    pointer = pinned.data_ptr()
    assert pinned.pin_memory().data_ptr() == pointer, "already pinned"
    del pinned, made
    assert torch.cuda.host_memory_stats()["active_bytes.current"] == 0


# -- values on the card --------------------------------------------------------------------------------------------


def test_small_tensors_hold_true_values(gpu: VirtualGPU) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="cuda")
    assert x.sum().item() == 10.0 and (x @ x).tolist() == [[7.0, 10.0], [15.0, 22.0]]
    assert x.argmax().item() == 3 and bool((x > 0).all()) and int(x[1, 0]) == 3
    assert f"{x.mean():.2f}" == "2.50" and float(x.std()) == pytest.approx(1.29099, abs=1e-4)
    x[0] = 0
    assert x.t().tolist() == [[0.0, 3.0], [0.0, 4.0]]
    view = x.view(-1)
    view.add_(1)
    assert x.tolist() == [[1.0, 1.0], [4.0, 5.0]], "a view and its base are one storage"
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1)
    assert str(torch.tensor([1.5], device="cuda")) == "tensor([1.5000], device='cuda:0')"
    assert codes(gpu) == set()


def test_accuracy_counts_the_true_labels_of_a_small_model(gpu: VirtualGPU) -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], device="cuda")
    labels = torch.tensor([1, 0, 0], device="cuda")
    assert (logits.argmax(1) == labels).sum().item() == 2
    _, predicted = logits.max(1)
    assert predicted.eq(labels).float().mean().item() == pytest.approx(2 / 3)
    _, top = logits.topk(2, 1)
    assert top.eq(labels.view(-1, 1)).any(1).sum().item() == 3
    confusion = torch.zeros(2, 2, dtype=torch.long, device="cuda")
    for truth, guess in zip(labels, predicted, strict=True):
        confusion[truth.long(), guess.long()] += 1
    assert confusion.tolist() == [[1, 1], [0, 1]]


def test_values_of_large_models_are_assumed_and_named(gpu: VirtualGPU) -> None:
    model = nn.Linear(128, 64).cuda()
    out = model(torch.randn(256, 128, device="cuda"))
    loss = out.float().pow(2).mean()
    line = sys._getframe().f_lineno + 1
    value = loss.item()
    assert value == 1.0
    (warning,) = [w for w in gpu.run.warnings if w.code == "guessed-value"]
    assert warning.location == f"{__file__}:{line}" and warning.count == 1
    assert not torch.isnan(out).any() and bool(torch.isfinite(out).all())


def test_early_stopping_and_best_losses_work(gpu: VirtualGPU) -> None:
    best, bad, epochs = float("inf"), 0, 0
    for value in (3.0, 2.0, 2.5, 2.6, 1.0):
        epochs += 1
        loss = torch.tensor(value, device="cuda")
        if loss < best:
            best, bad = loss.item(), 0
        else:
            bad += 1
        if bad >= 2:
            break
    assert (best, epochs) == (2.0, 4)


@pytest.mark.parametrize("ends_with", ["none left", "all done", "grown"])
def test_loops_over_assumed_values_end(gpu: VirtualGPU, ends_with: str) -> None:
    x = torch.randn(100, 100, device="cuda")
    rounds = 0
    if ends_with == "none left":
        while (x > 2).any():
            x = torch.where(x > 2, torch.randn_like(x), x)
            rounds += 1
        assert rounds == 0
    elif ends_with == "all done":
        while not (x > 100).sum() > 5000:
            x = x + 1
            rounds += 1
    else:
        while x.mean() < 50:
            x = x + 1
            rounds += 1
    assert rounds < 1000
    if ends_with == "grown":
        assert "guess-flipped" in codes(gpu) and rounds >= 199


def test_generation_with_small_logits_samples_real_tokens(gpu: VirtualGPU) -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[1, 2]], device="cuda")
    table = nn.Embedding(50, 16).cuda()
    head = nn.Linear(16, 50).cuda()
    for _ in range(5):
        with torch.no_grad():
            probabilities = head(table(tokens)[:, -1]).softmax(-1)
        assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-5)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], 1)
    assert tokens.shape == (1, 7) and all(0 <= t < 50 for t in tokens[0].tolist())
    assert "guessed-value" not in codes(gpu)


# -- files ---------------------------------------------------------------------------------------------------------


def test_saving_never_touches_a_file_and_loading_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"the user's own")
    with VirtualGPU("RTX 4090") as gpu:
        _save_and_load(path)
        assert path.stat().st_size > 400, "the block sees what it saved"
    assert path.read_bytes() == b"the user's own" and list(tmp_path.iterdir()) == [path]
    assert gpu.run.files is not None
    (change,) = [one for one in gpu.run.files.entries if one.path == str(path)]
    assert change.kind is ChangeKind.REPLACED and change.size_bytes > 400


def test_where_files_are_real_a_virtual_checkpoint_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"the user's own")
    with VirtualGPU("RTX 4090", writes="real") as gpu:
        _save_and_load(path)
    assert path.read_bytes() == b"the user's own" and list(tmp_path.iterdir()) == [path]
    (warning,) = [w for w in gpu.run.warnings if w.code == "save-skipped"]
    assert str(path) in warning.message and "files are written for real" in warning.message


def _save_and_load(path: Path) -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    weights = model.weight.tolist()
    with torch.no_grad():
        model.weight.zero_()
    on_card = torch.load(path)
    assert on_card["epoch"] == 3 and on_card["model"]["weight"].is_cuda
    on_host = torch.load(path, map_location="cpu")
    assert on_host["model"]["weight"].device.type == "cpu"
    assert on_host["model"]["weight"].tolist() == weights, "the values of the moment of saving"
    model.load_state_dict(on_host["model"])
    optimizer.load_state_dict(on_host["optimizer"])
    assert model.weight.tolist() == weights and model.weight.is_cuda
    assert optimizer.state[model.weight]["exp_avg"].is_cuda
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert set(torch.load(buffer)) == {"weight", "bias"}


def test_a_saved_state_holds_no_memory_of_the_card(gpu: VirtualGPU, tmp_path: Path) -> None:
    model = nn.Linear(512, 512, bias=False).cuda()
    before = torch.cuda.memory_allocated()
    torch.save(model.state_dict(), tmp_path / "big.pt")
    assert torch.cuda.memory_allocated() == before
    loaded = torch.load(tmp_path / "big.pt")
    assert torch.cuda.memory_allocated() == 2 * before
    del loaded
    assert torch.cuda.memory_allocated() == before
    found = (tmp_path / "big.pt").stat()
    assert found.st_size > 512 * 512 * 4 and found.st_blocks * 512 < 64 << 10, (
        "its size is true, its bytes are holes"
    )


def test_real_objects_are_saved_and_loaded_as_ever(gpu: VirtualGPU, tmp_path: Path) -> None:
    path = tmp_path / "real.pt"
    torch.save({"mean": torch.ones(3), "names": ["a"]}, path)
    assert torch.load(path)["mean"].tolist() == [1.0, 1.0, 1.0]
    on_card = torch.load(path, map_location="cuda")["mean"]
    assert on_card.is_cuda and on_card.tolist() == [1.0, 1.0, 1.0]
    assert torch.load(path, map_location={"cpu": "cuda:0"})["mean"].is_cuda
    assert torch.load(path, map_location=lambda storage, location: storage)["names"] == ["a"]
    with pytest.raises(RuntimeError, match=r"CUDA device 3 but torch.cuda.device_count\(\) is 1"):
        torch.load(path, map_location="cuda:3")


def test_tensors_loaded_to_the_card_share_storages_as_in_the_file(gpu: VirtualGPU, tmp_path: Path) -> None:
    path = tmp_path / "shared.pt"
    base = torch.arange(100_000, dtype=torch.float32)
    torch.save({"base": base, "tail": base[50_000:], "half": base.half()}, path)
    loaded = torch.load(path, map_location="cuda")
    assert loaded["tail"].data_ptr() == loaded["base"].data_ptr() + 200_000
    assert torch.cuda.memory_allocated() == 512 * (-(-400_000 // 512) + -(-200_000 // 512))
    del loaded
    assert torch.cuda.memory_allocated() == 0


def test_a_real_checkpoint_fills_a_virtual_model(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.full((3, 2), 0.5), "bias": torch.arange(3.0)}, path)
    with VirtualGPU("RTX 4090"):
        model = nn.Linear(2, 3)
        model.load_state_dict(torch.load(path))
        model.cuda()
        assert model(torch.ones(1, 2, device="cuda")).tolist() == [[1.0, 2.0, 3.0]]


def test_safetensors_files_are_left_alone(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    for writes in ("discard", "real"):
        with VirtualGPU("RTX 4090", writes=writes):
            model = nn.Linear(2, 2).cuda()
            safetensors.save_file(model.state_dict(), path)
            assert safetensors.load_file(path)["weight"].tolist() == model.weight.tolist()
        assert path.read_bytes() == b"old"


def test_state_dicts_pass_through_module_methods(gpu: VirtualGPU) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).cuda()
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).cuda()
    result = other.load_state_dict(model.state_dict())
    assert result.missing_keys == [] and result.unexpected_keys == []
    assert other[0].weight.tolist() == model[0].weight.tolist()
    real = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in model.state_dict().items()}
    other.load_state_dict(real)
    assert other[0].weight.tolist() == [[0.0, 0.0], [0.0, 0.0]] and other[0].weight.is_cuda
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({"0.weight": torch.zeros(3, 3)}, strict=False)


def test_storages_have_addresses(gpu: VirtualGPU) -> None:
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    assert x.untyped_storage().data_ptr() == x.data_ptr() == x[3:].untyped_storage().data_ptr()
    assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
    host = nn.Linear(2, 2)
    addresses = {p.untyped_storage().data_ptr() for p in host.parameters()}
    assert len(addresses) == 2 and 0 not in addresses
    real = torch.ones(3)
    assert real.untyped_storage().data_ptr() == real.data_ptr()


def test_a_pretrained_model_is_saved_and_loaded_within_the_run(gpu: VirtualGPU, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).cuda()
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > sum(p.numel() * 4 for p in model.parameters())
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert again.transformer.wte.weight.tolist() == model.transformer.wte.weight.tolist()


def test_a_tensor_of_the_card_is_shared_and_cannot_leave_by_dlpack(gpu: VirtualGPU) -> None:
    x = torch.ones(3, device="cuda")
    assert x.share_memory_() is x and x.is_shared()
    layer = nn.Linear(2, 2).cuda()
    assert layer.share_memory() is layer and layer.weight.is_cuda
    exports: list[Callable[[Tensor], Any]] = [torch.utils.dlpack.to_dlpack, torch.from_dlpack]
    for export in exports:
        with pytest.raises(NotImplementedError, match="cannot be exported with DLPack"):
            export(x)
    assert torch.from_dlpack(torch.arange(3)).tolist() == [0, 1, 2]
