"""The model compiled by ``torch.compile``, with a budget for what its backward pass keeps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import nn

from vramfit.allocator.versions import parse_torch_version
from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.torch_internals.layers import DropoutNd, is_compiled, set_compiled_call

_BUDGETS = (1.0, 0.5, 0.25, 0.0)
_RECOMPILE_LIMIT = 64


class CompileMode(Enum):
    """Modes of torch's compiler, as `torch.compile` names them."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"
    MAX_AUTOTUNE_NO_GRAPHS = "max-autotune-no-cudagraphs"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileSetting(Setting):
    """How it is compiled.

    Attributes:
        memory_budget: what the backward pass may keep, from 0 (the inputs alone, all else is computed again) to 1 (what
            is fastest); a share of each graph's own range, as torch's ``activation_memory_budget``.
        modules: names of those that are compiled each by itself; empty for the model as a whole.
        redraws: whether dropout may draw otherwise than the plain program, which is faster and keeps no masks.
    """

    memory_budget: float = 1.0
    mode: CompileMode = CompileMode.DEFAULT
    modules: tuple[str, ...] = ()
    redraws: bool = False


class Compile(Technique[CompileSetting]):
    """``torch.compile`` fuses operations, and keeps for the backward pass what its min-cut partitioner chooses.

    Chains of pointwise operations become one kernel, so that what lies between is never stored. Below a budget of 1 the
    partitioner recomputes more, the cheapest first (torch/_functorch/config.py, ``activation_memory_budget``). The
    budget is a share, it holds for each graph by itself, and the peak need not follow it; so every value is tried.
    It pays for models of many small operations, most of all where blocks were not checkpointed before.

    Compiling takes from seconds to minutes, at the first step and again for new shapes (name repeated blocks in
    `modules`: each kind is compiled once). On a card it wants Triton. A graph break ends a graph, and with it what can
    be fused. Copies of the model (``copy.deepcopy``, ``torch.save``) are plain, as torch has it. On the virtual GPU
    compiled programs are estimates.

    In half precision fused kernels compute in float32 in between. Dropout draws what the plain program draws unless
    `redraws` allows otherwise. What was drawn is kept at any budget (see `kept_draws`).
    """

    name: ClassVar[str] = "compile"
    summary: ClassVar[str] = "torch.compile, with a budget for what the backward pass keeps"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[AttachStage] = AttachStage.STEP
    setting_type = CompileSetting
    follows: ClassVar[str | None] = "gradient-projection"
    quickens: ClassVar[bool] = True
    on_request: ClassVar[bool] = True  # a minute for each of the runs that a plan is made of

    def options(self, profile: Profile) -> Iterable[CompileSetting]:
        """On a card: several budgets where the model trains, then with dropout drawn otherwise where it has any."""
        if profile.device_type != "cuda":
            return
        budgets = _BUDGETS if profile.trains else (1.0,)
        for budget in budgets:
            yield CompileSetting(memory_budget=budget)
        if profile.trains and _draws(profile):
            for budget in budgets:
                yield CompileSetting(memory_budget=budget, redraws=True)

    def promise(self, setting: CompileSetting) -> Promise:
        """Rounding, unless dropout is drawn otherwise."""
        if setting.redraws:
            return Promise(
                Numerics.APPROXIMATE, "dropout drops other values than before, with the same probability"
            )
        return Promise(
            Numerics.ROUNDING, "fused operations round less often, and sums are taken in another order"
        )

    def attach(self, live: AttachedProgram, setting: CompileSetting) -> None:
        """Compile in place; the work is done at the first call.

        Raises:
            UsageError: the budget is no share, or a module is unknown or compiled already.
        """
        if not 0.0 <= setting.memory_budget <= 1.0:
            raise UsageError(
                f"memory_budget of compile is {setting.memory_budget}", "Give a share from 0.0 to 1.0"
            )
        modules = [_module(live.model, name) for name in setting.modules] or [live.model]
        for module in modules:
            if is_compiled(module):
                raise UsageError(
                    f"a module {type(module).__name__} is compiled already",
                    "Apply the plan to the plain model, without torch.compile",
                )
        backend = _Backend(setting.mode.value, setting.memory_budget, setting.redraws)
        for module in modules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # parts of torch that others of its parts call deprecated
                compiled = torch.compile(
                    _inlined(module), backend=backend, **_own_entries(whole=not setting.modules)
                )
            set_compiled_call(module, compiled)
            live.on_undo(partial(set_compiled_call, module, None))


@dataclass(frozen=True, slots=True)
class _Backend:
    """Compiles a graph by inductor under settings of its own, those of the process untouched.

    Dynamo runs what it compiled before for other modules of the same code where the backends are equal. With the
    settings in the backend instead of torch's global configuration, modules with another budget are compiled anew.
    """

    mode: str
    budget: float
    redraws: bool

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """The compiled graph; forward and backward pass are parted here."""
        from vramfit.torch_internals import compiler

        patches = {
            **compiler.list_mode_options(self.mode),
            "fallback_random": not self.redraws,
        }
        passes: Any = compiler.inductor_config.joint_custom_post_pass
        patches["joint_custom_post_pass"] = kept_draws(passes)
        with compiler.functorch_config.patch(activation_memory_budget=self.budget):
            return compiler.compile_fx.compile_fx(graph, inputs, config_patches=patches)


def _inlined(module: nn.Module) -> Callable[..., Any]:
    """The module's call from a file that Dynamo does not skip.

    ``module.compile()`` begins in torch's own files, so that an ``nn.Sequential`` falls into a graph for each layer.
    """
    call: Callable[..., Any] = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return run


def _own_entries(*, whole: bool) -> dict[str, Any]:
    """What keeps compilations of the same code for other programs from counting here.

    Dynamo compiles the same code 8 times and then runs it eagerly, without a word but a warning. A whole model gets
    entries of its own; modules compiled each by itself share theirs, and may be compiled more often. Releases of torch
    that lack these arguments count all together.
    """
    known = inspect.signature(torch.compile).parameters
    wanted: dict[str, Any] = {"isolate_recompiles": True} if whole else {"recompile_limit": _RECOMPILE_LIMIT}
    return {name: value for name, value in wanted.items() if name in known}


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise UsageError(f"the model has no module {name!r}", "Correct its name in modules") from None


def _draws(profile: Profile) -> bool:
    """Whether the forward pass draws random numbers, by its blocks or by its layers."""
    dropouts = DropoutNd
    layers = (module.p for module in profile.model.modules() if isinstance(module, dropouts))
    return any(op.random for block in profile.blocks for op in block.ops) or any(p > 0 for p in layers)


# -- what compiled forward passes drew at random, so that backward passes do not draw it anew ----------------------

_MARKS_SINCE = (2, 13)  # where this was tried
# At 0 the partitioner keeps the inputs alone, whatever is marked (torch/_functorch/partitioners.py,
# choose_saved_values_set). This is no byte more for anything else.
_LEAST_BUDGET = 1e-9
_VERSION = "vramfit-kept-draws-1"  # inductor's caches tell compilations with and without it apart by this


@cache
def kept_draws(before: Any = None) -> Any:
    """A pass over joint graphs that has all random operations saved.

    Below a budget of 1 torch's partitioner may recompute random operations in the backward pass, which draw anew there:
    dropout then has another mask than in the forward pass, and gradients are wrong without a word
    (github.com/pytorch/pytorch/issues/190758; so in 2.13). Operations that are marked as `CheckpointPolicy.MUST_SAVE`
    are left out of that choice. Dropout's result and mask are kept then, 5 bytes an element in float32; of what
    inductor draws itself, the seeds alone. Before 2.13, where that was not tried, such a graph gets a budget of 1.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    from vramfit.torch_internals.compiler import CustomGraphPass
    from vramfit.torch_internals.compiler import functorch_config as functorch

    class KeptDraws(CustomGraphPass):  # type: ignore[misc,unused-ignore]  # loaded late: importing inductor takes seconds
        """Runs after inductor's passes over a joint graph, before it is parted."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            if before is not None:
                before(graph)
            drawing = [node for node in graph.nodes if _draws_at_random(node)]
            for node in drawing:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if drawing:
                least = _LEAST_BUDGET if marks_hold() else 1.0
                functorch.activation_memory_budget = max(functorch.activation_memory_budget, least)

        def uuid(self) -> Any:
            if before is None:
                return _VERSION
            known = before.uuid() if hasattr(before, "uuid") else None
            return known and (_VERSION, known)  # without its name nothing may be cached

    return KeptDraws()


def marks_hold() -> bool:
    """Whether this torch's partitioner is known to save what is marked, at any budget above 0."""
    return parse_torch_version(torch.__version__) >= _MARKS_SINCE


def _draws_at_random(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(
        node.target, "tags", ()
    ):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    names = [argument.name for argument in arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")  # attention, which draws for its dropout alone
    default = arguments[place].default_value
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", default)
    return bool(given != 0.0)
