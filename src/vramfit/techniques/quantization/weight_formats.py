"""Formats of the weights of linear layers: which card has them, what torchao makes of a weight, and its CPU equivalent.

NOTE [Equivalents]: int4 in tensor-core tiles and products of float8 exist on cards alone. So that what they do to a
model's outputs can be measured on a CPU, there they have an equivalent: the same rounding by torchao's own functions,
with the products in the model's dtype. It saves no memory. The other formats run on the CPU as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.surround import plain_class

Capability = tuple[int, int]


class WeightFormat(Enum):
    """How a linear layer keeps its weight.

    Attributes:
        NONE: as it is.
        INT8: eight bits and a scale for each row; widened for each product.
        INT8_DYNAMIC: the same, with inputs rounded to eight bits too, row by row, and products of integers.
        INT4: four bits and a scale and zero for each group of a row, in tensor-core tiles.
        FP8: float8 (e4m3) for weights and inputs, with products of float8.
        FP8_WEIGHT_ONLY: float8 for weights alone, widened for each product.
    """

    NONE = "none"
    INT8 = "int8"
    INT8_DYNAMIC = "int8-dynamic"
    INT4 = "int4"
    FP8 = "fp8"
    FP8_WEIGHT_ONLY = "fp8-weight-only"


DEFAULT_FORMATS = (WeightFormat.INT8_DYNAMIC, WeightFormat.INT8, WeightFormat.FP8, WeightFormat.INT4)
"""Those that are tried where none are named; float8 for weights alone is widened in float32 and takes the most."""

# _int_mm: CUDABlas.cpp, int8_gemm (tensor cores for integers, from 7.5 on). int4: int4mm.cu asks for 8.0. Products of
# float8: ScaledBlas.cpp, _scaled_mm_allowed_device (8.9). bfloat16: CUDA C++ Programming Guide.
_FROM: Mapping[WeightFormat, Capability] = {
    WeightFormat.INT8_DYNAMIC: (7, 5),
    WeightFormat.INT4: (8, 0),
    WeightFormat.FP8: (8, 9),
}
_GROUPS = (128, 64, 32)
"""Sizes of int4's groups, the largest that divides a row is taken (torchao, ``Int4WeightOnlyConfig``)."""

ROUNDED = "vramfit_rounded"
"""Attribute of a parameter that stands for a packed one on the CPU; see NOTE [Equivalents]."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def parse_format(given: Any) -> WeightFormat:
    """A format by its name.

    Raises:
        UsageError: there is no such one.
    """
    if isinstance(given, WeightFormat):
        return given
    try:
        return WeightFormat(given)
    except ValueError:
        names = ", ".join(one.value for one in WeightFormat)
        raise UsageError(f"{given!r} is no format of weights", f"Give some of {names}") from None


def check_card(formats: Iterable[WeightFormat], capability: Capability, card: str) -> None:
    """Make sure that a card has formats that were asked for.

    Raises:
        UsageError: it has not.
    """
    for one in formats:
        if not has_format(one, capability):
            least = ".".join(map(str, _FROM[one]))
            have = ".".join(map(str, capability))
            raise UsageError(
                f"{card} has no {one.value}: that needs compute capability {least}, and it has {have}",
                f"Leave {one.value} out of formats",
            )


def has_format(one: WeightFormat, capability: Capability) -> bool:
    """Whether a card has a format."""
    return capability >= _FROM.get(one, (0, 0))


def why_not(layer: nn.Linear, one: WeightFormat) -> str:
    """Why a layer cannot have a format; empty where it can."""
    rows, columns = layer.weight.shape
    if experts := getattr(layer, "experts", 0):  # see fused_experts.py
        if one in (WeightFormat.INT8_DYNAMIC, WeightFormat.FP8):
            return f"{one.value} rounds inputs too, and an expert is given too few rows at once for such products"
        if one is WeightFormat.INT4 and rows // experts % 8:
            return f"tiles of int4 have 8 rows, and an expert has {rows // experts}"
    if one is WeightFormat.INT4:
        if layer.weight.dtype is not torch.bfloat16:
            return f"int4 is for weights in bfloat16, and these are in {_short(layer.weight.dtype)}"
        if group_size(columns) is None:
            return f"rows of {columns} elements are no multiple of int4's smallest group, {_GROUPS[-1]}"
    if one is WeightFormat.INT8_DYNAMIC and (rows % 8 or columns % 8):
        return f"products of integers need multiples of 8, and the weight has {rows} x {columns}"
    if one is WeightFormat.FP8 and (rows % 16 or columns % 16):
        return f"products of float8 need multiples of 16, and the weight has {rows} x {columns}"
    return ""


def quantisable(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model that can be quantised, by name, each once.

    Left out are layers whose forward pass is not torch's (they may use their weight otherwise), parametrised ones, and
    weights that are quantised already.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and plain_class(module).forward is nn.Linear.forward
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        and not hasattr(module, "parametrizations")
        and isinstance(module.weight, nn.Parameter)
        and type(module.weight.data).__name__ in ("Tensor", "FakeTensor", "Parameter")
        and module.weight.dtype in _FLOATS
        and module.weight.numel() > 0
        and not hasattr(module.weight, ROUNDED)
    }


def shared_weights(model: nn.Module) -> set[int]:
    """Identities of the parameters that several modules hold, as an embedding and a head do.

    A layer that a model calls at several places is one module, and its weight goes with it.
    """
    held = Counter(
        id(one) for module in model.modules() for one in module._parameters.values() if one is not None
    )
    return {one for one, count in held.items() if count > 1}


def packed_weight(weight: torch.Tensor, one: WeightFormat) -> torch.Tensor:
    """A weight in a format, as torchao's tensor, where the weight is.

    Args:
        weight: ``[out, in]``, with values or on a virtual card.

    Raises:
        UsageError: torchao is not there, or refuses.
    """
    quantize = _torchao().quantize_
    holder = nn.Linear(1, 1, bias=False, device="meta")
    holder.weight = nn.Parameter(weight.detach(), requires_grad=False)
    try:
        quantize(holder, _config(one, weight), filter_fn=lambda module, _name: module is holder)
    except (AssertionError, ValueError, ImportError, NotImplementedError) as error:
        raise UsageError(
            f"torchao refuses {one.value} for a weight of {tuple(weight.shape)}: {error}".splitlines()[0],
            f"Leave {one.value} out of formats",
        ) from error
    packed = holder.weight.detach()
    del holder.weight  # torchao's extra_repr holds the module that it is bound to, until garbage is collected
    return packed


def packed_through(weight: torch.Tensor, one: WeightFormat, device: torch.device) -> torch.Tensor:
    """A weight in a format, on the CPU, packed on a device some rows at a time, so that it takes little there.

    Rows have scales of their own, and int4's tiles have eight: parts of the weight are packed as the whole is.
    """
    host = torch.device("cpu")
    by_row = one is not WeightFormat.FP8 or weight.dtype is torch.bfloat16  # else one scale for all
    step = max(_TILE, _PART // weight.shape[1] // _TILE * _TILE) if by_row else weight.shape[0]
    parts = [
        packed_weight(weight.detach()[start : start + step].to(device), one).to(host)
        for start in range(0, weight.shape[0], step)
    ]
    return parts[0] if len(parts) == 1 else _joined(parts, weight.shape)


_PART = 1 << 20  # elements packed at a time; that takes about 12 bytes for each
_TILE = 32  # rows; a multiple of those of int4's tiles


def _joined(parts: list[Any], shape: torch.Size) -> torch.Tensor:
    """Packed rows one below the other, as torchao would have packed them together."""
    names, attributes = parts[0].__tensor_flatten__()
    tensors = {
        # int4_tile_packed_to_4d_tensor.py: scales and zeros are [columns / group, rows, 2]
        name: torch.cat([getattr(part, name) for part in parts], dim=1 if name == "scale_and_zero" else 0)
        for name in names
    }
    if "shape" in attributes:
        attributes = {**attributes, "shape": shape}
    found: torch.Tensor = type(parts[0]).__tensor_unflatten__(tensors, attributes, shape, None)
    return found


def has_equivalent(one: WeightFormat) -> bool:
    """Whether a format is imitated on the CPU; see NOTE [Equivalents]."""
    return one in (WeightFormat.INT4, WeightFormat.FP8)


def rounded_weight(weight: torch.Tensor, one: WeightFormat) -> torch.Tensor:
    """A weight with the values that a format would leave of it, in its own dtype: the CPU's equivalent."""
    if one is WeightFormat.INT4:
        return _rounded_int4(weight)
    return _float8(weight, by_row=weight.dtype is torch.bfloat16)


class Float8Inputs:
    """Surrounds a linear layer: inputs are rounded to float8 as the card rounds them, for the CPU's equivalent."""

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's forward pass on rounded inputs."""
        del module
        value = args[0] if args else kwargs["input"]
        return forward(_float8(value, by_row=value.dtype is torch.bfloat16))


def _config(one: WeightFormat, weight: torch.Tensor) -> Any:
    ao = _torchao()
    if one is WeightFormat.INT8:
        return ao.Int8WeightOnlyConfig(set_inductor_config=False)
    if one is WeightFormat.INT8_DYNAMIC:
        return ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    if one is WeightFormat.FP8_WEIGHT_ONLY:
        return ao.Float8WeightOnlyConfig(set_inductor_config=False)
    if one is WeightFormat.FP8:
        rows = weight.dtype is torch.bfloat16  # torchao: scales for rows are for bfloat16 alone
        return ao.Float8DynamicActivationFloat8WeightConfig(
            granularity=ao.PerRow() if rows else ao.PerTensor(), set_inductor_config=False
        )
    return ao.Int4WeightOnlyConfig(
        group_size=group_size(weight.shape[-1]) or _GROUPS[-1],
        int4_packing_format="tile_packed_to_4d",
        set_inductor_config=False,
    )


def _rounded_int4(weight: torch.Tensor) -> torch.Tensor:
    """int4_tile_packed_to_4d_tensor.py, ``from_hp``, and what the kernel reads of it: ``(q - 8) * scale + zero``."""
    primitives: Any = _primitives()
    block = [1, group_size(weight.shape[-1]) or _GROUPS[-1]]
    scale, zero = primitives._choose_qparams_affine_tinygemm(
        weight.detach(),
        mapping_type=primitives.MappingType.ASYMMETRIC,
        block_size=tuple(block),
        target_dtype=torch.int32,
        quant_min=0,
        quant_max=15,
        scale_dtype=weight.dtype,
        zero_point_dtype=weight.dtype,
    )
    values = primitives._quantize_affine_tinygemm(
        weight.detach(), block, scale, zero, torch.int32, quant_min=0, quant_max=15
    )
    found: torch.Tensor = primitives._dequantize_affine_tinygemm(
        values, block, scale, zero, torch.int32, quant_min=0, quant_max=15, output_dtype=weight.dtype
    )
    return found


def _float8(values: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """Values rounded to e4m3 with a scale for each row, or one for all (torchao, ``_choose_scale_float8``)."""
    if not values.numel():
        return values
    wide = values.detach().float()
    most = wide.abs().amax(dim=-1, keepdim=True) if by_row else wide.abs().amax()
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = most.clamp(min=torch.finfo(torch.float32).tiny * limit) / limit
    small = (wide / scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return (small.float() * scale).to(values.dtype)


def group_size(columns: int) -> int | None:
    """Elements of a row that share a scale in int4; None where no size divides the row."""
    return next((size for size in _GROUPS if columns % size == 0), None)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torchao() -> Any:
    try:
        import torchao.quantization as found  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            "weight-quantization needs torchao, which is not installed", "pip install vramfit[torchao]"
        ) from error
    return found


def _primitives() -> Any:
    _torchao()
    import torchao.quantization.quant_primitives as found  # type: ignore[import-untyped]

    return found
