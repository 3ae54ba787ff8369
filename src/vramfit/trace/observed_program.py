"""What a program was seen to train or to run: models, optimizers, loaders, and what else it does. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from vramfit.trace.model import Frame


class Framework(Enum):
    """Whose loop the program runs."""

    NONE = ""
    TRAINER = "Trainer"
    """Hugging Face's `transformers.Trainer`, and what derives from it."""
    LIGHTNING = "Lightning"
    ACCELERATE = "Accelerate"
    """A loop of the program's own with objects that accelerate prepared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedOptimizer:
    """An optimizer that the program made.

    Attributes:
        kind: its class.
        parameters: elements of all that it was made with.
        stepped: whether it took a step.
        at: the line of the program that made it, None where that is not one of its own.
        model_as: the expression that this line's scope has for the model; empty if unknown.
        wants_closure: whether its step calls a function that runs the model, as that of LBFGS does.
    """

    kind: str
    parameters: int
    stepped: bool = False
    at: Frame | None = None
    model_as: str = ""
    wants_closure: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedModel:
    """A module that an optimizer trains: the outermost one that was called with gradients enabled.

    Attributes:
        kind: its class, below what wraps it.
        package: the top package of that class.
        parameters: elements, all of them.
        trained: of these, the ones that an optimizer has.
        optimizers: which of the program's optimizers have them, by their position.
        wrappers: what wraps it, from the outside in, such as ``DistributedDataParallel``.
        shapes: of the tensors of its first training pass.
        calls: training passes.
        evaluations: passes without gradients.
        called_as: the expression that the calling line's scope has for it, such as ``self.net``; empty if unknown.
        called_at: the line of the program that first called it with gradients.
        called_from: that line and those from which it was reached, innermost first.
    """

    kind: str
    package: str = ""
    parameters: int
    trained: int
    optimizers: tuple[int, ...] = ()
    wrappers: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    calls: int = 0
    evaluations: int = 0
    called_as: str = ""
    called_at: Frame | None = None
    called_from: tuple[Frame, ...] = ()


class CalledBy(Enum):
    """What calls a model for the program."""

    PROGRAM = ""
    GENERATE = "generate"
    """`generate` of transformers."""
    PIPELINE = "pipeline"
    """A pipeline of diffusers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedModel:
    """A module that no optimizer has, the outermost one that was called on a card: a model in use, not in training.

    Attributes:
        kind: its class, below what wraps it.
        parameters: elements, all of them.
        parameter_bytes: that they take.
        dtype: of most of them, ``float32``.
        shapes: of the tensors of its first call.
        with_gradients: whether gradients were enabled in that call.
        called_by: what called it.
        called_as: the expression that the calling line's scope has for it, or for the pipeline; empty if unknown.
        called_at: the line of the program that first called it, or what calls it.
        moved_at: the line of the program that put it onto the card; None if that was not seen.
    """

    kind: str
    parameters: int
    parameter_bytes: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...] = ()
    with_gradients: bool = False
    called_by: CalledBy = CalledBy.PROGRAM
    called_as: str = ""
    called_at: Frame | None = None
    moved_at: Frame | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedLoader:
    """A `torch.utils.data.DataLoader` from which batches were taken.

    Attributes:
        batch_size: of its batches; None where a sampler makes them.
        workers: processes that load.
        batches: how many were taken.
        at: the line of the program that made it.
    """

    batch_size: int | None
    workers: int = 0
    batches: int = 0
    at: Frame | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedOption:
    """An option of the program's own command line with a whole number or a flag as its value.

    Attributes:
        flag: as it is written, ``--batch-size``.
        value: what it was; flags have 0 or 1.
        is_flag: whether it takes no value.
    """

    flag: str
    value: int
    is_flag: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedProgram:
    """What a program was seen to train.

    Attributes:
        models: that it trains, in the order of their first training pass.
        used: that it runs and does not train, in the order of their first call.
        optimizers: in the order in which they were made.
        loaders: those from which batches were taken.
        framework: whose loop it runs.
        settings: of the framework, by the names of its arguments: whole numbers, flags and words.
        options: of the command line, where the program reads it with argparse.
        accumulation: batches whose gradients one step adds up; 0 where there was no whole step.
        steps: rounds of the optimizers.
        autocast: the type of autocast in a training pass, ``bfloat16``; empty where there was none.
        scaler: whether losses are scaled by a `GradScaler`.
        clipping: whether gradients are clipped.
        schedulers: classes of learning-rate schedules.
        backward_at: the line of the program that first went backward.
        unclear: what cannot be told of it, each with what to do.
    """

    models: tuple[ObservedModel, ...] = ()
    used: tuple[UsedModel, ...] = ()
    optimizers: tuple[ObservedOptimizer, ...] = ()
    loaders: tuple[ObservedLoader, ...] = ()
    framework: Framework = Framework.NONE
    settings: dict[str, int | str] = field(default_factory=dict)
    options: tuple[ObservedOption, ...] = ()
    accumulation: int = 0
    steps: int = 0
    autocast: str = ""
    scaler: bool = False
    clipping: bool = False
    schedulers: tuple[str, ...] = ()
    backward_at: Frame | None = None
    unclear: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether a model was trained, or an optimizer stepped."""
        return bool(self.models) or any(optimizer.stepped for optimizer in self.optimizers)

    @property
    def main_model(self) -> ObservedModel | None:
        """The trained model with the most trained parameters; None without any."""
        return max(self.models, key=lambda model: model.trained, default=None)

    @property
    def infers(self) -> bool:
        """Whether it runs models and trains none."""
        return bool(self.used) and not self.trains and self.backward_at is None

    @property
    def main_used(self) -> UsedModel | None:
        """The model in use whose parameters take most; None without any."""
        return max(self.used, key=lambda model: model.parameter_bytes, default=None)
