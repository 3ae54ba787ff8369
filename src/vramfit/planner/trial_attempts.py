"""Ways to try a workload for real on this machine's CPU within bounds of time and memory, the truest first.

A model that is too large to be tried as it is, is tried at smaller sizes of its batch, and then by a stand-in: a
smaller model of the same code.

NOTE [Standing in]: the model is made with its large tensors on the meta device, so that making it takes little memory.
Of layers that are alike and follow each other two are left, and values are drawn for what is left; or, where models of
transformers say in a config how wide they are, the workload's own function makes it with fewer layers and heads and
narrower ones, whatever it puts around it. What couples examples (a loss, a normalisation, a router) is code, and that
stays the same.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vramfit.patching import PatchStack
from vramfit.planner.devices import cpu_backend
from vramfit.techniques.micro_batching import batch_size_name
from vramfit.torch_internals.fake_tensors import device_constructors
from vramfit.workload import Workload

_LARGE = 1 << 20
"""Values of a tensor above which it is made without them."""

_LAYERS = 2
"""How many of layers that are alike are left."""

_STD = 0.02
"""Standard deviation of drawn values, as most models are initialised."""

_NARROW = "_vramfit_narrow"
"""The attribute that marks a config as narrowed already."""

# Names in configs read better several in a line:
# fmt: off
_DEPTHS = frozenset({
    "num_hidden_layers", "num_layers", "num_encoder_layers", "num_decoder_layers", "encoder_layers",
    "decoder_layers", "n_layer", "n_layers",
})
_HEADS = frozenset({
    "num_attention_heads", "num_key_value_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "n_head", "n_heads",
})
_WIDTHS = frozenset({
    "hidden_size", "intermediate_size", "projection_dim", "embed_dim", "ffn_dim", "encoder_ffn_dim",
    "decoder_ffn_dim", "n_embd", "n_inner", "d_model", "d_ff", "dim", "hidden_dim",
})
# fmt: on
"""Names in configs of transformers; n_embd and n_head are GPT-2's, dim and hidden_dim DistilBERT's."""


def stand_in(workload: Workload, most_bytes: int) -> Iterator[tuple[Callable[[], nn.Module], str]]:
    """Makers of models that stand in for a workload's, the truest first, each with what it is in words.

    Nothing comes where there is none of at most so many bytes in 32 bits, or where the model cannot be made without
    its values.
    """
    try:
        with _LargeOnMeta():
            model = workload.model()
        left = _shortened(model)
    except Exception:  # it reads its values while it is made, or its layers cannot be taken out
        return
    if left and _bytes_of(model) <= most_bytes and not _unknown_buffers(model):
        yield partial(_with_values, model), f"a stand-in of the same code with {left} layers"
    for make, words in _narrowed(workload.model, model):
        try:
            with _LargeOnMeta():
                fits = _bytes_of(make()) <= most_bytes
        except Exception:  # it reads weights of the full width, or takes more than a config
            continue
        if fits:
            yield make, f"a stand-in of the same code with {words}"
            return


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors without values, and small ones, such as buffers of positions, as they are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """One function of torch."""
        kwargs = kwargs or {}
        if func in device_constructors() and kwargs.get("device") in (None, "cpu", torch.device("cpu")):
            empty = func(*args, **kwargs | {"device": "meta"})
            if empty.numel() > _LARGE:
                return empty
        return func(*args, **kwargs)


def _shortened(model: nn.Module) -> str:
    """Leave two of layers that are alike, in place; how many that left of how many, empty where nothing was taken out.

    Lists inside of layers stay as they are: experts of a mixture are alike too.
    """
    found: list[str] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for name, child in module.named_children():
            kept = _kept(list(child.children())) if type(child) in (nn.ModuleList, nn.Sequential) else None
            if kept is None:
                waiting.append(child)
                continue
            module._modules[name] = (
                nn.Sequential(*kept) if type(child) is nn.Sequential else nn.ModuleList(kept)
            )
            found.append(f"{len(kept)} of {len(list(child.children()))}")
    return " and ".join(found)


def _kept(layers: list[nn.Module]) -> list[nn.Module] | None:
    """The layers without those that two before them are like; None where nothing is left out."""
    shapes = [_shape(layer) for layer in layers]
    kept = [
        layer
        for number, layer in enumerate(layers)
        if number < _LAYERS
        or not shapes[number][1]
        or shapes[number - _LAYERS : number] != [shapes[number]] * _LAYERS
    ]
    return kept if len(kept) < len(layers) else None


def _shape(layer: nn.Module) -> tuple[type, tuple[tuple[str, torch.Size], ...]]:
    return type(layer), tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def _bytes_of(model: nn.Module) -> int:
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def _unknown_buffers(model: nn.Module) -> bool:
    """Whether buffers have no values: unlike those of parameters, any others would not do."""
    return any(buffer.is_meta for buffer in model.buffers())


def _with_values(model: nn.Module) -> nn.Module:
    """A model with drawn values where it has none; parameters that are tied stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                if parameter not in made:
                    values = torch.empty(parameter.shape).normal_(std=_STD)
                    made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                setattr(module, name, made[parameter])
    return model


def _narrowed(
    make: Callable[[], nn.Module], model: nn.Module
) -> Iterator[tuple[Callable[[], nn.Module], str]]:
    """Makers of a narrower model of transformers, each described in words; none where the model is of another library.

    Args:
        make: the workload's, which may put something around it or into it: adapters, a head.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return
    words = f"at most {_LAYERS} layers and widths divided by {_divisor(config)}"
    yield partial(_made_narrow, make), words
    config, kind = copy.deepcopy(config), type(model)  # what reads weights may do without
    _narrow_all(config)
    yield partial(kind, config), words


def _made_narrow(make: Callable[[], nn.Module]) -> nn.Module:
    """What a function makes where models of transformers are made narrower than it says.

    Configs are the user's: they are changed while models are made from them, which then hold copies.
    """
    base: Any = sys.modules["transformers"].PreTrainedModel
    original = base.__init__
    wide: list[tuple[Any, dict[str, Any]]] = []

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(config, _NARROW):  # of parts of a model it is the model's, or a copy
            wide.extend((part, dict(vars(part))) for part in _configs(config))
            _narrow_all(config)
        original(self, config, *args, **kwargs)

    with PatchStack() as patches:
        patches.set(base, "__init__", init)
        try:
            made = make()
            copies = {id(config): copy.deepcopy(config) for config, _ in wide}
        finally:
            for config, values in reversed(wide):
                vars(config).clear()
                vars(config).update(values)
    for module in made.modules():
        for name, value in list(vars(module).items()):
            if id(value) in copies:
                setattr(module, name, copies[id(value)])
    return made


def _narrow_all(config: Any) -> None:
    divisor = _divisor(config)
    for part in list(_configs(config)):
        _narrow(part, divisor)
        setattr(part, _NARROW, True)


def _divisor(config: Any) -> int:
    """By how much widths can be divided: as many heads as all parts have."""
    values = [item for part in _configs(config) for item in vars(part).items()]
    heads = [value for name, value in values if name in _HEADS and type(value) is int]
    return math.gcd(*heads) if heads else 1


def _configs(config: Any) -> Iterator[Any]:
    """A config and those inside it, as of text and images."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs(value)


def _narrow(config: Any, divisor: int) -> None:
    values = vars(config)
    depths = {value for name, value in values.items() if name in _DEPTHS and type(value) is int}
    for name, value in list(values.items()):
        if name in _DEPTHS and type(value) is int:
            values[name] = min(value, _LAYERS)
        elif name in _WIDTHS | _HEADS and type(value) is int and value % divisor == 0:
            values[name] = value // divisor
        elif isinstance(value, list) and len(value) in depths and len(value) > _LAYERS:
            values[name] = value[:_LAYERS]  # the kinds of layers, one each


_SHORTEST = 8
"""No size of a batch is made smaller than this."""


@dataclass(frozen=True, slots=True)
class TrialAttempt:
    """One way to try a workload.

    Attributes:
        words: what was tried, after "with".
        model: makes what stands in for the workload's; None for its own.
    """

    sizes: Mapping[str, int]
    words: str
    model: Callable[[], nn.Module] | None = None


def ways_to_try(
    workload: Workload,
    sizes: Mapping[str, int],
    *,
    flops: float,
    seconds: float,
    model_bytes: int,
    most_bytes: int,
) -> Iterator[TrialAttempt]:
    """Ways to try a workload that take no more than the time and memory given.

    Args:
        flops: of the whole trial with the model itself at these sizes; 0 where nobody knows.
        seconds: that a trial may take.
        model_bytes: of the model's parameters in 32 bits.
        most_bytes: bytes of parameters in 32 bits that a trial may have.
    """
    name = batch_size_name(sizes)
    most = seconds * cpu_backend.CPU_FLOPS
    smaller, less = _smaller(sizes, name, flops, most)
    if model_bytes <= most_bytes:
        if flops <= most:
            yield TrialAttempt(dict(sizes), "the model itself")
        if less <= most and smaller != dict(sizes):
            yield TrialAttempt(smaller, f"the model itself at {_words(smaller, name)}")
    for model, words in stand_in(workload, most_bytes):
        yield TrialAttempt(smaller, words, model)


def most_model_bytes(part: float, most: int) -> int:
    """Bytes of a model in 32 bits that a trial may have: a part of this machine's memory, and no more than `most`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(most, round(part * memory))


def _smaller(sizes: Mapping[str, int], name: str, flops: float, most: float) -> tuple[dict[str, int], float]:
    """Sizes halved until a trial is quick enough, and its FLOPs then; the number of examples stays."""
    found = dict(sizes)
    while flops > most:
        largest = max((one for one in found if one != name), key=lambda one: found[one], default=None)
        if largest is None or found[largest] // 2 < _SHORTEST:
            break
        found[largest] //= 2
        flops /= 2
    return found, flops


def _words(sizes: Mapping[str, int], name: str) -> str:
    return ", ".join(f"{one} {value:,}" for one, value in sizes.items() if one != name)
