"""Inference mode shows composite ops whole: memory and values must be those of ``no_grad``."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vramfit.virtual.gpu import VirtualGPU


def attend() -> torch.Tensor:
    query = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.float16)
    return F.scaled_dot_product_attention(query, query, query, is_causal=True)


FAMILIES = {
    "linear": lambda: nn.Linear(100, 200).cuda()(torch.randn(64, 100, device="cuda")),
    "strided linear": lambda: nn.Linear(64, 96).cuda()(torch.randn(8, 16, 64, device="cuda").transpose(0, 1)),
    "dropout": lambda: nn.Dropout().cuda().eval()(torch.randn(256, 1024, device="cuda")),
    "matmul": lambda: torch.randn(4, 1, 8, 64, device="cuda") @ torch.randn(3, 64, 16, device="cuda"),
    "upsample": lambda: F.interpolate(
        torch.randn(2, 3, 32, 32, device="cuda"), scale_factor=2, mode="bicubic"
    ),
    "norms": lambda: nn.LayerNorm(64).cuda()(nn.RMSNorm(64).cuda()(torch.randn(32, 64, device="cuda"))),
    "conv": lambda: nn.Conv2d(3, 8, 3).cuda()(torch.randn(2, 3, 32, 32, device="cuda")),
    "batch norm": lambda: nn.BatchNorm2d(3).cuda().eval()(torch.randn(2, 3, 32, 32, device="cuda")),
    "attention": attend,
    "einsum": lambda: torch.einsum("ij,kj->ik", *[torch.randn(64, 64, device="cuda")] * 2),
    "lstm": lambda: nn.LSTM(16, 32).cuda()(torch.randn(5, 3, 16, device="cuda"))[0],
    "encoder": lambda: (
        nn.TransformerEncoderLayer(64, 4, batch_first=True)
        .cuda()
        .eval()(torch.randn(2, 10, 64, device="cuda"))
    ),
}


def peaks(mode: type, family: str) -> tuple[int, int]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with mode():
        out = FAMILIES[family]()
        assert isinstance(out.sum().item(), float)
        assert isinstance(float(out.mean()), float)
        assert bool((out == out).all())
    del out
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_that_of_no_grad(gpu: VirtualGPU, family: str) -> None:
    first = peaks(torch.no_grad, family)  # takes the workspaces, which stay
    assert first[0] > 0
    assert peaks(torch.inference_mode, family) == peaks(torch.no_grad, family)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            lambda: nn.Linear(16, 4).cuda().half()(torch.randn(8, 16, device="cuda")),
            "same dtype, but got Float and Half",
        ),
        (lambda: torch.mm(*[torch.ones(3, 4, device="cuda")] * 2), "cannot be multiplied .3x4 and 3x4."),
        (lambda: nn.LayerNorm(16).cuda().half()(torch.randn(8, 16, device="cuda")), "Float but found Half"),
        (
            lambda: F.cross_entropy(
                torch.randn(3, 4, device="cuda"), torch.ones(3, dtype=torch.int32, device="cuda")
            ),
            "Long but found Int",
        ),
        (
            lambda: torch.randn(3, generator=torch.Generator(), device="cuda"),
            "'cuda' device type for generator",
        ),
    ],
)
def test_what_a_card_refuses_is_refused(gpu: VirtualGPU, mistake: object, words: str) -> None:
    assert callable(mistake)
    with pytest.raises(RuntimeError, match=words):
        mistake()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_operators_over_functions_run_their_plain_form(gpu: VirtualGPU) -> None:
    from torch._higher_order_ops.out_dtype import out_dtype
    from torch._higher_order_ops.scan import scan
    from torch.nn.attention.flex_attention import flex_attention

    codes = torch.ones(32, 64, dtype=torch.int8, device="cuda")
    product = out_dtype(torch.ops.aten.mm.default, torch.int32, codes, codes.t().contiguous())
    assert product.dtype is torch.int32 and product.is_cuda and product[0, 0].item() == 64
    final, partial = scan(lambda total, x: (total + x, total), torch.zeros(3).cuda(), torch.ones(4, 3).cuda())
    assert final.tolist() == [4.0] * 3 and partial[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    bigger = torch.cond(final.sum() > 10, lambda x: x + 1, lambda x: x - 1, (final,))
    assert bigger.tolist() == [5.0] * 3

    query = torch.randn(1, 2, 128, 64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flex_attention(query, query, query, score_mod=lambda score, b, h, i, j: score + i - j)
    # Without a compiler a card materialises the scores, too.
    assert torch.cuda.max_memory_allocated() - before >= 2 * 2 * 128 * 128 * 4


def test_an_operator_over_functions_without_a_plain_form_is_named(gpu: VirtualGPU) -> None:
    class Unheard(torch._ops.HigherOrderOperator):
        def __call__(self, *args: object) -> object:
            return super().__call__(*args)

    with pytest.raises(NotImplementedError, match="unheard_of"):
        Unheard("unheard_of")(torch.ones(1, device="cuda"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_arrays_go_to_the_card(mode: Callable[[], AbstractContextManager[None]]) -> None:
    """What YOLOv5 does after each validation batch (ultralytics/yolov5, utils/metrics.py, ``process_batch``)."""
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=0), mode():
        kept = torch.tensor(np.ones((300, 10), bool), dtype=torch.bool, device="cuda:0")
        moved = torch.ones(1000).to("cuda", torch.float16)
        assert (kept.device.type, kept.shape, int(kept.sum())) == ("cuda", (300, 10), 3000)
        assert (moved.device.type, moved.dtype, moved.sum().item()) == ("cuda", torch.float16, 1000)
        assert torch.cuda.memory_allocated() == 3072 + 2048
