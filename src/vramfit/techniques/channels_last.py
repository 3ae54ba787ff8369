"""Images and volumes with the channels innermost, as tensor cores read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.torch_internals.layers import ConvNd

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_FIRST_TENSOR_CORES = (7, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelsLastSetting(Setting):
    """What is converted beside the filters.

    Attributes:
        inputs: whether images and volumes that the model is called with are converted; leave it where your loader makes
            them so, which saves the copy.
    """

    inputs: bool = True


class ChannelsLast(Technique[ChannelsLastSetting]):
    """Filters, and the inputs that meet them, lie in memory with the channels innermost.

    It is for speed: tensor cores read this order, and cuDNN converts others back and forth around each convolution. It
    pays for convolutions in float16, bfloat16 or tf32 on cards from capability 7.0 on, in networks whose layers all
    keep the order (convolutions, batch norms, pooling, pointwise operations); a layer that does not, such as an
    instance norm or a reshape, copies its input. It saves no memory: filters take the same bytes, and the converted
    copy of the input is held beside the input during the forward pass. Hence it belongs to plans that have memory to
    spare and want time.

    Source: pytorch.org/tutorials/intermediate/memory_format_tutorial.html.
    """

    name: ClassVar[str] = "channels-last"
    summary: ClassVar[str] = "channels innermost, for convolutions on tensor cores"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = ChannelsLastSetting
    follows: ClassVar[str | None] = "early-release"
    quickens: ClassVar[bool] = True

    def options(self, profile: Profile) -> Iterable[ChannelsLastSetting]:
        """On cards with tensor cores, for models with convolutions of images or volumes."""
        cores = profile.device_type == "cuda" and profile.capability >= _FIRST_TENSOR_CORES
        if cores and any(True for _ in _filters(profile.model)):
            yield ChannelsLastSetting()

    def promise(self, setting: ChannelsLastSetting) -> Promise:  # noqa: ARG002  # the same for both
        """Other kernels."""
        return Promise(Numerics.ROUNDING, "convolutions run in other kernels, which sum in another order")

    def attach(self, live: AttachedProgram, setting: ChannelsLastSetting) -> None:
        """Convert the filters, with their gradients and the optimizer's states, and surround the model.

        Raises:
            UsageError: it has no convolutions of images or volumes.
        """
        filters = list(_filters(live.model))
        if not filters:
            raise UsageError(
                "the model has no convolutions in two or three dimensions", "Leave channels-last out"
            )
        changed = [weight for weight in filters if weight.is_contiguous()]
        for weight in changed:
            _lay_out(live, weight, _FORMATS[weight.dim()])
            live.on_undo(lambda weight=weight: _lay_out(live, weight, torch.contiguous_format))  # type: ignore[misc]
        if setting.inputs:
            live.surround(live.model, InputsLast(tuple(sorted({weight.dim() for weight in filters}))))


class InputsLast:
    """Converts a model's inputs."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = dims

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass with converted inputs."""
        del module
        args, kwargs = self.convert(args), self.convert(kwargs)
        return forward(*args, **kwargs)

    def convert(self, value: Any) -> Any:
        """A tensor, or a plain tuple, list or dict of them, with the channels innermost."""
        if isinstance(value, torch.Tensor):
            if value.dim() in self.dims and value.is_floating_point():
                return value.contiguous(memory_format=_FORMATS[value.dim()])
            return value
        if type(value) in (tuple, list):
            return type(value)(self.convert(item) for item in value)
        if type(value) is dict:
            return {name: self.convert(item) for name, item in value.items()}
        return value


def _filters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Filters of convolutions in two and three dimensions, once each."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, ConvNd):
            for weight in module.parameters():  # below the module: parametrizations hold their filters there
                if weight.dim() in _FORMATS and id(weight) not in seen:
                    seen.add(id(weight))
                    yield weight


def _lay_out(live: AttachedProgram, weight: nn.Parameter, order: torch.memory_format) -> None:
    """Bring a filter into an order, with all that has its shape: strides that differ slow optimizers down."""
    with torch.no_grad():
        weight.data = weight.data.contiguous(memory_format=order)
        if weight.grad is not None:
            weight.grad = weight.grad.contiguous(memory_format=order)
        states: Mapping[Any, Any] = live.optimizer.state if live.optimizer is not None else {}
        state = states.get(weight, {})
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                state[name] = value.contiguous(memory_format=order)
