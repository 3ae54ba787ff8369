"""What a step holds without need: the batch after the forward pass, caches for generation, outputs beside the loss."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.surround import plain_class
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyReleaseSetting(Setting):
    """What goes early.

    Attributes:
        batch: whether the batch on the device goes when its loss is there, in a workload's step.
        caches: whether models that cache keys and values for generation leave that while they train.
        outputs: fields of the model's output that go while it trains, where the output has a loss: ``logits``.
    """

    batch: bool = True
    caches: bool = True
    outputs: tuple[str, ...] = ()


class EarlyRelease(Technique[EarlyReleaseSetting]):
    """Tensors go as soon as nothing needs them, instead of when the step is over.

    The batch: what the backward pass needs of it, autograd keeps by itself; masks, labels and inputs that were
    converted first need not stay. A loop of your own does the same by not giving the batch on the device a name.

    Caches: models of transformers with ``config.use_cache`` join each layer's keys and values to a cache in training
    too. Where they come as views of one projection (GPT-2), that copies both, and the copies are kept. Checkpointed
    layers must not do it at all, since their second forward pass would join them again. ``use_cache=False`` is given
    where the caller gives nothing, in training alone; generation is as it was. Joined keys and values lie otherwise in
    memory, so that attention's products may sum in another order: in a GPT-2 of width 32 with dropout and padding,
    gradients differ by up to 5e-7 of their norm.

    Outputs: ``outputs = model(**batch); outputs.loss.backward()`` holds the logits during the backward pass, beside
    their float32 copy or log-softmax that cross-entropy keeps: batch x length x vocabulary x 4 bytes. Named here, they
    are no longer in the output that the loop gets. Leave them where the loop reads them, for a metric or another loss.

    All of this costs nothing, and changes no bit but for the caches.
    """

    name: ClassVar[str] = "early-release"
    summary: ClassVar[str] = "batch, caches and unused outputs go before the backward pass"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = EarlyReleaseSetting
    follows: ClassVar[str | None] = "parameter-sharing"

    def options(self, profile: Profile) -> Iterable[EarlyReleaseSetting]:
        """The batch where the inputs take 1 MiB or more, then caches too where the model has some."""
        if not profile.trains:
            return
        caches = any(True for _ in _caching(profile.model))
        batch = not profile.own_step and profile.categories.get("inputs", 0) >= MIB
        if batch:
            yield EarlyReleaseSetting(caches=False)
        if caches:
            yield EarlyReleaseSetting()

    def promise(self, setting: EarlyReleaseSetting) -> Promise:
        """Bitwise, unless models cache nothing that they would cache."""
        if not setting.caches:
            return Promise(Numerics.BITWISE)
        return Promise(
            Numerics.ROUNDING, "attention without a cache of keys and values may sum in another order"
        )

    def attach(self, live: AttachedProgram, setting: EarlyReleaseSetting) -> None:
        """Let the step free its batch, and surround the models that hold more than they need."""
        if setting.batch:
            live.set(live, "frees_input", True)
        if setting.caches:
            for module in _caching(live.model):
                live.surround(module, WithoutCache(_position_of_cache(module)))
        if setting.outputs:
            live.surround(live.model, LossAlone(setting.outputs))


class WithoutCache:
    """Gives ``use_cache=False`` to a model that trains."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass; a caller that gives a cache, or says whether it wants one, is heard."""
        asked = len(args) > self.position or kwargs.get("use_cache") is not None
        if (
            module.training
            and torch.is_grad_enabled()
            and not asked
            and kwargs.get("past_key_values") is None
        ):
            kwargs = kwargs | {"use_cache": False}
        return forward(*args, **kwargs)


class LossAlone:
    """Takes fields out of a training model's output that has a loss."""

    def __init__(self, outputs: tuple[str, ...]) -> None:
        self.outputs = outputs

    def __call__(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass; what is no mapping stays."""
        output = forward(*args, **kwargs)
        trains = module.training and torch.is_grad_enabled()
        if not trains or not isinstance(output, Mapping) or output.get("loss") is None:
            return output
        # Made anew: outputs of transformers are dataclass and mapping at once, and keep in one what the other drops.
        kept = {name: value for name, value in output.items() if name not in self.outputs}
        return type(output)(**kept)


def _caching(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that would cache keys and values."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(outer) for outer in inside):
            continue
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True and _position_of_cache(module) is not None:
            inside.append(f"{path}." if path else "")
            yield module


def _position_of_cache(module: nn.Module) -> Any:
    names = list(inspect.signature(plain_class(module).forward).parameters)[1:]
    return names.index("use_cache") if "use_cache" in names else None
