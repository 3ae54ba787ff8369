"""A workload: what is needed to run steps of a model at any input size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from vramfit.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

Batch: TypeAlias = Any
"""What a model takes: a tensor, or a tuple, list or dict of them; the dict's keys are the model's arguments."""


@dataclass(kw_only=True, slots=True)
class State:
    """What lives from step to step.

    Attributes:
        model: on its device.
        optimizer: None where the workload has none.
        device: where batches go.
        extra: room for what a ``step`` of your own keeps: a second model, a scaler.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and what is done with it, at sizes that can be varied.

    >>> mlp = vramfit.Workload(
    ...     model=lambda: torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))),
    ...     batch=lambda batch_size: torch.randn(batch_size, 1024),
    ...     sizes={"batch_size": 4096},
    ...     loss=lambda model, batch: model(batch).square().mean(),
    ...     optimizer=torch.optim.SGD,
    ... )
    >>> state = mlp.start("cpu")
    >>> mlp.run_step(state, {"batch_size": 2}).shape
    torch.Size([])

    Attributes:
        model: makes the model, on the CPU.
        batch: makes a batch on the CPU for named sizes.
        sizes: the usual value of each size, the one to vary first at the front; names are those of ``batch``.
        loss: the loss of a batch; None runs the model without gradients.
        optimizer: makes the optimizer of the model's parameters; None leaves the parameters as they are.
        groups: options of the optimizer's groups by the names of parameters: ``{"*.bias": {"weight_decay": 0.0}}``. A
            parameter belongs to the first pattern that its name matches (`fnmatch`), and to a group without options of
            its own where none does; the optimizer is made of the groups then.
        step: the whole step, given the state and a batch on its device, where one loss and one optimizer do not say it.

    Raises:
        UsageError: a part is not what it has to be.
    """

    model: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    sizes: Mapping[str, int]
    loss: Callable[[nn.Module, Batch], torch.Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    step: Callable[[State, Batch], Any] | None = None
    groups: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        """Check the parts."""
        for name in ("model", "batch"):
            if not callable(getattr(self, name)):
                raise UsageError(
                    f"{name} of a Workload is no function", f"Give a function that makes the {name}"
                )
        for name in ("loss", "optimizer", "step"):
            part = getattr(self, name)
            if part is not None and not callable(part):
                raise UsageError(f"{name} of a Workload is no function", "Give a function, or leave it out")
        self._check_groups()
        if not isinstance(self.sizes, Mapping) or not self.sizes:
            raise UsageError("a Workload has no sizes", 'Give some, such as sizes={"batch_size": 8}')
        for name, value in self.sizes.items():
            if type(value) is not int or value < 1:
                raise UsageError(
                    f"the size {name} of a Workload is {value!r}", "Give a whole number from 1 on"
                )

    def _check_groups(self) -> None:
        if self.groups is None:
            return
        if self.optimizer is None:
            raise UsageError(
                "a Workload has groups but no optimizer", "Give it the optimizer that they are for"
            )
        if not isinstance(self.groups, Mapping) or not all(
            isinstance(pattern, str) and isinstance(options, Mapping)
            for pattern, options in self.groups.items()
        ):
            raise UsageError(
                "groups of a Workload are no options by names",
                'Write them as {"*.bias": {"weight_decay": 0.0}}',
            )

    @property
    def trains(self) -> bool:
        """Whether a step changes the model."""
        return self.loss is not None or self.step is not None

    def start(self, device: torch.device | str) -> State:
        """A fresh model and optimizer on a device.

        Raises:
            UsageError: the model is made elsewhere than on the CPU.
        """
        import torch

        model = self.make_model().to(device)
        return State(model=model, optimizer=self.make_optimizer(model), device=torch.device(device))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """A fresh optimizer of a model's parameters, in their groups; None where the workload has none.

        Raises:
            UsageError: a pattern of the groups matches no parameter, or the optimizer wants a closure.
        """
        if self.optimizer is None:
            return None
        parameters: Any = model.parameters() if self.groups is None else grouped(model, self.groups)
        made = self.optimizer(parameters)
        if self.step is None:
            check_optimizer(made)
        return made

    def make_model(self) -> nn.Module:
        """A fresh model, where it is made.

        Raises:
            UsageError: that is not the CPU, or it is no module.
        """
        from torch import nn

        model = self.model()
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"model of a Workload gives a {type(model).__name__}, not an nn.Module",
                "Let it return the model",
            )
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type not in ("cpu", "meta"):
                raise UsageError(
                    f"model makes {name} on {tensor.device}",
                    "Make the model on the CPU: it is moved to the device",
                )
        return model

    def run_step(self, state: State, sizes: Mapping[str, int]) -> Any:
        """One step at these sizes: batch, forward and, with a loss, backward and the optimizer's step.

        Returns:
            the loss without its graph, what ``step`` returned, or None without a loss.
        """
        import torch

        batch = to_device(self.batch(**sizes), state.device)
        if self.step is not None:
            return self.step(state, batch)
        if self.loss is None:
            with torch.no_grad():
                call_model(state.model, batch)
            return None
        loss = self.loss(state.model, batch)
        check_loss(loss)
        loss.backward()
        loss = loss.detach()
        if state.optimizer is not None:
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
        else:
            state.model.zero_grad(set_to_none=True)
        return loss


def grouped(model: nn.Module, groups: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A model's parameters in groups, as an optimizer takes them: what matches no pattern comes first.

    Raises:
        UsageError: a pattern matches no parameter.
    """
    rest: list[nn.Parameter] = []
    found: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in groups}
    matched: set[str] = set()
    for name, parameter in model.named_parameters():
        fitting = [pattern for pattern in groups if fnmatchcase(name, pattern)]
        matched.update(fitting)
        (found[fitting[0]] if fitting else rest).append(parameter)
    for pattern in groups:
        if pattern not in matched:
            known = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            raise UsageError(
                f"no parameter has a name like {pattern!r} of the workload's groups",
                f"Names are those of model.named_parameters(), such as {known}",
            )
    return [
        {"params": parameters, **options}
        for parameters, options in ((rest, {}), *((found[one], groups[one]) for one in groups))
        if parameters
    ]


def check_optimizer(optimizer: Any) -> None:
    """Make sure that an optimizer takes a step without running the model itself.

    Raises:
        UsageError: its step wants a closure.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} wants a closure, with which it runs the model several times in a step: a step "
            "here goes forward and backward once",
            "Take another optimizer, or write the whole step yourself: step= of a Workload",
        )


def check_loss(loss: Any) -> None:
    """Make sure that something can go backward from a loss.

    Raises:
        UsageError: it is no scalar, or depends on no parameter.
    """
    import torch

    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(
            f"the loss is no scalar but {shape}", "Take its mean or its sum before the backward pass"
        )
    if not loss.requires_grad:
        raise UsageError(
            "the loss depends on no parameter that is trained",
            "Compute it from the model's output, without no_grad",
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch with all its tensors on a device, in the same containers."""
    if hasattr(batch, "to") and callable(batch.to):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def call_model(model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch: lists are its arguments, a dict its named ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    return model(batch)
