"""Libraries that look for fake tensors to find tracing go the way that they go on a card."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.utils import import_utils

from vramfit.virtual.gpu import VirtualGPU


def test_tensors_of_the_virtual_gpu_are_not_traced() -> None:
    original = import_utils.is_fake_tensor
    with VirtualGPU("RTX 4090") as gpu:
        assert import_utils.is_fake_tensor is not original
        assert not import_utils.is_tracing(torch.ones(2, device="cuda"))
        with FakeTensorMode() as other:
            assert other is not gpu.mode.fake
            assert import_utils.is_tracing(other.from_tensor(torch.ones(2)))
    assert import_utils.is_fake_tensor is original


def test_a_library_that_is_imported_inside_is_changed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = list(sys.meta_path)
    monkeypatch.delitem(sys.modules, import_utils.__name__)
    with VirtualGPU("RTX 4090"):
        module = importlib.import_module(import_utils.__name__)
        assert module is not import_utils
        assert not module.is_tracing(torch.ones(2, device="cuda"))
        assert module.is_torch_available()
    assert sys.meta_path == finders
    assert module.is_fake_tensor.__module__ == import_utils.__name__


@pytest.mark.parametrize(("padded", "kernel"), [(False, "flash"), (True, "efficient")])
def test_attention_has_a_mask_only_where_something_is_padded(padded: bool, kernel: str) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=100,
    )
    mask = torch.ones(8, 1024, dtype=torch.long)
    mask[0, :7] = not padded
    with VirtualGPU("RTX 4090") as gpu:
        model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
        tokens = torch.ones(8, 1024, dtype=torch.long, device="cuda")
        model(tokens, attention_mask=mask.cuda()).logits.sum().backward()
    taken = {op for op in gpu.run.trace.ops if "attention" in op}
    assert taken and all(kernel in op for op in taken)
    assert gpu.run.warnings == ()
