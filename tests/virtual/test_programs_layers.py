"""Layers, losses and ops of real programs: they run forward and backward with the right shapes, named where assumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vramfit.virtual.gpu import VirtualGPU


def cuda(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, device="cuda", **options)


def leaf(*shape: int, **options: Any) -> Tensor:
    return cuda(*shape, requires_grad=True, **options)


def backward(module: nn.Module, *inputs: Any) -> Tensor:
    """One pass through a module; every parameter gets a gradient of its own shape on its device."""
    module = module.cuda()
    out = module(*inputs)
    first = out[0] if isinstance(out, tuple) else out
    first.float().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape and parameter.grad.device == parameter.device, name
    assert isinstance(first, Tensor)
    return first


@pytest.mark.parametrize(
    ("card", "kept"),
    [
        ("RTX 4090", torch.channels_last),
        (
            "T4",
            torch.contiguous_format,
        ),  # cuDNN takes bfloat16 from compute capability 8.0 on; torch's own kernel is dense
    ],
)
def test_a_convolution_in_bfloat16_has_the_layout_of_its_card(card: str, kept: torch.memory_format) -> None:
    with VirtualGPU(card):
        images = cuda(2, 8, 16, 16, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        convolved = F.conv2d(images, leaf(8, 8, 3, 3, dtype=torch.bfloat16), dilation=2)
        assert convolved.is_contiguous(memory_format=kept)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_and_norms(gpu: VirtualGPU, memory_format: torch.memory_format) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(16, 8, 3),
        nn.GroupNorm(4, 8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    ).to(memory_format=memory_format)
    images = cuda(4, 3, 32, 32).to(memory_format=memory_format)
    assert backward(model, images).shape == (4, 10)
    tracked = model[1].num_batches_tracked
    assert tracked is not None and tracked.item() == 1
    convolved = model[0](images)
    assert convolved.is_contiguous(memory_format=memory_format), "the format is kept, as by cuDNN"
    with torch.autocast("cuda", dtype=torch.float16):
        assert model(images).dtype is torch.float16
    model.eval()
    with torch.inference_mode():
        assert model(images).shape == (4, 10)


def test_volumes(gpu: VirtualGPU) -> None:
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3), nn.InstanceNorm3d(8), nn.PReLU(), nn.Upsample(scale_factor=2, mode="trilinear")
    )
    assert backward(model, cuda(1, 1, 16, 16, 16)).shape == (1, 8, 28, 28, 28)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True, "num_layers": 2, "dropout": 0.1}, {"batch_first": True}],
    ids=["plain", "deep", "batch first"],
)
def test_recurrent_layers(gpu: VirtualGPU, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    layer = kind(16, 32, **options)
    out = backward(layer, cuda(5, 3, 16))
    assert out.shape == (5, 3, 64 if options.get("bidirectional") else 32)
    with torch.no_grad():
        assert layer(cuda(5, 3, 16))[0].shape == out.shape


def test_packed_sequences_and_cells(gpu: VirtualGPU) -> None:
    layer = nn.LSTM(16, 32, batch_first=True).cuda()
    packed = nn.utils.rnn.pack_padded_sequence(cuda(3, 7, 16), torch.tensor([7, 5, 2]), batch_first=True)
    assert packed.data.shape == (14, 16)
    out, lengths = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
    out.sum().backward()
    assert out.shape == (3, 7, 32) and lengths.tolist() == [7, 5, 2]
    assert backward(nn.LSTMCell(16, 32), cuda(3, 16)).shape == (3, 32)
    assert backward(nn.GRUCell(16, 32), cuda(3, 16)).shape == (3, 32)
    assert backward(nn.LSTM(16, 32, proj_size=8), cuda(5, 3, 16)).shape == (5, 3, 8)


def test_attention_layers(gpu: VirtualGPU) -> None:
    x = cuda(2, 10, 64)
    attention = nn.MultiheadAttention(64, 4, batch_first=True).cuda()
    out, weights = attention(x, x, x)
    assert out.shape == (2, 10, 64) and weights.shape == (2, 10, 10)
    assert attention(x, x, x, need_weights=False)[1] is None
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
    assert backward(encoder, x).shape == x.shape
    encoder.eval()
    with torch.no_grad():
        assert encoder(x).shape == x.shape
        mask = torch.zeros(2, 10, dtype=torch.bool, device="cuda")
        assert encoder(x, src_key_padding_mask=mask).shape == x.shape
    assert backward(nn.Transformer(64, 4, 1, 1, batch_first=True), x, x).shape == x.shape


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"dropout_p": 0.1}, {"attn_mask": "bool"}, {"attn_mask": "float"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scaled_dot_product_attention(gpu: VirtualGPU, options: dict[str, Any], dtype: torch.dtype) -> None:
    query, key, value = (leaf(2, 4, 32, 16, dtype=dtype) for _ in range(3))
    options = dict(options)
    if "attn_mask" in options:
        kind = torch.bool if options["attn_mask"] == "bool" else dtype
        options["attn_mask"] = torch.ones(32, 32, dtype=kind, device="cuda")
    out = F.scaled_dot_product_attention(query, key, value, **options)
    assert out.shape == query.shape and out.dtype is dtype
    out.sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape and tensor.grad.dtype is dtype


def test_grouped_queries_and_the_math_backend(gpu: VirtualGPU) -> None:
    query, key = leaf(2, 4, 32, 16, dtype=torch.float16), leaf(2, 2, 32, 16, dtype=torch.float16)
    F.scaled_dot_product_attention(query, key, key, enable_gqa=True).sum().backward()
    assert key.grad is not None and key.grad.shape == key.shape

    def held() -> int:
        before = torch.cuda.memory_allocated()
        out = F.scaled_dot_product_attention(big, big, big)
        held = torch.cuda.memory_allocated() - before
        out.sum().backward()
        return held

    big = leaf(4, 8, 1024, 64, dtype=torch.float16)
    scores = 4 * 8 * 1024 * 1024 * 2
    assert held() < scores, "flash attention keeps no matrix of scores"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert held() >= scores, "the math backend keeps it"


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "label_smoothing": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
    "nll": lambda o, y: F.nll_loss(o.log_softmax(1), y),
    "mse": lambda o, y: F.mse_loss(o, o.detach() + 1),
    "smooth_l1": lambda o, y: F.smooth_l1_loss(o, o.detach() + 1),
    "huber": lambda o, y: F.huber_loss(o, o.detach() + 1),
    "bce_with_logits": lambda o, y: F.binary_cross_entropy_with_logits(o, o.detach().sigmoid()),
    "kl_div": lambda o, y: F.kl_div(o.log_softmax(1), o.detach().softmax(1), reduction="batchmean"),
    "multi_margin": F.multi_margin_loss,
    "gaussian_nll": lambda o, y: F.gaussian_nll_loss(o, o.detach() + 1, o.detach().abs()),
    "triplet": lambda o, y: F.triplet_margin_loss(o, o + 1, o - 1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_small_tensors_have_their_true_values(gpu: VirtualGPU, name: str) -> None:
    torch.manual_seed(0)
    real = torch.randn(8, 10, requires_grad=True)
    labels = torch.randint(0, 10, (8,))
    expected = LOSSES[name](real, labels)
    expected.backward()
    moved = real.detach().cuda().requires_grad_()
    loss = LOSSES[name](moved, labels.cuda())
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert moved.grad is not None and real.grad is not None
    assert torch.allclose(moved.grad.cpu(), real.grad, atol=1e-6)


def test_ctc_loss(gpu: VirtualGPU) -> None:
    logits = leaf(20, 4, 10)
    targets = torch.randint(1, 10, (4, 5), device="cuda")
    F.ctc_loss(logits.log_softmax(2), targets, torch.full((4,), 20), torch.full((4,), 5)).backward()
    assert logits.grad is not None and logits.grad.shape == (20, 4, 10)


def test_embeddings_dense_sparse_and_bags(gpu: VirtualGPU) -> None:
    tokens = torch.randint(0, 100, (4, 5), device="cuda")
    assert backward(nn.Embedding(100, 16, padding_idx=0), tokens).shape == (4, 5, 16)
    assert backward(nn.EmbeddingBag(100, 16), tokens).shape == (4, 16)
    sparse = nn.Embedding(100, 16, sparse=True).cuda()
    sparse(tokens).sum().backward()
    assert sparse.weight.grad is not None and sparse.weight.grad.is_sparse


def test_shapes_from_data_are_true_for_small_tensors(gpu: VirtualGPU) -> None:
    x = torch.tensor([[1.0, -1.0], [2.0, -2.0]], device="cuda")
    positive = x > 0
    assert x[positive].tolist() == [1.0, 2.0]
    assert positive.nonzero().tolist() == [[0, 0], [1, 0]]
    assert torch.masked_select(x, positive).shape == (2,)
    assert torch.tensor([3, 1, 3], device="cuda").unique().tolist() == [1, 3]
    repeats = torch.tensor([2, 3], device="cuda")
    assert torch.repeat_interleave(torch.tensor([1, 2], device="cuda"), repeats).tolist() == [1, 1, 2, 2, 2]
    assert torch.bincount(torch.tensor([1, 2, 2], device="cuda")).tolist() == [0, 1, 2]
    x[positive] = 0
    assert x.tolist() == [[0.0, -1.0], [0.0, -2.0]]
    assert not gpu.run.warnings


def test_shapes_from_large_data_are_assumed_full_with_a_warning(gpu: VirtualGPU) -> None:
    x = cuda(100, 100)
    assert x[x > 0].shape == (10_000,)
    assert (x > 0).nonzero().shape == (10_000, 2)
    found = [w for w in gpu.run.warnings if w.code == "shape-from-data"]
    assert found and all("upper bound" in w.message for w in found)


def test_an_op_without_a_rule_is_named_and_never_run(gpu: VirtualGPU) -> None:
    with pytest.raises(
        NotImplementedError, match=r"vramfit: the virtual GPU has no rule for aten\._to_sparse_csr"
    ):
        cuda(4, 4).to_sparse_csr()
    assert [w.code for w in gpu.run.warnings] == ["op-without-rule"]
    assert torch.ones(2, device="cuda").sum().item() == 2.0


def test_parametrizations_and_function_transforms(gpu: VirtualGPU) -> None:
    backward(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), cuda(2, 8))
    backward(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), cuda(2, 8))
    layer = nn.Linear(4, 2).cuda()
    parameters = dict(layer.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, values, (x,)).sum()

    gradients = torch.func.grad(loss)(
        {k: v.detach() for k, v in parameters.items()}, torch.ones(3, 4, device="cuda")
    )
    assert gradients["weight"].tolist() == [[3.0] * 4] * 2
    assert torch.vmap(lambda row: row.sum())(torch.ones(3, 4, device="cuda")).tolist() == [4.0] * 3


def test_mixing_devices_is_the_error_it_is_on_a_card(gpu: VirtualGPU) -> None:
    with pytest.raises(
        RuntimeError, match=r"same device|two devices|Expected all tensors|Unhandled FakeTensor"
    ):
        nn.Linear(4, 4).cuda()(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same reduction dim"):
        cuda(2, 3) @ cuda(2, 3)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_lazy_modules_learn_their_shapes_where_they_are(gpu: VirtualGPU, device: str) -> None:
    model = nn.Sequential(
        nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2, bias=False)
    ).to(device, torch.float64)
    before = list(model.parameters())
    out = model(torch.ones(2, 3, 6, 6, device=device, dtype=torch.float64))
    assert out.shape == (2, 2) and out.dtype is torch.float64 and out.device.type == device
    assert type(model[3]) is nn.Linear and model[3].weight.shape == (2, 64)
    after = list(model.parameters())
    assert [id(p) for p in after] == [id(p) for p in before], "an optimizer made early keeps its parameters"
    assert all(p.device.type == device and isinstance(p, nn.Parameter) and p.requires_grad for p in after)
    assert model[1].running_mean.device.type == device
    optimizer = torch.optim.Adam(before)
    out.sum().backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in after)
    assert (torch.cuda.memory_allocated() > 0) is (device == "cuda")
    if device == "cpu":
        assert model.cuda()(torch.ones(2, 3, 6, 6, device="cuda", dtype=torch.float64)).is_cuda


@pytest.mark.parametrize(("rows", "columns"), [(8, 5), (5, 8)])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_least_squares_and_householder_products(
    gpu: VirtualGPU, batch: tuple[int, ...], rows: int, columns: int
) -> None:
    left, right = torch.randn(*batch, rows, columns), torch.randn(*batch, rows, 2)
    for rhs in (right, right[..., 0]):
        host = torch.linalg.lstsq(left, rhs, driver="gels")
        card = torch.linalg.lstsq(left.cuda(), rhs.cuda())
        assert card.solution.shape == host.solution.shape and card.solution.is_cuda
        assert card.residuals.shape == host.residuals.shape
        assert card.solution.untyped_storage().nbytes() == host.solution.untyped_storage().nbytes()
    reflectors, factors = torch.geqrf(left.cuda())
    on_host = torch.geqrf(left)
    assert (reflectors.stride(), factors.shape) == (on_host[0].stride(), on_host[1].shape)
    if rows > columns:
        square = torch.linalg.householder_product(reflectors, factors)
        assert square.shape == reflectors.shape
        assert torch.ormqr(reflectors, factors, right.cuda()).shape == right.shape


def test_a_dense_tensor_becomes_sparse(gpu: VirtualGPU) -> None:
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]], device="cuda").to_sparse()
    assert sparse.is_sparse and sparse.is_cuda and sparse._nnz() == 2
    assert sparse.is_coalesced() and sparse.values().tolist() == [2.0, 3.0]
    assert sparse.indices().tolist() == [[0, 1], [1, 0]]
    assert torch.sparse.mm(sparse, cuda(2, 3)).shape == (2, 3)
    assert not gpu.run.warnings
    assert cuda(100, 100).to_sparse()._nnz() == 10_000
    assert "shape-from-data" in {w.code for w in gpu.run.warnings}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
def test_sparse_tensors_cross_to_the_card_or_are_refused_by_name(gpu: VirtualGPU) -> None:
    indices, values = torch.tensor([[0, 1], [1, 0]]), torch.ones(2)
    sparse = torch.sparse_coo_tensor(indices, values, (2, 2), check_invariants=False).cuda()
    assert sparse.is_cuda and sparse.layout is torch.sparse_coo and sparse._nnz() == 2
    assert torch.sparse.mm(sparse, torch.ones(2, 3, device="cuda")).shape == (2, 3)
    blocks = torch.sparse_bsr_tensor(
        torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 2, 2), (2, 2), check_invariants=False
    )
    with pytest.raises(NotImplementedError, match="sparse_bsr"):
        blocks.cuda()


def test_flattened_weights_keep_their_true_values(gpu: VirtualGPU) -> None:
    layer = nn.GRU(4, 8)
    before = {name: weight.detach().tolist() for name, weight in layer.named_parameters()}
    layer.cuda()
    layer.flatten_parameters()
    weights = dict(layer.named_parameters())
    assert len({w.untyped_storage()._cdata for w in weights.values()}) == 1
    assert {name: weight.detach().tolist() for name, weight in weights.items()} == before
