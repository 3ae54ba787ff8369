"""Parameters live on the host and visit the card for the passes of their block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.host_lane import PINNED_ROUNDING
from vramfit.inference.streaming.layer_weights import move_tensors, own_names, parts
from vramfit.techniques.activation_offload import chosen_modules
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import LoopChange, Numerics, Promise, Setting, Technique
from vramfit.techniques.parameter_offload.depot import Depot, Visitors
from vramfit.techniques.support.blocks import best_blocks, find_blocks
from vramfit.techniques.support.optimizer_exchange import state_tensors
from vramfit.techniques.support.saved import hooks_outside, in_backward, packing, unseen


class GradientPlace(Enum):
    """Where gradients wait for the step.

    Attributes:
        HOST: they go to the host as they are computed.
        DEVICE: they stay on the card until the step.
    """

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterOffloadSetting(Setting):
    """Which blocks, and where their gradients wait.

    Attributes:
        modules: names of the blocks whose parameters live on the host; empty for all blocks that are found.
        gradients: where gradients wait for the step.
        ahead: how many blocks are brought to the card before they are asked for.
    """

    modules: tuple[str, ...] = ()
    gradients: GradientPlace = GradientPlace.HOST
    ahead: int = 1


class ParameterOffload(Technique[ParameterOffloadSetting]):
    """Parameters live in pinned host memory, and visit the card for the forward and the backward pass of their block.

    So a model trains that is larger than the card: of the chosen blocks no more than ``1 + ahead`` have their
    parameters there. Copies run beside the computation of the block before. Gradients follow to the host, where the
    optimizer steps, with its states. The parameters stay the objects that they were, on the CPU: ``state_dict``, the
    optimizer and ``deepcopy`` see them as ever. What two modules share (an embedding and a head), what lies outside of
    the chosen blocks, buffers, and the weights of recurrent layers stay on the card.

    It pays where parameters, gradients and states together do not fit, and a batch is large enough: each step, every
    parameter crosses the link twice, and its gradient once, whatever the batch. A linear layer in 16 bits hides its
    weights behind 2 FLOPs per weight and row for 2 bytes: at 25 GB/s and 100 TFLOP/s, with 4,000 rows or more. The
    optimizer's step on the CPU adds its own time; a fused optimizer reads and writes memory least often.

    With gradients on the card, they cross once per step in place of once per micro-batch. Then ``.grad`` is empty
    until the step, which has to be the plan's own: ``plan.step()``.

    Under autocast the graph also keeps the converted weights, on the card: add activation checkpointing of the same
    blocks, or train in bfloat16. Gradients are handed over in place of autograd's own addition unless a parameter has
    hooks; distributed data parallel models are refused.

    See Rajbhandari et al. 2021, ZeRO-Infinity (arXiv:2104.07857), and Ren et al. 2021, ZeRO-Offload (arXiv:2101.06840).
    """

    name: ClassVar[str] = "parameter-offload"
    summary: ClassVar[str] = "parameters live on the host and visit the card block by block"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.PLACEMENT
    setting_type = ParameterOffloadSetting
    follows: ClassVar[str | None] = "activation-compression"
    excludes: ClassVar[dict[str, str]] = {
        "optimizer-offload": "that wants the parameters on the card; here states are on the host anyway",
    }

    def options(self, profile: Profile) -> Iterable[ParameterOffloadSetting]:
        """Half of the blocks that have parameters, then all; where the host has room."""
        cuda = profile.device_type == "cuda" and profile.link_bytes_per_second > 0
        if not (profile.trains and cuda and profile.optimizer is not None):
            return
        sizes = {block.path: _bytes(profile.model, block.path) for block in profile.blocks}
        blocks = [block for block in profile.blocks if sizes[block.path] and block.calls == 1]
        states = profile.categories.get("optimizer_state", 0)
        for count in dict.fromkeys((-(-len(blocks) // 2), len(blocks))):
            chosen = best_blocks(
                blocks, count, lambda block: sizes[block.path], profile.link_bytes_per_second
            )
            needed = 2 * PINNED_ROUNDING * sum(sizes[block.path] for block in chosen) + states
            if not chosen or needed > profile.host_bytes:
                return
            yield ParameterOffloadSetting(modules=tuple(block.path for block in chosen))

    def promise(self, setting: ParameterOffloadSetting) -> Promise:
        """See `Technique.promise`."""
        del setting
        return Promise(
            Numerics.ROUNDING,
            "gradients are the same; the optimizer's kernels of the CPU may round otherwise",
        )

    def loop_change(self, setting: ParameterOffloadSetting) -> LoopChange | None:
        """See `Technique.loop_change`."""
        if setting.gradients is not GradientPlace.DEVICE:
            return None
        return LoopChange(
            what="keeps gradients away from .grad until the step, where the loop could not cut or read them",
            instead='Give it gradients = "host"',
        )

    def attach(self, live: AttachedProgram, setting: ParameterOffloadSetting) -> None:
        """See `Technique.attach`."""
        blocks = _chosen(live, setting)
        keeps = setting.gradients is GradientPlace.DEVICE
        depot = Depot(live.device, len(blocks), setting.ahead, keeps)
        away = {id(p): p for block, names in blocks for p in Visitors(depot, 0, block, names).parameters}
        place(live, away)
        for index, (block, names) in enumerate(blocks):
            live.surround(block, Visited(depot, index, names))
            depot.visitors(index, block, names)
            for path, part, inside in parts(block, names):
                live.surround(part, VisitedApart(depot, index, path, inside))
        live.on_undo(depot.close)
        live.after(AttachStage.OPTIMIZER, lambda: settle_optimizer(live, away, depot if keeps else None))


class Visited:
    """Surrounds a block whose parameters are brought for its passes."""

    def __init__(self, depot: Depot, index: int, names: tuple[str, ...]) -> None:
        self._depot, self._index, self._names = depot, index, names

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass with copies in the parameters' places."""
        visitors = self._depot.visitors(self._index, module, self._names)
        with unseen():
            copies = self._depot.enter(visitors)
        try:
            with packing(self._depot.take(visitors)), _in_place(visitors, copies), _visiting(visitors):
                return forward(*args, **kwargs)
        finally:
            with unseen():
                self._depot.exit(visitors)


class VisitedApart:
    """Surrounds a part of such a block, which may run while the block does not.

    NOTE [Parts that run apart]: a part is recomputed by itself, or a model asks one block's embedding for what all
    blocks get. In a backward pass the block's own copies are brought, as for the block. In a forward pass the part's
    copies are for this call alone, so that the visits of blocks stay as they are. Weights that autograd saves are taken
    in either run of a part, and in the first one too where it runs inside its block: checkpoints count saved tensors.
    """

    def __init__(self, depot: Depot, index: int, path: str, names: tuple[str, ...]) -> None:
        self._depot, self._index, self._path, self._names = depot, index, path, names

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass with copies in the parameters' places, unless they are there."""
        visit = self._depot.visiting.get(self._index)
        if visit is not None:
            visitors, hook = visit
            if hook is _innermost_hook():
                return forward(*args, **kwargs)
            with packing(self._depot.take(visitors)), _visiting(visitors):
                return forward(*args, **kwargs)
        block = self._depot.block_of(self._index, self._path, module) if in_backward() else None
        if block is not None:
            with unseen():
                copies = self._depot.fetch(block)
            with packing(self._depot.take(block)), _in_place(block, copies), _visiting(block):
                return forward(*args, **kwargs)
        visitors = self._depot.apart(self._index, self._path, module, self._names)
        with unseen():
            visitors.leave()
            copies = visitors.arrive()
        try:
            with packing(self._depot.take(visitors)), _in_place(visitors, copies), _visiting(visitors):
                return forward(*args, **kwargs)
        finally:
            with unseen():
                visitors.have_come()
                visitors.leave()


class _Bring(torch.autograd.Function):
    """A parameter on the host in, its copy on the card out; and the gradient back."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, visitors: Visitors, number: int, copies: list[torch.Tensor]
    ) -> torch.Tensor:
        del parameter
        ctx.set_materialize_grads(False)
        ctx.visitors, ctx.number = visitors, number
        return copies[number].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), node = gradients, ctx.next_functions[0][0]
        given = None
        if gradient is not None:
            given = ctx.visitors.depot.gradients.hand_over(ctx.visitors, ctx.number, gradient, node)
        return given, None, None, None


@contextmanager
def _visiting(visitors: Visitors) -> Iterator[None]:
    """Let the parts of a block know whose copies are in place, and under which hooks autograd saves tensors."""
    visiting = visitors.depot.visiting
    before = visiting.get(visitors.index)
    visiting[visitors.index] = visitors, _innermost_hook()
    try:
        yield
    finally:
        if before is None:
            del visiting[visitors.index]
        else:
            visiting[visitors.index] = before


def _innermost_hook() -> Any:
    hooks = hooks_outside()
    return None if hooks is None else hooks[0]


@contextmanager
def _in_place(visitors: Visitors, copies: list[torch.Tensor]) -> Iterator[None]:
    """Let the modules of a block see copies where they look for parameters."""
    seen: list[Any] = []
    for number, parameter in enumerate(visitors.parameters):
        if parameter.requires_grad and torch.is_grad_enabled():
            seen.append(_Bring.apply(parameter, visitors, number, copies))  # type: ignore[no-untyped-call]
        else:
            seen.append(copies[number].detach())
    try:
        for slot in visitors.places:
            slot.owner._parameters[slot.name] = seen[slot.number]
        yield
    finally:
        for slot in visitors.places:
            slot.owner._parameters[slot.name] = visitors.parameters[slot.number]


def _chosen(
    live: AttachedProgram, setting: ParameterOffloadSetting
) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The blocks, each with the names of its parameters that go."""
    if setting.ahead < 0:
        raise UsageError(f"ahead of parameter-offload is {setting.ahead}", "Give 0 or more")
    if hasattr(live.model, "no_sync"):
        raise UsageError(
            "parameter-offload cannot take a distributed data parallel model",
            "Apply the plan before wrapping it",
        )
    if live.optimizer is not None and any(group.get("capturable") for group in live.optimizer.param_groups):
        raise UsageError(
            "parameter-offload: a capturable optimizer needs its parameters on the card",
            "Make it with capturable=False",
        )
    names = setting.modules or tuple(block.path for block in find_blocks(live.model))
    if not names:
        raise UsageError("parameter-offload finds no blocks in the model", "Name some with modules")
    for name in names:
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise UsageError(f"parameter-offload: {name} is a part of {outer}", "Leave one out")
    chosen = chosen_modules(live.model, names, ParameterOffload.name)
    blocks = [(one, going) for one, going in zip(chosen, own_names(live.model, chosen), strict=True) if going]
    if not blocks:
        raise UsageError(
            "parameter-offload: the chosen blocks have no parameters of their own", "Choose others"
        )
    return blocks


def _bytes(model: nn.Module, path: str) -> int:
    return sum(parameter.nbytes for parameter in model.get_submodule(path).parameters())


# -- where parameters and the optimizer's state live ---------------------------------------------------------------


def place(live: AttachedProgram, away: dict[int, nn.Parameter]) -> None:
    """Put the chosen parameters onto the host, and all else onto the device."""
    if live.placed:
        move_tensors(live.model, torch.device("cpu"), lambda p: id(p) in away)
    else:
        move_tensors(live.model, live.device, lambda p: id(p) not in away)
        live.set(live, "placed", True)
    if live.device.type == "cuda":
        for parameter in away.values():
            parameter.data = parameter.data.pin_memory()
    live.on_undo(lambda: move_tensors(live.model, live.device, lambda p: id(p) in away))


def settle_optimizer(live: AttachedProgram, away: dict[int, nn.Parameter], keeping: Depot | None) -> None:
    """Let the optimizer's state be where the parameters are, and gradients come before it steps."""
    optimizer = live.optimizer
    if optimizer is not None:
        _move_state(optimizer, away, torch.device("cpu"))
        live.on_undo(lambda: _move_state(optimizer, away, live.device))
        live.keep_pageable(lambda: [one for p in away.values() for one in state_tensors(optimizer, p)])
    if keeping is None:
        return
    live.gathering.append(keeping.gradients.gather)
    live.on_undo(lambda: live.gathering.remove(keeping.gradients.gather))
    if optimizer is not None:
        live.on_undo(optimizer.register_step_pre_hook(_Gathered(keeping)).remove)


def _move_state(
    optimizer: torch.optim.Optimizer, away: dict[int, nn.Parameter], device: torch.device
) -> None:
    for group in optimizer.param_groups:
        # torch/optim/optimizer.py, _process_value_according_to_param_policy: counters of steps are on the card then.
        counters = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            if id(parameter) not in away:
                continue
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and (value.dim() or counters or device.type == "cpu"):
                    state[name] = value.to(device)


class _Gathered:
    """Refuses a step that would miss gradients."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot

    def __call__(self, *_: Any) -> None:
        if self._depot.gradients.pending:
            raise UsageError(
                "gradients are still on the card",
                "Step with plan.step(), or let parameter-offload send them to the host",
            )
