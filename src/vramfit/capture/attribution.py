"""Who allocates: the Python stack, the module and the phase at this moment.

They end up in the trace and in the report; nothing here changes what the program does.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from enum import Enum
from types import CodeType, FrameType

import torch
from torch import nn

from vramfit.capture.optimizer_rounds import OptimizerRounds
from vramfit.launch.running import OWN_FOLDERS
from vramfit.torch_internals.autograd_engine import current_graph_task_id
from vramfit.trace import TEARDOWN, Frame, TraceBuilder

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Frames of the dispatch machinery itself: they stand between the program's line and our mode, and say nothing.
_MACHINERY = (
    *OWN_FOLDERS,
    _TORCH + "_ops.py",
    _TORCH + "utils" + os.sep + "_python_dispatch.py",
    _TORCH + "_subclasses" + os.sep,
    _TORCH + "utils" + os.sep + "_device.py",
    _TORCH + "overrides.py",
)
_MAX_FRAMES = 64
# Tells objects that live apart as `id` does, which Python announces to audit hooks at each call: that takes five times
# as long while there is one, and files/ has one.
_identity = object.__hash__


class ProgramPhase(Enum):
    """What the program is doing, as far as torch's own hooks show."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    TEARDOWN = TEARDOWN
    """The program has done its work, and lets go of what it holds."""


class StackInterner:
    """Turns the current Python stack into an index of the trace's stack table, quickly.

    A stack is a flat tuple of identities of code and positions in their bytecode: code objects themselves are slow to
    hash, and a line number takes ten times as long to find as the position that it follows from.

    NOTE [Stacks of modules]
    While a module runs, the frames outside of its call stay where they are, so they are walked once for each call of a
    module and known by a number afterwards. A frame is told by its identity: it lives, and keeps it, until the call
    that put the module on its stack ends and takes it off.
    """

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._known: dict[tuple[object, ...], int] = {}
        self._hidden: dict[int, bool] = {}
        self._codes: dict[int, CodeType] = {}  # keeps them alive, so that their identities stay theirs
        self._lines: dict[tuple[int, int], int] = {}
        self._running: Callable[[], list[RunningModule]] = list
        self._call = 0  # identity of the code that calls modules
        self._numbers: dict[tuple[int, ...], int] = {}
        self._outside: list[tuple[int, ...]] = []
        # Innermost frames that no Python frame shows: a compiled program's.
        self.origin: tuple[Frame, ...] = ()

    def current(self, fallback: tuple[int, ...] | None = None, above: int = 0) -> int:
        """Index of the current stack, innermost first, without vramfit's and the dispatcher's own frames.

        Args:
            fallback: the key (from `key`) of the stack to use where this thread has no frame of the program,
                as in autograd's own threads.
            above: how many frames above the caller's the walk begins; those left out must be vramfit's.
        """
        running = self._running()
        key = self._walk(sys._getframe(1 + above), running, len(running) - 1) or fallback or ()
        index = self._known.get((self.origin, key) if self.origin else key)
        return self._intern(key) if index is None else index

    def key(self) -> tuple[int, ...]:
        """The current stack as alternating identities of code and bytecode positions, innermost first.

        Where a module runs, the key ends with the number that stands for the frames outside it. See NOTE [Stacks of
        modules].
        """
        running = self._running()
        return self._walk(sys._getframe(1), running, len(running) - 1)

    def follow_modules(self, modules: ModuleStack, call: CodeType) -> None:
        """Let keys end where a module was called, by frames of `call`, which are hidden."""
        self._running, self._call = modules.running_here, _identity(call)
        self._codes[self._call] = call

    def _walk(self, start: FrameType | None, running: list[RunningModule], depth: int) -> tuple[int, ...]:
        hidden, boundary, frame = self._hidden, self._call, start
        key: list[int] = []
        add = key.append
        while frame is not None and len(key) < 2 * _MAX_FRAMES:
            code = frame.f_code
            number = _identity(code)
            if number == boundary and depth >= 0:
                module = running[depth]
                if module.frame != _identity(frame):
                    if module.frame:  # not the frame that entered it: a switched stack
                        return self._walk(start, running, -1)
                    outside = self._walk(frame.f_back, running, depth - 1)
                    module.frame, module.outside = _identity(frame), self._number(outside)
                add(module.outside)
                break
            skip = hidden.get(number)
            if skip is None:
                skip = self._meet(code)
            if not skip:
                add(number)
                add(frame.f_lasti)
            frame = frame.f_back
        return tuple(key)

    def _number(self, key: tuple[int, ...]) -> int:
        """A negative number that stands for a key at the end of others."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = -1 - len(self._outside)
            self._outside.append(key)
        return number

    def _in_full(self, key: tuple[int, ...]) -> tuple[int, ...]:
        """A key with what its last number stands for."""
        while key and key[-1] < 0:
            key = key[:-1] + self._outside[-1 - key[-1]]
        return key[: 2 * _MAX_FRAMES]

    def _meet(self, code: CodeType) -> bool:
        name = code.co_filename
        number = _identity(code)
        self._codes[number] = code
        skip = self._hidden[number] = name.startswith(_MACHINERY) or name.startswith("<frozen")
        return skip

    def frames(self, key: tuple[int, ...]) -> tuple[Frame, ...]:
        """The frames of a key, innermost first."""
        codes, key = self._codes, self._in_full(key)
        return tuple(
            Frame(codes[number].co_filename, self._line(number, position), codes[number].co_qualname)
            for number, position in zip(key[::2], key[1::2], strict=True)
        )

    def _line(self, number: int, position: int) -> int:
        """The line at a position of a code object's bytecode."""
        line = self._lines.get((number, position))
        if line is None:
            spans = self._codes[number].co_lines()
            line = next((at or 0 for start, end, at in spans if start <= position < end), 0)
            self._lines[number, position] = line
        return line

    def _intern(self, key: tuple[int, ...]) -> int:
        index = self._builder.stack(self.origin + self.frames(key))
        self._known[(self.origin, key) if self.origin else key] = index
        return index


class RunningModule:
    """A module whose ``forward`` is running.

    Attributes:
        index: of the path in the trace.
        frame: identity of the frame that called it, 0 while nobody has asked for a stack inside of it.
        outside: what stands for the frames outside of that one.
    """

    __slots__ = ("frame", "index", "module", "outside", "path")

    def __init__(self, module: nn.Module, path: str, index: int) -> None:
        self.module = module
        self.path = path
        self.index = index
        self.frame = self.outside = 0


class ModuleStack:
    """The nn.Module whose ``forward`` is running on each thread, as a dotted path below its root's class name."""

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._local = threading.local()
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def enter(self, module: nn.Module) -> bool:
        """Push a module; True when it is a root (no other module is running on this thread)."""
        stack = self.running_here()
        root = not stack
        path = self._paths.get(module)
        if path is None:
            self.name_tree(stack[0].module if stack else module)
            path = self._paths.get(module)
            if path is None:  # called, but registered nowhere below the root
                path = f"{stack[-1].path}.{type(module).__name__}" if stack else type(module).__name__
                self._paths[module] = path
        stack.append(RunningModule(module, path, self._builder.module(path)))
        return root

    def leave(self) -> bool:
        """Pop the innermost module; True when the stack is empty again."""
        stack = self.running_here()
        if stack:
            stack.pop()
        return not stack

    def current(self) -> int:
        """Index of the running module in the trace's table, -1 outside every module."""
        stack = self.running_here()
        return stack[-1].index if stack else -1

    def current_path(self) -> str:
        """Dotted path of the running module, empty outside every module."""
        stack = self.running_here()
        return stack[-1].path if stack else ""

    def running(self) -> bool:
        """Whether any module runs on this thread."""
        return bool(self.running_here())

    def root(self) -> nn.Module | None:
        """The outermost module that runs on this thread, None outside every module."""
        stack = self.running_here()
        return stack[0].module if stack else None

    def known(self) -> list[nn.Module]:
        """All modules that are alive and have their paths."""
        return list(self._paths)

    def knows(self, module: nn.Module) -> bool:
        """Whether a module has its path already."""
        return module in self._paths

    def path_of(self, module: nn.Module) -> str:
        """Dotted path of a module, naming its tree from it when it is not known yet."""
        path = self._paths.get(module)
        if path is None:
            self.name_tree(module)
            path = self._paths[module]
        return path

    def name_tree(self, root: nn.Module, base: str = "") -> None:
        """Give every module below ``root`` its path, which begins with ``base`` or else the root's class."""
        base = base or type(root).__name__
        for name, module in root.named_modules():
            self._paths[module] = f"{base}.{name}" if name else base

    def running_here(self) -> list[RunningModule]:
        """The modules that run on this thread, outermost first."""
        stack: list[RunningModule] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack


_STEP = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__
"""Of the function that torch wraps around each optimizer's ``step``, hooks included."""


def _optimizers_stepping() -> int:
    """How many optimizers are in their step on this thread, one called by the other; one that failed does not count."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found += frame.f_code is _STEP
        frame = frame.f_back
    return found


class PhaseTracker:
    """Which step and phase the program is in: ``step 1/forward``, ``step 1/backward``, ``step 1/optimizer``.

    A phase lasts until another begins. A step is a round of the optimizers (NOTE [What a step is] in
    optimizer_rounds.py): the next one begins with the first pass after it. Passes of a closure that an optimizer calls
    belong to its step, as many as there are.

    Attributes:
        phase: the present one.
        step: number of the present step, from 1.
        index: of the present phase in the trace.
        rounds: the optimizers.
        before: called with each phase that is about to begin, the same as now included.
        after: called with each phase that has begun, again where it goes on with another outermost call of a module.
        on_step: called after each step of an optimizer with whether it ends a round.
        on_rest: called when a call of an outermost module, a backward pass or a step of an optimizer is over, and
            before another phase or pass begins.
    """

    def __init__(self, builder: TraceBuilder, on_change: Callable[[int], None]) -> None:
        self._builder = builder
        self._on_change = on_change
        self.phase = ProgramPhase.SETUP
        self.step = 1
        self.rounds = OptimizerRounds()
        self.rounds.on_step = self._stepped
        self.before: Callable[[ProgramPhase], object] | None = None
        self.after: Callable[[ProgramPhase], object] | None = None
        self.on_step: Callable[[bool], object] = lambda _: None
        self.on_rest: Callable[[], object] = lambda: None
        self.index = builder.phase(ProgramPhase.SETUP.value)
        self._stepping = False  # an optimizer has begun to step in this step
        self._round_over = False
        self._closed = False  # the step had passes of a closure

    def begin(self, phase: ProgramPhase) -> None:
        """Enter a phase. Entering the current one again changes nothing; each forward pass is noted all the same."""
        if self.before is not None:
            self.before(phase)
        if self._begins_step(phase):
            self.step += 1
            self._stepping = self._round_over = self._closed = False
        elif phase is self.phase:
            if phase is ProgramPhase.FORWARD:
                self.on_rest()
                self._on_change(self.index)
            self._tell(phase)
            return
        if phase is ProgramPhase.OPTIMIZER:
            self._stepping = True
        self._enter(phase)
        self._tell(phase)

    def _tell(self, phase: ProgramPhase) -> None:
        if self.after is not None:
            self.after(phase)

    def resume(self, phase: ProgramPhase) -> None:
        """Go back to a phase that another interrupted, as steps inside a backward pass do; no new step begins."""
        if phase is not self.phase:
            self._enter(phase)

    def _begins_step(self, phase: ProgramPhase) -> bool:
        """Whether a phase is the first of another step than the one before."""
        if not self._stepping:
            return False
        inside = _optimizers_stepping()
        if phase is not ProgramPhase.OPTIMIZER:
            self._closed = self._closed or inside > 0
            return self._round_over and not inside
        # After one that had passes of its own; steps inside of another's, or of a backward pass, are parts of it.
        return self._round_over and self._closed and inside == 1 and current_graph_task_id() == -1

    def _stepped(self, ends_round: bool) -> None:
        self._round_over = self._round_over or ends_round
        self.on_rest()
        self.on_step(ends_round)

    def end_backward(self) -> None:
        """Note that a backward pass is over: after that of a closure the optimizer goes on."""
        self.on_rest()
        if self._stepping and self.phase is ProgramPhase.BACKWARD and _optimizers_stepping():
            self._enter(ProgramPhase.OPTIMIZER)

    def end(self) -> None:
        """Note that the program has been told to end: what it frees from now on belongs to no step."""
        if self.phase is not ProgramPhase.TEARDOWN:
            self._enter(ProgramPhase.TEARDOWN)

    @property
    def name(self) -> str:
        """The present phase, as a trace names it."""
        if self.phase in (ProgramPhase.SETUP, ProgramPhase.TEARDOWN):
            return str(self.phase.value)
        return f"step {self.step}/{self.phase.value}"

    def _enter(self, phase: ProgramPhase) -> None:
        self.on_rest()
        self.phase = phase
        self.index = self._builder.phase(self.name)
        self._on_change(self.index)
