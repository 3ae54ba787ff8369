"""Observes what a program trains while it runs; see `ObservedProgram`. It changes nothing of the program.

NOTE [What is looked at, and when]: optimizers, schedules, scalers and loaders when they are made; a model at its first
outermost call with gradients, where its arguments are seen by a hook that takes itself away, and so is autocast, in the
first of its modules that runs; the framework by the objects on the stack of that call. Later calls are only counted.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from vramfit.capture.attribution import ModuleStack, PhaseTracker, ProgramPhase
from vramfit.capture.observing.command_options import following_options
from vramfit.capture.observing.framework_facts import framework_here
from vramfit.capture.observing.program_frames import (
    is_called_by_library,
    line_of,
    model_name_here,
    name_of,
    program_frame,
    program_line,
    program_lines,
)
from vramfit.capture.observing.tensor_shapes import shapes_of
from vramfit.capture.observing.training_finder import (
    TrainingFinder,
    elements,
    following_optimizers,
    parameters_of,
    wants_closure,
)
from vramfit.capture.observing.used_models import UsedModels
from vramfit.capture.observing.wrappers import kind_of, own_class, peeled
from vramfit.patching import PatchStack
from vramfit.torch_internals.layers import is_compiled
from vramfit.trace.observed_program import (
    ObservedLoader,
    ObservedModel,
    ObservedOptimizer,
    ObservedOption,
    ObservedProgram,
)

_NOTHING = object()

_OBSERVERS: list[ProgramObserver] = []


def is_observed() -> bool:
    """Whether the program of this process is observed, as one that vramfit runs is."""
    return bool(_OBSERVERS)


class ProgramObserver:
    """Observes one program. See NOTE [What is looked at, and when].

    Attributes:
        on_training: called with a model, and what wraps it, before its first training pass.
        finder: knows the program's optimizers.
        used: the models that are called and not trained.
    """

    def __init__(self, modules: ModuleStack, phases: PhaseTracker) -> None:
        self.on_training: Callable[[nn.Module], object] = lambda _module: None
        self._modules, self._phases = modules, phases
        self.finder = TrainingFinder()
        self.used = UsedModels()
        self._models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._seen: list[ObservedModel] = []
        self._optimizers: list[ObservedOptimizer] = []
        self._number: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._loaded: list[ObservedLoader] = []
        self._sources: list[Callable[[], Any]] = []
        self._found = ObservedProgram()
        self._options: dict[str, ObservedOption] = {}
        self._backwards = self._in_step = 0

    # -- following the program -----------------------------------------------------------------------------------

    def install(self, patches: PatchStack) -> None:
        """Observe what happens in this process until `patches` are undone."""
        _OBSERVERS.append(self)
        patches.call(partial(_OBSERVERS.remove, self))
        before, on_step = self._phases.before, self._phases.on_step

        def begin(phase: ProgramPhase) -> None:
            if before is not None:
                before(phase)
            self._begin(phase)

        def stepped(ends_round: bool) -> None:
            on_step(ends_round)
            if ends_round:
                self._end_step()

        patches.set(self._phases, "before", begin)
        patches.set(self._phases, "on_step", stepped)
        self.used.install(patches)
        patches.set(torch.optim.Optimizer, "__init__", following_optimizers(self._meet))
        patches.call(register_optimizer_step_post_hook(self._took_step).remove)
        patches.set(
            lr_scheduler.LRScheduler,
            "__init__",
            _telling(lr_scheduler.LRScheduler.__init__, self._meet_schedule),
        )
        patches.set(
            torch.amp.GradScaler, "__init__", _telling(torch.amp.GradScaler.__init__, self._meet_scaler)
        )
        patches.set(DataLoader, "__init__", _telling(DataLoader.__init__, self._meet_loader))
        patches.set(DataLoader, "__iter__", self._following_batches(patches))
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                patches.set(owner, name, self._following_clips(getattr(owner, name)))
        patches.set(
            argparse.ArgumentParser,
            "parse_known_args",
            following_options(lambda option: self._options.update({option.flag: option})),
        )

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._number:  # a class derived from another calls its __init__
            return
        self.finder.meet(optimizer)
        self._number[optimizer] = len(self._optimizers)
        seen = ObservedOptimizer(kind=type(optimizer).__name__, parameters=0, at=program_line())
        with suppress(Exception):  # an optimizer of the program's own may look different
            seen = replace(
                seen,
                parameters=sum(map(elements, parameters_of(optimizer))),
                model_as=model_name_here(optimizer),
                wants_closure=wants_closure(optimizer),
            )
        self._optimizers.append(seen)

    def _took_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        number = self._number.get(optimizer)
        if number is not None and not self._optimizers[number].stepped:
            self._optimizers[number] = replace(self._optimizers[number], stepped=True)

    def _meet_schedule(self, schedule: Any) -> None:
        kind = type(schedule).__name__
        if kind not in self._found.schedulers:
            self._found = replace(self._found, schedulers=(*self._found.schedulers, kind))

    def _meet_scaler(self, scaler: Any) -> None:
        if scaler.is_enabled():
            self._found = replace(self._found, scaler=True)

    def _meet_loader(self, loader: Any) -> None:
        if loader in self._loaders:
            return
        source = _source_of(loader)
        for number, known in enumerate(self._sources):
            if known() is source and is_called_by_library():
                self._loaders[loader] = (
                    number  # a library's, around the program's own: as accelerate prepares it
                )
                return
        self._loaders[loader] = len(self._loaded)
        self._sources.append(_weakly(source))
        self._loaded.append(
            ObservedLoader(batch_size=loader.batch_size, workers=loader.num_workers, at=program_line())
        )

    def _following_batches(self, patches: PatchStack) -> Callable[..., Any]:
        original = DataLoader.__iter__
        followed: set[type] = set()

        @wraps(original)
        def iterate(loader: Any) -> Any:
            found = original(loader)
            number = self._loaders.get(loader)
            if number is not None:
                with suppress(TypeError):  # one of a library's own, which cannot be followed
                    self._iterators[found] = number
                owner = next((base for base in type(found).__mro__ if "__next__" in vars(base)), None)
                if owner is not None and owner not in followed:
                    followed.add(owner)
                    patches.set(owner, "__next__", self._counting_batches(owner))
            return found

        return iterate

    def _counting_batches(self, owner: Any) -> Callable[..., Any]:
        original = owner.__next__

        @wraps(original)
        def following(iterator: Any) -> Any:
            batch = original(iterator)
            number = None
            with suppress(TypeError):
                number = self._iterators.get(iterator)
            if number is not None:
                one = self._loaded[number]
                self._loaded[number] = replace(one, batches=one.batches + 1)
            return batch

        return following

    def _following_clips(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if not self._found.clipping:
                self._found = replace(self._found, clipping=True)
            return original(*args, **kwargs)

        return clip

    def _begin(self, phase: ProgramPhase) -> None:
        if phase is ProgramPhase.FORWARD:
            root = self._modules.root()
            if root is not None:
                self._forward(root)
        elif phase is ProgramPhase.BACKWARD:
            self._backwards += 1
            self._in_step += 1
            if self._found.backward_at is None:
                self._found = replace(self._found, backward_at=program_line())

    def _end_step(self) -> None:
        steps, added = self._found.steps + 1, self._in_step
        self._found = replace(self._found, steps=steps, accumulation=max(self._found.accumulation, added))
        self._in_step = 0

    def _forward(self, root: nn.Module) -> None:
        number = self._models.get(root)
        if number is None:
            if not self.finder.trains(root):
                with suppress(Exception):  # whatever a program's objects make of being looked at, it goes on
                    self.used.meet(root)
                return
            number = self._models[root] = len(self._seen)
            try:
                self._seen.append(self._describe(root))
            except Exception:  # whatever a program's objects make of being looked at, it goes on
                self._seen.append(ObservedModel(kind=own_class(root).__name__, parameters=0, trained=0))
            self.on_training(root)
        one = self._seen[number]
        if torch.is_grad_enabled():
            self._seen[number] = replace(one, calls=one.calls + 1)
        else:
            self._seen[number] = replace(one, evaluations=one.evaluations + 1)

    def replaced(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear that another takes an optimizer's steps: nobody waits for those of the program's own any longer."""
        self._phases.rounds.leave(optimizer)
        number = self._number.get(optimizer)
        if number is not None:
            self._optimizers[number] = replace(self._optimizers[number], stepped=True)

    # -- a trained model -----------------------------------------------------------------------------------------

    def _describe(self, root: nn.Module) -> ObservedModel:
        wrappers, model = peeled(root)
        if not self._seen:
            framework, settings = framework_here()
            self._found = replace(self._found, framework=framework, settings=settings)
        if not any(map(is_compiled, {root, *model.modules()})):  # hooks would be compiled
            self._look_at_arguments(root, len(self._seen))
            self._look_at_autocast(model)
        frame = program_frame()
        return ObservedModel(
            kind=kind_of(model),
            package=own_class(model).__module__.partition(".")[0],
            parameters=sum(map(elements, model.parameters())),
            trained=self.finder.trained(root),
            optimizers=tuple(self._number[one] for one in self.finder.owners(root)),
            wrappers=wrappers,
            called_as="" if frame is None else name_of(root, frame) or name_of(model, frame),
            called_at=None if frame is None else line_of(frame),
            called_from=program_lines(),
        )

    def _look_at_arguments(self, root: nn.Module, number: int) -> None:
        """Note the shapes of a call's tensors by a hook, which takes itself away."""

        def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle.remove()
            self._seen[number] = replace(self._seen[number], shapes=shapes_of((args, kwargs)))

        handle = root.register_forward_pre_hook(look, with_kwargs=True)

    def _look_at_autocast(self, model: nn.Module) -> None:
        """Note autocast inside of a call."""
        inner = next((one for one in model.modules() if not list(one.children())), None)
        if inner is None:
            return

        def look(_module: nn.Module, _args: Any) -> None:
            handle.remove()
            for device in ("cuda", "cpu"):
                if torch.is_autocast_enabled(device) and not self._found.autocast:
                    dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                    self._found = replace(self._found, autocast=dtype)

        handle = inner.register_forward_pre_hook(look)

    # -- the result ----------------------------------------------------------------------------------------------

    def observed(self) -> ObservedProgram:
        """What was seen so far."""
        return replace(
            self._found,
            models=tuple(self._seen),
            used=tuple(self.used.without(self._models)),
            optimizers=tuple(self._optimizers),
            loaders=tuple(loader for loader in self._loaded if loader.batches),
            options=tuple(self._options.values()),
            accumulation=self._accumulation(),
            unclear=tuple(self._unclear()),
        )

    def _accumulation(self) -> int:
        """Batches of a step: as the framework says, by the batches that were loaded, or by the backward passes."""
        found, trained = self._found, len(self._seen)
        if not found.steps:
            return 0
        for name in ("gradient_accumulation_steps", "accumulate_grad_batches"):
            if name in found.settings:
                return int(found.settings[name])
        if trained > 1:
            return 1
        loaded = max((loader.batches for loader in self._loaded), default=0)
        if loaded:
            return max(1, min(loaded // found.steps, found.accumulation))
        return max(1, found.accumulation)

    def _unclear(self) -> Iterator[str]:
        if any(one.wants_closure and one.stepped for one in self._optimizers):
            kind = next(one.kind for one in self._optimizers if one.wants_closure and one.stepped)
            yield (
                f"{kind} runs the model several times in a step, so that no technique can be attached; take an "
                "optimizer whose step needs no closure"
            )
        if self._found.steps and not self._seen:
            yield (
                "the optimizer's parameters are of no module that was called (a functional loop), so that no technique "
                "can be attached; call the model as a module, or write a workload (docs/plan.md)"
            )
        if self._backwards and not self._optimizers:
            yield (
                "gradients were computed, but no optimizer of torch was made, so that no technique can be attached; "
                "step with one of torch.optim, or write a workload (docs/plan.md)"
            )


def _telling(original: Callable[..., None], note: Callable[[Any], object]) -> Callable[..., None]:
    """An ``__init__`` that also tells of the object."""

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        note(self)

    return init


def _weakly(value: Any) -> Callable[[], Any]:
    """A way to an object that does not keep it alive; to nothing where it can only be kept alive, as a list."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: _NOTHING


def _source_of(loader: Any) -> Any:
    """What a loader draws its batches from: its sampler of batches, without what a library put around that."""
    source = loader.batch_sampler if loader.batch_sampler is not None else loader.dataset
    while (inner := vars(source).get("batch_sampler") if hasattr(source, "__dict__") else None) is not None:
        source = inner
    return source


def observe_program(modules: ModuleStack, phases: PhaseTracker, patches: PatchStack) -> ProgramObserver:
    """Observe the program of this process until `patches` are undone."""
    observer = ProgramObserver(modules, phases)
    observer.install(patches)
    return observer
