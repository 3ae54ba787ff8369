"""The self-check: whether torch, asked as programs ask it, decides for virtual ``cuda`` tensors as it does on a card.

A backward pass shows that autograd can carry them. It would pass just as well with hooks in the wrong entries of their
table, and batch norm would silently take another kernel, with other memory. So torch is asked a question for each hook
that has an effect, in an order in which each question depends on one hook that no earlier one depended on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor

from vramfit.errors import EnvironmentUnfitError
from vramfit.patching import PatchStack
from vramfit.torch_internals import cuda_hooks, device_guards

# The process in which the self-check passed: autograd's threads, once started, stay as they are, but not in a fork.
_passed_in: int | None = None

_C: Any = torch._C


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One thing that torch decides for ``cuda`` tensors.

    Attributes:
        about: what is asked, to follow "torch answers wrongly about".
        hook: the hook or method of the guard that alone decides it, as far as earlier questions were answered.
        needs: the function of ``torch._C`` that is asked; without it the question is left out.
        ask: asks it, inside of a fake mode.
        expected: how a card's torch answers, as text.
    """

    about: str
    hook: str
    needs: str
    ask: Callable[[], object]
    expected: str


def self_check() -> None:
    """Ask torch about fake ``cuda`` tensors and run a tiny backward pass; where it passed, it is not run again.

    Raises:
        EnvironmentUnfitError: it failed, so nothing else would work either; the message says what did.

    A build that is unfit may abort the process instead of raising, which is why a child process runs this.
    """
    global _passed_in
    if _passed_in == os.getpid():
        return
    with (
        _untouched_card(),
        _DevicelessMode(allow_fallback_kernels=False),
        torch.inference_mode(False),
        torch.enable_grad(),
        _own_flags(),
    ):
        for question in QUESTIONS:
            _put(question)
        _backward()
    _passed_in = os.getpid()


def _put(question: Asked) -> None:
    if not hasattr(_C, question.needs):
        return
    try:
        answer = str(question.ask())
    except Exception as error:
        answer = _line(error)
    if answer != question.expected:
        raise EnvironmentUnfitError(
            f"in the self-check of the virtual GPU, torch {torch.__version__} answers wrongly about {question.about}: "
            f"{answer} instead of {question.expected}, which {question.hook} decides",
            "Use a PyTorch wheel from PyPI of a release that vramfit supports; or report this version.",
        )


def _backward() -> None:
    try:
        weight = _empty(4, 4, requires_grad=True)
        (_empty(2, 4) @ weight).relu().sum().backward()
        grad = weight.grad
    except Exception as error:
        raise EnvironmentUnfitError(
            f"autograd cannot run on virtual cuda tensors in this process ({_line(error)})",
            "If a backward pass ran here before, use vramfit.run(...) or `vramfit run`, which start a fresh process; "
            f"otherwise report torch {torch.__version__} as unfit.",
        ) from error
    if grad is None or grad.device.type != "cuda" or grad.shape != (4, 4):
        raise EnvironmentUnfitError(f"torch {torch.__version__} lost a virtual gradient in the self-check")


def _line(error: Exception) -> str:
    """Its first sentence: the refusals of hooks go on with help for those who link against torch."""
    return str(error).split("\n")[0].split(". ")[0] or type(error).__name__


class _DevicelessMode(fake_tensor.FakeTensorMode):
    """A fake mode that initialises no device where there is one."""

    @property
    def avoid_device_init(self) -> bool:
        return True


@contextmanager
def _untouched_card() -> Iterator[None]:
    """Three virtual cards, and no context on a real one, which fake tensors would make (``init_gpu_context``)."""
    with PatchStack() as patches:
        if hasattr(fake_tensor, "init_gpu_context"):
            patches.set(fake_tensor, "init_gpu_context", lambda *_: None)
        patches.call(cuda_hooks.describe_cards(lambda: ((9, 0),) * _DEVICES))
        yield


@contextmanager
def _own_flags() -> Iterator[None]:
    """cuDNN allowed and nothing deterministic, whatever the program has set."""
    with ExitStack() as undo:
        for get, put, wanted in _FLAGS:
            if hasattr(_C, get) and hasattr(_C, put):
                undo.callback(getattr(_C, put), getattr(_C, get)())
                getattr(_C, put)(wanted)
        strict = getattr(_C, "_get_deterministic_algorithms", None)
        if strict is not None and strict():
            undo.callback(
                _C._set_deterministic_algorithms, True, warn_only=_C._get_deterministic_algorithms_warn_only()
            )
            _C._set_deterministic_algorithms(False)
        yield


_FLAGS = (
    ("_get_cudnn_enabled", "_set_cudnn_enabled", True),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic", False),
)


# -- what is asked -------------------------------------------------------------------------------------------------


def _empty(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=requires_grad)


_DEVICES = 3  # no number that another hook gives
_LAST = _DEVICES - 1


def _on_last_device(ask: Callable[[], object]) -> Callable[[], object]:
    """Ask while the last device is this thread's current one."""

    def asked() -> object:
        before = device_guards.current_device()
        device_guards.set_current_device(_LAST)
        try:
            return ask()
        finally:
            device_guards.set_current_device(before)

    return asked


def _convolution(
    channels: int = 4, groups: int = 1, dilation: int = 1, dtype: torch.dtype = torch.float32
) -> Callable[[], object]:
    """Who computes a convolution (aten/src/ATen/native/Convolution.cpp, ``select_conv_backend``)."""

    def ask() -> object:
        source = _empty(2, channels, 16, 16, dtype=dtype)
        weight = _empty(channels, channels // groups, 3, 3, dtype=dtype)
        pair = [dilation, dilation]
        return _C._select_conv_backend(source, weight, None, [1, 1], pair, pair, False, [0, 0], groups, None)

    return ask


def _batch_norm(eps: float) -> Callable[[], object]:
    """Who computes a batch norm (aten/src/ATen/native/Normalization.cpp, ``_select_batch_norm_backend``)."""

    def ask() -> object:
        scale, shift, mean, variance = (_empty(4) for _ in range(4))
        return _C._select_batch_norm_backend(_empty(2, 4, 8, 8), scale, shift, mean, variance, True, eps)

    return ask


_CONVOLUTION = "_ConvBackend.Cudnn"
_HOOK = "the CUDA hook {}"

QUESTIONS = (
    Asked(
        about="the accelerator that it was built for",
        hook=_HOOK.format("isBuilt"),
        needs="_accelerator_getAccelerator",
        ask=lambda: _C._accelerator_getAccelerator(),
        expected="cuda",
    ),
    Asked(
        about="the current device of its guard",
        hook="uncheckedSetDevice or getDevice of the device guard",
        needs="_accelerator_getDeviceIndex",
        ask=_on_last_device(lambda: _C._accelerator_getDeviceIndex()),
        expected=str(_LAST),
    ),
    Asked(
        about="the device that x.cuda() goes to",
        hook="uncheckedSetDevice or getDevice of the device guard",
        needs="_select_conv_backend",
        ask=_on_last_device(lambda: torch.empty(1).cuda().device),
        expected=f"cuda:{_LAST}",
    ),
    Asked(
        about="the number of devices",
        hook=_HOOK.format("deviceCount"),
        needs="_accelerator_hooks_device_count",
        ask=lambda: _C._accelerator_hooks_device_count(),
        expected=str(_DEVICES),
    ),
    Asked(
        about="the current device of its hooks",
        hook=_HOOK.format("getCurrentDevice"),
        needs="_accelerator_hooks_get_current_device",
        ask=_on_last_device(lambda: _C._accelerator_hooks_get_current_device()),
        expected=str(_LAST),
    ),
    Asked(
        about="who computes a convolution",
        hook=_HOOK.format("compiledWithCuDNN, or versionCuDNN before torch 2.13,"),
        needs="_select_conv_backend",
        ask=_convolution(),
        expected=_CONVOLUTION,
    ),
    Asked(
        about="who computes a dilated convolution",
        hook=_HOOK.format("supportsDilatedConvolutionWithCuDNN"),
        needs="_select_conv_backend",
        ask=_convolution(dilation=2),
        expected=_CONVOLUTION,
    ),
    Asked(
        about="who computes a convolution in bfloat16",
        hook=_HOOK.format("supportsBFloat16ConvolutionWithCuDNNv8"),
        needs="_select_conv_backend",
        ask=_convolution(dtype=torch.bfloat16),
        expected=_CONVOLUTION,
    ),
    Asked(
        about="who computes a depthwise convolution in float16",
        hook=_HOOK.format("supportsDepthwiseConvolutionWithCuDNN"),
        needs="_select_conv_backend",
        ask=_convolution(channels=32, groups=32, dtype=torch.float16),
        expected=_CONVOLUTION,
    ),
    Asked(
        about="who computes a batch norm",
        hook=_HOOK.format("versionCuDNN or batchnormMinEpsilonCuDNN"),
        needs="_select_batch_norm_backend",
        ask=_batch_norm(1e-5),
        expected="_BatchNormBackend.Cudnn",
    ),
    Asked(
        about="who computes a batch norm whose epsilon is too small for cuDNN",
        hook=_HOOK.format("batchnormMinEpsilonCuDNN"),
        needs="_select_batch_norm_backend",
        ask=_batch_norm(-1.0),
        expected="_BatchNormBackend.Native",
    ),
)
"""What the self-check asks."""
