"""Kernels of a CUDA build that make real tensors on a card: refused while cards are virtual."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from vramfit.torch_internals.dispatch import has_kernel

FACTORIES = (
    "empty.memory_format",
    "empty_strided",
    "_efficientzerotensor",
    "tril_indices",
    "triu_indices",
    "_cudnn_init_dropout_state",
)
"""What a CUDA build makes a tensor on the card by without being given one (aten/src/ATen/native/native_functions.yaml:
kernels for CUDA of functions without tensors among their arguments). Kernels written in C++ call some of these for
scratch memory and for the parts of a sparse tensor, whatever mode is active."""

_KEY = "CUDA"


def refuse_real_tensors() -> Callable[[], None]:
    """Let no real tensor be made on a card, and give the undo.

    A CPU build has no such kernels: asked for one it raises NotImplementedError, which FakeTensorMode and our own rules
    for sparse tensors go by. So does a CUDA build from here on, with a card and without, where it would initialize CUDA
    and take memory of the real card.
    """
    present = [name for name in FACTORIES if has_kernel(f"aten::{name}", _KEY)]
    if not present:
        return lambda: None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # The dispatcher warns once in a process that a kernel is overridden, which is what we are here for.
        warnings.simplefilter("ignore")
        for name in present:
            library.impl(name, _refusal(name), _KEY, allow_override=True)
    return library._destroy


def _refusal(name: str) -> Callable[..., NoReturn]:
    # As c10/core/impl/OperatorEntry.cpp, reportError, begins.
    text = f"Could not run 'aten::{name}' with arguments from the '{_KEY}' backend: no card here holds real tensors"

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(text)

    return refuse
