"""A workload: what is needed to run steps of a model at any input size, and how one is read from a file."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from vramfit.errors import UsageError, VramfitError
from vramfit.failure_line import failure_line

if TYPE_CHECKING:
    import torch
    from torch import nn

T = TypeVar("T")
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
            UsageError: the device is not the CPU, or the model is not a module.
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
        if not self.trains:
            self.run_forward(state, sizes)
            return None
        batch = to_device(self.batch(**sizes), state.device)
        if self.step is not None:
            return self.step(state, batch)
        assert self.loss is not None
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

    def run_forward(self, state: State, sizes: Mapping[str, int]) -> Any:
        """What the model gives for a batch at these sizes, without gradients."""
        import torch

        batch = to_device(self.batch(**sizes), state.device)
        with torch.no_grad():
            return call_model(state.model, batch)


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


# -- Reading a workload from a file -------------------------------------------------------------------------


def split_target(target: str, kind: str = "workload") -> tuple[Path, str]:
    """File and name of ``FILE.py:NAME``, without running anything.

    Args:
        kind: what it should name, for the error.

    Raises:
        UsageError: the form is another, or the file does not exist.
    """
    file, separator, name = target.rpartition(":") if isinstance(target, str) else ("", "", "")
    if not separator or not file or not name.isidentifier():
        hint = "Write it as FILE.py:NAME, the file and the variable in it"
        if isinstance(target, str) and target.endswith(".py") and kind == "workload":
            hint += f"; for the program itself there are vramfit plan, fit and check {target} (docs/fit.md)"
        raise UsageError(f"{target!r} names no {kind}", hint)
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file}", "Check the path; it is relative to the current folder")
    return path, name


def load_workload(target: str) -> Workload:
    """Read ``FILE.py:NAME``: run the file as a module and take the workload of that name.

    Raises:
        UsageError: the file or the name does not exist, or is not a `Workload`.
        VramfitError: the file itself fails; exit code 1.
    """
    return load_named(target, Workload, "vramfit.Workload")


def load_named(target: str, kind: type[T], called: str) -> T:
    """Read ``FILE.py:NAME``: run the file as a module and take what has that name, or what a function of it gives.

    Args:
        kind: what it has to be.
        called: the kind by the name that people write.

    Raises:
        UsageError: the file or the name does not exist, or is something else.
        VramfitError: the file itself fails; exit code 1.
    """
    short = called.rpartition(".")[2]
    path, name = split_target(target, "workload" if short == "Workload" else short)
    module = _run_file(path)
    if not hasattr(module, name):
        known = sorted(key for key, value in vars(module).items() if isinstance(value, kind))
        hint = f"It has {', '.join(known)}" if known else _advice(short, called, name, path)
        raise UsageError(f"{path} has no {name}", hint)
    found = getattr(module, name)
    if not isinstance(found, kind) and callable(found):
        found = _made(found, path, name, called)
    if not isinstance(found, kind):
        raise UsageError(
            f"{name} in {path} is of type {type(found).__name__}, not a {short}",
            _advice(short, called, name, path),
        )
    return found


def _advice(short: str, called: str, name: str, path: Path) -> str:
    """What to write in the place of what is none; of a workload a template, and the page that has more."""
    if short != "Workload":
        return f"Make it a {called}, or a function without arguments that gives one"
    return (
        f"Write {name} = vramfit.Workload(model=MyModel, batch=lambda batch_size: torch.randn(batch_size, 8), "
        'sizes={"batch_size": 4}, loss=lambda model, batch: model(batch).mean(), optimizer=torch.optim.AdamW) '
        f"(docs/plan.md), or plan for the program itself: vramfit plan --gpu NAME {path} (docs/fit.md)"
    )


def _made(function: Callable[[], Any], path: Path, name: str, called: str) -> Any:
    hint = f"Name a {called}, or a function without arguments that gives one"
    try:
        wanted = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # a built-in, which has none
        wanted = []
    if wanted:
        raise UsageError(f"{name} in {path} is a function that wants {', '.join(wanted)}", hint)
    try:
        with _as_a_program(path, f"{name}()", hint):
            return function()
    except UsageError:
        raise
    except Exception as error:
        raise own_failure(path, error, f"{name}()") from error


@contextlib.contextmanager
def _as_a_program(path: Path, what: str, hint: str) -> Iterator[None]:
    """While a file's code runs, it finds itself as the program, without arguments.

    Raises:
        UsageError: it ends the program, as parsers of arguments do; what it said last is a part of the message.
    """
    before, said = sys.argv, io.StringIO()
    sys.argv = [str(path)]
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as error:
        last = said.getvalue().strip().rpartition("\n")[2]
        why = f" ({last})" if last else f" with exit code {error.code}" if error.code else ""
        said = io.StringIO()
        raise UsageError(f"{what} in {path} ends the program{why}", hint) from None
    finally:
        sys.argv = before
        sys.stderr.write(said.getvalue())


def _run_file(path: Path) -> ModuleType:
    """Run a file as python would, with its folder first on the path."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = (
        path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"_workload_{path.stem}"
    )
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", "Give a file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _as_a_program(path, "the code", 'Put what runs as a program below if __name__ == "__main__":'):
            spec.loader.exec_module(module)
    except UsageError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise own_failure(path, error, "the file") from error
    return module


def own_failure(path: Path, error: BaseException, what: str) -> VramfitError:
    """What the user's own code raised, with the line of theirs that did."""
    names = {str(path), str(path.absolute())}  # Python makes the path absolute
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in names]
    where = f"{path}:{lines[-1]}" if lines else str(path)
    if isinstance(error, SyntaxError) and error.lineno:
        where = f"{path}:{error.lineno}"
    return VramfitError(f"{where}: {failure_line(error)}", f"Correct {what}: python {path} shows the same")
