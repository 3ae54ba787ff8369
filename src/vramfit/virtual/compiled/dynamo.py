"""Dynamo on the virtual GPU: it compiles outside of it, and what it cannot compile runs eagerly, with a warning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vramfit.compiled_through import original_of
from vramfit.patching import PatchStack
from vramfit.torch_internals import compiler, compiler_inputs
from vramfit.torch_internals.compiler import (
    CheckFunctionManager,
    ConvertFrameReturn,
    FrameAction,
    FrameExecStrategy,
    OptimizerVariable,
    Unsupported,
    convert_frame,
    eval_frame,
    functorch_config,
)
from vramfit.virtual.compiled.outside import Outside
from vramfit.virtual.op_runner import OpRunner

_COUNT = "set_fullgraph_compiled_frame_count"
_PARTS_OF_PROGRAMS = ("techniques", "compiled_through.py")
_OURS = tuple(
    str(part) + (os.sep if part.is_dir() else "")
    for part in sorted(Path(__file__).resolve().parents[2].iterdir())
    if part.name not in _PARTS_OF_PROGRAMS
)
"""What lies in this package, but for what is compiled with a program: what techniques put around a model's layers, and
what passes a compiler on to the original."""


def install(mode: OpRunner, outside: Outside, patches: PatchStack) -> None:
    """Let Dynamo see the program's frames, and none of ours."""
    wrapper = convert_frame.CatchErrorsWrapper
    original = wrapper.__call__
    module_call = nn.Module.__call__.__code__
    refusals = _Refusals(patches)

    def convert(self: Any, frame: Any, *rest: Any) -> Any:
        code = frame.f_code
        if code is module_call:
            return _skip(within=False)  # it is what torch's own method calls that a program compiles
        if code.co_filename.startswith(_OURS):
            return _skip(within=True)  # our frames are no part of the program, nor is what they call
        try:
            with outside(), functorch_config.patch(enable_autograd_cache=False):
                return original(self, frame, *rest)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _tell(mode, error, f"{code.co_filename}:{code.co_firstlineno}")
            refusals.stop()
            return _skip(within=True)

    patches.set(wrapper, "__call__", convert)
    _patch_optimizers(mode, patches)
    _patch_guards(mode, patches)
    _patch_flex_attention(mode, outside, patches)
    # The mode is for the run, not for the compiler: a compiled program may run under it.
    patches.set(type(mode), "ignore_compile_internals", classmethod(lambda cls: True))
    compiler.compile_under_modes()
    compiler.compute_no_constants(patches)
    compiler.know_what_stands_in(original_of, patches)
    compiler_inputs.take_inputs_of_other_modes(patches)
    patches.call(compiler.reset)  # what was compiled for virtual tensors fits no others
    compiler.skipped_folders.extend(_OURS)
    compiler.make_skip_list_anew()

    def forget() -> None:
        for part in _OURS:
            compiler.skipped_folders.remove(part)
        compiler.make_skip_list_anew()

    patches.call(forget)


def _patch_optimizers(mode: OpRunner, patches: PatchStack) -> None:
    """An optimizer that is compiled makes its states for real when Dynamo first sees it: on the virtual card."""
    original = OptimizerVariable.call_method

    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        make = getattr(self.value, name, None) if name == compiler.MAKING_OPTIMIZER_STATES else None
        if make is None:
            return original(self, tx, name, *args, **kwargs)

        def make_here(*states: Any, **options: Any) -> Any:
            with mode:
                return make(*states, **options)

        with PatchStack() as once:
            once.set(self.value, name, make_here)
            return original(self, tx, name, *args, **kwargs)

    patches.set(OptimizerVariable, "call_method", call_method)


def _patch_guards(mode: OpRunner, patches: PatchStack) -> None:
    """Guards keep which dispatch keys are in force, and are checked where the program runs: under our mode."""
    original = CheckFunctionManager.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with mode:
            original(self, *args, **kwargs)

    patches.set(CheckFunctionManager, "__init__", init)


def _patch_flex_attention(mode: OpRunner, outside: Outside, patches: PatchStack) -> None:
    """``flex_attention`` with gradients traces its functions while the program runs: outside, as compilers do.

    What it makes on the card is kept virtual.
    """
    flex_attention = compiler.flex_attention()
    original = flex_attention.create_fw_bw_graph

    def create_fw_bw_graph(*args: Any, **kwargs: Any) -> Any:
        with outside(), mode.fake:
            return original(*args, **kwargs)

    patches.set(flex_attention, "create_fw_bw_graph", create_fw_bw_graph)


class _Refusals:
    """With ``fullgraph=True`` torch refuses a call of which no frame was compiled.

    Once something ran eagerly here, such calls pass: torch remembers which code it skips, and does not ask again.
    """

    def __init__(self, patches: PatchStack) -> None:
        self._eager = False
        self._count: Any = getattr(eval_frame, _COUNT, None)  # new in torch 2.13
        if self._count is not None:
            patches.set(eval_frame, _COUNT, self._counted)

    def stop(self) -> None:
        """Refuse no calls from now on: something has run eagerly."""
        self._eager = True

    def _counted(self, value: int) -> int:
        before: int = self._count(value)
        return max(before, 1) if self._eager and value < 0 else before


def _skip(*, within: bool) -> ConvertFrameReturn:
    """Run a frame as it is, and with `within` whatever it calls."""
    inner = FrameAction.SKIP if within else FrameAction.DEFAULT
    return ConvertFrameReturn(frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, inner))


def _tell(mode: OpRunner, error: Exception, location: str) -> None:
    reason = " ".join(str(error).partition("\n\n")[0].split())[:300]
    card = " (with fullgraph=True, a card would raise this)" if isinstance(error, Unsupported) else ""
    mode.machine.warn(
        "compile-ran-eagerly",
        "torch.compile could not be followed here and the program ran eagerly, which usually takes more memory than "
        f"the compiled one: {type(error).__name__}: {reason}{card}",
        location=location,
    )
