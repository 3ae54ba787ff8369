"""Each technique on its own: gradients and losses of one setting beside the plain program's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from gradient_parts.subjects import SUBJECTS
from vramfit.errors import UsageError
from vramfit.planner.verification import Training, judge_gradients, judge_losses
from vramfit.techniques import Choice, Numerics, Profile, Setting, find_technique, with_choices
from vramfit.techniques.tf32 import Tf32Setting
from vramfit.workload import Workload

TECHNIQUES = (
    *("mixed-precision", "low-precision-training", "tf32", "low-bit-optimizer", "activation-compression"),
    *("gradient-projection", "lean-optimizer"),
)
"""Those that compute with fewer bits or with other mathematics, for every workload."""

STEPS = 8
"""Of the loss curves: what an optimizer changes shows in them alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One setting of one technique on one workload.

    Attributes:
        technique: its name.
        setting: what is not as it is by default, in words.
        subject: the workload's name.
        promise: the level that the setting promises.
        parameters: whose gradients were compared; 0 where the technique refused.
        equal: how many are equal, bit for bit.
        worst: difference as a part of the gradient's scale.
        worst_name: of that parameter.
        allowed: by the promise; None for anything.
        losses: largest difference of a loss as a part of it.
        passes: whether gradients and losses keep the promise.
        refused: why the technique cannot be used there; empty where it was.
        seconds: that it took.
    """

    technique: str
    setting: str
    subject: str
    promise: str
    parameters: int = 0
    equal: int = 0
    worst: float = 0.0
    worst_name: str = ""
    allowed: float | None = None
    losses: float = 0.0
    passes: bool = True
    refused: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The plain program's training.

    Attributes:
        gradients: of the first step, by parameter.
        dtypes: of the parameters.
        losses: of each step.
    """

    gradients: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    losses: list[float]


def trials(subject: str, techniques: Iterable[str] = TECHNIQUES, steps: int = STEPS) -> Iterator[Trial]:
    """All settings of the techniques that they offer for a workload on the CPU."""
    workload = SUBJECTS[subject].make()
    references: dict[bool, Reference] = {}
    for name in techniques:
        for setting in settings(name, workload):
            choice = Choice(technique=find_technique(name), setting=setting)
            random = not choice.technique.redraws
            if random not in references:
                references[random] = reference(workload, steps, random=random)
            yield trial(subject, workload, choice, references[random])


def settings(name: str, workload: Workload) -> Iterator[Setting]:
    """What a technique offers for a workload on the CPU; for TF32 what it offers on a card."""
    if name == "tf32":
        yield Tf32Setting()
        return
    state = workload.start("cpu")
    profile = Profile(
        model=state.model,
        optimizer=state.optimizer,
        sizes=workload.sizes,
        trains=True,
        own_step=workload.step is not None,
        device_type="cpu",
        capability=(0, 0),
    )
    yield from find_technique(name).options(profile)


def reference(workload: Workload, steps: int, *, random: bool) -> Reference:
    """Train without any technique."""
    training = Training(workload, workload.sizes, random=random)
    dtypes = {name: parameter.dtype for name, parameter in training.state.model.named_parameters()}
    gradients = training.gradients()
    for number in range(1, steps):
        training.step(number)
    return Reference(gradients=gradients, dtypes=dtypes, losses=training.losses)


def trial(subject: str, workload: Workload, choice: Choice, plain: Reference) -> Trial:
    """Train with one setting, as many steps as the plain program was."""
    began = time.perf_counter()
    numerics, setting = choice.promise.numerics, choice.setting
    about = Trial(technique=choice.name, setting=words(setting), subject=subject, promise=numerics.value)
    around = tf32_rounding(setting) if isinstance(setting, Tf32Setting) else nullcontext()
    try:
        planned = with_choices(workload, (choice,))
        training = Training(planned, workload.sizes, random=not choice.technique.redraws)
        with closing(training), around:
            found = training.gradients()
            for number in range(1, len(plain.losses)):
                training.step(number)
    except UsageError as error:
        return replace(about, refused=str(error))
    except NotImplementedError as error:  # a kernel that torch has for cards alone
        return replace(about, refused=f"not on a CPU: {error}")
    gradients = judge_gradients(plain.gradients, found, numerics, plain.dtypes)
    losses = judge_losses(plain.losses, training.losses, numerics)
    return replace(
        about,
        parameters=gradients.parameters,
        equal=gradients.equal,
        worst=gradients.worst,
        worst_name=gradients.worst_name,
        allowed=gradients.allowed,
        losses=losses.worst,
        passes=gradients.passes and (losses.passes or numerics is Numerics.APPROXIMATE),
        seconds=time.perf_counter() - began,
    )


def words(setting: Setting) -> str:
    """What of a setting is not as it is by default: ``method quantized, bits 4``."""
    plain = type(setting)()
    told = []
    for one in fields(setting):
        value = getattr(setting, one.name)
        if value != getattr(plain, one.name):
            value = value.value if isinstance(value, Enum) else value
            value = ", ".join(value) if isinstance(value, tuple) else value
            told.append(one.name.replace("_", " ") + ("" if value is True else f" {value}"))
    return ", ".join(told)


ALONE_HEADS = (
    *("technique", "setting", "promised", "workloads", "equal", "worst gradient", "allowed", "worst loss"),
    "beyond",
)


def alone_cells(tried: Sequence[Trial]) -> Iterator[tuple[str, ...]]:
    """A row for each setting: the worst of all workloads."""
    settings_of: dict[tuple[str, str, str], list[Trial]] = {}
    for one in tried:
        settings_of.setdefault((one.technique, one.setting, one.promise), []).append(one)
    order = {name: place for place, name in enumerate(TECHNIQUES)}
    for (technique, setting, promise), all_of in sorted(settings_of.items(), key=lambda at: order[at[0][0]]):
        compared = [one for one in all_of if not one.refused]
        refused = [f"{one.subject}: {one.refused.partition('. ')[0]}" for one in all_of if one.refused]
        if not compared:
            yield technique, setting, promise, "0", "", "", "", "", "; ".join(refused)
            continue
        worst = max(compared, key=lambda one: one.worst)
        loss = max(compared, key=lambda one: one.losses)
        beyond = [f"{one.subject} ({one.worst:.2g})" for one in compared if not one.passes]
        yield (
            technique,
            setting or "as it is",
            promise,
            f"{len(compared)}" + (f" (not {'; '.join(refused)})" if refused else ""),
            f"{sum(one.equal for one in compared)} of {sum(one.parameters for one in compared)}",
            f"{worst.worst:.1e} ({worst.subject}: {worst.worst_name})" if worst.worst else "0",
            "anything" if worst.allowed is None else f"{worst.allowed:g}",
            f"{loss.losses:.1e} ({loss.subject})" if loss.losses else "0",
            ", ".join(beyond) or "none",
        )


def alone_table(tried: Sequence[Trial]) -> Table:
    """The same for a terminal."""
    table = Table(*ALONE_HEADS)
    for cells in alone_cells(tried):
        table.add_row(*cells)
    return table


_DROPPED = 13
"""Bits of float32's mantissa that TF32 does not have: 23 less 10."""

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm"}
_CONVOLUTIONS = {"convolution", "convolution_backward"}


@contextmanager
def tf32_rounding(setting: Tf32Setting) -> Iterator[None]:
    """TF32 on a CPU: the inputs of float32 products rounded to 10 bits of mantissa, as tensor cores round them.

    Rounds what the switches of the technique would let a card round. Attention runs in its products.
    """
    names = (_PRODUCTS if setting.matmul else set()) | (_CONVOLUTIONS if setting.convolution else set())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), _Rounding(names):
        yield


class _Rounding(TorchDispatchMode):
    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.overloadpacket.__name__ in self._names:
            args = torch.utils._pytree.tree_map_only(torch.Tensor, rounded, args)
        return func(*args, **(kwargs or {}))


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 tensor whose values are those of TF32, the nearest, ties away from zero; any other as it is.

    PTX ISA, ``cvt.rna.tf32.f32``: what kernels convert with.
    """
    if tensor.dtype is not torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    half, mask = 1 << (_DROPPED - 1), -(1 << _DROPPED)
    found = ((bits + half) & mask).view(torch.float32).view(tensor.shape)
    return torch.where(tensor.isfinite(), found, tensor)
