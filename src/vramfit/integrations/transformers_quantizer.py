"""Formats of weights as a quantisation of transformers: ``from_pretrained(quantization_config=FormatsConfig(...))``.

transformers knows it by the name ``vramfit`` from the first `FormatsConfig` on, or from `register` on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from vramfit.api.quantizing_api import QuantizedModel, quantized
from vramfit.errors import UsageError
from vramfit.techniques.quantization.weight_formats import parse_format, quantisable, why_not

try:
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise UsageError(
        "a quantizer of transformers needs transformers, which is not installed",
        'Install it: pip install "vramfit[transformers]"',
    ) from error

METHOD = "vramfit"
"""The name under which transformers knows it."""


class FormatsConfig(QuantizationConfigMixin):
    """Which layers get which format when a model is loaded.

    Example::

        choice = vramfit.quantized(model, batch, budget="6GiB", gpu="RTX 4090").formats
        model = AutoModelForCausalLM.from_pretrained(name, quantization_config=FormatsConfig(choice))

    Args:
        formats: of layers by name, such as ``vramfit.quantized(...).formats``; or one format for all linear layers and
            fused experts that can have it, but for the output head and what `skip` names.
        skip: names of layers that stay as they are, with those inside them.

    Raises:
        UsageError: there is no such format.
    """

    def __init__(
        self, formats: Mapping[str, str] | str = "int8", skip: tuple[str, ...] = (), **_others: Any
    ) -> None:
        register()
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers looks registered names up too
        for one in formats.values() if isinstance(formats, Mapping) else (formats,):
            parse_format(one)
        self.formats = dict(formats) if isinstance(formats, Mapping) else formats
        self.skip = list(skip)


class FormatsQuantizer(HfQuantizer):
    """Gives a model its formats once its weights are loaded; ``model.dequantize()`` gives them back, bit for bit."""

    requires_calibration = False
    quantization_config: FormatsConfig

    def __init__(self, quantization_config: FormatsConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._live: QuantizedModel | None = None

    def _process_model_after_weight_loading(self, model: Any, **_kwargs: Any) -> Any:
        self._live = quantized(model, formats=self._formats(model))
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        del dtype
        if self._live is not None:
            self._live.undo()
            self._live = None
        return model

    def is_serializable(self) -> bool:
        """No: packed weights are torchao's, which the plain checkpoint and the formats give again."""
        return False

    @property
    def is_trainable(self) -> bool:
        """No."""
        return False

    def _formats(self, model: Any) -> dict[str, str]:
        config = self.quantization_config
        if isinstance(config.formats, dict):
            return dict(config.formats)
        wanted = parse_format(config.formats)
        head = model.get_output_embeddings()
        return {
            name: wanted.value
            for name, layer in layers_with_experts(model).items()
            if layer is not head
            and not why_not(layer, wanted)
            and not any(name == one or name.startswith(f"{one}.") for one in config.skip)
        }


def layers_with_experts(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that `vramfit.quantized` can give formats, fused experts among them, by name."""
    from vramfit.techniques.core.attached_program import AttachedProgram
    from vramfit.techniques.quantization.fused_experts import split_experts

    live = AttachedProgram(model, None)
    try:
        split_experts(live)
        return quantisable(model)
    finally:
        live.undo()


def register() -> None:
    """Let transformers know the method; again, nothing happens."""
    if METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(METHOD)(FormatsConfig)
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(METHOD)(FormatsQuantizer)
