"""``tensor.data = other`` and storages from outside the dispatcher: device, bytes and identity as on a card.

What a real tensor on the CPU does is the reference for everything but the device and the bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vramfit.trace import Category
from vramfit.virtual.gpu import VirtualGPU

BLOCK = 512  # the allocator's smallest block: each tensor here takes one


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


# -- the table: what is assigned to, and what is assigned ----------------------------------------------------------

# Each is made by a function of the device that stands for the card.
TARGETS: dict[str, Callable[[str], Tensor]] = {
    "parameter on the host": lambda card: nn.Parameter(torch.arange(6.0)),
    "parameter on the card": lambda card: nn.Parameter(torch.arange(6.0, device=card)),
    "bfloat16 parameter on the card": lambda card: nn.Parameter(
        torch.arange(6.0, device=card, dtype=torch.bfloat16)
    ),
    "frozen parameter": lambda card: nn.Parameter(torch.arange(6.0, device=card), requires_grad=False),
    "tensor on the host": lambda card: torch.arange(6.0),
    "leaf on the host": lambda card: torch.arange(6.0, requires_grad=True),
    "tensor on the card": lambda card: torch.arange(6.0, device=card),
    "leaf on the card": lambda card: torch.arange(6.0, device=card).requires_grad_(),
}
SOURCES: dict[str, Callable[[str], Tensor]] = {
    "the card": lambda card: torch.ones(2, 2, device=card),
    "the card in bfloat16": lambda card: torch.ones(2, 2, device=card, dtype=torch.bfloat16),
    "a part on the card": lambda card: torch.ones(4, 4, device=card)[1:3, ::2],
    "the host": lambda card: torch.ones(2, 2),
    "the host in float64": lambda card: torch.ones(2, 2, dtype=torch.float64),
    "a part on the host": lambda card: torch.ones(4, 4)[1:3, ::2],
    "a parameter on the host": lambda card: nn.Parameter(torch.ones(2, 2)),
    "a parameter on the card": lambda card: nn.Parameter(torch.ones(2, 2, device=card)),
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a program can see of an assignment."""

    same_object: bool
    is_parameter: bool
    is_leaf: bool
    requires_grad: bool
    keeps_gradient: bool
    keeps_hook: bool
    keeps_note: bool
    keeps_version: bool
    layout: tuple[Any, ...]
    shares: list[list[float]]
    gradient: list[list[float]] | None
    hook_ran: int


def see(target: Tensor, value: Tensor) -> Seen:
    """Assign, and look at everything."""
    calls: list[int] = []
    before, version = id(target), target._version
    kept = {target: "by identity"}
    if target.requires_grad:
        target.register_hook(lambda gradient: calls.append(1))
        target.grad = gradient = torch.zeros_like(target)
    else:
        gradient = None
    hooks = target._backward_hooks
    target.note = "mine"  # type: ignore[attr-defined]
    target.data = value
    with torch.no_grad():
        target.data.mul_(3)
    shared = value.detach().cpu().tolist()
    keeps = target.grad is gradient
    if target.requires_grad:
        target.grad = None
        (2 * target).sum().backward()
    return Seen(
        same_object=id(target) == before and kept[target] == "by identity",
        is_parameter=isinstance(target, nn.Parameter),
        is_leaf=target.is_leaf,
        requires_grad=target.requires_grad,
        keeps_gradient=keeps,
        keeps_hook=target._backward_hooks is hooks,
        keeps_note=target.note == "mine",  # type: ignore[attr-defined]
        keeps_version=target._version == version,
        layout=(target.dtype, tuple(target.shape), target.stride(), target.storage_offset()),
        shares=shared,
        gradient=None if target.grad is None else target.grad.cpu().tolist(),
        hook_ran=len(calls),
    )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_an_assignment_is_seen_as_on_the_host(target: str, source: str) -> None:
    expected = see(TARGETS[target]("cpu"), SOURCES[source]("cpu"))
    with VirtualGPU("RTX 4090", alloc_conf=""):
        value, tensor = SOURCES[source]("cuda"), TARGETS[target]("cuda")
        seen = see(tensor, value)
        assert tensor.device == value.device == tensor.data.device
        assert tensor.is_cuda == value.is_cuda
        assert (seen.gradient is None) == (expected.gradient is None)
        assert seen == expected


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_an_assignment_frees_the_old_memory_and_holds_the_new(
    gpu: VirtualGPU, target: str, source: str
) -> None:
    nothing = allocated()
    tensor = TARGETS[target]("cuda")
    old = allocated() - nothing
    assert old == (BLOCK if tensor.is_cuda else 0)
    value = SOURCES[source]("cuda")
    new = allocated() - nothing - old
    assert new == (BLOCK if value.is_cuda else 0)
    old_pointer, new_pointer = tensor.data_ptr(), value.data_ptr()
    tensor.data = value
    assert allocated() - nothing == new, "the old block went when nobody held it any more"
    if value.is_cuda:
        assert tensor.data_ptr() == new_pointer != old_pointer
    del value
    assert allocated() - nothing == new, "it lives on in the tensor"
    del tensor
    assert allocated() == nothing


def accumulator(tensor: Tensor) -> Any:
    node = tensor.expand_as(tensor).grad_fn
    assert node is not None
    return node.next_functions[0][0]


@pytest.mark.parametrize(
    ("device", "dtype", "kept"),
    [
        ("cuda", torch.float32, True),
        ("cuda", torch.bfloat16, False),
        ("cpu", torch.float32, False),
    ],
)
def test_the_gradient_accumulator_goes_with_another_device_or_type(
    gpu: VirtualGPU, device: str, dtype: torch.dtype, kept: bool
) -> None:
    # torch/csrc/autograd/variable.cpp, VariableHooks::set_data
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    before = accumulator(weight)
    weight.data = torch.ones(3, device=device, dtype=dtype)
    assert (accumulator(weight) is before) == kept


# -- errors are those of a card ------------------------------------------------------------------------------------


def test_a_gradient_elsewhere_is_an_error_where_it_is_used_or_set(gpu: VirtualGPU) -> None:
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    (2 * weight).sum().backward()
    on_card = weight.grad
    weight.data = weight.data.cpu()
    assert weight.grad is on_card, "assigning .data leaves the gradient where it is"
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        (2 * weight).sum().backward()
    with pytest.raises(RuntimeError, match="gradient with device type 'cuda' to a tensor"):
        weight.grad = torch.ones(3, device="cuda")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: torch.ones(3, dtype=torch.int32, device="cuda"), "must be floating point or complex"),
        (lambda: torch.ones(3, device="meta"), "incompatible tensor type"),
        (lambda: torch.ones(3).to_sparse(), "incompatible tensor type"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_torch_refuses_is_refused(
    gpu: VirtualGPU, device: str, value: Callable[[], Tensor], message: str
) -> None:
    weight = nn.Parameter(torch.ones(3, device=device))
    with pytest.raises(RuntimeError, match=message):
        weight.data = value()
    assert weight.device.type == device


def test_a_real_tensor_in_a_graph_is_refused_by_name(gpu: VirtualGPU) -> None:
    computed = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(NotImplementedError, match="computed with gradients"):
        computed.data = torch.ones(3, device="cuda")


# -- offload and reload --------------------------------------------------------------------------------------------


def test_weights_go_to_the_host_and_come_back_by_data(gpu: VirtualGPU) -> None:
    layer = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256))
    optimizer = torch.optim.AdamW(layer.parameters())
    kept = {id(p) for p in layer.parameters()} | {id(b) for b in layer.buffers()}
    nothing = allocated()
    for tensor in [*layer.parameters(), *layer.buffers()]:
        tensor.data = tensor.data.to("cuda")
    # weight; bias; batch norm's weight, bias, mean, variance; its counter
    weights = 256 * 256 * 4 + 5 * 1024 + BLOCK
    assert allocated() - nothing == weights
    layer(torch.randn(4, 256, device="cuda")).sum().backward()
    optimizer.step()
    for tensor in [*layer.parameters(), *layer.buffers()]:
        tensor.data = tensor.data.to("cpu")
    assert {p.device.type for p in [*layer.parameters(), *layer.buffers()]} == {"cpu"}
    for tensor in [*layer.parameters(), *layer.buffers()]:
        tensor.data = tensor.data.to("cuda", non_blocking=True)
    optimizer.zero_grad()
    layer(torch.randn(4, 256, device="cuda")).sum().backward()
    optimizer.step()
    assert {id(p) for p in layer.parameters()} | {id(b) for b in layer.buffers()} == kept
    assert set(map(id, optimizer.state)) == {id(p) for p in layer.parameters()}


def test_values_and_categories_follow(gpu: VirtualGPU) -> None:
    module = nn.BatchNorm1d(4)
    module.running_mean.data = torch.arange(4.0).cuda()  # type: ignore[union-attr]
    assert module.state_dict()["running_mean"].tolist() == [0, 1, 2, 3]
    host = torch.zeros(3)
    card = torch.ones(3, device="cuda")
    card.data = host
    card.add_(2)
    assert host.tolist() == [2, 2, 2], "they share their memory"
    weight = nn.Parameter(torch.ones(1 << 18))
    weight.data = torch.ones(1 << 18, device="cuda")
    trace = gpu.trace
    assert trace.category[int((trace.size == 4 << 18).nonzero()[0][-1])] == Category.PARAMETERS


def test_what_came_back_shares_its_memory_with_arrays(gpu: VirtualGPU) -> None:
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    weight.data = weight.data.cpu()
    weight.detach().numpy()[0] = 5
    np.asarray(weight.detach())[1] = 6
    assert weight.tolist() == [5, 6, 1]


def test_tensors_of_inference_mode_move(gpu: VirtualGPU) -> None:
    with torch.inference_mode():
        tensor = torch.ones(4)
        tensor.data = tensor.data.cuda()
        assert tensor.is_inference() and tensor.device.type == "cuda" and tensor.tolist() == [1] * 4
        tensor.data = tensor.data.cpu()
        assert tensor.is_inference() and tensor.add_(1).tolist() == [2] * 4


def test_a_pinned_copy_stays_pinned_while_the_weight_has_it(gpu: VirtualGPU) -> None:
    def pinned() -> int:
        gc.collect()
        return int(torch.cuda.host_memory_stats()["active_bytes.current"])

    weight = nn.Parameter(torch.ones(1 << 20, device="cuda"))
    assert allocated() == 4 << 20
    copy = weight.data.cpu().pin_memory()
    weight.data = copy
    assert (allocated(), pinned()) == (0, 4 << 20)
    del copy
    assert pinned() == 4 << 20 and weight.data.is_pinned()
    weight.data = weight.data.to("cuda", non_blocking=True)
    assert (allocated(), pinned()) == (4 << 20, 0)


def test_pinning_what_came_from_the_card_keeps_values_and_costs_no_memory() -> None:
    with VirtualGPU("RTX 4090"):
        host = torch.zeros(1 << 20, device="cuda").cpu()
        host[700_000] = 5.0
        pinned = host.pin_memory()
        assert pinned[700_000] == 5 and int(pinned.count_nonzero()) == 1 and pinned.shape == host.shape


def test_a_storage_gives_its_memory_back_and_takes_it_again(gpu: VirtualGPU) -> None:
    weight = nn.Parameter(torch.randn(1 << 18, device="cuda"))
    view, storage = weight.data.view(512, 512), weight.untyped_storage()
    assert (storage.device, storage.is_cuda, storage.nbytes()) == (torch.device("cuda", 0), True, 1 << 20)
    copy = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).untyped_storage()
    copy.copy_(storage)
    storage.resize_(0)
    assert allocated() == 0 and weight.shape == (1 << 18,) and weight.device.type == "cuda"
    storage.resize_(1 << 20)
    storage.copy_(copy, non_blocking=True)
    assert allocated() == 1 << 20 and view.data_ptr() == weight.data_ptr()
    rows = [row for row in range(len(gpu.trace)) if gpu.trace.size[row] == 1 << 20]
    assert {Category(int(gpu.trace.category[row])) for row in rows if gpu.trace.kind[row] == 0} == {
        Category.PARAMETERS
    }
    assert storage.cpu().device.type == "cpu" and storage.cpu().nbytes() == 1 << 20
    assert storage.clone().device.type == "cuda" and copy.cuda().device.type == "cuda"
    assert storage.fill_(0) is storage
    assert allocated() == 1 << 20


def test_a_resized_storage_forgets_its_values(gpu: VirtualGPU) -> None:
    small = torch.arange(4.0, device="cuda")
    small.untyped_storage().resize_(0)
    small.untyped_storage().resize_(16)
    assert small.add_(1).shape == (4,)  # nothing of the old size is read
    small.untyped_storage().resize_(64)
    assert small.untyped_storage().nbytes() == 64 and allocated() == BLOCK


def test_set_takes_memory_of_its_own_device_only(gpu: VirtualGPU) -> None:
    first, second = torch.empty(1 << 18, device="cuda"), torch.empty(1 << 20, device="cuda")
    first.set_(second)
    assert first.shape == (1 << 20,) and allocated() == 4 << 20
    first.set_(second.untyped_storage(), 4, (8, 8), (8, 1))
    assert first.shape == (8, 8) and first.data_ptr() == second.data_ptr() + 16
    for wrong in (torch.empty(3), torch.empty(3).untyped_storage(), nn.Parameter(torch.ones(3))):
        with pytest.raises(RuntimeError, match='on device "cuda:0" to a storage on different device "cpu"'):
            first.set_(wrong)
    with pytest.raises(RuntimeError, match='on device "cpu" to a storage on different device "cuda:0"'):
        torch.empty(3).set_(second)
    host = nn.Parameter(torch.ones(3))
    real = torch.arange(5.0)
    host.data.set_(real)
    with torch.no_grad():
        host.set_(real)
    assert host.tolist() == [0, 1, 2, 3, 4] and host.device.type == "cpu"
    with pytest.raises(NotImplementedError, match=r"\.data"):
        torch.empty(3).set_(nn.Parameter(torch.ones(3)).data)


@pytest.mark.parametrize("start", ["olora", "pissa", "gaussian"])
def test_adapters_that_start_from_their_weights_lie_on_the_card(gpu: VirtualGPU, start: str) -> None:
    """PEFT makes adapters on the host, decomposes the weight on the card and assigns the parts by ``.data``."""
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 64, bias=False)).cuda()
    config = peft.LoraConfig(r=8, target_modules=["0", "2"], init_lora_weights=start)
    model = peft.get_peft_model(base, config)
    assert {p.device for p in model.parameters()} == {torch.device("cuda", 0)}
    torch._C._cuda_clearCublasWorkspaces()  # the product of the adapters took one
    # 64 x 32 weights are 16 blocks, and each adapter's A and B of rank 8 are 64 x 8 and 8 x 32: 4 and 2 blocks
    assert allocated() == 2 * (16 + 4 + 2) * BLOCK
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    assert len(trained) == 4 and all(p.grad is not None and p.grad.is_cuda for p in trained)
