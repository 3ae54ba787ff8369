"""Fake tensors as every supported release has them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vramfit.torch_internals.fake_tensors import device_of, takes_symbols

ATEN = torch.ops.aten


def test_the_device_of_a_fake_tensor_is_the_one_that_torch_names():
    with FakeTensorMode():
        tensor = torch.empty(2, device="meta")
        cpu = torch.empty(2)
    assert device_of(tensor) == tensor.fake_device == torch.device("meta")
    assert device_of(cpu) == cpu.fake_device == torch.device("cpu")


@pytest.mark.parametrize("func", [ATEN.empty.memory_format, ATEN.view_copy.default, ATEN.mm.default])
def test_which_ops_take_symbols_is_said_as_by_a_mode(func):
    assert takes_symbols(func) == FakeTensorMode().cpp_meta_supports_symint(func)
    assert takes_symbols(func) == (func is not ATEN.mm.default)
