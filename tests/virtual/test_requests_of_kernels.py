"""What kernels ask for beside their results, and in which order, as recordings of an H100 show it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramfit import VirtualGPU
from vramfit.trace import EventKind

HALF = torch.bfloat16


def requests(work: Callable[[], object]) -> list[int]:
    """Sizes of the blocks that some work takes, negative ones where a block is given back; what it makes is dropped."""
    with VirtualGPU("H100 SXM") as gpu:
        work()
        torch.cuda.synchronize()
        first = len(gpu.trace)
        made = work()
        trace = gpu.trace
        del made
    signs = {EventKind.ALLOC: 1, EventKind.FREE_REQUESTED: -1}
    kinds, sizes = trace.kind[first:].tolist(), trace.size[first:].tolist()
    return [signs[kind] * size for kind, size in zip(kinds, sizes, strict=True) if kind in signs]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("cast", [True, False])
def test_a_bias_is_added_in_place_to_the_product_of_strided_input(grad: bool, cast: bool) -> None:
    """ATen/native/Linear.cpp gives tensor subclasses a second result."""

    def work() -> object:
        layer = nn.Linear(64, 96).cuda().requires_grad_(grad)
        data = torch.randn(8, 32, 64, device="cuda").transpose(0, 1)
        with torch.autocast("cuda", HALF, enabled=cast):
            return layer(data)

    made = requests(work)
    product = 8 * 32 * 96 * (2 if cast else 4)
    assert made.count(product) == 1 and -product not in made


KINDS = {
    "four dimensions": lambda layer, data: layer(data.permute(1, 2, 0, 3)),
    "one row": lambda layer, data: layer(data[0, 0, :, 0].repeat(4)[::2]),
    "no rows": lambda layer, data: layer(data[:0].transpose(1, 2)),
    "a weight of one dimension": lambda layer, data: F.linear(data.transpose(0, 1), layer.weight[0]),
    "vmap": lambda layer, data: torch.func.vmap(lambda part: F.linear(part, layer.weight, layer.bias))(
        data.transpose(1, 2)
    ),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_other_strided_input_has_the_shape_that_torch_gives(kind: str, mode: type) -> None:
    plain = KINDS[kind](nn.Linear(32, 24), torch.randn(4, 8, 16, 32))
    with VirtualGPU("H100 SXM"), mode():
        found = KINDS[kind](nn.Linear(32, 24).cuda(), torch.randn(4, 8, 16, 32, device="cuda"))
        assert found.shape == plain.shape


def test_gradients_of_a_bias_added_in_place_are_there() -> None:
    with VirtualGPU("H100 SXM"):
        layer = nn.Linear(64, 96).cuda()
        data = torch.randn(8, 16, 64, device="cuda", requires_grad=True)
        layer(data.transpose(0, 1)).sum().backward()
        assert layer.bias.grad is not None and layer.bias.grad.shape == (96,)
        assert layer.weight.grad is not None and data.grad is not None


def attention(backend: SDPBackend) -> list[int]:
    def work() -> object:
        query, key, value = (torch.empty(2, 4, 128, 64, device="cuda", dtype=HALF) for _ in range(3))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return requests(work)


def test_cudnn_attention_makes_its_random_state_first() -> None:
    result = 2 * 4 * 128 * 64 * 2
    found = attention(SDPBackend.CUDNN_ATTENTION)
    assert found[3:8] == [8, 8, result, 256, -256]  # nothing for a backward pass


def test_flash_attention_makes_a_second_random_state() -> None:
    found = attention(SDPBackend.FLASH_ATTENTION)
    assert found[5:9] == [16, 8, 16, -16]


def test_attention_by_products_keeps_its_copies_until_the_end() -> None:
    half, weights = 2 * 4 * 128 * 64 * 2, 2 * 4 * 128 * 128
    found = attention(SDPBackend.MATH)[3:]
    mask = [128 * 128, 128 * 128, -128 * 128, 4, 4, 128 * 128 * 4, -4, -4, -128 * 128]
    assert found[:13] == [*[2 * half] * 4, *mask]
    products = found.index(-4 * weights)
    # The weights as the caller would have them, the product, and that as the caller has it.
    assert found[products + 1 : products + 4] == [2 * weights, 2 * half, half]
    assert found[:products].count(-2 * half) == 1  # keys times a factor; the copies in float32 are there


def test_a_power_of_a_number_makes_a_tensor_of_the_number() -> None:
    assert requests(lambda: 2.0 ** torch.ones(1000, device="cuda")) == [4000, 4000, 8, -8, -4000]
    assert requests(lambda: 1.0 ** torch.ones(1000, device="cuda")) == [4000, 4000, -4000]


def test_dropout_in_evaluation_hands_its_input_on_in_inference_mode() -> None:
    def work() -> object:
        with torch.inference_mode():
            return F.dropout(torch.ones(1000, device="cuda"), training=False)

    assert requests(work) == [4000]


def test_a_copied_image_is_gone_before_the_bias_is_summed() -> None:
    """Convolution.cpp hands the copy to the call that makes both gradients, and sums the bias afterwards."""

    def work() -> object:
        layer = nn.Conv2d(3, 64, 3, padding=1).cuda().to(memory_format=torch.channels_last)
        image = torch.randn(4, 3, 64, 64, device="cuda")
        layer(image).sum().backward()
        return layer

    found = requests(work)
    copy, sums = 4 * 3 * 64 * 64 * 4, 64 * 4
    last = len(found) - 1 - found[::-1].index(sums)  # the bias' gradient
    assert -copy in found[:last]
