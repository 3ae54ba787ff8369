"""TF32 for products and convolutions of float32 on tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.torch_internals.layers import ConvNd

# CUDA C++ Programming Guide, compute capabilities: tensor cores take TF32 from 8.0 on.
_FIRST_CAPABILITY = (8, 0)
_OF_CUDNN = (ConvNd, nn.RNNBase)
# Torch makes the switches when they are asked for, so that type checkers know nothing of them.
_BACKENDS: Any = torch.backends
_OF_CUBLAS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tf32Setting(Setting):
    """What may use TF32.

    Attributes:
        matmul: matrix products (cuBLAS).
        convolution: convolutions and recurrent layers (cuDNN); torch allows it unless the program forbids it.
    """

    matmul: bool = True
    convolution: bool = True


class Tf32(Technique[Tf32Setting]):
    """Lets the tensor cores round the inputs of float32 products to TF32.

    TF32 keeps float32's 8 bits of exponent and 10 of its 23 bits of mantissa; sums are float32 still, and so is every
    tensor (https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32 on Ampere and later devices"). It
    saves time, up to 8 times in a product, and no memory but for other workspaces of convolutions. It pays where
    the seconds that another technique costs have to be won back, and the products are large and in float32. It does
    nothing for products that are in half precision already, and on GeForce cards of the Ada generation, whose rate
    for TF32 is that for float32 (NVIDIA Ada GPU architecture whitepaper, appendix A).

    The switches are the process's, not the model's: a second model in the process computes in TF32 as well, until the
    undo. Both faces of torch's switches are set (``torch.backends.cuda.matmul.fp32_precision`` and
    ``torch.set_float32_matmul_precision``), since torch refuses to read the one while only the other is set.
    """

    name: ClassVar[str] = "tf32"
    summary: ClassVar[str] = "rounds the inputs of float32 products to 10 bits, for tensor cores"
    numerics: ClassVar[Numerics] = Numerics.PRECISION
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = Tf32Setting
    follows: ClassVar[str | None] = "low-precision-training"
    quickens: ClassVar[bool] = True

    def options(self, profile: Profile) -> Iterator[Tf32Setting]:
        """Convolutions alone where they are forbidden it now, then products too."""
        if profile.device_type != "cuda" or profile.capability < _FIRST_CAPABILITY:
            return
        modules = tuple(profile.model.modules())
        if not any(parameter.dtype is torch.float32 for parameter in profile.model.parameters()):
            return
        convolution = _BACKENDS.cudnn.conv.fp32_precision != "tf32" and any(
            isinstance(module, _OF_CUDNN) for module in modules
        )
        # Modules of other libraries hide their products: only a model of convolutions alone is sure to have none.
        matmul = _BACKENDS.cuda.matmul.fp32_precision != "tf32" and (
            any(isinstance(module, _OF_CUBLAS) for module in modules)
            or not any(isinstance(module, _OF_CUDNN) for module in modules)
        )
        if convolution:
            yield Tf32Setting(matmul=False)
        if matmul:
            yield Tf32Setting(convolution=convolution)

    def promise(self, setting: Tf32Setting) -> Promise:
        """What is rounded."""
        whose = " and ".join(
            name
            for name, chosen in (("products", setting.matmul), ("convolutions", setting.convolution))
            if chosen
        )
        return Promise(
            Numerics.PRECISION, f"inputs of float32 {whose} are rounded to TF32, about 3 decimal digits"
        )

    def attach(self, live: AttachedProgram, setting: Tf32Setting) -> None:
        """Allow it, in the whole process."""
        if not (setting.matmul or setting.convolution):
            raise UsageError(
                "tf32 is allowed neither for products nor for convolutions",
                "Set matmul or convolution to true",
            )
        before = _Switches.read()
        live.on_undo(before.restore)
        if setting.matmul:
            if before.old_matmul is not None:
                torch.set_float32_matmul_precision("high")
                _BACKENDS.mkldnn.matmul.fp32_precision = before.mkldnn  # products on the CPU stay exact
            _BACKENDS.cuda.matmul.fp32_precision = "tf32"
        if setting.convolution:
            if before.old_cudnn is not None:
                _BACKENDS.cudnn.allow_tf32 = True
            _BACKENDS.cudnn.conv.fp32_precision = "tf32"
            _BACKENDS.cudnn.rnn.fp32_precision = "tf32"


@dataclass(frozen=True, slots=True)
class _Switches:
    """Torch's switches as they stood; None for an old one that the program has set by its new name alone."""

    old_matmul: str | None
    old_cudnn: bool | None
    matmul: str
    mkldnn: str
    convolution: str
    recurrent: str

    @classmethod
    def read(cls) -> _Switches:
        """The switches as they stand now."""
        return cls(
            old_matmul=_or_none(torch.get_float32_matmul_precision),
            old_cudnn=_or_none(lambda: bool(_BACKENDS.cudnn.allow_tf32)),
            matmul=_BACKENDS.cuda.matmul.fp32_precision,
            mkldnn=_BACKENDS.mkldnn.matmul.fp32_precision,
            convolution=_BACKENDS.cudnn.conv.fp32_precision,
            recurrent=_BACKENDS.cudnn.rnn.fp32_precision,
        )

    def restore(self) -> None:
        """Put them back; the old ones first, since they set the new ones."""
        if self.old_matmul is not None:
            torch.set_float32_matmul_precision(self.old_matmul)
        if self.old_cudnn is not None:
            _BACKENDS.cudnn.allow_tf32 = self.old_cudnn
        _BACKENDS.cuda.matmul.fp32_precision = self.matmul
        _BACKENDS.mkldnn.matmul.fp32_precision = self.mkldnn
        _BACKENDS.cudnn.conv.fp32_precision = self.convolution
        _BACKENDS.cudnn.rnn.fp32_precision = self.recurrent


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except RuntimeError:  # torch refuses to read an old switch after only its new name was set
        return None
