"""Whatever makes a tensor of the card does so in every mode of autograd: same device, dtype, shape and bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from vramfit.virtual.gpu import VirtualGPU

MASK = np.zeros((3, 10), dtype=bool)
NUMBERS = np.arange(6, dtype=np.float64)

MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor of an array": lambda: torch.tensor(MASK, dtype=torch.bool, device="cuda"),
    "tensor of an array, converted": lambda: torch.tensor(NUMBERS, dtype=torch.float16, device="cuda"),
    "tensor of a list": lambda: torch.tensor([1.0, 2.0], device="cuda"),
    "as_tensor": lambda: torch.as_tensor(NUMBERS, device="cuda"),
    "from_numpy": lambda: torch.from_numpy(NUMBERS).cuda(),
    "asarray": lambda: torch.asarray(MASK, device="cuda"),
    "Tensor": lambda: torch.Tensor([1.0, 2.0]).cuda(),
    "FloatTensor": lambda: torch.cuda.FloatTensor([1.0, 2.0]),
    "FloatTensor of sizes": lambda: torch.cuda.FloatTensor(3, 4),
    "new_tensor": lambda: torch.zeros(2, device="cuda").new_tensor(NUMBERS),
    "new": lambda: torch.zeros(2, device="cuda").new([1.0, 2.0]),
    "new_zeros": lambda: torch.zeros(2, device="cuda").new_zeros(3),
    "scalar_tensor": lambda: torch.scalar_tensor(1.0, device="cuda"),
    "to, by place": lambda: torch.zeros(3).to("cuda", torch.half, True),
    "to like another": lambda: torch.zeros(3).to(torch.zeros(1, dtype=torch.half, device="cuda")),
    "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.uint8).to("cuda"),
    "hann_window": lambda: torch.hann_window(5, device="cuda"),
    "kaiser_window": lambda: torch.kaiser_window(5, device="cuda"),
    "empty_strided": lambda: torch.empty_strided((3,), (1,), device="cuda"),
    "tril_indices": lambda: torch.tril_indices(3, 3, device="cuda"),
    "zeros_like": lambda: torch.zeros_like(torch.zeros(3), device="cuda"),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device="cuda"),
}


def in_inference(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return make()


def without_grad(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return make()


def in_function(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    made: list[torch.Tensor] = []

    class Making(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # on a thread of the engine
            made.append(make())
            return grad

    Making.apply(torch.zeros(1, device="cuda", requires_grad=True)).sum().backward()
    return made[0]


def in_vmap(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    made: list[torch.Tensor] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        made.append(make())
        return x * 2

    torch.func.vmap(body)(torch.zeros(2, 3, device="cuda"))
    return made[0]


def in_grad(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    made: list[torch.Tensor] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        made.append(make())
        return (x * x).sum()

    torch.func.grad(body)(torch.zeros(2, device="cuda"))
    return made[0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("where", [in_inference, without_grad, in_function, in_vmap, in_grad])
def test_the_card_holds_what_a_factory_makes(
    gpu: VirtualGPU, where: Callable[[Callable[[], torch.Tensor]], torch.Tensor]
) -> None:
    for name, make in MAKERS.items():
        expected = make()
        made = where(make)
        assert made.device == expected.device == torch.device("cuda", 0), name
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape), name


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_default_type_or_device_rules_what_it_rules_on_a_card(gpu: VirtualGPU) -> None:
    """As torch has it with the device ``meta`` (a default device), and tensor_new.cpp (a default type)."""
    constructed = (
        lambda: torch.Tensor([1e10]),
        lambda: torch.Tensor(3, 4),
        lambda: torch.Tensor(torch.Size([2])),
    )
    factories = (
        lambda: torch.tensor([1.0]),
        lambda: torch.tensor([torch.ones(()), torch.ones(())]),
        lambda: torch.as_tensor(NUMBERS),
        lambda: torch.zeros(2),
        lambda: torch.randperm(4),
        lambda: torch.nn.Linear(2, 2).weight,
    )
    host = (
        lambda: torch.from_numpy(NUMBERS),
        lambda: torch.FloatTensor([1.0]),
        lambda: torch.LongTensor(2),
        lambda: torch.tensor([1.0], device="cpu"),
        lambda: torch.nn.Parameter(torch.FloatTensor(2, 2)),
    )

    def kinds(makers: tuple[Callable[[], torch.Tensor], ...]) -> set[str]:
        return {make().device.type for make in makers}

    try:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        assert kinds((*constructed, *factories)) == {"cuda"} and kinds(host) == {"cpu"}
        assert type(torch.Tensor([1.0])) is type(torch.zeros(1))
        assert torch.Tensor([1e10]).tolist() == [1e10]
        distances = torch.cat([torch.zeros(2, 1), torch.Tensor([1e10]).expand(2, 1)], -1)  # as NeRF has it
        assert distances.tolist() == [[0.0, 1e10]] * 2
        assert torch.zeros(5).unique().tolist() == [0.0] and torch.randperm(9).topk(2)[0].tolist() == [8, 7]
        torch.set_default_tensor_type("torch.FloatTensor")
        assert kinds((*constructed, *factories, *host)) == {"cpu"}
        torch.set_default_device("cuda")
        assert kinds(factories) == {"cuda"} and kinds((*constructed, *host)) == {"cpu"}
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
        torch.set_default_device(None)


def test_old_constructors_read_numbers_that_lie_on_the_card(gpu: VirtualGPU) -> None:
    token, loss = torch.tensor(5, device="cuda"), torch.tensor(0.5, device="cuda")
    assert torch.LongTensor([[token]]).tolist() == [[5]]
    assert torch.FloatTensor([loss, 1.0]).tolist() == [0.5, 1.0]
    assert torch.Tensor(((loss,), (loss + 1,))).tolist() == [[0.5], [1.5]]
    assert torch.zeros(2).new([loss]).tolist() == torch.zeros(2).new_tensor([loss]).tolist() == [0.5]
    assert torch.cuda.LongTensor([token, token]).tolist() == [5, 5]


def test_types_of_the_host_are_still_types(gpu: VirtualGPU) -> None:
    number = torch.zeros(2)
    assert isinstance(number, torch.FloatTensor) and not isinstance(number, torch.LongTensor)
    assert number.type() == "torch.FloatTensor" and number.type(torch.LongTensor).dtype is torch.int64
    assert torch.nn.Linear(1, 1).type(torch.DoubleTensor).weight.dtype is torch.float64
    assert torch.LongTensor.dtype is torch.int64 and torch.LongTensor.__name__ == "LongTensor"
    assert (torch.LongTensor | None) and torch.LongTensor(2, 3).shape == (2, 3)
    assert pickle.loads(pickle.dumps(torch.LongTensor)) is torch.LongTensor


def test_a_table_of_types_that_was_made_before_is_found_by_them() -> None:
    before = {torch.LongTensor: 1, torch.FloatTensor: 2}
    with VirtualGPU("RTX 4090"):
        assert before[torch.LongTensor] == 1 and before[torch.FloatTensor] == 2


def test_the_constructor_is_torch_s_own_after_the_run() -> None:
    kept = torch.LongTensor, torch.Tensor.new, torch.Tensor.new_tensor
    with VirtualGPU("RTX 4090"):
        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        assert torch.Tensor(2).is_cuda
    assert not {"__new__", "new", "new_tensor"} & set(vars(torch.Tensor))
    assert (torch.LongTensor, torch.Tensor.new, torch.Tensor.new_tensor) == kept
    assert torch.LongTensor is kept[0]
    assert torch.Tensor(2).device.type == "cpu" and torch.Tensor([1.0]).dtype is torch.float32
