"""Losses, optimisers and copies."""

import pytest
import torch

from vramfit.virtual.kernels import Extras, covered
from vramfit.virtual.kernels.copying import copy_temporaries

from .support import FAKE, ask, aten, cuda


def test_softmax_backward_multiplies_beside_its_result():
    scores = cuda(8, 16, 128)
    found = ask(aten._softmax_backward_data.default, scores, scores, -1, torch.float32)
    assert found == Extras(after=(8 * 16 * 128 * 4,))
    assert ask(aten._log_softmax_backward_data.default, scores, scores, -1, torch.float32) is None


def test_mean_squared_error_keeps_the_unreduced_loss_for_a_moment():
    prediction = cuda(32, 100)
    assert ask(aten.mse_loss.default, prediction, prediction) == Extras(after=(12_800,))
    assert ask(aten.mse_loss.default, prediction, prediction, 0) is None
    assert ask(aten.huber_loss.default, prediction, prediction) == Extras(before=(12_800,))


def test_foreach_norm_keeps_a_row_of_partial_norms_for_each_tensor():
    # Three tensors, the largest of 200,000 elements = 4 chunks of 65,536: 3 x 4 floats
    tensors = [cuda(10), cuda(200_000), cuda(70_000)]
    assert ask(aten._foreach_norm.Scalar, tensors) == Extras(before=(48,))
    halves = [cuda(10, dtype=torch.bfloat16)]
    assert ask(aten._foreach_norm.Scalar, halves) == Extras(before=(4,))


def test_fused_and_foreach_steps_allocate_nothing():
    assert not any("_fused_adam" in name or "_foreach_add" in name for name in covered())


@pytest.mark.parametrize(
    ("source", "non_blocking", "expected"),
    [
        ("dense", False, ()),
        ("strided", False, (64 * 32 * 4,)),
        ("dense", True, ()),
    ],
)
def test_copies_to_the_host(source, non_blocking, expected):
    with FAKE:
        host = torch.empty(64, 32)
        tensor = cuda(64, 32) if source == "dense" else cuda(32, 64).t()
    assert copy_temporaries(tensor, host, non_blocking) == expected


def test_converting_copies():
    with FAKE:
        host, half_host = torch.empty(64, 32), torch.empty(64, 32, dtype=torch.float16)
        strided = cuda(32, 64).t()
    half = cuda(64, 32, dtype=torch.float16)
    assert copy_temporaries(half, host, False) == ()  # moved as halves, converted on the host
    assert copy_temporaries(half, host, True) == (64 * 32 * 4,)  # converted on the card
    assert copy_temporaries(half_host, cuda(64, 32), True) == ()  # converted on the host
    assert copy_temporaries(half_host, strided, False) == (64 * 32 * 4,)  # a dense target stands in
    assert copy_temporaries(half, cuda(64, 32), False) == ()  # on one device a kernel does it all


def test_every_rule_belongs_to_an_op_of_this_torch():
    names = covered()
    assert {"aten.mm.default", "aten.sort.default", "aten.convolution.default", "aten.copy_.default"} <= names
    assert len(names) > 90
