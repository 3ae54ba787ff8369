"""Training in bfloat16 as a whole: weights, gradients and activations, with a remedy for updates that would vanish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import LoopChange, Numerics, Promise, Setting, Technique
from vramfit.techniques.optimizer_offload import HostOptimizer
from vramfit.techniques.support.casting import (
    HALVES,
    KEPT_BUFFERS,
    cast_tensors,
    device_type_of,
    find_islands,
    flatten_recurrent,
    is_norm,
    put_values,
    surround_loss,
)
from vramfit.techniques.support.float32_steps import Float32Steps, is_elementwise, join_, resting_dtype, split
from vramfit.torch_internals.layers import BatchNorm, NormBase

_BFLOAT16_FROM = (8, 0)  # CUDA C++ Programming Guide, arithmetic instructions
_AO_ROUNDING = "bf16_stochastic_round"  # torchao/optim/adam.py: its optimizers round by themselves


class Master(Enum):
    """What keeps updates that are smaller than a unit of bfloat16.

    Attributes:
        FLOAT32: the weights' lower 16 bits, kept beside them.
        STOCHASTIC_ROUNDING: chance: an update of a tenth of a unit counts in one of ten steps.
        NONE: nothing: the optimizer updates bfloat16 as it is.
    """

    FLOAT32 = "float32"
    STOCHASTIC_ROUNDING = "stochastic-rounding"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPrecisionTrainingSetting(Setting):
    """How much precision is left.

    Attributes:
        master: what keeps small updates.
        bfloat16_states: whether the optimizer's states rest in bfloat16, rounded at random; with ``none`` they always
            are, rounded to nearest.
        float32_norms: whether norms keep their parameters and statistics in float32; all but batch norm then compute
            in it.
        islands: paths of modules that stay in float32 and compute in it.
        float32_outputs: whether the model's outputs are float32 where the loss is computed outside of autocast.
    """

    master: Master = Master.FLOAT32
    bfloat16_states: bool = False
    float32_norms: bool = False
    islands: tuple[str, ...] = ()
    float32_outputs: bool = True


class LowPrecisionTraining(Technique[LowPrecisionTrainingSetting]):
    """Puts the whole model into bfloat16: parameters, buffers, gradients and activations.

    With Adam a parameter takes 16 bytes in float32 (4 for itself, 4 for its gradient, 8 for the states). Here it takes
    14 with float32 weights, which cost no more than the 2 bytes that bfloat16 leaves out; 10 with states in bfloat16
    too; and 8 with stochastic rounding in place of the float32 weights, as without any remedy. Activations halve. It
    pays where parameters, gradients and states are a large part of the memory: mixed precision leaves all of them in
    float32.

    Updates are often smaller than the 2^-8 that bfloat16 resolves, and would vanish (Zamirai et al., 2020,
    arXiv:2010.06192). So steps are computed in float32 for any optimizer, in chunks of a 128th of the parameters, at
    least 4 million elements, which hold about 28 bytes an element in between; an optimizer that is not known to treat
    each parameter on its own gets all at once. torchao's optimizers round stochastically by themselves and are set to.
    That costs a few memory-bound kernels a chunk: AdamW's step takes 4 times as long with float32 weights on a CPU, 7
    times with states in bfloat16. The optimizer stays the same object, with its groups, schedules and ``state_dict``,
    where the lower bits are ``float32_remainders``.

    Inputs of the model's ``forward`` are cast; other methods of it are called with bfloat16. A model that makes float32
    tensors in its forward pass and multiplies them by weights fails: leave such modules as ``islands``. Buffers named
    ``inv_freq``, the frequencies of rotary embeddings, stay in float32, as transformers computes with them.

    In a workload the loss is computed under autocast, which brings the outputs to float32 for the usual losses and
    holds no copy of them. In a loop of your own the loss gets outputs that were cast to float32, unless
    ``float32_outputs`` is false or your loop enters autocast itself. A loss that the model computes itself has
    bfloat16's 8 bits, unless the model casts its outputs before.

    Where the model chooses by its values, choices near a tie fall otherwise in bfloat16: a small mixture of experts has
    gradients of its router that are 0.23 of their norm off. Plans are compared before they are written, and leave it
    out there.

    Gradients are summed over micro-batches in bfloat16. With optimizer-offload float32 weights and states lie on the
    host, and cost nothing of the card. Apply it before DistributedDataParallel, and before loading the ``state_dict``
    of an optimizer that had it. After the undo, trained parameters have their float32 values; all else has lost the
    lower bits.
    """

    name: ClassVar[str] = "low-precision-training"
    summary: ClassVar[str] = "weights, gradients and activations in bfloat16, steps in float32"
    numerics: ClassVar[Numerics] = Numerics.PRECISION
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = LowPrecisionTrainingSetting
    follows: ClassVar[str | None] = "mixed-precision"
    quickens: ClassVar[bool] = True
    excludes: ClassVar[dict[str, str]] = {
        "mixed-precision": "the whole model is in bfloat16 already",
    }

    def options(self, profile: Profile) -> Iterator[LowPrecisionTrainingSetting]:
        """Float32 weights, then with states in bfloat16, then stochastic rounding; for training alone."""
        able = profile.device_type == "cpu" or profile.capability >= _BFLOAT16_FROM
        if not able or not any(p.dtype is torch.float32 for p in profile.model.parameters()):
            return
        # Statistics of batch norm are sums of many small changes; they cost nothing worth saving.
        norms = any(isinstance(module, NormBase) for module in profile.model.modules())
        if profile.trains and not profile.own_step and _is_steppable(profile.optimizer):
            yield LowPrecisionTrainingSetting(float32_norms=norms)
            yield LowPrecisionTrainingSetting(bfloat16_states=True, float32_norms=norms)
            yield LowPrecisionTrainingSetting(
                master=Master.STOCHASTIC_ROUNDING, bfloat16_states=True, float32_norms=norms
            )

    def promise(self, setting: LowPrecisionTrainingSetting) -> Promise:
        """What has fewer bits."""
        note = "parameters, gradients and activations have 8 bits of precision (bfloat16)"
        if setting.master is Master.FLOAT32:
            note += ", updates add up in float32"
        elif setting.master is Master.STOCHASTIC_ROUNDING:
            note += ", updates are rounded at random, right on average"
        else:
            note += ", updates below a 256th of a parameter are lost"
        if setting.bfloat16_states or setting.master is Master.NONE:
            note += ", the optimizer's states are in bfloat16"
        return Promise(Numerics.PRECISION, note)

    def loop_change(self, setting: LowPrecisionTrainingSetting) -> LoopChange:  # noqa: ARG002
        """See `Technique.loop_change`."""
        return LoopChange(
            what="puts the parameters into bfloat16, also for the loop's checkpoints, averages and evaluation",
            instead="Take mixed-precision, or change the program's own parameters to bfloat16",
        )

    def attach(self, live: AttachedProgram, setting: LowPrecisionTrainingSetting) -> None:
        """Cast the model, surround it and its islands, and hook the optimizer once it is there."""
        islands = find_islands(live.model, setting.islands, ())
        if setting.float32_norms:
            inside = {id(module) for island in islands for module in island.modules()}
            islands += [m for m in live.model.modules() if is_norm(m) and id(m) not in inside]
        _check(live, islands)
        casts = Casts(keeps_lost_bits=setting.master is Master.FLOAT32)
        live.on_undo(lambda: casts.undo(live.model))
        casts.cast(live.model, islands)
        for module in islands:
            live.surround(module, MasterIsland())
        live.surround(live.model, HalfModel(float32_outputs=setting.float32_outputs))
        surround_loss(live, torch.bfloat16)
        live.after(AttachStage.OPTIMIZER, lambda: _take_over(live, setting, casts))


def _check(live: AttachedProgram, islands: list[nn.Module]) -> None:
    """Make sure that the model can be cast."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in live.model.modules()):
        raise UsageError(
            "the model is in DistributedDataParallel, whose buckets have the dtype of its parameters",
            "Apply the plan to the model first, then wrap it",
        )
    if not any(parameter.dtype is torch.float32 for parameter in live.model.parameters()):
        raise UsageError("the model has no float32 parameter to cast", "Leave low-precision-training out")
    if live.optimizer is not None and not _is_steppable(live.optimizer):
        raise _unsteppable(live.optimizer)
    inside = {id(p) for island in islands for p in island.parameters()}
    parts = {id(module) for island in islands for module in island.modules()}
    for name, module in live.model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in inside and id(module) not in parts:
                raise UsageError(
                    f"{name}.{own} is shared with an island, and can have only one dtype",
                    f"Make {name} an island too, or leave the other out",
                )


def _is_steppable(optimizer: torch.optim.Optimizer | None) -> bool:
    return optimizer is not None and not isinstance(optimizer, torch.optim.LBFGS)


def _unsteppable(optimizer: torch.optim.Optimizer) -> UsageError:
    return UsageError(
        f"{type(optimizer).__name__} computes the loss several times in a step, which has to be in float32",
        "Leave low-precision-training out, or use another optimizer",
    )


def _take_over(live: AttachedProgram, setting: LowPrecisionTrainingSetting, casts: Casts) -> None:
    """Hook the optimizer, which is the final one now, and bring its states into their dtype."""
    optimizer = live.optimizer
    if optimizer is None:
        casts.remainders.clear()
        return
    if not _is_steppable(optimizer):
        raise _unsteppable(optimizer)
    if isinstance(optimizer, HostOptimizer):
        _take_over_host(live, optimizer, setting, casts)
        return
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in list(casts.remainders):
        if parameter in trained:
            casts.remainders[parameter] = casts.remainders[parameter].to(parameter.device)
        else:
            del casts.remainders[parameter]
    half_states = setting.bfloat16_states or setting.master is Master.NONE
    live.on_undo(
        lambda: _cast_states(optimizer, lambda p: torch.float32 if p in casts.tensors else torch.bfloat16)
    )
    _cast_states(optimizer, lambda p: resting_dtype(p, half_states=half_states))
    if setting.master is Master.NONE:
        return
    if setting.master is Master.STOCHASTIC_ROUNDING and hasattr(optimizer, _AO_ROUNDING):
        live.set(optimizer, _AO_ROUNDING, True)
        return
    live.keep_pageable(casts.remainders.values)
    kept = casts.remainders if setting.master is Master.FLOAT32 else None
    steps = Float32Steps(kept, half_states=half_states)
    for handle in (
        optimizer.register_step_pre_hook(steps.before),
        optimizer.register_step_post_hook(steps.after),
        optimizer.register_state_dict_post_hook(steps.save),
        optimizer.register_load_state_dict_pre_hook(steps.before_load),
        optimizer.register_load_state_dict_post_hook(steps.after_load),
    ):
        live.on_undo(handle.remove)


def _take_over_host(
    live: AttachedProgram, optimizer: HostOptimizer, setting: LowPrecisionTrainingSetting, casts: Casts
) -> None:
    """Let an optimizer on the host keep float32 weights there, where they cost nothing of the card."""
    if setting.bfloat16_states or setting.master is not Master.FLOAT32:
        raise UsageError(
            "an optimizer on the host keeps weights and states in float32, which costs nothing of the card",
            'Give low-precision-training master = "float32" and no bfloat16_states with optimizer-offload',
        )
    live.on_undo(lambda: casts.remainders.update(optimizer.drop_masters()))
    optimizer.keep_masters(casts.remainders)


def _cast_states(optimizer: torch.optim.Optimizer, dtype_of: Callable[[torch.Tensor], torch.dtype]) -> None:
    """Cast the states of parameters in bfloat16 that have a value for each element."""
    for parameter, states in optimizer.state.items():
        if parameter.dtype is torch.bfloat16:
            for name, value in states.items():
                if is_elementwise(name, value, parameter.shape):
                    states[name] = value.to(dtype_of(parameter))


# -- the model: its tensors cast in place, its inputs and outputs, and its islands in float32 ----------------------


_WIDER = frozenset({torch.float16, torch.float32, torch.float64})
_FLOAT32 = frozenset({torch.float32})


class HalfModel:
    """Casts the inputs of a model to bfloat16, and its outputs to float32 if the loss is to be computed in it.

    Inside autocast the outputs stay as they are, since autocast brings them to float32 in the losses that want it, and
    the model computes without it.
    """

    def __init__(self, *, float32_outputs: bool) -> None:
        self.float32_outputs = float32_outputs

    def __call__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the forward pass."""
        args, kwargs = cast_tensors((args, kwargs), _WIDER, torch.bfloat16)
        device = device_type_of(module, (args, kwargs))
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return forward(*args, **kwargs)
        outputs = forward(*args, **kwargs)
        return cast_tensors(outputs, HALVES, torch.float32) if self.float32_outputs else outputs


class MasterIsland:
    """Runs a module of float32 parameters on float32 inputs; its outputs are in bfloat16 again."""

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass."""
        if isinstance(module, BatchNorm):  # its kernels take float32 parameters with inputs of 16 bits
            return forward(*args, **kwargs)
        args, kwargs = cast_tensors((args, kwargs), HALVES, torch.float32)
        return cast_tensors(forward(*args, **kwargs), _FLOAT32, torch.bfloat16)


class Casts:
    """Casts a model's tensors in place, each an object as before, and back.

    Attributes:
        tensors: what was cast.
        remainders: lost bits by parameter, int16 (see NOTE [Two halves]).
    """

    def __init__(self, *, keeps_lost_bits: bool) -> None:
        self.remainders: dict[torch.Tensor, torch.Tensor] = {}
        self._keeps = keeps_lost_bits
        self.tensors: dict[torch.Tensor, None] = {}

    def cast(self, model: nn.Module, islands: Iterable[nn.Module]) -> None:
        """Cast all float32 parameters and buffers outside of islands to bfloat16."""
        kept = {id(tensor) for island in islands for tensor in (*island.parameters(), *island.buffers())}
        for tensor in _tensors(model):
            if tensor.dtype is torch.float32 and id(tensor) not in kept:
                if self._keeps and tensor.requires_grad:
                    half, self.remainders[tensor] = split(tensor.detach())
                else:
                    half = tensor.detach().to(torch.bfloat16)
                put_values(tensor, half)
                self.tensors[tensor] = None
        flatten_recurrent(model)

    def undo(self, model: nn.Module) -> None:
        """Cast back, with the lost bits where they were kept."""
        while self.tensors:
            tensor, _ = self.tensors.popitem()
            wide = tensor.detach().to(torch.float32)
            lost = self.remainders.pop(tensor, None)
            if lost is not None:
                join_(wide, lost.to(wide.device))
            put_values(tensor, wide)
        flatten_recurrent(model)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters and buffers, once each."""
    yield from model.parameters()
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] not in KEPT_BUFFERS:
            yield buffer
