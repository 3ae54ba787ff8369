"""``torch.jit.trace`` and what is built on it: the module runs once, for its memory, and no graph is recorded.

torch's tracer turns sizes into tensors, which fake tensors cannot have, and a graph has no place in a memory run. The
result runs the module itself. ``torch.jit.script`` reads source text instead, and stays torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner

Warn = Callable[[str], None]
_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


class TracedModule(nn.Module):
    """Stands for a traced module: shares its parameters and children, and runs it."""

    _traced: nn.Module
    _warn: Warn

    def __init__(self, module: nn.Module, warn: Warn) -> None:
        super().__init__()
        self.__dict__.update(module.__dict__)  # the same parameters under the same names
        self.__dict__.update(_traced=module, _warn=warn)  # not as a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module that was traced gives."""
        return self._traced(*args, **kwargs)

    def train(self, mode: bool = True) -> TracedModule:
        """Set the mode, also of the module that was traced."""
        super().train(mode)
        self._traced.train(mode)
        return self

    def save(self, f: Any, **options: Any) -> None:  # noqa: ARG002  # as torch calls it
        """Write nothing: there is no graph, and a warning says so."""
        self._warn("a traced module is not written: nothing was recorded")


class TracedFunction:
    """Stands for a traced function, and runs it."""

    def __init__(self, function: Callable[..., Any], warn: Warn) -> None:
        functools.update_wrapper(self, function, updated=())
        self._traced = function
        self._warn = warn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function that was traced gives."""
        return self._traced(*args, **kwargs)

    def save(self, f: Any, **options: Any) -> None:  # noqa: ARG002  # as torch calls it
        """Write nothing: there is no graph, and a warning says so."""
        self._warn("a traced function is not written: nothing was recorded")


_STAND_INS = (TracedModule, TracedFunction)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Replace tracing, freezing of what was traced, and the export to ONNX."""

    def warn(message: str) -> None:
        mode.machine.warn("no-graph", message, location=mode.guesses.location())

    patches.rebind(
        [
            (torch.jit.trace, _trace(warn)),
            (torch.jit.trace_module, _trace_module(warn)),
            (torch.jit.freeze, _passed_on(torch.jit.freeze)),
            (torch.jit.optimize_for_inference, _passed_on(torch.jit.optimize_for_inference)),
            (torch.onnx.export, _onnx_export(warn)),
        ]
    )


def writers(mode: OpRunner, patches: PatchStack) -> dict[str, Callable[[ModuleType], None]]:
    """Changes, by module, of TensorBoard's writers: ``add_graph`` runs the model once and adds nothing."""

    def add_graph(self: Any, model: Any, input_to_model: Any = None, *options: Any, **named: Any) -> None:
        mode.machine.warn(
            "no-graph",
            "add_graph runs the model once and writes no graph: nothing is recorded of a virtual run",
            location=mode.guesses.location(),
        )
        if input_to_model is not None:
            _run_evaluating(model, input_to_model, {})

    def change(module: ModuleType) -> None:
        writer = vars(module).get("SummaryWriter")
        if writer is not None:
            patches.set(writer, "add_graph", add_graph)

    return dict.fromkeys(_WRITERS, change)


def _arguments(inputs: Any) -> tuple[Any, ...]:
    # torch/jit/_trace.py, make_tuple
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def _run_evaluating(model: Any, inputs: Any, named: Mapping[str, Any]) -> None:
    """Run a model as TensorBoard and ONNX do: in evaluation mode, afterwards as it was."""
    training = isinstance(model, nn.Module) and model.training
    if training:
        model.eval()
    try:
        model(*_arguments(inputs), **named)
    finally:
        if training:
            model.train()


def _stand_in(traced: Any, warn: Warn) -> Any:
    warn(
        "torch.jit.trace records no graph on the virtual GPU: the module itself runs where the traced one would"
    )
    return TracedModule(traced, warn) if isinstance(traced, nn.Module) else TracedFunction(traced, warn)


def _trace(warn: Warn) -> Callable[..., Any]:
    @functools.wraps(torch.jit.trace)
    def trace(func: Any, example_inputs: Any = None, *options: Any, **named: Any) -> Any:
        keywords = named.get("example_kwarg_inputs")
        if (example_inputs is None) == (keywords is None):
            raise RuntimeError("example_inputs or example_kwarg_inputs: one of them must be given")
        if isinstance(func, (torch.jit.ScriptFunction, torch.jit.ScriptModule, *_STAND_INS)):
            return func
        if keywords is not None:
            func(**keywords)
        else:
            func(*_arguments(example_inputs))
        return _stand_in(func, warn)

    return trace


def _trace_module(warn: Warn) -> Callable[..., Any]:
    @functools.wraps(torch.jit.trace_module)
    def trace_module(mod: nn.Module, inputs: Mapping[str, Any], *options: Any, **named: Any) -> Any:
        for method, given in inputs.items():
            call = mod if method == "forward" else getattr(mod, method)
            if named.get("example_inputs_is_kwarg"):
                call(**given)
            else:
                call(*_arguments(given))
        return _stand_in(mod, warn)

    return trace_module


def _passed_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """A pass over a graph, which returns a stand-in without a graph unchanged."""

    @functools.wraps(original)
    def passed(mod: Any, *args: Any, **kwargs: Any) -> Any:
        return mod if isinstance(mod, _STAND_INS) else original(mod, *args, **kwargs)

    return passed


def _onnx_export(warn: Warn) -> Callable[..., Any]:
    @functools.wraps(torch.onnx.export)
    def export(model: Any, args: Any = (), f: Any = None, *options: Any, **named: Any) -> None:
        if f is None:
            raise NotImplementedError(
                "vramfit: the virtual GPU makes no ONNX program: parameters have no values there. "
                "Leave the export out of the run, or give torch.onnx.export a file, which is then not written"
            )
        warn("torch.onnx.export runs the model once and writes no file: parameters have no values here")
        keywords: Mapping[str, Any] = named.get("kwargs") or {}
        given = _arguments(args) if args is not None else ()
        # torch/onnx/__init__.py: the last of args holds those by name.
        if given and isinstance(given[-1], dict) and not keywords:
            *given, keywords = given  # type: ignore[assignment]
        with torch.no_grad():
            _run_evaluating(model, tuple(given), keywords)

    return export
