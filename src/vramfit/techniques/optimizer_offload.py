"""The optimizer's states and its step on the CPU: torchao's offload in the place of a step on the card.

NOTE [Offloaded optimizers]: torchao makes an optimizer for each large parameter on the host and one for the small ones
on the card. Its groups are one for each parameter, its ``state_dict`` has a form of its own, it keeps no handles of its
hooks, and its copies of the parameters on the host overwrite what a program loads into the model. `HostOptimizer`
shows the groups of the program's own optimizer instead, and copies their values to torchao's before each step; its
``state`` holds torchao's states by the parameters on the card, so that checkpoints fit the program's own optimizer;
parameters that somebody changed since the last step, as their version counters tell, are copied to the host anew.
torchao copies gradients in the backward pass, and never sees what a program's own loop does to them then: below such a
loop they are copied at the step, as the loop left them.

NOTE [Master weights]: parameters in bfloat16 are stepped in float32: torchao's copies stay in bfloat16, since they are
what crosses the link, and beside each lies a master in float32, which the host's optimizer has in its place.
Checkpoints have what bfloat16 loses as those of low-precision-training on the card do.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import LoopChange, Numerics, Promise, Setting, Technique
from vramfit.techniques.optimizer_kernel import (
    Implementation,
    OptimizerKernel,
    OptimizerKernelSetting,
    implementation_refused,
)
from vramfit.techniques.support.float32_steps import REMAINDERS, Float32Steps, join_, lost_bits
from vramfit.techniques.support.optimizer_exchange import (
    Optimizer,
    exchange,
    exchangeable,
    fused_refused,
    is_separable,
    others_excluded,
    parameters_of,
    place_counters,
    state_tensors,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerOffloadSetting(Setting):
    """What leaves the card.

    Attributes:
        offload_gradients: whether each gradient goes to the host in the backward pass and leaves the card at once.
        minimal_size: parameters with fewer elements keep their states on the card.
    """

    offload_gradients: bool = False
    minimal_size: int = 4096


class OptimizerOffload(Technique[OptimizerOffloadSetting]):
    """torchao's ``CPUOffloadOptimizer``: the states lie in host memory, and the CPU takes the step.

    Gradients are copied to pinned memory while the backward pass goes on; at the step the CPU updates its own copy of
    each parameter, which is copied back. (torchao/optim/README.md, after ZeRO-Offload,
    https://arxiv.org/abs/2101.06840.) The card loses all states of large parameters, and with ``offload_gradients`` all
    gradients but the one at work.

    It pays where states are a large part of the memory and steps are long beside them: large batches, accumulated
    micro-batches. It costs host memory of parameters, gradients and states, two passes over the link, and the CPU's
    time for the step, which nothing overlaps: about as long as the host needs to read and write them.

    On a model that is on the CPU it leaves all in its place, and takes the kernel that the step would have there.

    Clip gradients with ``step(clip_norm=...)``: those that are used lie on the host. Loss scaling is refused. With
    ``offload_gradients`` nothing can accumulate, so micro-batches are refused.
    """

    name: ClassVar[str] = "optimizer-offload"
    summary: ClassVar[str] = "keep the optimizer's states on the host and step there"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    phase: ClassVar[AttachStage] = AttachStage.OPTIMIZER
    setting_type = OptimizerOffloadSetting
    follows: ClassVar[str | None] = "low-bit-optimizer"
    excludes: ClassVar[dict[str, str]] = others_excluded("optimizer-offload") | {
        "step-in-backward": "the step needs the CPU, and waits for the end of the backward pass",
    }

    def options(self, profile: Profile) -> Iterable[OptimizerOffloadSetting]:
        """With gradients left on the card, then without; where there are states, and the host has room for them."""
        optimizer = profile.optimizer
        if optimizer is None or profile.device_type != "cuda" or not _offloadable(optimizer):
            return
        if importlib.util.find_spec("torchao") is None:
            return
        setting = OptimizerOffloadSetting()
        moved = [p for p in parameters_of(optimizer) if p.requires_grad and p.numel() >= setting.minimal_size]
        states = sum(_state_bytes(optimizer, parameter) for parameter in moved)
        # Parameters and gradients are pinned, in blocks of powers of two (ATen/core/CachingHostAllocator.h).
        needed = states + 2 * sum(1 << (parameter.nbytes - 1).bit_length() for parameter in moved)
        if not states or needed > profile.host_bytes:
            return
        yield setting
        if not profile.own_step:
            yield OptimizerOffloadSetting(offload_gradients=True)

    def promise(self, setting: OptimizerOffloadSetting) -> Promise:  # noqa: ARG002
        """The CPU rounds otherwise than the card."""
        return Promise(self.numerics, "the optimizer's step may round differently in the last bits")

    def loop_change(self, setting: OptimizerOffloadSetting) -> LoopChange | None:
        """See `Technique.loop_change`."""
        if not setting.offload_gradients:
            return None
        return LoopChange(
            what="takes gradients away from .grad in the backward pass, where the loop could not cut or add them up",
            instead="Give it offload_gradients = false",
        )

    def attach(self, live: AttachedProgram, setting: OptimizerOffloadSetting) -> None:
        """Exchange the optimizer; its states move to the host, and come back with the undo."""
        old = exchangeable(live, self.name)
        _check(live, old)
        if all(parameter.device.type == "cpu" for parameter in parameters_of(old)):
            if implementation_refused(old, Implementation.FUSED) is None:
                OptimizerKernel().attach(live, OptimizerKernelSetting(implementation=Implementation.FUSED))
            return
        host = HostOptimizer(
            old,
            offload_gradients=setting.offload_gradients,
            minimal_size=setting.minimal_size,
            fetches_gradients=live.own_loop,
        )
        host.take_states(old)

        def check() -> None:
            if live.scaler is not None:
                raise _scaled()
            if live.splitter is not None and setting.offload_gradients:
                raise UsageError(
                    "gradients that are offloaded one by one cannot accumulate over micro-batches",
                    "Give optimizer-offload offload_gradients=False, or leave micro-batches out",
                )

        exchange(live, host)
        live.on_undo(lambda: host.give_back(old))
        live.keep_pageable(host.pageable)
        live.after(AttachStage.STEP, check)
        live.before_step.append(check)
        live.on_undo(lambda: live.before_step.remove(check))
        live.set(live, "clip", host.clip)


def _offloadable(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's that can step on the CPU parameter by parameter."""
    return type(optimizer).__module__.startswith("torch.optim.") and is_separable(optimizer)


def _check(live: AttachedProgram, old: Optimizer) -> None:
    if live.scaler is not None:
        raise _scaled()
    if not _offloadable(old):
        raise UsageError(
            f"{type(old).__name__} cannot be offloaded",
            "Use one of torch.optim's that step each parameter on its own",
        )
    places = sorted({parameter.device.type for parameter in parameters_of(old)})
    if places not in (["cuda"], ["cpu"]):
        raise UsageError(
            f"optimizer-offload is for a model on one CUDA device, and parameters are on {' and '.join(places)}",
            "Leave it out",
        )
    if isinstance(live.model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "optimizer-offload cannot wait for the gradients of other processes", "Leave it out with DDP"
        )
    if importlib.util.find_spec("torchao") is None:
        raise UsageError(
            "optimizer-offload needs torchao, which is not installed", "pip install vramfit[torchao]"
        )


def _scaled() -> UsageError:
    return UsageError(
        "optimizer-offload cannot go with loss scaling: gradients reach the host before they are divided again",
        "Train in bfloat16, or leave one of them out",
    )


def _state_bytes(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Bytes of a parameter's states; before the first step what its optimizer will make."""
    if optimizer.state.get(parameter):
        return sum(value.nbytes for value in state_tensors(optimizer, parameter) if value.numel() > 1)
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    if isinstance(optimizer, torch.optim.SGD):
        return parameter.nbytes if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.Adafactor):
        return 0  # a row and a column
    return 2 * parameter.nbytes


_NOT_SHARED = ("params", "param_names", "foreach", "fused", "capturable", "initial_lr")


class HostOptimizer(torch.optim.Optimizer):
    """The optimizer of a program, with states and step on the host. See NOTE [Offloaded optimizers].

    Args:
        offload_gradients: whether gradients leave the card in the backward pass.
        minimal_size: parameters with fewer elements stay on the card.
        fetches_gradients: whether gradients go to the host at the step, as they are then, and not in the backward pass.

    Attributes:
        saves_as_the_program: its ``state_dict`` is one of the optimizer before.
    """

    saves_as_the_program = True

    def __init__(
        self,
        old: Optimizer,
        *,
        offload_gradients: bool,
        minimal_size: int,
        fetches_gradients: bool = False,
    ) -> None:
        super().__init__(
            [{**group, "params": list(group["params"])} for group in old.param_groups], dict(old.defaults)
        )
        from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-untyped]

        self._kind = type(old)
        hooks = {parameter: set(_hooks(parameter)) for parameter in parameters_of(self)}
        self._inner: Any = CPUOffloadOptimizer(
            [self._host_group(group) for group in self.param_groups],
            self._kind,
            offload_gradients=offload_gradients,
            minimal_size=minimal_size,
            # torchao would ask for the fused kernel of AdamW, whatever the groups say.
            **({"fused": None} if "fused" in self.defaults else {}),
        )
        placed = [(_hooks(p), key) for p, before in hooks.items() for key in set(_hooks(p)) - before]
        # Hooks of tensors are unseen by Python's garbage collector, and torchao's hold all parameters.
        self._unhook = weakref.finalize(self, _remove, placed)
        self._fetches = fetches_gradients
        if fetches_gradients:
            self._unhook()
        self._versions = {parameter: parameter._version for parameter in self._inner.param_d2h_map}
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self._remainders: dict[torch.Tensor, torch.Tensor] = {}  # of parameters that stay on the card
        self._handles: list[Any] = []

    def pageable(self) -> Iterator[torch.Tensor]:
        """Masters and states on the host; parameters and gradients there are pinned."""
        yield from self._masters.values()
        for parameter in self._inner.param_d2h_map:
            yield from state_tensors(self, parameter)

    # -- torch's interface -----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the host with the gradients of the last backward pass, and copy the parameters back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pass_values()
        self._refresh()
        if self._fetches:
            self._fetch_gradients()
        self._inner.step()
        self._versions = {parameter: parameter._version for parameter in self._inner.param_d2h_map}
        self._show_states()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while it is made; later it has no way to the host."""
        if "_inner" in vars(self):
            raise ValueError(
                "parameters cannot be added to an offloaded optimizer: add them before, and apply again"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this optimizer or the one before saved; large states stay on the host.

        Raises:
            ValueError: it is of another model.
        """
        groups, saved = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ValueError("loaded state dict has other parameter groups than the optimizer")
        for group, values in zip(groups, saved, strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})
            for parameter, index in zip(group["params"], values["params"], strict=True):
                if (found := state_dict["state"].get(index)) is not None:
                    self._put_states(parameter, found, copy=True)
                if (lost := state_dict.get(REMAINDERS, {}).get(index)) is not None:
                    self._put_remainder(parameter, lost)
        self._finish_states()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    # -- for the technique -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_states(self, old: Optimizer) -> None:
        """Move the states of the optimizer before over, which has none then."""
        for parameter in list(old.state):
            self._put_states(parameter, old.state.pop(parameter), copy=False)
        self._finish_states()

    @torch.no_grad()
    def give_back(self, old: Optimizer) -> None:
        """Move the states as they are now back to the optimizer before, and take the hooks away."""
        for parameter, states in self.state.items():
            old.state[parameter] = {
                name: value.to(parameter.device) if _is_large(value) else value
                for name, value in states.items()
            }
        place_counters(old)
        self.state.clear()
        self._unhook()
        self._inner.optim_dict.clear()
        self._inner.param_d2h_map.clear()

    @torch.no_grad()
    def clip(self, norm: float) -> torch.Tensor:
        """Cut all gradients together to a norm, those on the host and those on the card; gives their norm before."""
        inner = self._inner
        inner.stream.synchronize()
        on_host = [inner.param_d2h_map[parameter] for parameter in inner.queue]
        on_card = [p for group in inner.d_param_groups for p in group["params"] if p.grad is not None]
        norms = [nn.utils.get_total_norm([p.grad for p in side]).cpu() for side in (on_host, on_card) if side]
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        for side in (on_host, on_card):
            if side:
                nn.utils.clip_grads_with_norm_(side, norm, total.to(side[0].device))
        return total

    @torch.no_grad()
    def keep_masters(self, remainders: dict[torch.Tensor, torch.Tensor]) -> None:
        """Step parameters in bfloat16 in float32 from now on. See NOTE [Master weights].

        Args:
            remainders: what bfloat16 lost, by parameter; emptied.
        """
        inner = self._inner
        for parameter, host in inner.param_d2h_map.items():
            if parameter.dtype is torch.bfloat16:
                stepping = inner.optim_dict[parameter]
                master = torch.empty_like(host, dtype=torch.float32).copy_(parameter)
                stepping.param_groups[0]["params"] = [master]
                if (states := stepping.state.pop(host, None)) is not None:
                    stepping.state[master] = states
                self._masters[parameter] = master
                self._handles += [
                    stepping.register_step_pre_hook(_Widened(host, master)),
                    stepping.register_step_post_hook(_Narrowed(host, master)),
                ]
        self._remainders = {
            parameter: lost.to(parameter.device)
            for parameter, lost in remainders.items()
            if parameter not in inner.param_d2h_map
        }
        for parameter, lost in remainders.items():
            self._put_remainder(parameter, lost)
        remainders.clear()
        if inner.d_opt is not None:
            steps = Float32Steps(self._remainders, half_states=False)
            self._handles += [
                inner.d_opt.register_step_pre_hook(steps.before),
                inner.d_opt.register_step_post_hook(steps.after),
            ]
        self._handles.append(self.register_state_dict_post_hook(_save_remainders))

    @torch.no_grad()
    def drop_masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Step in the parameters' own dtype again; what bfloat16 loses of them, by parameter."""
        lost = self.remainders()
        for handle in self._handles:
            handle.remove()
        inner = self._inner
        for parameter, master in self._masters.items():
            stepping, host = inner.optim_dict[parameter], inner.param_d2h_map[parameter]
            stepping.param_groups[0]["params"] = [host]
            if (states := stepping.state.pop(master, None)) is not None:
                stepping.state[host] = states
        self._handles.clear()
        self._masters.clear()
        self._remainders = {}
        return lost

    def remainders(self) -> dict[torch.Tensor, torch.Tensor]:
        """What bfloat16 loses of each master, int16."""
        hosts = self._inner.param_d2h_map
        masters = self._masters.items()
        return {p: lost_bits(master, hosts[p]) for p, master in masters} | self._remainders

    # -- inside ----------------------------------------------------------------------------------------------------

    def _host_group(self, group: dict[str, Any]) -> dict[str, Any]:
        parameters = group["params"]
        one = {**group, "params": list(parameters)}
        one.pop("param_names", None)
        if "capturable" in one:
            one["capturable"] = False  # the CPU knows no graphs
        if "fused" in one:
            on_host = (torch.empty((), dtype=p.dtype) for p in parameters)
            one["fused"] = fused_refused(self._kind, on_host) is None and not one.get("differentiable")
            one["foreach"] = False
        return one

    def _host_of(self, parameter: torch.Tensor) -> tuple[Optimizer | None, torch.Tensor]:
        """The optimizer that steps a parameter, and the parameter that it has."""
        inner = self._inner
        if parameter in inner.param_d2h_map:
            host = self._masters.get(parameter, inner.param_d2h_map[parameter])
            return inner.optim_dict[parameter], host
        return inner.d_opt, parameter

    def _pass_values(self) -> None:
        """Give what schedules changed in the groups to torchao's."""
        inner = self._inner
        theirs = {parameter: host.param_groups[0] for parameter, host in inner.optim_dict.items()}
        theirs |= {parameter: group for group in inner.d_param_groups for parameter in group["params"]}
        for group in self.param_groups:
            values = {name: value for name, value in group.items() if name not in _NOT_SHARED}
            for parameter in group["params"]:
                if parameter in theirs:
                    theirs[parameter].update(values)

    def _fetch_gradients(self) -> None:
        """Copy all gradients to the host, as torchao's hooks do in the backward pass."""
        inner = self._inner
        inner.queue.clear()
        inner.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(inner.stream):
            for parameter, host in inner.param_d2h_map.items():
                if parameter.grad is not None:
                    host.grad.copy_(parameter.grad, non_blocking=True)
                    inner.queue[parameter] = inner.stream.record_event()

    @torch.no_grad()
    def _refresh(self) -> None:
        for parameter, host in self._inner.param_d2h_map.items():
            if parameter._version != self._versions[parameter]:
                host.copy_(parameter)
                if parameter in self._masters:
                    self._masters[parameter].copy_(host)

    def _show_states(self) -> None:
        for parameter in parameters_of(self):
            stepping, known = self._host_of(parameter)
            if stepping is not None and known in stepping.state:
                self.state[parameter] = stepping.state[known]

    def _put_states(self, parameter: torch.Tensor, states: dict[str, Any], *, copy: bool) -> None:
        stepping, known = self._host_of(parameter)
        if stepping is None or not parameter.requires_grad:
            return
        stepping.state[known] = {
            name: value.to(known.device if _is_large(value) else "cpu", copy=copy)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in states.items()
        }

    def _put_remainder(self, parameter: torch.Tensor, lost: torch.Tensor) -> None:
        if (master := self._masters.get(parameter)) is not None:
            self._inner.param_d2h_map[parameter].copy_(parameter)
            self._versions[parameter] = parameter._version
            join_(master.copy_(parameter), lost.to("cpu"))
        elif parameter in self._remainders:
            self._remainders[parameter].copy_(lost)

    def _finish_states(self) -> None:
        for optimizer in (*self._inner.optim_dict.values(), self._inner.d_opt):
            if optimizer is not None:
                place_counters(optimizer)
        self._show_states()


class _Widened:
    """Before a step on the host: the gradient of a master, from that in bfloat16."""

    def __init__(self, host: torch.Tensor, master: torch.Tensor) -> None:
        self._host, self._master = host, master

    def __call__(self, *_: Any) -> None:
        """Widen the gradient."""
        assert self._host.grad is not None
        self._master.grad = self._host.grad.to(torch.float32)


class _Narrowed(_Widened):
    """After the step: the weight that goes to the card."""

    def __call__(self, *_: Any) -> None:
        """Round the weight to nearest."""
        self._host.copy_(self._master)
        self._master.grad = None


def _save_remainders(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Add what bfloat16 loses; a hook after ``state_dict``."""
    assert isinstance(optimizer, HostOptimizer)
    lost = optimizer.remainders()
    numbered = enumerate(parameters_of(optimizer))
    state_dict[REMAINDERS] = {index: lost[p] for index, p in numbered if p in lost}


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _remove(placed: list[tuple[dict[int, Any], int]]) -> None:
    for hooks, key in placed:
        hooks.pop(key, None)


def _hooks(parameter: torch.Tensor) -> dict[int, Any]:
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks
