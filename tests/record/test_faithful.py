"""Programs of many kinds compute under the meter what they compute without it, bit by bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import vramfit

pytestmark = pytest.mark.torch_versions

Program = Callable[[], Iterator[torch.Tensor]]


def encoder() -> Iterator[torch.Tensor]:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.randn(2, 8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    yield from model.parameters()
    with torch.inference_mode():
        yield model.eval()(torch.randn(2, 8, 32))  # the fast path


def recurrent() -> Iterator[torch.Tensor]:
    model = nn.LSTM(8, 16, 2, dropout=0.2)
    model(torch.randn(5, 3, 8))[0].sum().backward()
    yield from (parameter.grad for parameter in model.parameters())


def checkpointed() -> Iterator[torch.Tensor]:
    model, x = (
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)),
        torch.randn(4, 8, requires_grad=True),
    )
    checkpoint(model, x, use_reentrant=False).sum().backward()
    checkpoint(model, x, use_reentrant=True).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().sum()
    loss.backward()
    yield x.grad


def loaded() -> Iterator[torch.Tensor]:
    data = DataLoader(
        TensorDataset(torch.randn(16, 8), torch.randint(0, 3, (16,))), batch_size=8, shuffle=True
    )
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield from model.parameters()


def closures() -> Iterator[torch.Tensor]:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    yield from model.parameters()


def copied() -> Iterator[torch.Tensor]:
    model, stream = nn.Linear(8, 8), io.BytesIO()
    other = copy.deepcopy(model)
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream))
    yield from other.parameters()


def functional() -> Iterator[torch.Tensor]:
    gradient = torch.func.grad(lambda w, x: (w * x).sum())
    yield torch.func.vmap(gradient, in_dims=(None, 0))(torch.ones(4), torch.randn(3, 4))
    w = torch.randn(6, 6, requires_grad=True)
    (twice,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
    twice.sum().backward()
    yield w.grad


def sparse() -> Iterator[torch.Tensor]:
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 2, 1])).sum().backward()
    yield table.weight.grad.to_dense()


def data_dependent() -> Iterator[torch.Tensor]:
    x = torch.randn(1000)
    yield from (x.sort()[0], x.topk(5)[0], torch.unique(x.round()), x[x > 0], torch.fft.rfft(x).abs())
    yield torch.linalg.svd(torch.randn(5, 5))[1]


def odd_tensors() -> Iterator[torch.Tensor]:
    yield torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]).to_padded_tensor(0.0)
    grown = torch.zeros(5)
    yield grown.resize_(1000).fill_(1)
    lazy = nn.LazyLinear(4)
    lazy(torch.ones(2, 6)).sum().backward()
    yield from lazy.parameters()
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    yield nn.init.ones_(empty.to_empty(device="cpu").weight)


def shared() -> Iterator[torch.Tensor]:
    model = nn.Linear(8, 8)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    yield from average.parameters()
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    normed(torch.ones(1, 8)).sum().backward()
    yield from normed.parameters()


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor is True")
@pytest.mark.parametrize(
    "program",
    [
        encoder, recurrent, checkpointed, loaded, closures, copied, functional, sparse, data_dependent,
        odd_tensors, shared,
    ],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_what_is_computed_does_not_change(program: Program) -> None:
    torch.manual_seed(0)
    plain = [tensor.detach().clone() for tensor in program()]
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with vramfit.track(device="cpu") as tracked:
        metered = [tensor.detach().clone() for tensor in program()]
    assert torch.equal(torch.get_rng_state(), after)
    assert len(plain) == len(metered) > 0
    assert all(torch.equal(one, two) for one, two in zip(plain, metered, strict=True))
    assert tracked.peak_allocated_bytes >= max(tensor.nbytes for tensor in metered)
